"""Rows to tokens: documents, conversations and preference pairs, one behind the other in one flat array.

A unit is what packing keeps together: a document, a conversation, or both sides of a pair.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from dataset.chat import (
    Conversation,
    RenderedChat,
    chat_renderer,
    encoder_of_normal_text,
    is_normal,
    plain_encoder,
    trim_pair,
    trim_to_window,
)
from dataset.formats import messages_from_row, pair_from_row, row_kind, text_from_row
from dataset.readers import Row
from dataset.sources import HELD_OUT_BELOW, row_hash
from dataset.token_bytes import token_byte_lengths

CHUNK_ROWS = 512
CHUNK_CHARACTERS = 1_000_000
STRETCH_CHARACTERS = 100_000
CUT = re.compile(r"\n(?=\S)")

Reasoning = Literal["keep", "drop"]
ThinkingMix = tuple[float, float, float]
Kind = Literal["document", "conversation", "both", "pair"]

UNIT = np.dtype(
    [
        ("start", "<i8"),  # index of its first token in the flat array
        ("length", "<i8"),  # tokens
        ("first_length", "<i8"),  # tokens of a pair's chosen side; 0 for other units
        ("supervised", "<i8"),  # tokens that may be targets; a piece's first token never is
        ("bytes", "<i8"),  # UTF-8 bytes behind the tokens; control tokens have none
        ("row_hash", "<u8"),
        ("is_document", "?"),
        ("held_out", "?"),  # belongs to the validation part, where the source has one
    ]
)


@dataclasses.dataclass(frozen=True)
class UnitOptions:
    """What decides how rows become tokens.

    Attributes:
        kinds: what rows become; as "document", chat rows give their words; as "conversation", text rows are bad; "both"
            by the row's form; "pair": a chosen and a rejected conversation.
        max_length: conversations and pairs are shortened to it; documents are not.
        train_on: which assistant turns are supervised.
        reasoning: "keep" the assistant's reasoning where there is some, or "drop" it.
        thinking_mix: shares of the conversations and pairs that are shown as with thinking left to the model, turned
            on (the block is open already, and closed at once where there is no reasoning) and turned off (an empty
            block, which is not trained). A row's content decides its part.

    Raises:
        ValueError: an unknown value, or a window without room.
    """

    kinds: Kind
    max_length: int
    train_on: Literal["all", "last"] = "all"
    reasoning: Reasoning = "keep"
    thinking_mix: ThinkingMix = (1.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        if self.max_length < 4:
            raise ValueError(f"max_length {self.max_length} is too short for a row; use at least 4")
        choices = {
            "train_on": (self.train_on, ("all", "last")),
            "reasoning": (self.reasoning, ("keep", "drop")),
        }
        for name, (value, known) in choices.items():
            if value not in known:
                raise ValueError(f"{name}={value!r} must be {' or '.join(map(repr, known))}")
        if problem := mix_problem(self.thinking_mix):
            raise ValueError(f"thinking_mix={self.thinking_mix!r} {problem}")


@dataclasses.dataclass
class UnitBatch:
    """Units of some rows, and account of the rows that gave none.

    Attributes:
        tokens: (N,) uint16 or uint32.
        trained: (N,) bool, whether a token may be a target; None where every one may.
        table: (U,) of dtype `UNIT`, a record a unit, in order.
        rows_read: rows that were looked at.
        rejected: (path, line, reason) of rows that cannot be used.
        skipped: conversations left out, by reason.
        shortened: conversations longer than the window, of which the last turns are kept.
    """

    tokens: np.ndarray
    trained: np.ndarray | None
    table: np.ndarray
    rows_read: int = 0
    rejected: list[tuple[str, int, str]] = dataclasses.field(default_factory=list)
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    shortened: int = 0


def token_dtype(vocabulary: int) -> np.dtype:
    """16 bits a token where the vocabulary allows it."""
    return np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32)


def separator_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token at both ends of a document: padding, or the end of text where a vocabulary has none."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


class UnitMaker:
    """Makes units out of rows with one tokenizer, in this process."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: UnitOptions):
        self.options = options
        self.dtype = token_dtype(len(tokenizer))
        self.encoder, self.encoder_of_normal_text = plain_encoder(tokenizer), encoder_of_normal_text(tokenizer)
        self.renderer = None if options.kinds == "document" else chat_renderer(tokenizer)
        self.token_bytes = token_byte_lengths(tokenizer).numpy()
        # A document has <|endoftext|> at both ends. The last teaches the model to stop; the first is there because a
        # document's first token is never a target: without it the model would not learn how documents begin, and the
        # first word's bytes would be missing from bits per byte. One token of a document is the price. It is one token
        # for both ends, and not the chat's <|im_start|> and <|im_end|>, so that a base model that ends a document does
        # not end a turn, and a prompt can be begun the same way.
        self.separator = separator_id(tokenizer)

    def empty(self) -> UnitBatch:
        """A batch without units."""
        return UnitBatch(np.empty(0, self.dtype), None, np.empty(0, UNIT))

    def make(self, rows: Iterable[Row], held_out: bool | None = None) -> UnitBatch:
        """Units of rows, the good and the bad.

        Args:
            rows: as `dataset.readers.parse_block` gives them.
            held_out: the part that the rows belong to; None decides by each row's hash.
        """
        return join_batches([self.empty(), *(self._make_chunk(chunk, held_out) for chunk in _chunks(rows))])

    def _make_chunk(self, rows: list[Row], held_out: bool | None) -> UnitBatch:
        batch = dataclasses.replace(self.empty(), rows_read=len(rows))
        documents: list[tuple[Row, str]] = []
        chats: list[tuple[Row, list[Conversation]]] = []
        for row in rows:
            try:
                if isinstance(row.value, str):
                    raise ValueError(row.value)
                if self._is_document(row.value):
                    documents.append((row, text_from_row(row.value)))
                else:
                    chats.append((row, self._conversations_of(row.value)))
            except ValueError as error:
                batch.rejected.append((row.path, row.line, str(error)))
        units = [*self._encode(documents), *self._render(chats, batch)]
        batch.rejected.sort(key=lambda bad: bad[:2])  # what the template refuses is known last
        if units:
            stretches = itertools.chain.from_iterable(unit.ids for unit in units)
            batch.tokens = np.fromiter(itertools.chain.from_iterable(stretches), dtype=self.dtype)
            if chats:
                masks = [unit.mask or itertools.repeat(True, unit.length) for unit in units]
                batch.trained = np.fromiter(itertools.chain.from_iterable(masks), dtype=bool)
            batch.table = self._describe(units, batch, held_out)
        return batch

    def _is_document(self, value: dict[str, Any]) -> bool:
        kind, kinds = row_kind(value), self.options.kinds
        if (kinds == "pair") != (kind == "pair"):
            expected = "pairs" if kinds == "pair" else {"both": "documents or conversations"}.get(kinds, kinds + "s")
            raise ValueError(f"its keys make it a {kind} row; here {expected} are expected")
        if kinds == "conversation" and kind == "text":
            raise ValueError("a {'text'} row is a document; here conversations are expected")
        return kinds == "document" or kind == "text"

    def _conversations_of(self, value: dict[str, Any]) -> list[Conversation]:
        """The row's conversation, or both sides of its pair, chosen first."""
        sides = list(pair_from_row(value)) if self.options.kinds == "pair" else [messages_from_row(value)]
        for messages, _ in sides:
            if not any(message["role"] == "assistant" for message in messages):
                raise ValueError("the conversation has no assistant message, so there is nothing to learn from it")
        return [apply_reasoning_rule(side, self.options.reasoning) for side in sides]

    def _encode(self, documents: list[tuple[Row, str]]) -> Iterator["_Unit"]:
        stretches = [stretches_of(text) for _, text in documents]
        flat = [stretch for parts in stretches for stretch in parts]
        edge = [self.separator]
        encoder = self.encoder_of_normal_text if all(map(is_normal, flat)) else self.encoder
        encoded = iter(encoder.encode_batch_fast(flat, add_special_tokens=False) if flat else ())
        for (row, _), parts in zip(documents, stretches, strict=True):
            ids = [edge, *(encoding.ids for encoding in itertools.islice(encoded, len(parts))), edge]
            yield _Unit(row, ids, sum(map(len, ids)), mask=None, is_document=True)

    def _render(self, chats: list[tuple[Row, list[Conversation]]], batch: UnitBatch) -> Iterator["_Unit"]:
        parts = [thinking_of(row.value, self.options.thinking_mix) for row, _ in chats]
        rendered = {}
        for thinking in set(parts):
            alike = [sides for (_, sides), part in zip(chats, parts, strict=True) if part is thinking]
            rendered[thinking] = iter(self._render_all([*itertools.chain.from_iterable(alike)], thinking))
        for (row, sides), thinking in zip(chats, parts, strict=True):
            results = list(itertools.islice(rendered[thinking], len(sides)))
            refused = next((result for result in results if isinstance(result, str)), None)
            if refused is not None:
                batch.rejected.append((row.path, row.line, refused))
                continue
            trim = trim_pair if self.options.kinds == "pair" else trim_to_window
            fitting = trim(*results, self.options.max_length)
            if isinstance(fitting, str):
                batch.skipped[fitting] = batch.skipped.get(fitting, 0) + 1
                continue
            kept = list(fitting) if isinstance(fitting, tuple) else [fitting]
            batch.shortened += kept[0] is not results[0]
            ids = [chat.input_ids for chat in kept]
            mask = [trained for chat in kept for trained in chat.assistant_mask]
            first_length = len(ids[0]) if len(kept) == 2 else 0
            yield _Unit(row, ids, sum(map(len, ids)), mask, is_document=False, first_length=first_length)

    def _render_all(self, conversations: list[Conversation], thinking: bool | None) -> list[RenderedChat | str]:
        """Rendered conversations; a string in place of one says why the template refused it."""
        if not conversations:
            return []
        try:
            return self.renderer.render_many(conversations, open_thinking=thinking, train_on=self.options.train_on)
        except ValueError as error:
            if len(conversations) == 1:
                return [str(error)]
            return [result for one in conversations for result in self._render_all([one], thinking)]

    def _describe(self, units: list["_Unit"], batch: UnitBatch, held_out: bool | None) -> np.ndarray:
        """The table of a chunk whose tokens are in place."""
        table = np.zeros(len(units), dtype=UNIT)
        table["length"] = [unit.length for unit in units]
        table["first_length"] = [unit.first_length for unit in units]
        table["start"] = starts = np.cumsum(table["length"]) - table["length"]
        table["bytes"] = np.add.reduceat(self.token_bytes[batch.tokens], starts)
        # Nothing precedes a unit's first token, nor that of a pair's second side: neither is ever a target.
        seconds = starts + table["first_length"]
        trained = mask_of(batch)
        table["supervised"] = np.add.reduceat(trained, starts, dtype=np.int64) - trained[starts]
        table["supervised"] -= trained[seconds] & (table["first_length"] > 0)
        table["row_hash"] = [row_hash(unit.row.value) for unit in units]
        table["is_document"] = [unit.is_document for unit in units]
        table["held_out"] = table["row_hash"] < np.uint64(HELD_OUT_BELOW) if held_out is None else held_out
        return table


