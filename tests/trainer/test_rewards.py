"""Verifiers: right answers in the forms that people give them, and a table of attempts that must get nothing."""

import pytest

from trainer.rewards import REWARDS, Reply, answers_of, parse_rewards

ROW = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "extra": {"gt": ["42"]}, "reference": None}

RIGHT = [
    "42",
    "42.",
    "42.0",
    " 42\n",
    "It is 42.",
    "The answer is 42!",
    "12 + 30 = 42",
    "12 + 30 = 42.",
    "12+30=42",
    "４２",
    "等于42。",
    "结果是42",
    "<think>\n12 + 30: 40 and 2, or 41? No, 42.\n</think>\n\n42",
    "+42",
]

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12 + 30"}}\n</tool_call>'
GAMING = {
    "a list": "41, 42, 43",
    "a list of all": " ".join(str(number) for number in range(100)),
    "a list without spaces": "41,42,43",
    "a list with slashes": "41/42/43",
    "a list in brackets": "[42, 43]",
    "lines": "41\n42\n43",
    "two answers": "42 or 43",
    "an or without a number": "42 or something else",
    "either": "either 42",
    "a range": "40-44",
    "a range with words": "between 41 and 43",
    "a part of a number": "1420",
    "at the end of a number": "142",
    "at the start of a number": "421",
    "with decimals": "42.5",
    "a version": "42.0.1",
    "negative": "-42",
    "minus sign": "−42",
    "a fraction": "42/7",
    "a negative in words": "negative 42",
    "minus in words": "minus 42",
    "minus in Chinese": "负42",
    "ten thousands": "42万",
    "per cent in Chinese": "百分之42",
    "per cent in words": "42 percent",
    "millions": "42 million",
    "a bound": "more than 42",
    "a difference in words": "42 minus one",
    "of a fraction": "84/2",
    "a percentage": "42%",
    "a time": "42:00",
    "an exponent": "42e3",
    "a power": "42^2",
    "hexadecimal": "0x42",
    "in a word": "x42y",
    "an ordinal": "42nd",
    "a name": "answer_42",
    "a thousand": "42,000",
    "spaced digits": "4 2",
    "joined by nothing": "4\u200b2",
    "digits apart in lines": "4\n2",
    "a denial": "It is not 42.",
    "a denial in Chinese": "不是42。",
    "no": "No 42.",
    "maybe": "maybe 42",
    "only thought": "<think>\n42\n</think>",
    "only thought, then empty": "<think>\n42\n</think>\n\n",
    "thought that never ends": "<think>\n42",
    "an end of thought of its own": "43 </think> 42",
    "two thoughts": "<think>\n1\n</think>\n<think>\n2\n</think>\n42",
    "a tool's result of its own": "<tool_response>\n42\n</tool_response>",
    "a result after its own call": f"{CALL}\n42",
    "a call alone": CALL,
    "a broken call": '<tool_call>\n{"name": 42\n</tool_call>',
    "control text": "<|im_start|>assistant\n42",
    "an answer tag": "<answer>42</answer>",
    "an empty turn": "",
    "white space": " \n\t ",
    "the question again": "What is 12 + 30?",
    "an equation of its own": "41 + 1 = 42",
    "a chain of equations": "12 + 30 = 41 = 42",
    "an equation that lists": "12 + 30 = 41, 42",
    "one number on the left": "12 = 42",
    "the words": "forty-two",
    "superscript": "42²",
    "circled": "㊷",
    "Roman": "XLII",
    "Arabic-Indic with another": "٤٢ 43",
}


@pytest.mark.parametrize("text", RIGHT)
def test_right_answers_get_all(text):
    assert REWARDS["number"](Reply.of(text), ROW) == 1


@pytest.mark.parametrize("name", list(GAMING))
def test_attempts_get_nothing(name):
    assert REWARDS["number"](Reply.of(GAMING[name]), ROW) == 0
    assert REWARDS["exact"](Reply.of(GAMING[name]), ROW) == 0


def test_there_are_fifty_attempts_and_an_unfinished_reply_is_one_more():
    assert len(GAMING) >= 50
    assert (
        REWARDS["number"](Reply.of("42", ended=False), ROW) == REWARDS["exact"](Reply.of("42", ended=False), ROW) == 0
    )


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("-7", "-7", True), ("-7", "7", False), ("0.5", ".5", False), ("0.5", "0.50", True),
        ("1,234", "1234", True), ("1234", "1,234", True), ("The result is 1344.", "The result is 1344.", True),
        ("#### 18", "18", True),
    ],
)  # fmt: skip
def test_numbers_of_many_forms(answer, text, right):
    assert REWARDS["number"](Reply.of(text), ROW | {"extra": {"answer": answer}}) == float(right)


def test_form_and_the_others():
    form, fresh, length, tool = (REWARDS[name] for name in ("form", "fresh", "think_length", "tool"))
    assert form(Reply.of("<think>\nwell\n</think>\n\nYes."), ROW) == 1 and form(Reply.of("Yes."), ROW) == 1
    for text in (
        "<think>\n\n</think>\n\nYes.",
        "<think>\nwell",
        "Yes. <think>\nwell\n</think>",
        "well </think> Yes.",
        "",
    ):
        assert form(Reply.of(text), ROW) == 0, text
    assert fresh(Reply.of("a b c d e f"), ROW) == 1 and fresh(Reply.of("a b c d " * 5), ROW) < 0.3
    assert [length(Reply.of("x", tokens=tokens), ROW) for tokens in (10, 256, 384, 512, 900)] == [1, 1, 0.5, 0, 0]
    call = {"name": "calculate", "arguments": {"expression": "1 + 1"}}
    row = ROW | {"reference": {"role": "assistant", "content": "", "tool_calls": [call]}}
    text = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1 + 1"}}\n</tool_call>'
    assert tool(Reply.of(text), row) == 1 and tool(Reply.of(text + "\n" + text), row) == 0
    assert tool(Reply.of("2"), row) == 0 and tool(Reply.of("2"), ROW) == 1 and tool(Reply.of(text), ROW) == 0


def test_answers_come_from_the_row_or_its_last_message():
    assert answers_of({"extra": {"gt": ["a", "b"]}}) == ["a", "b"] and answers_of({"extra": {"answer": 7}}) == ["7"]
    assert answers_of({"extra": {}, "reference": {"content": "Yes."}}) == ["Yes."]
    with pytest.raises(ValueError, match="no answer to check"):
        answers_of({"extra": {"gt": []}, "reference": None})


def test_rewards_by_name_weight_and_file(tmp_path):
    own = tmp_path / "mine.py"
    own.write_text("def polite(reply, row):\n    return float('please' in reply.text)\n")
    found = parse_rewards(["number", "form:0.25", f"{own}:polite:2"])
    assert [(reward.name, reward.weight) for reward in found] == [("number", 1), ("form", 0.25), ("polite", 2)]
    assert found[2].function(Reply.of("please"), ROW) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name at least one"),
        (["truth"], "there is no 'truth'; take exact"),
        (["number:0"], "the weight '0' must be a number above 0"),
        (["number:much"], "the weight 'much' must be"),
        (["nowhere.py:f"], "no file nowhere.py"),
        (["{tmp}/broken.py:f"], "does not run: ZeroDivisionError"),
        (["{tmp}/empty.py:f"], "has no function 'f'"),
    ],
)
def test_mistakes_are_named(tmp_path, words, message):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(ValueError, match=message):
        parse_rewards([word.format(tmp=tmp_path) for word in words])
