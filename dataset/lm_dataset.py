"""Data sets of packed rows for pretraining, mid-training and supervised fine-tuning.

An item is one row of `max_length` = T slots:
    input_ids     (T,) int64, padded with the tokenizer's pad token
    labels        (T,) int64, unshifted; -100 where there is no loss, always on the first token of a piece
    document_ids  (T,) int64, 0 for padding, 1.. for the row's pieces in order

Tokens are held in one flat array, in 16 bits where the vocabulary allows it; a row is put together when it is asked for.
"""

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from dataset.chat import Conversation, RenderedChat, chat_renderer, plain_encoder, trim_to_window
from dataset.formats import messages_from_row, row_kind, text_from_row
from dataset.order import EMPTY_ROW
from dataset.packing import PackingPlan, cut_documents, one_piece_a_row, pack_conversations, pack_documents
from dataset.sources import Part, Row, Source, parse_sources, read_rows, split_held_out

IGNORED_LABEL = -100
CHUNK_ROWS = 512
CHUNK_CHARACTERS = 1_000_000
QUIET_SECONDS = 2.0

DataPath = str | Path | Sequence[str | Path]
Say = Callable[[str], None]


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
        kinds: "document", "conversation" or "both": what a row may become. As documents, chat rows give their words.
        train_on: which assistant turns are supervised.
        loss_on: "assistant", or "all" tokens of conversations. Documents are always supervised whole.
        say: prints a progress line when it takes long; None for silence.
        only: pass over rows of the other kind.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        kinds: Literal["document", "conversation", "both"],
        train_on: Literal["all", "last"],
        loss_on: Literal["all", "assistant"],
        say: Say | None,
        only: Literal["document", "conversation"] | None = None,
    ):
        if loss_on not in ("all", "assistant"):
            raise ValueError(f"loss_on={loss_on!r} must be 'all' or 'assistant'")
        if max_length < 4:
            raise ValueError(f"max_length {max_length} is too short for a row; use at least 4")
        self.max_length, self.kinds, self.train_on, self.loss_on, self.say = max_length, kinds, train_on, loss_on, say
        self.only = only
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

    def add_source(self, index: int, source: Source, strict: bool, text_as: Literal["file", "paragraph"], part: Part) -> None:
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
            return list(self.renderer.render_many([conversation for _, conversation in conversations], train_on=self.train_on))
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
        return Units(tokens, trained, lengths, np.array(self.is_document, dtype=bool), np.array(self.source, dtype=np.int64))


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
    """Which units a mixture holds: (K,) indices, repeated where a source is gone through more than once, and the passes.

    Weights are token shares. The mixture has as many tokens as the sources together; a source that must give more
    than it has is repeated, one that must give less is drawn from without replacement.
    """
    num_sources = int(units.source.max()) + 1 if len(units.source) else 0
    sizes = np.bincount(units.source, weights=units.lengths, minlength=num_sources)
    if weights is None:
        return np.arange(len(units.lengths)), [1.0] * num_sources
    passes = [weight / sum(weights) * sizes.sum() / size if size else 0.0 for weight, size in zip(weights, sizes, strict=True)]
    chosen = []
    for index, times in enumerate(passes):
        members = np.flatnonzero(units.source == index)
        chosen += [members] * int(times)
        shuffled = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index]))).permutation(members)
        before = np.cumsum(units.lengths[shuffled]) - units.lengths[shuffled]
        chosen.append(np.sort(shuffled[before < (times % 1) * sizes[index] - 0.5]))
    return np.concatenate(chosen), passes


class PackedDataset(Dataset):
    """Rows of a plan over flat tokens. The data sets below differ in what they take and how they pack it.

    Attributes:
        plan: which pieces share a row.
        max_length: slots in a row.
        summary: a `DataSummary`.
    """

    def __init__(self, tokens: np.ndarray, trained: np.ndarray, plan: PackingPlan, pad_id: int, summary: DataSummary):
        self.tokens, self.trained, self.plan, self.pad_id, self.summary = tokens, trained, plan, pad_id, summary
        self.max_length = plan.max_length

    def __len__(self) -> int:
        return self.plan.num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Row `index`, or a fully masked one for `EMPTY_ROW` (-1)."""
        if not (0 <= index < len(self) or index == EMPTY_ROW):
            raise IndexError(f"row {index} of {len(self)}")
        input_ids = np.full(self.max_length, self.pad_id, dtype=np.int64)
        labels = np.full(self.max_length, IGNORED_LABEL, dtype=np.int64)
        document_ids = np.zeros(self.max_length, dtype=np.int64)
        first, last = (0, 0) if index == EMPTY_ROW else self.plan.row_pieces[index : index + 2].tolist()
        position = 0
        starts, lengths = self.plan.piece_starts[first:last].tolist(), self.plan.piece_lengths[first:last].tolist()
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True), start=1):
            end = position + length
            tokens = self.tokens[start : start + length]
            input_ids[position:end] = tokens
            labels[position + 1 : end] = np.where(self.trained[start + 1 : start + length], tokens[1:], IGNORED_LABEL)
            document_ids[position:end] = number
            position = end
        return {
            "input_ids": torch.from_numpy(input_ids),
            "labels": torch.from_numpy(labels),
            "document_ids": torch.from_numpy(document_ids),
        }


def collate_rows(items: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of rows: every entry (B, T)."""
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