class _Unit(NamedTuple):
    """A unit in the making. `ids` are stretches that lie one behind the other; without a mask all may be targets."""

    row: Row
    ids: list[list[int]]
    length: int
    mask: list[int] | None
    is_document: bool
    first_length: int = 0


def mix_problem(mix: Sequence[float]) -> str | None:
    """What is wrong with a mixture of thinking, as the end of a sentence."""
    if len(mix) != 3 or min(mix) < 0 or not math.isclose(sum(mix), 1.0, abs_tol=1e-6):
        return "must be three shares, none negative, that sum to 1: thinking left free, turned on, turned off"
    return None


def thinking_of(row: dict[str, Any], mix: ThinkingMix) -> bool | None:
    """How a row is shown: thinking left free (None), on or off. Other bits of its hash hold rows out of training."""
    free, opened, _ = mix
    place = row_hash(row) % 2**32 / 2**32 if free < 1 else 0.0
    return None if place < free else place < free + opened


def apply_reasoning_rule(conversation: Conversation, reasoning: Reasoning) -> Conversation:
    """The conversation as the rule leaves it: without anybody's reasoning unless it is kept."""
    messages, tools = conversation
    if reasoning == "keep":
        return conversation
    kept = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]
    return kept, tools


def stretches_of(text: str) -> list[str]:
    """Cut a long text so that its stretches are encoded side by side, into the same tokens as the whole.

    A cut is made behind a line break that no white space follows: there every split pattern of the GPT-2 family, and
    so each of the byte-level tokenizers in use, ends a word, and no character composes with a line break.
    """
    if len(text) <= STRETCH_CHARACTERS:
        return [text]
    cuts = [0]
    while match := CUT.search(text, cuts[-1] + STRETCH_CHARACTERS):
        cuts.append(match.end())
    return [text[start:end] for start, end in itertools.pairwise([*cuts, len(text)])]


