"""Packing plans: every target exactly once, full rows, nothing that stalls."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset.packing import cut_documents, one_piece_a_row, pack_conversations, pack_documents, pack_mixture

LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40)


def targets_of(starts, lengths) -> list[int]:
    """Indices of all tokens behind the first of their piece."""
    return [index for start, length in zip(starts, lengths, strict=True) for index in range(start + 1, start + length)]


def expected_targets(lengths) -> list[int]:
    """Every token but the first of its document."""
    starts = np.cumsum(lengths) - lengths
    return targets_of(starts, lengths)


def row_sizes(plan) -> list[int]:
    """Tokens in each row."""
    return [
        int(plan.piece_lengths[first:last].sum())
        for first, last in zip(plan.row_pieces[:-1], plan.row_pieces[1:], strict=True)
    ]


@given(LENGTHS, st.integers(2, 40))
def test_every_token_but_the_first_is_a_target_once(lengths, window):
    plan = pack_documents(lengths, window)
    assert targets_of(plan.piece_starts, plan.piece_lengths) == expected_targets(np.array(lengths))
    assert plan.piece_lengths.min() >= 2
    assert max(row_sizes(plan)) <= window


@given(st.lists(st.integers(3, 60), min_size=1, max_size=40), st.integers(4, 40))
def test_document_rows_are_full_but_the_last(lengths, window):
    sizes = row_sizes(pack_documents(lengths, window))
    assert all(size == window for size in sizes[:-1])
    assert sizes[-1] >= 2


def pour(lengths, window):
    """`pack_documents` as its docstring says it, a slot at a time."""
    starts, pieces, rows, start, free = [], [], [0], 0, window
    for length in lengths:
        position, rest = start, length
        while rest > 1:
            take = min(rest, free)
            if free - take == 1 and take > 2:
                take -= 1
            starts.append(position)
            pieces.append(take)
            free, position, rest = free - take, position + take - 1, rest - take + 1
            if free < 2:
                rows.append(len(starts))
                free = window
        start += length
    return starts, pieces, rows + ([len(starts)] if rows[-1] < len(starts) else [])


@given(LENGTHS, st.integers(2, 40))
def test_documents_are_poured_into_rows(lengths, window):
    plan = pack_documents(lengths, window)
    found = [array.tolist() for array in (plan.piece_starts, plan.piece_lengths, plan.row_pieces)]
    assert found == list(pour(lengths, window))


def best_fit(lengths, window):
    """`pack_conversations` as its docstring says it, one conversation at a time."""
    waiting = {}
    for index, length in enumerate(lengths):
        waiting.setdefault(length, []).append(index)
    order, rows = [], [0]

    def take(length):
        order.append(waiting[length].pop(0))
        if not waiting[length]:
            del waiting[length]

    def pair(free):
        for first in sorted(waiting, reverse=True):
            if free - first in waiting and (2 * first != free or len(waiting[first]) > 1):
                return [first, free - first]
        return []

    while waiting:
        free, chosen = window, [max(waiting)]
        while chosen:
            for length in chosen:
                take(length)
            free -= sum(chosen)
            chosen = ([free] if free in waiting else pair(free)) if free else []
            if free and not chosen and any(length <= free for length in waiting):
                chosen = [max(length for length in waiting if length <= free)]
        rows.append(len(order))
    return order, rows


@given(st.lists(st.integers(2, 24), max_size=120), st.integers(24, 60))
def test_conversations_are_fitted_as_told(lengths, window):
    plan = pack_conversations(lengths, window)
    order, rows = best_fit(lengths, window)
    starts = np.cumsum([0, *lengths])[:-1]
    assert plan.piece_starts.tolist() == [int(starts[index]) for index in order]
    assert plan.row_pieces.tolist() == rows


def test_a_single_free_slot_is_avoided():
    plan = pack_documents([5, 9], 6)
    # Five tokens would leave one slot: four, and the last again with its predecessor.
    assert plan.piece_lengths.tolist() == [4, 2, 6, 4]
    assert plan.piece_starts.tolist() == [0, 3, 5, 10]
    assert plan.row_pieces.tolist() == [0, 2, 3, 4]


def test_two_tokens_in_three_slots_leave_one_empty():
    assert row_sizes(pack_documents([3, 2, 2], 6)) == [5, 2]


@given(LENGTHS, st.integers(2, 40))
def test_cut_documents_cover_every_target_once(lengths, window):
    starts, pieces = cut_documents(lengths, window)
    assert targets_of(starts, pieces) == expected_targets(np.array(lengths))
    assert pieces.min() >= 2 and pieces.max() <= window


@given(st.lists(st.integers(2, 40), max_size=60), st.integers(40, 80))
def test_conversations_are_kept_whole_and_once(lengths, window):
    plan = pack_conversations(lengths, window)
    starts = np.cumsum(lengths) - lengths
    found = sorted(zip(plan.piece_starts.tolist(), plan.piece_lengths.tolist(), strict=True))
    assert found == sorted(zip(np.asarray(starts, dtype=int).tolist(), lengths, strict=True))
    sizes = row_sizes(plan)
    assert all(2 <= size <= window for size in sizes)
    # No two rows could be one, unless neither was complete: the last rows are all that is left over.
    assert len(sizes) <= 2 * -(-sum(lengths) // window) + 1


def test_conversations_of_the_window_never_stall():
    plan = pack_conversations([64] * 10, 64)
    assert plan.num_rows == 10 and plan.fill_rate == 1.0
    assert pack_conversations([], 64).num_rows == 0


def test_exact_completion_fills_what_best_fit_leaves():
    # Longest first would put 6 with 3 and leave 5 + 4 and 2: three rows. 6 + 4, 5 + 3 + 2 are two.
    plan = pack_conversations([6, 5, 4, 3, 2], 10)
    assert row_sizes(plan) == [10, 10]


def test_equal_halves_need_two_of_a_kind():
    assert row_sizes(pack_conversations([5, 5, 5], 10)) == [10, 5]


@given(st.lists(st.integers(2, 40), max_size=30), st.lists(st.integers(41, 300), max_size=6))
def test_mixtures_keep_short_units_whole_and_lose_no_target(short, long):
    lengths = np.array(short + long, dtype=int)
    starts = np.cumsum(lengths) - lengths
    count = len(short)
    plan = pack_mixture((lengths[:count], starts[:count]), (lengths[count:], starts[count:]), 40)
    assert sorted(targets_of(plan.piece_starts, plan.piece_lengths)) == expected_targets(lengths)
    pieces = set(zip(plan.piece_starts.tolist(), plan.piece_lengths.tolist(), strict=True))
    assert pieces >= set(zip(starts[:count].tolist(), short, strict=True))
    sizes = row_sizes(plan)
    assert all(2 <= size <= 40 for size in sizes)
    # Gaps are filled as long as there is something to fill them with.
    enough = sum(long) > 40 * (len(short) + 1)
    assert not enough or sum(40 - size >= 5 for size in sizes) <= 1


def test_gaps_are_filled_by_the_long_document():
    lengths, starts = np.array([30, 20]), np.array([0, 100])
    plan = pack_mixture((lengths, starts), (np.array([60]), np.array([200])), 40)
    assert row_sizes(plan) == [40, 40, 32]
    assert plan.piece_starts.tolist() == [0, 200, 100, 209, 228]


def test_plans_are_deterministic():
    lengths = np.random.default_rng(0).integers(2, 300, 2000)
    first, second = pack_conversations(lengths, 512), pack_conversations(lengths.copy(), 512)
    assert (first.piece_starts == second.piece_starts).all() and (first.row_pieces == second.row_pieces).all()
    assert first.fill_rate > 0.99


def test_no_packing_gives_a_row_each():
    plan = one_piece_a_row([3, 4, 5], 8)
    assert row_sizes(plan) == [3, 4, 5]


def test_a_window_of_one_is_refused():
    with pytest.raises(ValueError, match="max_length 1 leaves nothing to predict"):
        pack_documents([3], 1)


def test_a_hundred_thousand_are_packed_quickly():
    lengths = np.random.default_rng(0).integers(10, 1000, 100_000)
    started = time.process_time()
    documents, conversations = pack_documents(lengths, 2048), pack_conversations(lengths, 2048)
    assert time.process_time() - started < 4
    assert documents.fill_rate > 0.9999 and conversations.fill_rate > 0.999


def test_more_tokens_than_32_bits_count():
    lengths = [2**30 + 5, 7, 2**30 + 3, 11, 2**20]
    plan = pack_documents(lengths, 2**20)
    full = np.add.reduceat(plan.piece_lengths, plan.row_pieces[:-1])
    assert sum(lengths) > 2**31 and (full[:-1] == 2**20).all()
    # Every token but a document's first is a target once: piece by piece, each begins where the one before ended.
    assert plan.piece_lengths.sum() - len(plan.piece_lengths) == sum(lengths) - len(lengths)
    ends = plan.piece_starts + plan.piece_lengths
    first_tokens = np.cumsum([0, *lengths])
    assert (np.isin(plan.piece_starts[1:], first_tokens) | (plan.piece_starts[1:] == ends[:-1] - 1)).all()
