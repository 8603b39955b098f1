"""The learning rate: bounds for any run, and known values by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.schedule import get_lr


@given(
    total=st.integers(1, 5000),
    step=st.integers(0, 6000),
    warmup=st.floats(0, 1),
    decay=st.floats(0, 1),
    floor=st.floats(0, 1),
    peak=st.floats(1e-6, 1),
    schedule=st.sampled_from(["cosine", "wsd", "constant"]),
)
def test_rate_is_positive_never_above_peak_and_at_least_min_after_warmup(
    total, step, warmup, decay, floor, peak, schedule
):
    rate = get_lr(step, total, peak, warmup, schedule, decay, floor)
    assert 0 < rate <= peak * (1 + 1e-12)
    if min(step, total - 1) >= warmup * total:
        assert rate >= floor * peak * (1 - 1e-12)


def test_warmup_rises_in_equal_parts_and_the_peak_follows():
    assert [get_lr(step, 100, 1.0, warmup_ratio=0.04) for step in range(4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert get_lr(4, 100, 1.0, warmup_ratio=0.04) == pytest.approx(1.0)


def test_wsd_is_constant_then_falls_linearly_to_its_end():
    rates = [get_lr(step, 10, 1.0, 0.0, "wsd", decay_ratio=0.5, min_ratio=0.0) for step in range(10)]
    assert rates == pytest.approx([1, 1, 1, 1, 1, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_halfway_in_the_middle():
    assert get_lr(50, 100, 2.0, 0.0, "cosine", min_ratio=0.1) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))


def test_a_step_past_the_end_keeps_the_last_rate():
    assert get_lr(10**9, 100, 1.0) == get_lr(99, 100, 1.0)
