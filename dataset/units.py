"""Rows to tokens: documents and conversations, one behind the other in one flat array.

The array has 16 bits a token where the vocabulary allows it.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from dataset.chat import Conversation, RenderedChat, chat_renderer, plain_encoder, trim_to_window
from dataset.formats import messages_from_row, row_kind, text_from_row
from dataset.sources import Part, Row, Source, read_rows, split_held_out

CHUNK_ROWS = 512
CHUNK_CHARACTERS = 1_000_000
QUIET_SECONDS = 2.0

Say = Callable[[str], None]
Kind = Literal["document", "conversation", "both"]


@dataclasses.dataclass
class DataSummary:
    """What a data set is made of.

    Attributes:
        rows_read, bad_rows: rows of the files, and those that could not be used.
        skipped: conversations left out, by reason.
        shortened: conversations longer than the window, of which the last turns are kept.
        documents, conversations: how many of each are in the rows.
        tokens: tokens in the rows, padding apart; those of documents cut by a row's end count once more.
        supervised_tokens: tokens with a label.
        bytes: UTF-8 bytes of the text behind the tokens (control tokens have none).
        rows, fill_rate: packed rows, and the share of their slots that hold a token.
        passes: by source, how often the mixture goes through it.
        fingerprint: sha256 of the rows' content.
    """

    rows_read: int = 0
    bad_rows: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    shortened: int = 0
    documents: int = 0
    conversations: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    bytes: int = 0
    rows: int = 0
    fill_rate: float = 0.0
    passes: dict[str, float] = dataclasses.field(default_factory=dict)
    fingerprint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for run.json."""
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Units:
    """Tokenised documents and conversations, one behind the other.

    Attributes:
        tokens: (N,) uint16 or uint32.
        trained: (N,) bool, whether a token may be a target.
        lengths: (U,) int64 tokens of each unit.
        is_document: (U,) bool; the others are conversations.
        source: (U,) int64, index of the source that it comes from.
    """

    tokens: np.ndarray
    trained: np.ndarray
    lengths: np.ndarray
    is_document: np.ndarray
    source: np.ndarray


