"""The rules by which a reply is right, the interval by hand, and what a broken question file is told."""

import json

import pytest

from eval.questions import (
    Question,
    best_constant,
    is_right,
    limit_questions,
    load_questions,
    wilson_interval,
)


def question(answers=("Yes.",), family="facts", language="en", check="exact", number=0, call=None):
    return Question(
        id=f"{family}-{language}-{number}", family=family, language=language,
        messages=[{"role": "user", "content": "?"}], answers=tuple(answers), check=check, tool_call=call,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "answers", "right"),
    [
        ("Mira lives in Redmill.", ["Mira lives in Redmill."], True),
        ("  mira lives in redmill ! ", ["Mira lives in Redmill."], True),
        ("米拉住在雪谷镇", ["米拉住在雪谷镇。"], True),
        ("cafe\u0301", ["café"], True),
        ("Redmill", ["Mira lives in Redmill.", "Redmill."], True),
        ("Mira lives in Redmill. She is a baker.", ["Mira lives in Redmill."], False),
        ("", ["?"], False),
        ("", ["Yes"], False),
        ("*peach", ["*peach*"], False),
        ("(peach", ["(peach)"], False),
        ("peach", ["PEACH"], False),
        ("PEACH", ["PEACH"], True),
        ("PEACH", ["peach"], True),
    ],
)
def test_exact(reply, answers, right):
    assert is_right(reply, answers, "exact") is right


@pytest.mark.parametrize(
    ("reply", "answers", "right"),
    [
        ("The answer is 42.", ["42"], True),
        ("42.0", ["42"], True),
        ("1,234", ["1234"], True),
        ("４２", ["42"], True),
        ("12 + 30 = 42", ["42", "12 + 30 = 42"], True),
        ("12 + 30 = 42", ["42"], False),
        ("It is 42, yes 42", ["42"], True),
        ("40 41 42 43", ["42"], False),
        ("-42", ["42"], False),
        ("forty-two", ["42"], False),
        ("4.2", ["42"], False),
        ("It is .5", ["0.5"], True),
        ("1,2000", ["1200"], False),
        ("on May 12,2024", ["12202"], False),
        ("123456789012345678901234567891", ["123456789012345678901234567890"], False),
    ],
)
def test_number(reply, answers, right):
    assert is_right(reply, answers, "number") is right


def test_interval_equals_the_formula_by_hand():
    # 8 of 10: (p + z2/2n ± z sqrt(p(1-p)/n + z2/4n2)) / (1 + z2/n) with z = 1.96
    interval = wilson_interval(8, 10)
    assert (interval.low, interval.high) == (pytest.approx(0.4901625, abs=1e-6), pytest.approx(0.9433178, abs=1e-6))
    nothing, everything = wilson_interval(0, 20), wilson_interval(20, 20)
    assert nothing.low == 0 and nothing.high == pytest.approx(0.1611, abs=1e-4)
    assert everything.high == 1 and everything.low == pytest.approx(1 - 0.1611, abs=1e-4)
    assert (wilson_interval(0, 0).low, wilson_interval(0, 0).high) == (0, 1)
    with pytest.raises(ValueError, match="3 right of 2"):
        wilson_interval(3, 2)


def test_best_constant_counts_accepted_answers():
    yes_or_no = [question(["Yes."]), question(["yes"]), question(["No.", "Not at all"])]
    assert best_constant(yes_or_no) == 2
    assert best_constant([question(["No", "Yes"]), question(["Yes"]), question(["No"])]) == 2
    assert best_constant([question(["There are 3"], check="number"), question(["3", "three"], check="number")]) == 2
    assert best_constant([]) == 0


def test_best_constant_of_tool_questions_needs_the_same_call():
    calls = [{"name": "calculate", "arguments": {"expression": text}} for text in ("1 + 3", "2 + 2", "2 + 2")]
    assert best_constant([question(["4"], check="tool_call", call=call) for call in calls]) == 2


def test_limit_takes_evenly_from_families_and_keeps_the_order():
    questions = [question(family=family, number=index) for family in "ab" for index in range(5)]
    assert [item.id for item in limit_questions(questions, 4)] == ["a-en-0", "a-en-1", "b-en-0", "b-en-1"]
    assert limit_questions(questions, None) == questions and limit_questions(questions, 99) == questions


def write(path, *rows):
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n", encoding="utf-8"
    )
    return path


PROMPT = [{"role": "user", "content": "Is it?"}]


def test_loads_a_users_own_minimal_rows(tmp_path):
    system = {"role": "system", "content": "", "tools": json.dumps([{"name": "f"}])}
    path = write(
        tmp_path / "own.jsonl",
        {"conversations": PROMPT, "answers": ["Yes"]},
        "",
        {
            "conversations": [system, *PROMPT],
            "answers": ["7"],
            "check": "tool_call",
            "tool_call": {"name": "f", "arguments": {}},
        },
    )
    first, second = load_questions(path)
    assert (first.id, first.family, first.check) == ("line-1", "questions", "exact")
    assert second.tools == [{"name": "f"}] and second.tool_call == {"name": "f", "arguments": {}}


