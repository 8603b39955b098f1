"""Paired comparisons against SciPy's binomial test and a count by hand."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from eval.changes import lost_families
from eval.comparison import compare, question_key, sign_test, verdicts_of


@given(first=st.integers(0, 900), second=st.integers(0, 900))
def test_the_test_is_scipys(first, second):
    expected = binomtest(first, first + second).pvalue if first + second else 1.0
    assert sign_test(first, second) == pytest.approx(expected, rel=1e-6, abs=1e-290)


def test_only_shared_questions_count():
    first = {"a": True, "b": True, "c": False, "d": False, "only here": True}
    second = {"a": True, "b": False, "c": True, "d": True}
    found = compare(first, second)
    assert (found.shared, found.only_first, found.only_second, found.missing) == (4, 1, 2, 1)
    assert found.difference == 0.25 and found.p_value == 1.0
    assert found.interval.low < 0.25 < found.interval.high
    nothing = compare({}, {"a": True})
    assert (nothing.difference, nothing.p_value, nothing.interval.low) == (0.0, 1.0, -1.0)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Of all outcomes of 60 questions with chances 0.1 and 0.25 of being won by one side, 95 % cover 0.15."""
    from scipy.stats import multinomial

    covered = 0.0
    outcomes = multinomial(60, [0.1, 0.25, 0.65])
    for lost in range(61):
        for won in range(61 - lost):
            names = [f"{n}" for n in range(60)]
            first = {name: n < lost for n, name in enumerate(names)}
            second = {name: lost <= n < lost + won for n, name in enumerate(names)}
            interval = compare(first, second).interval
            if interval.low <= 0.15 <= interval.high:
                covered += outcomes.pmf([lost, won, 60 - lost - won])
    assert 0.94 < covered < 0.975


def test_verdicts_come_from_an_evaluated_folder(tmp_path):
    with pytest.raises(ValueError, match=r"not evaluated; do it with: python eval/eval_llm.py --model_path .*full_sft"):
        verdicts_of(tmp_path / "full_sft_256")
    reply = {"id": "a", "right": True, "reply": "x\u2028y", "prompt": "A?\u0085", "expected": "x"}
    (tmp_path / "eval_replies.jsonl").write_text(json.dumps(reply, ensure_ascii=False) + "\n", encoding="utf-8")
    assert verdicts_of(tmp_path) == {question_key(reply): True}
    for other in ({"prompt": "B?"}, {"expected": "y"}):
        found = compare(verdicts_of(tmp_path), {question_key(reply | other): True})
        assert not found.shared, "ids of another file, or an answer that was corrected"
    (tmp_path / "eval_replies.jsonl").write_text("{")
    with pytest.raises(ValueError, match="eval_replies.jsonl: cannot be read"):
        verdicts_of(tmp_path)


def replies(rights, family="home", language="en"):
    return [
        {"id": f"{family}-{language}-{number}", "family": family, "language": language, "right": right}
        for number, right in enumerate(rights)
    ]


def test_families_that_fell_beyond_chance_are_named():
    first = replies([True] * 40) + replies([True] * 40, "sort", "zh")
    second = replies([True] * 30 + [False] * 10) + replies([True] * 37 + [False] * 3, "sort", "zh")
    assert lost_families(first, second) == ["home (en) 100 → 75 %"]
    assert lost_families(second, first) == []
