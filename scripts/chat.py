"""Talk to a model: streaming, many turns, thinking, tools. In a terminal, through a pipe, or for one question.

Examples:
    python scripts/chat.py
    python scripts/chat.py --prompt "Who are you?" --temperature 0
    printf 'Hello!\\nWho are you?\\n' | python scripts/chat.py
"""

import gc, pathlib, sys  # noqa: E401

sys.path[0] = sys.path[0] if __package__ else str(pathlib.Path(__file__).resolve().parents[1])
__package__ or gc.disable()  # a fifth of the time of the imports; `user_errors` turns it on again

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

from tokenizers.decoders import DecodeStream
from transformers.utils import logging

from dataset.chat import render_prompt
from dataset.formats import parse_reply
from dataset.tools import TOOL_SCHEMAS, run_tool
from model.decoding import Decoder, stream_tokens
from model.model_minimind import load_model
from trainer.config import ModelChoice, flag, parse_arguments, user_errors
from trainer.distributed import choose_device
from trainer.precision import choose_precision, has_native_bfloat16
from trainer.weights import find_folder, load_tokenizer

HELP = """/clear  forget the conversation
/help   this list
/exit   leave (as does Ctrl-D)
Ctrl-C  stop the answer"""

MAX_TOOL_ROUNDS = 5

# Both tools of the built-in training data, in an order that occurs there; a tool that a model never saw confuses it.
OFFERED_TOOLS = ("calculate", "lookup")


@dataclasses.dataclass
class TalkArguments:
    """What is said."""

    _argument_group_name = "talk"

    prompt: str | None = flag(None, "answer this one message and leave")
    system: str | None = flag(None, "system message: how the model should behave")
    open_thinking: Literal[0, 1] | None = flag(None, "1: think first, 0: do not; by default the model chooses")
    tools: Literal[0, 1] = flag(0, "1: let the model call the built-in safe tools (" + ", ".join(OFFERED_TOOLS) + ")")


@dataclasses.dataclass
class SamplingArguments:
    """How words are picked."""

    _argument_group_name = "sampling"

    temperature: float = flag(0.5, "0: always the likeliest word; higher: more varied")
    top_p: float = flag(0.9, "pick among the likeliest words that together have this probability")
    top_k: int = flag(0, "pick among this many likeliest words; 0: no such limit")
    max_new_tokens: int = flag(512, "longest answer")
    seed: int = flag(42, "seed of the picking; the same seed and words give the same answers")

    def validate(self) -> None:
        """Raise ValueError that names the first flag out of range."""
        if not self.temperature >= 0:
            raise ValueError(f"--temperature {self.temperature} must not be negative; 0 picks the likeliest word")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top_p {self.top_p} must lie above 0 and up to 1; 1 is no limit")
        if self.top_k < 0:
            raise ValueError(f"--top_k {self.top_k} must not be negative; 0 is no limit")
        if self.max_new_tokens < 1:
            raise ValueError(f"--max_new_tokens {self.max_new_tokens} must be at least 1")


class Event(NamedTuple):
    """A piece of an answer. Text and thinking come in pieces; a call, a result or a note comes whole."""

    kind: Literal["text", "thinking", "call", "result", "note"]
    text: str


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