def join_batches(batches: Sequence[UnitBatch]) -> UnitBatch:
    """Batches, at least one, in one behind the other."""
    behind = 0
    for batch in batches:
        batch.table["start"] += behind
        behind += len(batch.tokens)
    whole = UnitBatch(
        tokens=np.concatenate([batch.tokens for batch in batches]),
        trained=None,
        table=np.concatenate([batch.table for batch in batches]),
        rows_read=sum(batch.rows_read for batch in batches),
        rejected=[bad for batch in batches for bad in batch.rejected],
        shortened=sum(batch.shortened for batch in batches),
    )
    if any(batch.trained is not None for batch in batches):
        whole.trained = np.concatenate([mask_of(batch) for batch in batches])
    for batch in batches:
        add_counts(whole.skipped, batch.skipped)
    return whole


def mask_of(batch: UnitBatch) -> np.ndarray:
    """(N,) bool, which tokens of a batch may be targets."""
    return np.ones(len(batch.tokens), dtype=bool) if batch.trained is None else batch.trained


def add_counts(total: dict[str, int], counts: dict[str, int]) -> None:
    """Add counts by name to others, in place."""
    for name, count in counts.items():
        total[name] = total.get(name, 0) + count


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in lists that are large enough to keep the tokenizer busy and small enough for memory."""
    chunk, characters = [], 0
    for row in rows:
        chunk.append(row)
        if isinstance(row.value, dict):
            characters += sum([len(part) for part in row.value.values() if isinstance(part, str)])
        if len(chunk) >= CHUNK_ROWS or characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
