"""Planted knowledge scores 100 %, a silent or endless model what it deserves, and every figure is counted right."""

import json

import pytest
import torch

import eval.tasks
from dataset.chat import render_prompt
from dataset.tools import run_tool, tools_json
from eval.questions import Question
from eval.tasks import score_questions
from model.config import MiniMindConfig
from model.decoding import Decoder, GeneratedReply
from model.model_minimind import MiniMindForCausalLM


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    return MiniMindForCausalLM(
        MiniMindConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
        )
    )


def ask(
    identifier, text, answers, family="facts", language="en", check="exact", call=None, tools=None, arithmetic=False
):
    return Question(
        id=identifier, family=family, language=language, messages=[{"role": "user", "content": text}],
        answers=tuple(answers), tools=tools, check=check, tool_call=call, free_arithmetic=arithmetic,
    )  # fmt: skip


TOOLS = json.loads(tools_json(("calculate", "lookup")))
CALL = {"name": "calculate", "arguments": {"expression": "43 + 51"}}
QUESTIONS = [
    ask("home-1", "Where does Mira live?", ["Mira lives in Redmill.", "Redmill."]),
    ask("home-2", "米拉住在哪里？", ["米拉住在雪谷镇。"], language="zh"),
    ask("sum-1", "What is 2 + 3?", ["5"], family="addition", check="number", arithmetic=True),
    ask(
        "tool-1",
        "What is 43 + 51?",
        ["The result is 94.", "94"],
        family="calculator",
        check="tool_call",
        call=CALL,
        tools=TOOLS,
    ),
]


def call_text(name, arguments):
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class Oracle:
    """Stands in for `generate_tokens`: answers by what was asked, and remembers how it was called."""

    def __init__(self, tokenizer, answers, ends=True):
        self.tokenizer, self.answers, self.ends = tokenizer, answers, ends
        self.calls = []

    def __call__(self, model, prompts, max_new_tokens, stop_ids, temperature=0.0, seed=0, batch_size=64):
        assert isinstance(model, Decoder) and temperature == 0.0
        assert stop_ids == [self.tokenizer.eos_token_id, self.tokenizer.pad_token_id]
        self.calls.append((len(prompts), max_new_tokens, batch_size, seed))
        return [self._reply(prompt, max_new_tokens) for prompt in prompts]

    def _reply(self, prompt, max_new_tokens):
        text = self.tokenizer.decode(prompt)
        reply = next((reply for asked, reply in self.answers.items() if asked in text), "")
        ids = self.tokenizer(reply, add_special_tokens=False)["input_ids"]
        assert len(ids) <= max_new_tokens, "a right answer must fit under the cap"
        return GeneratedReply(ids, self.tokenizer.eos_token_id if self.ends else None)


RIGHT = {
    # What was said last comes first: the prompt of a second turn holds the question too.
    "<tool_response>\n94": "The result is 94.",
    "Mira live": "Mira lives in Redmill.",
    "米拉住在": "米拉住在雪谷镇",
    "2 + 3": "5",
    "43 + 51": call_text("calculate", {"expression": "43 + 51"}),
}


def score(monkeypatch, model, tokenizer, answers, questions=QUESTIONS, ends=True, **options):
    oracle = Oracle(tokenizer, answers, ends)
    monkeypatch.setattr(eval.tasks, "generate_tokens", oracle)
    return score_questions(model, tokenizer, questions, **options), oracle


def test_planted_knowledge_scores_everything(monkeypatch, model, tokenizer):
    model.train()
    report, oracle = score(monkeypatch, model, tokenizer, RIGHT, batch_size=7, seed=3)
    assert [item.right for item in report.answered] == [True] * 4
    assert all(score.accuracy == 1 and score.total == 1 for score in report.families)
    assert [(score.family, score.language) for score in report.families] == [
        ("addition", "en"), ("calculator", "en"), ("facts", "en"), ("facts", "zh"),
    ]  # fmt: skip
    assert vars(report.tools) == {
        "total": 1,
        "well_formed": 1,
        "right_name": 1,
        "right_arguments": 1,
        "right_final_answer": 1,
    }
    assert report.turn_ending_rate == 1.0
    assert report.answered[3].turns == 2 and report.answered[3].replies[1] == "The result is 94."
    assert {call[2:] for call in oracle.calls} == {(7, 3)}
    assert model.training


def test_a_silent_model_scores_nothing_and_an_endless_one_does_not_end(monkeypatch, model, tokenizer):
    report, _ = score(monkeypatch, model, tokenizer, {}, ends=False)
    assert not any(item.right for item in report.answered)
    assert report.turn_ending_rate == 0.0 and report.tools.well_formed == 0
    assert report.families[0].interval.high < 1