class Conversation:
    """A talk with one model. `say` adds a turn of the user's and streams what comes back, tool calls included.

    Args:
        decoder, tokenizer: a loaded model folder.
        talk, sampling: see their dataclasses.
        window: tokens that the model was trained to look at; older turns are left out beyond three quarters of it.
    """

    def __init__(self, decoder: Decoder, tokenizer, talk: TalkArguments, sampling: SamplingArguments, window: int):
        self.decoder, self.tokenizer, self.sampling, self.window = decoder, tokenizer, sampling, window
        self.open_thinking = None if talk.open_thinking is None else bool(talk.open_thinking)
        self.tools = [TOOL_SCHEMAS[name] for name in OFFERED_TOOLS] if talk.tools else None
        self._opening = [{"role": "system", "content": talk.system}] if talk.system else []
        self._replies = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages: list[dict[str, Any]] = list(self._opening)

    def say(self, text: str) -> Iterator[Event]:
        """Answer one message of the user's.

        What was said so far stays in the conversation when the caller stops early.

        Raises:
            ValueError: the message does not fit into the model's positions; it is forgotten.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._exchange()
        except ValueError:
            self.messages = before
            raise

    def _exchange(self) -> Iterator[Event]:
        """The model's turns and the tools' results up to its answer."""
        for tool_round in range(MAX_TOOL_ROUNDS + 1):
            yield from self._reply()
            calls = self.messages[-1].get("tool_calls", [])
            for call in calls:
                yield Event("call", f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})")
            if not calls or self.tools is None:
                return
            if tool_round == MAX_TOOL_ROUNDS:
                yield Event("note", f"stopped after {MAX_TOOL_ROUNDS} rounds of tool calls")
                return
            for call in calls:
                result = run_tool(call["name"], call["arguments"])
                self.messages.append({"role": "tool", "content": result})
                yield Event("result", result)

    def _reply(self) -> Iterator[Event]:
        """Stream one turn of the model and add it to the conversation."""
        prompt, note = self._prompt()
        if note:
            yield Event("note", note)
        room = self.decoder.config.max_position_embeddings - len(prompt)
        tokens = stream_tokens(
            self.decoder,
            prompt,
            max_new_tokens=min(self.sampling.max_new_tokens, room),
            stop_ids=[self.tokenizer.eos_token_id],
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            seed=self.sampling.seed + self._replies,
        )
        self._replies += 1
        decoder = ReplyDecoder(self.tokenizer, thinking=bool(self.open_thinking))
        ids: list[int] = []
        try:
            for token_id in tokens:
                ids.append(token_id)
                if event := decoder.feed(token_id):
                    yield event
        finally:  # also when the caller stops in the middle
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            self.messages.append(parse_reply(text, self.open_thinking))
        if decoder.held and not self.messages[-1].get("tool_calls"):
            yield Event("text", decoder.held)  # a call that is not valid: show what was written

    def _prompt(self) -> tuple[list[int], str]:
        """The ids to go on from, and a note if old turns had to be left out."""
        kept = self.messages
        prompt = render_prompt(kept, self.tokenizer, self.tools, self.open_thinking)
        first, dropped = len(self._opening), 0
        while len(prompt) > self.window * 3 // 4:
            later_turns = [i for i, message in enumerate(kept) if message["role"] == "user" and i > first]
            if not later_turns:
                break
            kept = [*self._opening, *kept[later_turns[0] :]]
            dropped += 1
            prompt = render_prompt(kept, self.tokenizer, self.tools, self.open_thinking)
        limit = self.decoder.config.max_position_embeddings
        if len(prompt) >= limit:
            raise ValueError(f"the message has {len(prompt):,} tokens with its conversation, the model takes {limit:,}")
        self.messages = kept
        return prompt, f"the oldest {dropped} turns were left out: too long for the model" if dropped else ""


class Printer:
    """Writes events as they come: thinking and tools dimmed in a terminal, in brackets elsewhere."""

    STYLES = {"thinking": "\033[2m", "call": "\033[36m", "result": "\033[36m", "note": "\033[33m"}
    LABELS = {"thinking": "[thinking] ", "call": "[call] ", "result": "[result] ", "note": "[note] "}

    def __init__(self, out: TextIO, styled: bool):
        self.out, self.styled = out, styled

    def show(self, events: Iterable[Event]) -> None:
        """Print one answer and end its line."""
        previous, last_text = None, "\n"
        try:
            for event in events:
                if event.kind != previous or event.kind in ("call", "result", "note"):
                    self._open(event.kind, on_new_line=last_text.endswith("\n"))
                previous, last_text = event.kind, event.text
                self.out.write(event.text)
                self.out.flush()
        finally:
            self.out.write("\033[0m\n" if self.styled else "\n")
            self.out.flush()

    def _open(self, kind: str, on_new_line: bool) -> None:
        end = "" if on_new_line else "\n"
        if self.styled:
            self.out.write(f"\033[0m{end}{self.STYLES.get(kind, '')}")
        else:
            self.out.write(end + self.LABELS.get(kind, ""))


def open_conversation(
    folder: Path, choice: ModelChoice, talk: TalkArguments, sampling: SamplingArguments
) -> Conversation:
    """Load the model and start talking to it."""
    device = choose_device(choice.device)
    precision = choose_precision(device.type, has_native_bfloat16(device), choice.dtype)
    tokenizer = load_tokenizer(folder)
    decoder = Decoder(load_model(str(folder)).to(device), precision.dtype)
    return Conversation(decoder, tokenizer, talk, sampling, trained_window(folder, decoder))


def trained_window(folder: Path, decoder: Decoder) -> int:
    """Tokens that the model saw at once in training, from its run.json; else all the positions that it has."""
    positions = decoder.config.max_position_embeddings
    try:
        window = json.loads((folder / "run.json").read_text(encoding="utf-8"))["settings"]["data"]["max_seq_len"]
    except (OSError, ValueError, KeyError, TypeError):
        return positions  # made by another trainer
    return min(int(window), positions)


def talk_by_line(conversation: Conversation, printer: Printer, interactive: bool) -> None:
    """One turn for each line of standard input, until it ends or says /exit."""
    while (line := read_line(interactive)) is not None:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/clear":
            conversation.clear()
        elif text == "/help":
            print(HELP)
        elif text.startswith("/"):
            print(f"unknown command {text.split()[0]}; /help lists them", file=sys.stderr)
        elif text:
            answer(conversation, printer, text, interactive)


def answer(conversation: Conversation, printer: Printer, text: str, interactive: bool) -> None:
    """Print the answer to one message; in a terminal, Ctrl-C and an unusable message end the answer, not the talk."""
    try:
        printer.show(conversation.say(text))
    except KeyboardInterrupt:
        if not interactive:
            raise
        print("(stopped)", file=sys.stderr)
    except ValueError as error:
        if not interactive:
            raise
        print(f"error: {error}", file=sys.stderr)


def read_line(interactive: bool) -> str | None:
    """The next line of the user's, None at the end."""
    if not interactive:
        return sys.stdin.readline() or None
    while True:
        try:
            return input("\n> ")
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
        except EOFError:
            print()
            return None


def main() -> None:
    """Entry point."""
    logging.disable_progress_bar()
    groups = (ModelChoice, TalkArguments, SamplingArguments)
    choice, talk, sampling = parse_arguments(*groups, description=__doc__.split("\n")[0])
    sampling.validate()
    for stream in (sys.stdin, sys.stdout):
        # Words are UTF-8 whatever the terminal's locale says; a broken byte must not end the talk.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    folder = find_folder(choice)
    conversation = open_conversation(folder, choice, talk, sampling)
    styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    printer = Printer(sys.stdout, styled)
    if talk.prompt is not None:
        if not talk.prompt.strip():
            raise ValueError("--prompt is empty")
        answer(conversation, printer, talk.prompt, interactive=False)
        return
    interactive = sys.stdin.isatty()
    if interactive:
        print(f"{folder} on {choose_device(choice.device)}. /help lists commands, /exit leaves.", file=sys.stderr)
    talk_by_line(conversation, printer, interactive)


if __name__ == "__main__":
    with user_errors():
        try:
            main()
        except KeyboardInterrupt:
            raise SystemExit(130) from None
