"""Data sets for every stage: documents, conversations, both, preference pairs, and prompts.

An item of all but `PromptDataset` is one row of `max_length` = T slots:
    input_ids     (T,) int64, padded with the tokenizer's pad token
    labels        (T,) int64, unshifted; -100 where there is no loss, always on the first token of a piece
    document_ids  (T,) int64, 0 for padding, 1.. for the row's pieces in order
A row is put together from the flat token array when it is asked for. Without packing it has one piece and no padding.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from dataset.chat import render_prompt
from dataset.formats import CONTENT_KEYS, messages_from_row
from dataset.order import EMPTY_ROW, choose_units
from dataset.packing import (
    PackingPlan,
    cut_documents,
    one_piece_a_row,
    pack_conversations,
    pack_documents,
    pack_mixture,
)
from dataset.plans import Selection, kept_selection, plan_folder
from dataset.readers import TextAs
from dataset.selection import DataSummary, Units, complete_summary, select_units
from dataset.sources import BadRows, Part, RowReader, parse_sources, split_held_out
from dataset.store import FlatArray, TokenisedSource, columns_of
from dataset.tokenise import Say, tokenise
from dataset.units import (
    Kind,
    Reasoning,
    ThinkingMix,
    UnitBatch,
    UnitMaker,
    UnitOptions,
    add_counts,
    mask_of,
    separator_id,
)

IGNORED_LABEL = -100

DataPath = str | Path | Sequence[str | Path]


class PackedDataset(Dataset):
    """Rows of a plan over flat tokens. The data sets below differ in what they take and how they pack it.

    Attributes:
        plan: which pieces share a row.
        max_length: slots in a row.
        is_padded: False where rows are as long as their piece.
        summary: a `DataSummary`.
    """

    def __init__(
        self,
        tokens: FlatArray,
        trained: FlatArray,
        plan: PackingPlan,
        pad_id: int,
        summary: DataSummary,
        is_padded: bool = True,
    ):
        self.tokens, self.trained, self.plan, self.pad_id, self.summary = tokens, trained, plan, pad_id, summary
        self.max_length, self.is_padded = plan.max_length, is_padded

    def __len__(self) -> int:
        return self.plan.num_rows

    def describe(self) -> str:
        """What a run says of its data before it starts."""
        summary = self.summary
        kinds = {"documents": summary.documents, "conversations": summary.conversations}
        units = ", ".join(f"{count:,} {name}" for name, count in kinds.items() if count)
        return (
            f"{units}, {summary.tokens:,} tokens ({summary.supervised_tokens:,} with a loss), "
            f"{len(self):,} rows of {self.max_length}, {summary.fill_rate:.1%} filled"
        )

    @property
    def preview(self) -> "PackedDataset":
        """Rows to try things on: all of them; a stream has only some."""
        return self

    def state(self) -> None:
        """Nothing: where a run stands in rows that lie ready is one number, which the run has."""

    @property
    def group_lengths(self) -> np.ndarray | None:
        """(rows,) tokens of each row where rows of like length should share a batch, else None."""
        return None if self.is_padded else self.plan.piece_lengths

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Row `index`, or a fully masked one for `EMPTY_ROW` (-1)."""
        if not (0 <= index < len(self) or index == EMPTY_ROW):
            raise IndexError(f"row {index} of {len(self)}")
        first, last = (0, 0) if index == EMPTY_ROW else self.plan.row_pieces[index : index + 2].tolist()
        starts, lengths = self.plan.piece_starts[first:last].tolist(), self.plan.piece_lengths[first:last].tolist()
        size = self.max_length if self.is_padded or not lengths else lengths[0]
        input_ids = np.full(size, self.pad_id, dtype=np.int64)
        labels = np.full(size, IGNORED_LABEL, dtype=np.int64)
        document_ids = np.zeros(size, dtype=np.int64)
        position = 0
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
    """A batch of rows: every entry (B, T), shorter rows padded to the longest."""
    # Which token pads makes no difference where document_ids is 0; 0 is one that every vocabulary has.
    padding = {"labels": IGNORED_LABEL}
    return {
        name: pad_sequence([item[name] for item in items], batch_first=True, padding_value=padding.get(name, 0))
        for name in items[0]
    }


