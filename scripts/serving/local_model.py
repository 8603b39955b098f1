"""A model folder that answers in this process, by our own decoder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from dataset.chat import render_prompt
from dataset.formats import parse_reply
from model.decoding import Decoder, stream_tokens
from scripts.serving.conversation import Event, TooLong
from scripts.serving.sampling import SamplingArguments
from trainer.config import ModelChoice
from trainer.distributed import choose_device
from trainer.precision import choose_precision, has_native_bfloat16
from trainer.weights import load_tokenizer, open_model, trained_window


class LocalModel:
    """Answers by `model.decoding`.

    Args:
        decoder, tokenizer: of one model folder.
        window: tokens that the model was trained to look at; older turns should go beyond three quarters of it.
        seed: of the first answer; each further one counts it up.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingArguments,
        window: int,
        seed: int = 42,
    ):
        self.decoder, self.tokenizer, self.sampling, self.window = decoder, tokenizer, sampling, window
        self.seed = seed

    @classmethod
    def open(cls, folder: Path, choice: ModelChoice, sampling: SamplingArguments, seed: int) -> "LocalModel":
        """Load a model folder onto the device that the flags name."""
        device = choose_device(choice.device)
        precision = choose_precision(device.type, has_native_bfloat16(device), choice.dtype)
        decoder = Decoder(open_model(folder).to(device), precision.dtype)
        positions = decoder.config.max_position_embeddings
        window = min(trained_window(folder) or positions, positions)
        return cls(decoder, load_tokenizer(folder), sampling, window, seed)

    def reply(
        self, messages: list[dict[str, Any]], tools: list[dict] | None, open_thinking: bool | None, is_last_try: bool
    ) -> "LocalReply":
        """See `conversation.Model`."""
        prompt = render_prompt(messages, self.tokenizer, tools, open_thinking)
        limit = self.decoder.config.max_position_embeddings
        if is_last_try and len(prompt) >= limit:
            raise ValueError(f"the message has {len(prompt):,} tokens with its conversation, the model takes {limit:,}")
        if not is_last_try and len(prompt) > self.window * 3 // 4:
            raise TooLong(f"{len(prompt):,} tokens")
        tokens = stream_tokens(
            self.decoder,
            prompt,
            max_new_tokens=min(self.sampling.max_new_tokens, limit - len(prompt)),
            stop_ids=[self.tokenizer.eos_token_id],
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            seed=self.seed,
        )
        self.seed += 1
        return LocalReply(tokens, self.tokenizer, open_thinking)


class LocalReply:
    """One turn, see `conversation.Reply`."""

    def __init__(self, tokens: Iterator[int], tokenizer: PreTrainedTokenizerBase, open_thinking: bool | None):
        self._tokens, self._tokenizer, self._open_thinking = tokens, tokenizer, open_thinking
        self._ids: list[int] = []

    @property
    def message(self) -> dict[str, Any]:
        """What was said so far, as a message."""
        return parse_reply(self._tokenizer.decode(self._ids, skip_special_tokens=True), self._open_thinking)

    def __iter__(self) -> Iterator[Event]:
        decoder = ReplyDecoder(self._tokenizer, thinking=bool(self._open_thinking))
        for token_id in self._tokens:
            self._ids.append(token_id)
            if event := decoder.feed(token_id):
                yield event
        if decoder.held and not self.message.get("tool_calls"):
            yield Event("text", decoder.held)  # a call that is not valid: show what was written


class ReplyDecoder:
    """Token ids to events, as they come. A character whose bytes arrive in several tokens is held back until whole.

    The text of tool calls is held back too, in `held`: calls are shown when they are complete.
    """

    def __init__(self, tokenizer, thinking: bool):
        self._backend = tokenizer.backend_tokenizer
        kinds = {"<think>": "thinking", "</think>": "text", "<tool_call>": "call", "</tool_call>": "text"}
        self._kind_after = {tokenizer.convert_tokens_to_ids(token): kind for token, kind in kinds.items()}
        self.held = ""
        self._start("thinking" if thinking else "text")

    def _start(self, kind: str) -> None:
        self._kind, self._fresh = kind, True
        self._stream = DecodeStream(skip_special_tokens=True)

    def feed(self, token_id: int) -> Event | None:
        """The event that this token completes, if any."""
        if token_id in self._kind_after:
            self._start(self._kind_after[token_id])
            return None
        piece = self._stream.step(self._backend, token_id) or ""
        if self._fresh:
            # The template puts line breaks behind control tokens; an answer's own indentation stays.
            piece = piece.lstrip() if self._kind == "thinking" else piece.lstrip("\n")
            self._fresh = not piece
        if self._kind == "call":
            self.held += piece
            return None
        return Event(self._kind, piece) if piece else None