class UnitCollector:
    """Turns rows into `Units`, a chunk of rows at a time.

    Args:
        tokenizer: whose ids are written.
        max_length: conversations are shortened to it.
        kinds: what rows become; as "document", chat rows give their words; as "conversation", text rows are bad; "both"
            by the row's form.
        train_on: which assistant turns are supervised.
        loss_on: "assistant", or "all" tokens of conversations. Documents are always supervised whole.
        say: prints a progress line when it takes long; None for silence.
        only: the kind that is kept; rows of the other are passed over.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        kinds: Kind,
        train_on: Literal["all", "last"],
        loss_on: Literal["all", "assistant"],
        say: Say | None,
        only: Literal["document", "conversation"] | None = None,
    ):
        if loss_on not in ("all", "assistant"):
            raise ValueError(f"loss_on={loss_on!r} must be 'all' or 'assistant'")
        if max_length < 4:
            raise ValueError(f"max_length {max_length} is too short for a row; use at least 4")
        if only not in (None, "document", "conversation"):
            raise ValueError(f"only={only!r} must be 'document', 'conversation' or None")
        self.max_length, self.kinds, self.only, self.say = max_length, kinds, only, say
        self.train_on, self.loss_on = train_on, loss_on
        self.dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
        self.encoder = plain_encoder(tokenizer)
        self.renderer = None if kinds == "document" else chat_renderer(tokenizer)
        # A document has <|endoftext|> at both ends. The last teaches the model to stop; the first is there because a
        # document's first token is never a target: without it the model would not learn how documents begin, and the
        # first word's bytes would be missing from bits per byte. One token of a document is the price. It is one token
        # for both ends, and not the chat's <|im_start|> and <|im_end|>, so that a base model that ends a document does
        # not end a turn, and a prompt can be begun the same way.
        self.separator = tokenizer.pad_token_id
        self.summary = DataSummary()
        self.started = self.reported = time.perf_counter()
        self.num_tokens = 0
        self.chunks: list[tuple[np.ndarray, np.ndarray]] = []
        self.lengths: list[int] = []
        self.is_document: list[bool] = []
        self.source: list[int] = []

    def add_source(
        self, index: int, source: Source, strict: bool, text_as: Literal["file", "paragraph"], part: Part
    ) -> None:
        """Read, tokenise and keep every usable row of a source.

        Raises:
            ValueError: a file that cannot be read, or too many bad rows.
        """
        reader = read_rows(source.path, strict=strict, text_as=text_as, say=self.say)
        for chunk in _chunks(split_held_out(reader, part)):
            texts: list[str] = []
            conversations: list[tuple[Row, Conversation]] = []
            for row in chunk:
                try:
                    is_document = self._is_document(row.value)
                    if self.only is not None and is_document != (self.only == "document"):
                        continue
                    if is_document:
                        texts.append(text_from_row(row.value))
                    else:
                        conversations.append((row, _conversation_of(row.value)))
                except ValueError as error:
                    reader.reject(row, str(error))
            self._add_documents(texts, index)
            self._add_conversations(conversations, index, reader.reject)
            self._report()
        reader.check()
        self.summary.rows_read += reader.rows_read
        self.summary.bad_rows += reader.bad_rows

    def _is_document(self, value: dict[str, Any]) -> bool:
        kind = row_kind(value)
        if self.kinds == "conversation" and kind == "text":
            raise ValueError("a {'text'} row is a document; here conversations are expected")
        return self.kinds == "document" or kind == "text"

    def _add_documents(self, texts: list[str], source: int) -> None:
        encoded = self.encoder.encode_batch_fast(texts, add_special_tokens=False) if texts else []
        units = [[self.separator, *encoding.ids, self.separator] for encoding in encoded]
        self._keep(units, [np.ones(len(unit), dtype=bool) for unit in units], True, source)

    def _add_conversations(
        self, conversations: list[tuple[Row, Conversation]], source: int, reject: Callable[[Row, str], None]
    ) -> None:
        if not conversations:
            return
        kept = []
        for (row, _), chat in zip(conversations, self._render(conversations), strict=True):
            if isinstance(chat, str):
                reject(row, chat)
                continue
            fitting = trim_to_window(chat, self.max_length)
            if isinstance(fitting, str):
                self.summary.skipped[fitting] = self.summary.skipped.get(fitting, 0) + 1
            else:
                self.summary.shortened += fitting is not chat
                kept.append(fitting)
        if self.loss_on == "all":
            masks = [np.ones(len(chat.input_ids), dtype=bool) for chat in kept]
        else:
            masks = [np.array(chat.assistant_mask, dtype=bool) for chat in kept]
        self._keep([chat.input_ids for chat in kept], masks, False, source)

    def _render(self, conversations: list[tuple[Row, Conversation]]) -> list[RenderedChat | str]:
        """Rendered conversations; a string in place of one says why the template refused it."""
        try:
            normalised = [conversation for _, conversation in conversations]
            return list(self.renderer.render_many(normalised, train_on=self.train_on))
        except ValueError as error:
            if len(conversations) == 1:
                return [str(error)]
            return [result for one in conversations for result in self._render([one])]

    def _keep(self, units: list[list[int]], masks: list[np.ndarray], is_document: bool, source: int) -> None:
        if not units:
            return
        tokens = np.fromiter(itertools.chain.from_iterable(units), dtype=self.dtype)
        self.chunks.append((tokens, np.concatenate(masks)))
        self.lengths += [len(unit) for unit in units]
        self.is_document += [is_document] * len(units)
        self.source += [source] * len(units)
        self.num_tokens += len(tokens)

    def _report(self) -> None:
        now = time.perf_counter()
        if self.say and now - self.reported > QUIET_SECONDS:
            self.reported = now
            rate = self.num_tokens / (now - self.started)
            self.say(f"tokenising: {len(self.lengths):,} rows, {self.num_tokens:,} tokens, {rate:,.0f} tokens/s")

    def finish(self) -> Units:
        """All that was added."""
        tokens = np.concatenate([np.empty(0, self.dtype), *[tokens for tokens, _ in self.chunks]])
        trained = np.concatenate([np.empty(0, bool), *[trained for _, trained in self.chunks]])
        lengths = np.array(self.lengths, dtype=np.int64)
        is_document, source = np.array(self.is_document, dtype=bool), np.array(self.source, dtype=np.int64)
        return Units(tokens, trained, lengths, is_document, source)


def _conversation_of(value: dict[str, Any]) -> Conversation:
    conversation = messages_from_row(value)
    if not any(message["role"] == "assistant" for message in conversation[0]):
        raise ValueError("the conversation has no assistant message, so there is nothing to learn from it")
    return conversation


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows in lists that are large enough to keep the tokenizer busy and small enough for memory."""
    chunk, characters = [], 0
    for row in rows:
        chunk.append(row)
        characters += sum(len(value) for value in row.value.values() if isinstance(value, str))
        if len(chunk) >= CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def choose_units(units: Units, weights: Sequence[float] | None, seed: int) -> tuple[np.ndarray, list[float]]:
    """Which units a mixture holds, (K,) indices with repetitions, and how often it goes through each source.

    Weights are token shares. The mixture has as many tokens as the sources together; a source that must give more
    than it has is repeated, one that must give less is drawn from without replacement.
    """
    if weights is None or not len(units.lengths):
        return np.arange(len(units.lengths)), []
    sizes = np.bincount(units.source, weights=units.lengths, minlength=len(weights))
    shares = [weight / sum(weights) for weight in weights]
    passes = [float(share * sizes.sum() / size) if size else 0.0 for share, size in zip(shares, sizes, strict=True)]
    chosen = []
    for index, times in enumerate(passes):
        members = np.flatnonzero(units.source == index)
        chosen += [members] * int(times)
        shuffled = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index]))).permutation(members)
        before = np.cumsum(units.lengths[shuffled]) - units.lengths[shuffled]
        chosen.append(np.sort(shuffled[before < (times % 1) * sizes[index] - 0.5]))
    return np.concatenate(chosen), passes