class MixtureDataset(PackedDataset):
    """Documents and conversations together, for mid-training: {"text"} rows and chat rows, in any mixture of files.

    Everything is packed by best fit, so that no document is cut that fits into a row.

    Args:
        data_path: files; PATH:WEIGHT gives token shares.
        tokenizer: with a chat template that marks its generation spans, and a pad token.
        max_length: slots in a row.
        packing: False puts each piece into a row of its own, for comparison.
        train_on: "all" assistant turns are supervised, or only the "last".
        loss_on: "assistant", or "all" tokens of conversations; documents are supervised whole.
        strict: any bad row is an error.
        part: "train" or "validation" where one file serves as both, "all" otherwise.
        text_as: whether a .txt file is one document or one a paragraph.
        seed: of the choice where a weighted source is used in part.
        say: prints a line; None for silence.
        only: take only the documents, or only the conversations, of mixed files; the other rows are passed over.

    Raises:
        ValueError: no usable row, too many bad ones, a file that cannot be read, or an option of an unknown value.
    """

    _kinds: Literal["document", "conversation", "both"] = "both"

    def __init__(
        self,
        data_path: DataPath,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int = 768,
        packing: bool = True,
        train_on: Literal["all", "last"] = "all",
        loss_on: Literal["all", "assistant"] = "assistant",
        strict: bool = False,
        part: Part = "all",
        text_as: Literal["file", "paragraph"] = "file",
        seed: int = 0,
        say: Say | None = print,
        only: Literal["document", "conversation"] | None = None,
    ):
        collector = UnitCollector(tokenizer, max_length, self._kinds, train_on, loss_on, say, only)
        sources = parse_sources(data_path)
        for index, source in enumerate(sources):
            collector.add_source(index, source, strict, text_as, part)
        units, summary = collector.finish(), collector.summary
        if not len(units.lengths) and part != "validation":
            reasons = "".join(f"; {count:,} {reason}" for reason, count in summary.skipped.items())
            raise ValueError(f"{', '.join(source.path for source in sources)}: no usable row{reasons}")
        weights = None if part == "validation" else [source.weight for source in sources]
        chosen, passes = choose_units(units, None if weights is None or None in weights else weights, seed)
        summary.passes = {source.path: round(times, 4) for source, times in zip(sources, passes, strict=False)}
        plan = self._pack(units, chosen, max_length, packing)
        _complete(summary, units, chosen, plan, tokenizer)
        super().__init__(units.tokens, units.trained, plan, tokenizer.pad_token_id, summary)

    def _pack(self, units: Units, chosen: np.ndarray, max_length: int, packing: bool) -> PackingPlan:
        starts = (np.cumsum(units.lengths) - units.lengths)[chosen]
        piece_starts, piece_lengths = cut_documents(units.lengths[chosen], max_length, starts)
        return (pack_conversations if packing else one_piece_a_row)(piece_lengths, max_length, piece_starts)


class SFTDataset(MixtureDataset):
    """Conversations for supervised fine-tuning, packed whole by best fit. Arguments as for `MixtureDataset`."""

    _kinds = "conversation"


class PretrainDataset(MixtureDataset):
    """Documents for pretraining, every row full but the last: documents are cut where a row ends.

    {"text"} rows give their text, chat rows their words. Arguments as for `MixtureDataset`.
    """

    _kinds = "document"

    def __init__(
        self,
        data_path: DataPath,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int = 512,
        packing: bool = True,
        strict: bool = False,
        part: Part = "all",
        text_as: Literal["file", "paragraph"] = "file",
        seed: int = 0,
        say: Say | None = print,
    ):
        super().__init__(
            data_path, tokenizer, max_length, packing, strict=strict, part=part, text_as=text_as, seed=seed, say=say
        )

    def _pack(self, units: Units, chosen: np.ndarray, max_length: int, packing: bool) -> PackingPlan:
        if not packing:
            return super()._pack(units, chosen, max_length, packing)
        starts = (np.cumsum(units.lengths) - units.lengths)[chosen]
        return pack_documents(units.lengths[chosen], max_length, starts)


def _complete(
    summary: DataSummary, units: Units, chosen: np.ndarray, plan: PackingPlan, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Fill in the counts that follow from the plan, and the fingerprint."""
    summary.documents = int(units.is_document[chosen].sum())
    summary.conversations = len(chosen) - summary.documents
    summary.rows, summary.fill_rate, summary.tokens = plan.num_rows, plan.fill_rate, int(plan.piece_lengths.sum())
    # Per piece the targets behind its first token; the extra False makes an end of the array a valid index.
    edges = np.stack([plan.piece_starts + 1, plan.piece_starts + plan.piece_lengths], axis=1).ravel()
    if len(edges):
        trained = np.append(units.trained, False)
        summary.supervised_tokens = int(np.add.reduceat(trained, edges, dtype=np.int64)[::2].sum())
        sizes = np.append(_token_bytes(tokenizer)[units.tokens], 0)
        unit_starts = np.append(0, np.cumsum(units.lengths))[:-1]
        summary.bytes = int(np.add.reduceat(sizes, unit_starts, dtype=np.int64)[chosen].sum())
    digest = hashlib.sha256(json.dumps([plan.max_length, str(units.tokens.dtype)]).encode())
    for array in (units.tokens, units.trained, plan.piece_starts, plan.piece_lengths, plan.row_pieces):
        digest.update(np.ascontiguousarray(array))
    summary.fingerprint = digest.hexdigest()


def _token_bytes(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """(V,) UTF-8 bytes that each token stands for; 0 for control tokens. Byte-level alphabets have a character a byte."""
    control = set(tokenizer.get_added_vocab().values())
    lengths = np.zeros(len(tokenizer), dtype=np.int64)
    for token, index in tokenizer.get_vocab().items():
        lengths[index] = 0 if index in control else len(token)
    return lengths