class MixtureDataset(PackedDataset):
    """Documents and conversations together, for mid-training: {"text"} rows and chat rows, in any mixture of files.

    All are packed whole that fit into a row; longer documents are cut to fill the gaps that the others leave.

    Args:
        data_path: files; PATH:WEIGHT gives token shares.
        tokenizer: with a chat template that marks its generation spans, and a pad token.
        max_length: slots in a row.
        packing: False puts each piece into a row of its own, as long as the piece, for comparison.
        train_on: "all" assistant turns are supervised, or only the "last".
        loss_on: "assistant", or "all" tokens of conversations; documents are supervised whole.
        reasoning: "keep" the assistant's, or "drop" it.
        thinking_mix: shares of conversations shown with thinking left free, on and off; see `UnitOptions`.
        dedup: of rows with the same content only the first is taken.
        strict: any bad row is an error.
        part: "train" or "validation" where one file serves as both, "all" otherwise.
        text_as: whether a .txt file is one document or one a paragraph.
        seed: of the choice where a weighted source is used in part.
        say: prints a line; None for silence.
        only: take only the documents, or only the conversations, of mixed files; the other rows are passed over.
        cache_dir: where tokenised files are kept for the next start; None keeps none.
        workers: processes that tokenise; None decides by the files' size.

    Raises:
        ValueError: no usable row, too many bad ones, a file that cannot be read, or an option of an unknown value.
    """

    kinds: Kind = "both"

    def __init__(
        self,
        data_path: DataPath,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int = 768,
        packing: bool = True,
        train_on: Literal["all", "last"] = "all",
        loss_on: Literal["all", "assistant"] = "assistant",
        reasoning: Reasoning = "keep",
        thinking_mix: ThinkingMix = (1.0, 0.0, 0.0),
        dedup: bool = False,
        strict: bool = False,
        part: Part = "all",
        text_as: TextAs = "file",
        seed: int = 0,
        say: Say | None = print,
        only: Literal["document", "conversation"] | None = None,
        cache_dir: str | Path | None = None,
        workers: int | None = None,
    ):
        if part not in ("all", "train", "validation"):
            raise ValueError(f"part={part!r} must be 'all', 'train' or 'validation'")
        if only not in (None, "document", "conversation"):
            raise ValueError(f"only={only!r} must be 'document', 'conversation' or None")
        options = UnitOptions(self.kinds, max_length, train_on, reasoning, tuple(thinking_mix))
        sources = parse_sources(data_path)
        units = Units(
            [
                tokenise(source.path, tokenizer, options, part != "all", text_as, strict, cache_dir, workers, say)
                for source in sources
            ],
            loss_on,
        )
        weights = [source.weight for source in sources]
        rules = [type(self).__name__, part, only, dedup, weights, seed, max_length, packing, loss_on]
        selection = kept_selection(
            plan_folder(cache_dir, units, rules),
            lambda: self._select(units, part, only, dedup, weights, seed, max_length, packing),
        )
        self.units, self.chosen = units, selection.chosen
        pad_id = separator_id(tokenizer)
        super().__init__(units.tokens, units.trained, selection.plan, pad_id, selection.summary, is_padded=packing)

    @classmethod
    def _select(
        cls,
        units: Units,
        part: Part,
        only: Literal["document", "conversation"] | None,
        dedup: bool,
        weights: list[float | None],
        seed: int,
        max_length: int,
        packing: bool,
    ) -> Selection:
        summary = DataSummary()
        chosen = select_units(units, part, only, dedup, summary)
        for source in units.sources:
            summary.rows_read += source.bad_rows.rows_read
            summary.bad_rows += source.bad_rows.count
            summary.shortened += source.shortened
            add_counts(summary.skipped, source.skipped)
        paths = [source.path for source in units.sources]
        if not len(chosen) and part != "validation" and only is None:
            reasons = "".join(f"; {count:,} {reason}" for reason, count in summary.skipped.items())
            raise ValueError(f"{', '.join(paths)}: no usable row{reasons}")
        passes = [1.0] * len(paths)
        if part != "validation" and None not in weights:
            picked, passes = choose_units(units.lengths[chosen], units.source[chosen], weights, seed)
            chosen = chosen[picked]
        summary.passes = {path: round(times, 4) for path, times in zip(paths, passes, strict=True)}
        plan = cls.pack(units, chosen, max_length, packing)
        complete_summary(summary, units, chosen, plan)
        return Selection(chosen, plan, summary)

    @classmethod
    def of_batch(
        cls,
        batch: UnitBatch,
        maker: UnitMaker,
        loss_on: Literal["all", "assistant"] = "assistant",
        held_out: bool | None = None,
        only: Literal["document", "conversation"] | None = None,
    ) -> PackedDataset:
        """Rows of units that are in memory.

        Args:
            batch: the units.
            maker: that made them.
            loss_on: as for the class.
            held_out: the part that is taken; None takes both.
            only: as for the class.
        """
        source = TokenisedSource("", batch.tokens, mask_of(batch), columns_of(batch.table), BadRows(), {}, 0, "")
        units, summary = Units([source], loss_on), DataSummary()
        part: Part = "all" if held_out is None else "validation" if held_out else "train"
        chosen = select_units(units, part, only, False, summary)
        plan = cls.pack(units, chosen, maker.options.max_length, packing=True)
        complete_summary(summary, units, chosen, plan)
        return PackedDataset(units.tokens, units.trained, plan, maker.separator, summary)

    def __getstate__(self) -> dict[str, Any]:
        # A process that loads rows needs the plan, not what the plan was made from.
        return {name: value for name, value in self.__dict__.items() if name not in ("units", "chosen")}

    @classmethod
    def pack(cls, units: Units, chosen: np.ndarray, max_length: int, packing: bool) -> PackingPlan:
        lengths, starts = units.lengths[chosen], units.starts[chosen]
        if not packing:
            pieces = cut_documents(lengths, max_length, starts)
            return one_piece_a_row(pieces[1], max_length, pieces[0])
        long = lengths > max_length
        return pack_mixture((lengths[~long], starts[~long]), (lengths[long], starts[long]), max_length)


