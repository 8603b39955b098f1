"""Multiple choice and generation against lm-evaluation-harness, question by question."""

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from dataset.chat import chat_renderer
from eval.choices import Continuation, encode_continuation, pick, weigh
from eval.questions import load_questions
from eval.tasks import repeated_share, score_questions
from model.model_minimind import load_model
from tests.eval.helpers import CHOICE_FIELDS, write_rows, write_task
from tests.hard_strings import hard_strings
from tests.model.helpers import tiny_model
from trainer.results import save_model

SHAPES = {"dense": {}, "moe": {"use_moe": True}}


@pytest.fixture(scope="module", params=list(SHAPES))
def folder(request, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("choices") / "m"
    model = tiny_model(vocab_size=len(tokenizer), initializer_range=0.2, **SHAPES[request.param])
    save_model(model, tokenizer, path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load_model(str(folder)).eval()


@pytest.fixture(scope="module")
def harness(folder):
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4)


def test_log_likelihoods_are_the_harness_s(model, harness, tokenizer):
    strings = hard_strings()
    pairs = [(strings[n], strings[-1 - n]) for n in range(60)]
    pairs += [("Mira lives in ", "Redmill"), ("", "Hello"), ("a" * 2000, " b c"), ("米拉", "住在")]
    # The harness asserts that a prompt has tokens.
    pairs = [(prompt, text) for prompt, text in pairs if text.strip() and (prompt.strip() or not prompt)]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    ours = weigh(model, tokenizer, [Continuation(*pair) for pair in pairs], torch.float32)
    for pair, mine, (theirs, is_greedy) in zip(pairs, ours, harness.loglikelihood(requests), strict=True):
        assert mine.log_likelihood == pytest.approx(theirs, rel=1e-5, abs=1e-4), pair
        assert mine.is_greedy == is_greedy


def test_batches_make_no_difference(model, tokenizer):
    continuations = [Continuation(text, " end") for text in hard_strings()[:20]]
    one, all_together = (weigh(model, tokenizer, continuations, torch.float32, tokens) for tokens in (1, 10**6))
    for first, second in zip(one, all_together, strict=True):
        assert first.log_likelihood == pytest.approx(second.log_likelihood, abs=1e-4)


def test_a_prompt_of_ids_and_a_long_one(tokenizer):
    ids, count = encode_continuation(tokenizer, Continuation([5, 6, 7], "Hello"), 100)
    assert ids[:3] == [5, 6, 7] and tokenizer.decode(ids[3:]) == "Hello" and count == len(ids) - 3
    ids, count = encode_continuation(tokenizer, Continuation([5] * 50, "Hello"), 10)
    assert len(ids) == 11 and tokenizer.decode(ids[-count:]) == "Hello"


def test_each_rule_of_picking():
    picks = pick(["ab", "abcdef", "米拉"], [-2.0, -3.0, -2.5])
    assert (picks.raw, picks.by_characters, picks.by_bytes) == (0, 1, 2)


def run_task(harness, folder, name):
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    result = simple_evaluate(harness, tasks=[name], task_manager=manager, bootstrap_iters=0, log_samples=True)
    return result["results"][name], sorted(result["samples"][name], key=lambda sample: sample["doc_id"])


def test_multiple_choice_scores_are_the_harness_s(model, harness, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    choices = ["Redmill", "the small town of Northport", "米拉", "a", "everything else there is"]
    rows = [
        {"id": f"q{n}", "prompt": f"Question {n}: {text}\nAnswer:", "choices": choices[n % 3 :][:3], "answer": n % 3}
        for n, text in enumerate(hard_strings()[:30])
    ]
    data = write_task(tmp_path / "tasks", "mine", rows, **CHOICE_FIELDS)
    scores, samples = run_task(harness, tmp_path / "tasks", "mine")
    report = score_questions(model, tokenizer, load_questions(data))
    (family,) = report.families
    assert family.right / family.total == pytest.approx(scores["acc,none"])
    assert family.right_by_characters / family.total == pytest.approx(scores["acc_norm,none"])
    assert family.constant_right == pytest.approx(10) and 0 < family.right < 30
    for item, sample in zip(report.answered, samples, strict=True):
        theirs = [float(response[0]) for response in sample["filtered_resps"]]
        assert item.log_likelihoods == pytest.approx(theirs, rel=1e-5, abs=1e-4)
        assert item.right == bool(sample["acc"]), item.question.id


def test_generated_answers_are_the_harness_s(model, harness, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    chats = [[{"role": "user", "content": f"Say {n}."}] for n in range(20)]
    prompts = [chat.input_ids for chat in chat_renderer(tokenizer).render_many([(chat, None) for chat in chats], True)]
    first = score_questions(model, tokenizer, questions_of(tmp_path, chats, ["?"] * 20), max_new_tokens=6)
    # Every third answer is what the model says anyway.
    answers = [item.reply if n % 3 == 0 and item.reply else "no" for n, item in enumerate(first.answered)]
    report = score_questions(model, tokenizer, questions_of(tmp_path, chats, answers), max_new_tokens=6)
    rows = [{"prompt": tokenizer.decode(ids), "answer": answer} for ids, answer in zip(prompts, answers, strict=True)]
    write_task(
        tmp_path / "tasks",
        "said",
        rows,
        output_type="generate_until",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": [tokenizer.eos_token], "max_gen_toks": 6, "do_sample": False},
        filter_list=[{"name": "strip", "filter": [{"function": "regex", "regex_pattern": r"(?s)\s*(.*\S)"}]}],
        metric_list=[{"metric": "exact_match"}],
    )
    scores, samples = run_task(harness, tmp_path / "tasks", "said")
    right = [item.right for item in report.answered]
    assert 5 <= sum(right) < 20
    assert sum(right) / 20 == pytest.approx(scores["exact_match,strip"])
    assert right == [bool(sample["exact_match"]) for sample in samples]


def questions_of(folder, chats, answers):
    rows = [{"conversations": chat, "answers": [answer]} for chat, answer in zip(chats, answers, strict=True)]
    return load_questions(write_rows(folder / "questions.jsonl", rows))


def test_repetition_is_the_share_of_repeated_fours():
    assert repeated_share("one two three") is None
    assert repeated_share("a b c d e f") == 0
    assert repeated_share("a b c d a b c d") == pytest.approx(1 / 5)
