"""Which tokens share a row: pure plans over lengths, no tokens touched.

A row holds pieces. A piece is a stretch of one document or a whole conversation; attention and positions do not cross
its edges, and its first token is never a target, for nothing precedes it.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass
class PackingPlan:
    """Rows as lists of pieces of one flat token array.

    Attributes:
        piece_starts: (P,) int64, index of each piece's first token in the flat array.
        piece_lengths: (P,) int64, at least 2.
        row_pieces: (R + 1,) int64; row r holds pieces row_pieces[r] to row_pieces[r + 1] - 1.
        max_length: slots in a row.
    """

    piece_starts: np.ndarray
    piece_lengths: np.ndarray
    row_pieces: np.ndarray
    max_length: int

    @property
    def num_rows(self) -> int:
        """Number of rows R."""
        return len(self.row_pieces) - 1

    @property
    def fill_rate(self) -> float:
        """Share of the slots of all rows that hold a token."""
        return float(self.piece_lengths.sum() / (self.num_rows * self.max_length)) if self.num_rows else 0.0


def _starts_of(lengths: np.ndarray) -> np.ndarray:
    """Start of each unit when units of these lengths lie one behind the other."""
    return np.cumsum(lengths) - lengths


def _check(lengths: Sequence[int] | np.ndarray, max_length: int) -> np.ndarray:
    lengths = np.asarray(lengths, dtype=np.int64)
    if max_length < 2:
        raise ValueError(f"max_length {max_length} leaves nothing to predict; use at least 2")
    assert not len(lengths) or lengths.min() >= 2, "a unit of one token has no target"
    return lengths


def pack_documents(
    lengths: Sequence[int] | np.ndarray, max_length: int, starts: np.ndarray | None = None
) -> PackingPlan:
    """Fill rows with documents in the given order, cut wherever a row ends: every row is full but the last.

    A document that is cut goes on in the next row with the last token again, as context: every token but a document's
    first is a target exactly once. A piece of one token would have no target, so where a document would leave a
    single free slot, its last token is split off as a piece of two. (Only where a document of two tokens meets three
    free slots, or rows have fewer than four, one slot stays empty.)

    Args:
        lengths: tokens of each document, at least 2.
        max_length: slots in a row, at least 2.
        starts: where each document starts in the flat array; by default they lie one behind the other.
    """
    lengths = _check(lengths, max_length)
    starts = _starts_of(lengths) if starts is None else starts
    return _plan(*_pour(lengths, starts, [], max_length), max_length)


def _pour(
    lengths: np.ndarray, starts: np.ndarray, gaps: Sequence[int], max_length: int
) -> tuple[list[int], list[int], list[int]]:
    """Cut documents to fill first the gaps (free slots, at least 2 each) and then new rows.

    Returns:
        Starts and lengths of the pieces, and the number of the first piece of each gap or row, with their count behind.
    """
    piece_starts: list[int] = []
    piece_lengths: list[int] = []
    first_pieces = [0]
    free = gaps[0] if gaps else max_length
    for start, rest in zip(starts.tolist(), lengths.tolist(), strict=True):
        while rest > 1:
            take = min(rest, free)
            if free - take == 1 and take > 2:
                take -= 1
            piece_starts.append(start)
            piece_lengths.append(take)
            free -= take
            start += take - 1
            rest -= take - 1
            if free < 2:
                number = len(first_pieces)
                first_pieces.append(len(piece_starts))
                free = gaps[number] if number < len(gaps) else max_length
    if first_pieces[-1] < len(piece_starts):
        first_pieces.append(len(piece_starts))
    return piece_starts, piece_lengths, first_pieces


def pack_mixture(
    whole: tuple[np.ndarray, np.ndarray], long: tuple[np.ndarray, np.ndarray], max_length: int
) -> PackingPlan:
    """Rows of units that stay whole, their gaps filled with pieces of long documents, and rows of these alone.

    A document longer than a row must be cut somewhere; cut to the gaps that whole units leave, it costs nothing. Gaps
    of less than an eighth of a row stay empty: so short a piece has too little context to learn from.

    Args:
        whole: (lengths, starts) of conversations and of documents that fit into a row.
        long: (lengths, starts) of documents that are cut.
        max_length: slots in a row.
    """
    base = pack_conversations(whole[0], max_length, whole[1])
    row_of_base = np.repeat(np.arange(base.num_rows), np.diff(base.row_pieces))
    free = max_length - np.bincount(row_of_base, weights=base.piece_lengths, minlength=base.num_rows).astype(np.int64)
    with_gap = np.flatnonzero(free >= max(max_length // 8, 2))
    starts, lengths, first_pieces = _pour(_check(long[0], max_length), long[1], free[with_gap].tolist(), max_length)
    used = len(first_pieces) - 1
    rows = np.concatenate([with_gap, np.arange(base.num_rows, base.num_rows + max(used - len(with_gap), 0))])[:used]
    row_of_piece = np.concatenate([row_of_base, np.repeat(rows, np.diff(first_pieces))]).astype(np.int64)
    by_row = np.argsort(row_of_piece, kind="stable")
    row_pieces = np.concatenate([[0], np.cumsum(np.bincount(row_of_piece, minlength=base.num_rows))])
    all_starts, all_lengths = np.append(base.piece_starts, starts), np.append(base.piece_lengths, lengths)
    return _plan(all_starts[by_row], all_lengths[by_row], row_pieces, max_length)


def cut_documents(
    lengths: Sequence[int] | np.ndarray, max_length: int, starts: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Cut documents longer than `max_length` into pieces that overlap by one token.

    Returns:
        Starts and lengths of the pieces, in order; the last piece of a document has at least two tokens.
    """
    lengths = _check(lengths, max_length)
    starts = _starts_of(lengths) if starts is None else starts
    # A document of n tokens has n - 1 targets and each piece holds up to max_length - 1 of them.
    targets = max_length - 1
    counts = -(-(lengths - 1) // targets)
    number_in_document = np.arange(counts.sum()) - np.repeat(_starts_of(counts), counts)
    offsets = number_in_document * targets
    piece_starts = np.repeat(starts, counts) + offsets
    piece_lengths = np.minimum(np.repeat(lengths, counts) - offsets, max_length)
    return piece_starts.astype(np.int64), piece_lengths.astype(np.int64)


def pack_conversations(
    lengths: Sequence[int] | np.ndarray, max_length: int, starts: np.ndarray | None = None
) -> PackingPlan:
    """Put whole conversations into rows.

    A row begins with the longest that is left. It is then completed with one that fits exactly, else with two that do
    together, else it takes the longest that fits, and so on. Plain best fit leaves 2.1 % of the slots of GSM8K at 768
    empty, this 1.1 %. No input can stall it: every row takes at least one. The result depends on nothing but the
    lengths and their order.

    Args:
        lengths: tokens of each conversation, from 2 to `max_length`.
        max_length: slots in a row.
        starts: where each one starts in the flat array; by default they lie one behind the other.
    """
    lengths = _check(lengths, max_length)
    assert not len(lengths) or lengths.max() <= max_length, "a conversation longer than the row"
    starts = _starts_of(lengths) if starts is None else starts
    waiting = _Waiting(lengths.tolist(), max_length)
    order: list[int] = []
    row_pieces = [0]
    while waiting.present:
        order.append(waiting.take(waiting.longest(max_length)))
        free = max_length - int(lengths[order[-1]])
        while free:
            completing = waiting.completing(free) or [waiting.longest(free)]
            if not completing[0]:
                break
            order += [waiting.take(length) for length in completing]
            free -= sum(completing)
        row_pieces.append(len(order))
    return _plan(starts[order], lengths[order], row_pieces, max_length)


class _Waiting:
    """Conversations that have no row yet, by length, with the lengths present as the bits of an integer.

    `mirror` has bit max_length - n where `present` has bit n, so that the lengths a for which both a and free - a are
    present are one shift and one "and" away.
    """

    def __init__(self, lengths: list[int], max_length: int):
        self.max_length = max_length
        self.by_length: dict[int, list[int]] = {}
        for index in reversed(range(len(lengths))):
            self.by_length.setdefault(lengths[index], []).append(index)
        self.present = sum(1 << length for length in self.by_length)
        self.mirror = sum(1 << (max_length - length) for length in self.by_length)

    def take(self, length: int) -> int:
        """Remove and return the first one of this length."""
        indices = self.by_length[length]
        index = indices.pop()
        if not indices:
            self.present ^= 1 << length
            self.mirror ^= 1 << (self.max_length - length)
        return index

    def longest(self, free: int) -> int:
        """The longest length present that is at most `free`, or 0."""
        return max((self.present & ((2 << free) - 1)).bit_length() - 1, 0)

    def completing(self, free: int) -> list[int]:
        """One or two lengths present that add up to `free`, or none."""
        if self.present >> free & 1:
            return [free]
        pairs = self.present & (self.mirror >> (self.max_length - free))
        if free % 2 == 0 and len(self.by_length.get(free // 2, ())) < 2:
            pairs &= ~(1 << (free // 2))
        if not pairs:
            return []
        first = pairs.bit_length() - 1
        return [first, free - first]


def one_piece_a_row(
    lengths: Sequence[int] | np.ndarray, max_length: int, starts: np.ndarray | None = None
) -> PackingPlan:
    """No packing: each piece is a row by itself, padded. For comparison."""
    lengths = _check(lengths, max_length)
    starts = _starts_of(lengths) if starts is None else starts
    return _plan(starts, lengths, np.arange(len(lengths) + 1), max_length)


def _plan(starts: object, lengths: object, row_pieces: object, max_length: int) -> PackingPlan:
    arrays = [np.asarray(values, dtype=np.int64) for values in (starts, lengths, row_pieces)]
    return PackingPlan(*arrays, max_length)