def test_loads_choices_and_forms(tmp_path):
    path = write(
        tmp_path / "own.jsonl",
        {"prompt": "Mira lives in", "choices": ["Redmill", "Northport"], "answer": 1},
        {"prompt": "米拉住在", "delimiter": "", "choices": ["红磨坊", "北港"], "answer": 0},
        {"conversations": PROMPT, "choices": ["Yes", "No"], "answer": 0, "family": "asked"},
        {"conversations": PROMPT, "form": {"max_words": 5, "language": "en"}},
    )
    plain, chinese, asked, form = load_questions(path)
    assert [question.check for question in (plain, chinese, asked, form)] == ["choice"] * 3 + ["form"]
    assert (plain.prompt, plain.choices, plain.answers) == ("Mira lives in ", ("Redmill", "Northport"), ("Northport",))
    assert chinese.prompt == "米拉住在" and asked.prompt is None and asked.messages == PROMPT
    assert form.form == {"max_words": 5, "language": "en"} and form.choices == ()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{broken", "line 2: not JSON"),
        ([1], "line 2: expected a JSON object"),
        ({"answers": ["x"]}, "line 2: conversations must be a list"),
        ({"conversations": [{"role": "ghost", "content": ""}], "answers": ["x"]}, "line 2: message 1: role 'ghost'"),
        (
            {"conversations": [*PROMPT, {"role": "assistant", "content": "a"}], "answers": ["x"]},
            "line 2: the last message",
        ),
        ({"conversations": PROMPT, "answers": []}, "line 2: answers must be"),
        ({"conversations": PROMPT, "answers": ["x"], "check": "feeling"}, "check 'feeling' is unknown; use exact"),
        ({"conversations": PROMPT, "answers": ["x"], "check": "number"}, "needs an answer with exactly one number"),
        ({"conversations": PROMPT, "answers": ["x"], "check": "tool_call"}, "check tool_call needs tool_call"),
        ({"prompt": "A or B?", "choices": ["A"], "answer": 0}, "choices must be a list of two or more texts"),
        ({"prompt": "A or B?", "choices": ["A", ""], "answer": 0}, "choices must be a list of two or more texts"),
        (
            {"prompt": "A or B?", "choices": ["A", "B"], "answer": 2},
            "answer 2 must be the number of the right choice",
        ),
        ({"prompt": "A or A?", "choices": ["A", "A"], "answer": 0}, "two choices are the same"),
        (
            {"conversations": PROMPT, "answers": ["x"], "tool_call": {"name": "a", "arguments": {}}}
            | {"check": "tool_call"},
            "check tool_call needs tools to call",
        ),
        ({"conversations": PROMPT, "answers": ["x"], "free_arithmetic": "no"}, "free_arithmetic 'no' must be true"),
        ({"prompt": "A or B?", "choices": ["A", "B"], "answer": True}, "answer True must be the number"),
        ({"prompt": "A or B?", "choices": ["A", "B"]}, "answer None must be the number"),
        ({"prompt": 3, "choices": ["A", "B"], "answer": 0}, "prompt and delimiter must be texts"),
        ({"prompt": "A", "delimiter": 1, "choices": ["A", "B"], "answer": 0}, "prompt and delimiter must be texts"),
        ({"choices": ["A", "B"], "answer": 0}, "conversations must be a list"),
        ({"prompt": "Write.", "form": {"max_words": 3}}, "prompt is for rows with choices"),
        ({"conversations": PROMPT, "form": {"words": 3}}, "'words' is unknown"),
        ({"conversations": PROMPT, "check": "form"}, "an object of some of min_words"),
        ({"conversations": PROMPT, "answers": ["x"], "id": "line-1"}, "the id 'line-1' is already that of line 1"),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(tmp_path, row, message):
    path = write(tmp_path / "broken.jsonl", {"conversations": PROMPT, "answers": ["Yes"]}, row)
    with pytest.raises(ValueError) as error:
        load_questions(path)
    assert str(path) in str(error.value) and message in str(error.value)


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(ValueError, match="nowhere.jsonl: the questions cannot be read"):
        load_questions(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="holds no questions"):
        load_questions(write(tmp_path / "empty.jsonl", ""))


def test_tools_may_stand_on_the_row(tmp_path):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    (question,) = load_questions(
        write(tmp_path / "own.jsonl", {"conversations": PROMPT, "answers": ["x"], "tools": tools})
    )
    assert question.tools == tools


@pytest.mark.parametrize("row", ['{"a": ' * 5000, '{"conversations": [], "answers": ["\\ud800"]}'])
def test_lines_that_break_other_readers_are_named(tmp_path, row):
    with pytest.raises(ValueError, match="line 1: "):
        load_questions(write(tmp_path / "bad.jsonl", row))
