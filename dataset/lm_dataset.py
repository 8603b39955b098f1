"""Data sets of packed rows for pretraining, mid-training and supervised fine-tuning.

An item is one row of `max_length` = T slots:
    input_ids     (T,) int64, padded with the tokenizer's pad token
    labels        (T,) int64, unshifted; -100 where there is no loss, always on the first token of a piece
    document_ids  (T,) int64, 0 for padding, 1.. for the row's pieces in order

A row is put together from the flat token array when it is asked for.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from dataset.order import EMPTY_ROW
from dataset.packing import PackingPlan, cut_documents, one_piece_a_row, pack_documents, pack_mixture
from dataset.sources import Part, parse_sources
from dataset.token_bytes import token_byte_lengths
from dataset.units import DataSummary, Kind, Say, UnitCollector, Units, choose_units

IGNORED_LABEL = -100

DataPath = str | Path | Sequence[str | Path]


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
            tokens = self.tokens[start : start + length].astype(np.int64)  # 16 bits cannot hold -100
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

    All are packed whole that fit into a row; longer documents are cut to fill the gaps that the others leave.

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

    _kinds: Kind = "both"

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
        if not len(units.lengths) and part != "validation" and only is None:
            reasons = "".join(f"; {count:,} {reason}" for reason, count in summary.skipped.items())
            raise ValueError(f"{', '.join(source.path for source in sources)}: no usable row{reasons}")
        weights = None if part == "validation" else [source.weight for source in sources]
        chosen, passes = choose_units(units, None if weights is None or None in weights else weights, seed)
        passes = passes or [1.0] * len(sources)
        summary.passes = {source.path: round(times, 4) for source, times in zip(sources, passes, strict=True)}
        plan = self._pack(units, chosen, max_length, packing)
        _complete(summary, units, chosen, plan, tokenizer)
        super().__init__(units.tokens, units.trained, plan, tokenizer.pad_token_id, summary)

    def _pack(self, units: Units, chosen: np.ndarray, max_length: int, packing: bool) -> PackingPlan:
        lengths = units.lengths[chosen]
        starts = (np.cumsum(units.lengths) - units.lengths)[chosen]
        if not packing:
            pieces = cut_documents(lengths, max_length, starts)
            return one_piece_a_row(pieces[1], max_length, pieces[0])
        long = lengths > max_length
        return pack_mixture((lengths[~long], starts[~long]), (lengths[long], starts[long]), max_length)


class SFTDataset(MixtureDataset):
    """Conversations for supervised fine-tuning, packed whole. Arguments as for `MixtureDataset`."""

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
        sizes = np.append(token_byte_lengths(tokenizer).numpy()[units.tokens], 0)
        unit_starts = np.append(0, np.cumsum(units.lengths))[:-1]
        summary.bytes = int(np.add.reduceat(sizes, unit_starts, dtype=np.int64)[chosen].sum())
    digest = hashlib.sha256(json.dumps([plan.max_length, str(units.tokens.dtype)]).encode())
    for array in (units.tokens, units.trained, plan.piece_starts, plan.piece_lengths, plan.row_pieces):
        digest.update(np.ascontiguousarray(array))
    summary.fingerprint = digest.hexdigest()
