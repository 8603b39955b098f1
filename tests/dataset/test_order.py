"""Row order: a pure function of (seed, epoch); any ranks, any stop, no row lost or repeated."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataset.order import EMPTY_ROW, SkipBatchSampler, choose_units, epoch_order, next_source


@given(st.integers(0, 200), st.integers(0, 9), st.integers(0, 9))
def test_order_is_a_pure_permutation(num_rows, seed, epoch):
    order = epoch_order(num_rows, seed, epoch)
    np.random.seed(0)  # somebody else's generator makes no difference
    assert (order == epoch_order(num_rows, seed, epoch)).all()
    assert sorted(order.tolist()) == list(range(num_rows))


def test_order_differs_by_seed_and_epoch_and_stays_what_it_is():
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    # A run that is resumed under another release of numpy must see the same rows.
    assert epoch_order(8, seed=42, epoch=1).tolist() == [6, 7, 2, 1, 0, 3, 4, 5]


@given(
    st.integers(0, 60), st.integers(1, 5), st.integers(1, 4), st.integers(0, 60), st.integers(1, 4), st.integers(1, 5)
)
def test_stopped_anywhere_and_resumed_on_other_ranks(num_rows, batch, ranks, stop, ranks_after, batch_after):
    def run(skip, batch_size, world_size, steps=None):
        samplers = [SkipBatchSampler(num_rows, batch_size, rank, world_size, 7, 3, skip) for rank in range(world_size)]
        shares = [list(sampler)[:steps] for sampler in samplers]
        assert all(len(sampler) == len(list(sampler)) == len(samplers[0]) for sampler in samplers)
        assert all(batches for share in shares for batches in share), "a rank without a batch hangs the others"
        return [row for share in shares for rows in share for row in rows if row != EMPTY_ROW]

    before = run(0, batch, ranks, stop)
    after = run(len(before), batch_after, ranks_after)
    assert sorted(before + after) == list(range(num_rows))


def test_a_rank_without_rows_gets_an_empty_one():
    batches = [list(SkipBatchSampler(1, 4, rank, 3)) for rank in range(3)]
    assert batches == [[[0]], [[EMPTY_ROW]], [[EMPTY_ROW]]]


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ({"num_rows": -1, "batch_size": 1}, "num_rows -1"),
        ({"num_rows": 4, "batch_size": 0}, "batch_size 0"),
        ({"num_rows": 4, "batch_size": 1, "rank": 2, "world_size": 2}, "rank 2 is not one of 2 ranks"),
        ({"num_rows": 4, "batch_size": 1, "skip_rows": 5}, "cannot skip 5 rows of 4"),
    ],
)
def test_numbers_out_of_range(arguments, problem):
    with pytest.raises(ValueError, match=problem):
        SkipBatchSampler(**arguments)


@given(st.lists(st.integers(2, 50), max_size=300), st.integers(0, 5))
def test_grouped_by_length_is_a_permutation_too(lengths, epoch):
    order = epoch_order(len(lengths), 3, epoch, np.array(lengths, dtype=int))
    assert sorted(order.tolist()) == list(range(len(lengths)))


def test_rows_of_like_length_share_a_batch():
    lengths = np.random.default_rng(0).integers(2, 500, 10_000)

    def padded(order):
        batches = [lengths[order[first : first + 16]] for first in range(0, len(order), 16)]
        return sum(len(batch) * batch.max() for batch in batches) / lengths.sum() - 1

    grouped, plain = epoch_order(10_000, 1, 0, lengths), epoch_order(10_000, 1, 0)
    assert padded(grouped) < 0.02 and padded(plain) > 0.8
    assert not (grouped == epoch_order(10_000, 1, 1, lengths)).all()
    # The groups are random and the strips shuffled: long and short batches alternate.
    means = [lengths[grouped[first : first + 64]].mean() for first in range(0, 9_984, 64)]
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3


@given(
    st.lists(st.tuples(st.integers(2, 30), st.integers(0, 2)), min_size=1, max_size=200),
    st.tuples(*[st.floats(0.05, 1)] * 3),
    st.integers(0, 5),
)
def test_mixtures_have_the_frequencies_that_were_asked_for(units, weights, seed):
    lengths, source = np.array([length for length, _ in units]), np.array([number for _, number in units])
    chosen, passes = choose_units(lengths, source, weights, seed)
    assert (chosen == choose_units(lengths, source, weights, seed)[0]).all()
    times = np.bincount(chosen, minlength=len(lengths))
    for number, weight in enumerate(weights):
        members = source == number
        if not members.any():
            assert passes[number] == 0
            continue
        # Every unit of a source is there equally often, or once more; the tokens are its share, to one unit.
        assert times[members].max() - times[members].min() <= 1
        given_tokens = int((times * lengths)[members].sum())
        assert abs(given_tokens - weight / sum(weights) * lengths.sum()) <= 30
        assert passes[number] * lengths[members].sum() == pytest.approx(weight / sum(weights) * lengths.sum())


def test_an_imbalanced_source_is_drawn_from_evenly():
    """A thousandth of the tokens that shall be half: each unit 500 times; the large one is drawn without a pattern."""
    lengths, source = np.full(100_100, 10), np.repeat([0, 1], [100_000, 100])
    counts = np.zeros(100_000, dtype=int)
    for seed in range(20):
        chosen, _ = choose_units(lengths, source, (0.5, 0.5), seed)
        times = np.bincount(chosen, minlength=100_100)
        assert set(times[100_000:]) <= {500, 501} and abs(times[100_000:].sum() - 50_050) <= 1
        counts += times[:100_000]
    # 20 draws of about half: a binomial of mean 10.01 and variance 5.
    assert abs(counts.mean() - 10.01) < 0.01 and abs(counts.var() - 5) < 0.1


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=5), st.lists(st.integers(1, 30), min_size=50, max_size=200))
def test_a_stream_follows_its_weights(weights, sizes):
    given_tokens = [0] * len(weights)
    for size in sizes:
        given_tokens[next_source(weights, given_tokens)] += size
    for tokens, weight in zip(given_tokens, weights, strict=True):
        assert abs(tokens - weight / sum(weights) * sum(given_tokens)) <= 31 * len(weights)