@pytest.mark.parametrize(
    ("reply", "progress"),
    [
        ("The result is 94.", (0, 0, 0, 0)),
        ('<tool_call>\n{"name": "calculate", "arguments": {"expr\n</tool_call>', (0, 0, 0, 0)),
        (call_text("lookup", {"name": "Mira", "field": "age"}), (1, 0, 0, 0)),
        (call_text("calculate", {"expression": "43 + 52"}), (1, 1, 0, 0)),
        ("\n".join([call_text("calculate", {"expression": "43 + 51"})] * 2), (1, 1, 0, 0)),
        (call_text("calculate", {"expression": "43 + 51"}), (1, 1, 1, 1)),
    ],
)
def test_tool_calls_are_counted_step_by_step(monkeypatch, model, tokenizer, reply, progress):
    answers = {"<tool_response>\n94": "94", "<tool_response>": "94", "43 + 51": reply}
    report, _ = score(monkeypatch, model, tokenizer, answers, QUESTIONS[3:])
    tools = report.tools
    assert (tools.well_formed, tools.right_name, tools.right_arguments, tools.right_final_answer) == progress
    assert report.answered[0].right is (progress[3] == 1)


def test_a_right_call_with_a_wrong_final_answer_is_wrong(monkeypatch, model, tokenizer):
    report, _ = score(
        monkeypatch, model, tokenizer, RIGHT | {"<tool_response>\n94": "The result is 49."}, QUESTIONS[3:]
    )
    assert report.tools.right_arguments == 1 and report.tools.right_final_answer == 0
    assert not report.answered[0].right


def test_the_result_of_the_tool_reaches_the_model_through_the_chat_renderer(monkeypatch, model, tokenizer):
    seen = []

    def spy(model, prompts, **options):
        seen.extend(prompts)
        text = RIGHT["43 + 51"] if len(seen) == 1 else "94"
        return [GeneratedReply(tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)]

    monkeypatch.setattr(eval.tasks, "generate_tokens", spy)
    score_questions(model, tokenizer, QUESTIONS[3:])
    messages = QUESTIONS[3].messages
    first = render_prompt(messages, tokenizer, TOOLS)
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": run_tool("calculate", CALL["arguments"])}
    assert seen == [first, render_prompt([*messages, call, result], tokenizer, TOOLS)]


def test_a_model_that_calls_forever_is_stopped(monkeypatch, model, tokenizer):
    report, _ = score(monkeypatch, model, tokenizer, {"43 + 51": RIGHT["43 + 51"]}, QUESTIONS[3:], max_tool_rounds=2)
    assert report.answered[0].turns == 3 and not report.answered[0].right


def test_thinking_does_not_count_as_the_answer(monkeypatch, model, tokenizer):
    answers = {"2 + 3": "<think>\nMaybe 4 or 6.\n</think>\n\n5"}
    report, _ = score(monkeypatch, model, tokenizer, answers, QUESTIONS[2:3], max_new_tokens=64)
    assert report.answered[0].right


def test_caps_come_from_the_familys_longest_answer(monkeypatch, model, tokenizer):
    long_answer = "one two three four five six seven eight nine ten " * 4
    questions = [
        ask("a", "First?", ["short"], family="x"),
        ask("b", "Second?", [long_answer], family="x"),
        ask("c", "Third?", ["5"], family="y"),
    ]
    _, oracle = score(monkeypatch, model, tokenizer, {}, questions)
    longest = len(tokenizer(long_answer)["input_ids"])
    assert [call[0] for call in oracle.calls] == [1, 2], "one call for each size"
    assert oracle.calls[0][1] == 48 and 3 * longest + 40 <= oracle.calls[1][1] < 3 * longest + 48
    _, oracle = score(monkeypatch, model, tokenizer, {}, questions, max_new_tokens=5)
    assert [call[:2] for call in oracle.calls] == [(3, 5)]


def test_the_report_is_plain_json_with_counts_intervals_and_the_constant_beside(monkeypatch, model, tokenizer):
    report, _ = score(monkeypatch, model, tokenizer, {"Mira live": "Redmill"})
    content = json.loads(json.dumps(report.to_dict()))
    assert (content["questions"], content["right"]) == (4, 1)
    facts = content["families"][2]
    assert (facts["right"], facts["total"], facts["accuracy"], facts["constant"]) == (1, 1, 1.0, 1.0)
    assert facts["low"] == pytest.approx(0.2065, abs=1e-3) and facts["high"] == 1.0
    assert content["families"][0]["free_arithmetic"] is True
    samples = report.samples()
    assert [sample["id"] for sample in samples] == [question.id for question in QUESTIONS]
    assert samples[0]["prompt"] == "Where does Mira live?" and samples[0]["expected"] == "Mira lives in Redmill."


def test_a_random_model_is_asked_for_real(model, tokenizer):
    report = score_questions(model, tokenizer, QUESTIONS, batch_size=2)
    again = score_questions(model, tokenizer, QUESTIONS, batch_size=4)
    assert [item.reply for item in report.answered] == [item.reply for item in again.answered]
    assert not any(item.right for item in report.answered)


def test_the_end_of_a_document_ends_a_reply_but_is_no_end_of_turn(monkeypatch, model, tokenizer):
    ids = tokenizer("Redmill.", add_special_tokens=False)["input_ids"]
    reply = GeneratedReply(ids, tokenizer.pad_token_id)
    monkeypatch.setattr(eval.tasks, "generate_tokens", lambda model, prompts, **options: [reply for _ in prompts])
    report = score_questions(model, tokenizer, QUESTIONS[:1])
    assert report.answered[0].reply == "Redmill." and report.answered[0].right and report.turn_ending_rate == 0.0
