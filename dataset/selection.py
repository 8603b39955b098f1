"""Which of the units of its sources a data set holds, and what they come to."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from dataset.packing import PackingPlan
from dataset.sources import Part
from dataset.store import FlatArray, TokenisedSource, all_trained


@dataclasses.dataclass
class DataSummary:
    """What a data set is made of.

    Attributes:
        rows_read, bad_rows: rows of the files, and those that could not be used.
        skipped: conversations left out, by reason.
        shortened: conversations longer than the window, of which the last turns are kept.
        duplicates: rows left out because another has the same content.
        documents, conversations: how many of each are in the rows; a preference pair is one conversation.
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
    duplicates: int = 0
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


class Units:
    """The units of several sources, one source behind the other.

    Args:
        sources: at least one.
        loss_on: "assistant", or "all" tokens of conversations; documents are supervised whole.

    Attributes:
        tokens, trained: flat arrays, see `dataset.store.TokenisedSource`.
    """

    def __init__(self, sources: Sequence[TokenisedSource], loss_on: Literal["all", "assistant"] = "assistant"):
        if loss_on not in ("all", "assistant"):
            raise ValueError(f"loss_on={loss_on!r} must be 'all' or 'assistant'")
        self.sources = sources
        self.tokens = FlatArray([source.tokens for source in sources])
        everything = loss_on == "all"
        self.trained = FlatArray(
            [all_trained(len(source.tokens)) if everything else source.trained for source in sources]
        )
        self.everything = everything

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """(U,) int64, tokens of each unit."""
        return self.column("length")

    @functools.cached_property
    def source(self) -> np.ndarray:
        """(U,) int16, number of each unit's source."""
        counts = [len(source.table["length"]) for source in self.sources]
        return np.repeat(np.arange(len(counts), dtype=np.int16), counts)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """(U,) int64, where each unit lies in the flat arrays."""
        if len(self.sources) == 1:
            return self.column("start")
        return self.column("start") + np.cumsum([0, *[len(source.tokens) for source in self.sources]])[self.source]

    @functools.cached_property
    def supervised(self) -> np.ndarray:
        """(U,) int64, tokens of each unit that are targets."""
        if self.everything:
            # The first token of a unit, and of a pair's second side, is never a target.
            return self.lengths - 1 - (self.column("first_length") > 0)
        return self.column("supervised")

    def column(self, name: str) -> np.ndarray:
        """(U,) one column of `dataset.units.UNIT`."""
        columns = [source.table[name] for source in self.sources]
        return columns[0] if len(columns) == 1 else np.concatenate(columns)  # the mapped file itself, if it is one


def select_units(
    units: Units, part: Part, only: Literal["document", "conversation"] | None, dedup: bool, summary: DataSummary
) -> np.ndarray:
    """(K,) indices of the units that are taken, in order."""
    chosen = np.arange(len(units.lengths))
    if part != "all":
        chosen = chosen[units.column("held_out") == (part == "validation")]
    if only is not None:
        chosen = chosen[units.column("is_document")[chosen] == (only == "document")]
    if dedup:
        first = np.sort(np.unique(units.column("row_hash")[chosen], return_index=True)[1])
        summary.duplicates = len(chosen) - len(first)
        chosen = chosen[first]
    return chosen


def complete_summary(summary: DataSummary, units: Units, chosen: np.ndarray, plan: PackingPlan) -> None:
    """Fill in the counts that follow from the plan, and the fingerprint."""
    summary.documents = int(units.column("is_document")[chosen].sum())
    summary.conversations = len(chosen) - summary.documents
    summary.rows, summary.fill_rate, summary.tokens = plan.num_rows, plan.fill_rate, int(plan.piece_lengths.sum())
    # Every target of a unit is in exactly one piece, however documents are cut.
    summary.supervised_tokens = int(units.supervised[chosen].sum())
    summary.bytes = int(units.column("bytes")[chosen].sum())
    content = [plan.max_length, [source.fingerprint for source in units.sources], summary.supervised_tokens]
    digest = hashlib.sha256(json.dumps(content).encode())
    for array in (plan.piece_starts, plan.piece_lengths, plan.row_pieces):
        digest.update(np.ascontiguousarray(array))
    summary.fingerprint = digest.hexdigest()