class SFTDataset(MixtureDataset):
    """Conversations for supervised fine-tuning, packed whole. Arguments as for `MixtureDataset`."""

    kinds = "conversation"


class PretrainDataset(MixtureDataset):
    """Documents for pretraining, every row full but the last: documents are cut where a row ends.

    {"text"} rows give their text, chat rows their words. Arguments as for `MixtureDataset`.
    """

    kinds = "document"

    @classmethod
    def pack(cls, units: Units, chosen: np.ndarray, max_length: int, packing: bool) -> PackingPlan:
        if not packing:
            return super().pack(units, chosen, max_length, packing)
        return pack_documents(units.lengths[chosen], max_length, units.starts[chosen])


class DPODataset(MixtureDataset):
    """Preference pairs: a row's pieces 1 and 2 are the chosen and rejected side of a pair, 3 and 4 of the next.

    Both sides are rendered and shortened alike. Arguments as for `MixtureDataset`; rows are always packed.

    Attributes:
        reference: (pieces,) float32, what a reference model makes of each side of each pair, or None. With it an item
            holds `reference`, (pieces of the row,).
    """

    kinds = "pair"
    reference: np.ndarray | None = None

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Row `index`, or a fully masked one for `EMPTY_ROW` (-1)."""
        item = super().__getitem__(index)
        if self.reference is not None:
            first, last = (0, 0) if index == EMPTY_ROW else self.plan.row_pieces[index : index + 2].tolist()
            item["reference"] = torch.from_numpy(self.reference[first:last])
        return item

    @classmethod
    def pack(cls, units: Units, chosen: np.ndarray, max_length: int, packing: bool) -> PackingPlan:
        if not packing:
            raise ValueError("both sides of a pair share a row: preference pairs are always packed")
        # The plan is of the pairs' numbers first: a start tells both where a pair lies and how it is divided.
        pairs = pack_conversations(units.lengths[chosen], max_length, np.arange(len(chosen)))
        order = chosen[pairs.piece_starts]
        first = units.column("first_length")[order]
        starts = np.stack([units.starts[order], units.starts[order] + first], axis=1).ravel()
        lengths = np.stack([first, units.lengths[order] - first], axis=1).ravel()
        return PackingPlan(starts, lengths, pairs.row_pieces * 2, max_length)


class PromptDataset(Dataset):
    """Prompts for reinforcement learning: conversations whose last assistant message is taken off, to be generated.

    An item holds
        input_ids  (P,) int64, the prompt, an assistant turn opened at its end
        labels     (P,) int64, all -100: nothing in a prompt is supervised
        messages   the prompt's messages, tools beside them
        tools      tool schemas, or None
        reference  the message that was taken off, or None
        extra      what else the row holds, for rewards, such as "gt"; "answer" too

    Args:
        data_path: conversations in any known format.
        tokenizer: with a chat template.
        max_length: longest prompt; longer ones are left out and counted.
        open_thinking: as in `dataset.chat.render_prompt`.
        strict, part, say: as for `MixtureDataset`.

    Raises:
        ValueError: no usable prompt, or too many bad rows.
    """

    def __init__(
        self,
        data_path: DataPath,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int = 512,
        open_thinking: bool | None = None,
        strict: bool = False,
        part: Part = "all",
        say: Say | None = print,
    ):
        reader = RowReader(data_path, strict, say=say)
        self.items: list[dict[str, Any]] = []
        self.summary = DataSummary()
        digest = hashlib.sha256(json.dumps([max_length, open_thinking]).encode())
        for row in split_held_out(reader, part):
            try:
                item = _prompt_item(row.value, tokenizer, open_thinking)
            except ValueError as error:
                reader.reject(row, str(error))
                continue
            if len(item["input_ids"]) > max_length:
                add_counts(self.summary.skipped, {"prompt longer than the window": 1})
                continue
            self.items.append(item)
            digest.update(item["input_ids"].numpy())
            digest.update(json.dumps([item["reference"], item["extra"]], sort_keys=True, default=str).encode())
        reader.check()
        self.summary.rows_read, self.summary.bad_rows = reader.bad_rows.rows_read, reader.bad_rows.count
        self._count()
        self.summary.fingerprint = digest.hexdigest()
        if not self.items and part != "validation":
            reasons = "".join(f"; {count:,} {reason}" for reason, count in self.summary.skipped.items())
            raise ValueError(f"{', '.join(reader.paths)}: no usable prompt{reasons}")

    def keep(self, fits: Callable[[dict[str, Any]], bool], others: str) -> None:
        """Leave out the prompts that do not fit, which are counted under the name of `others`.

        Raises:
            ValueError: none is left.
        """
        kept = [item for item in self.items if fits(item)]
        if self.items and not kept:
            raise ValueError(f"all {len(self.items):,} prompts are {others}")
        if len(kept) < len(self.items):
            add_counts(self.summary.skipped, {f"prompts {others}": len(self.items) - len(kept)})
        self.items = kept
        self._count()

    def _count(self) -> None:
        self.summary.rows = self.summary.conversations = len(self.items)
        self.summary.tokens = sum(len(item["input_ids"]) for item in self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.items[index]


def _prompt_item(
    value: dict[str, Any], tokenizer: PreTrainedTokenizerBase, open_thinking: bool | None
) -> dict[str, Any]:
    messages, tools = messages_from_row(value)
    reference = messages.pop() if messages[-1]["role"] == "assistant" else None
    if not messages:
        raise ValueError("the conversation has no message before the answer")
    ids = torch.tensor(render_prompt(messages, tokenizer, tools, open_thinking), dtype=torch.int64)
    return {
        "input_ids": ids,
        "labels": torch.full_like(ids, IGNORED_LABEL),
        "messages": messages,
        "tools": tools,
        "reference": reference,
        "extra": {key: content for key, content in value.items() if key == "answer" or key not in CONTENT_KEYS},
    }
