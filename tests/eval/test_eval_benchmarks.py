"""The harness on a folder by our command: local tasks, the embedded questions, and what cannot be run."""

import json
import shutil
import sys

import pytest

import eval.eval_benchmarks as eval_benchmarks
from eval.harness import is_right_reply
from tests.eval.helpers import CHOICE_FIELDS, SUMS, write_task
from tests.model.helpers import tiny_model
from trainer.config import user_errors
from trainer.results import save_model


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmarks") / "full_sft_32"
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512)
    save_model(model, tokenizer, path)
    return path


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["eval_benchmarks.py", *map(str, words)])
    with user_errors():
        eval_benchmarks.main()


@pytest.mark.slow  # the harness reads its 10,000 tasks first
def test_a_local_task_and_the_embedded_questions(monkeypatch, capsys, folder, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_task(tmp_path / "tasks", "my_task", SUMS, **CHOICE_FIELDS)
    words = ["--model_path", folder, "--device", "cpu", "--dtype", "float32", "--batch_size", 4]
    run(monkeypatch, *words, "--tasks", "my_task", "embedded", "--include_path", tmp_path / "tasks", "--limit", 8)
    scores = json.loads((folder / "benchmarks.json").read_text())
    assert scores["my_task"]["questions"] == 6 and 0 <= scores["my_task"]["acc"] <= 1
    assert scores["embedded"]["questions"] > 0 and scores["embedded"]["acc"] == 0  # random weights answer nothing
    printed = capsys.readouterr().out
    assert "my_task" in printed and "95 % interval" in printed and "benchmarks.json" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(
            ["--tasks", "no_such_task"],
            "--tasks no_such_task: the harness knows no such task",
            marks=pytest.mark.slow,
        ),
        (["--include_path", "{tmp}/none"], "--include_path {tmp}/none: no such folder of YAML tasks"),
        (["--batch_size", "0", "--limit", "-1"], "--batch_size 0 must be at least 1"),
        (["--chat", "1"], "--chat 1 is not for --tasks embedded"),
        (["--num_fewshot", "2"], "--num_fewshot 2 is not for --tasks embedded"),
        (["--batch_size", "9" * 20], f"--batch_size {'9' * 20} is beyond 64 bits"),
        pytest.param(
            ["--tasks", "arc_easy", "--limit", "2"], "a task's data cannot be fetched", marks=pytest.mark.slow
        ),
    ],
)
def test_mistakes_get_one_message(words, message, monkeypatch, capsys, folder, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, "--model_path", folder, "--device", "cpu", *(word.format(tmp=tmp_path) for word in words))
    assert stop.value.code == 2
    assert message.format(tmp=tmp_path) in capsys.readouterr().err


def test_intervals_of_shares_are_wilsons_and_those_of_other_scores_follow_their_error():
    low, high = eval_benchmarks.interval_of(1.0, 0.0, 4)  # by hand: 4 / (4 + 1.96 squared)
    assert (round(low, 4), high) == (0.5101, 1.0)
    low, high = eval_benchmarks.interval_of(0.5, (0.25 / 99) ** 0.5, 100)
    assert (round(low, 3), round(high, 3)) == (0.404, 0.596)
    assert eval_benchmarks.interval_of(12.0, 0.5, 100) == pytest.approx((11.02, 12.98), abs=1e-3)


def test_every_reading_of_a_reply_has_its_row_and_groups_their_questions():
    values = {"exact_match,strict": 0.0, "exact_match_stderr,strict": 0.0, "exact_match,loose": 0.25}
    values |= {"exact_match_stderr,loose": 0.16366, "acc,none": 0.25, "acc_stderr,none": 0.16366}
    group = {"acc,none": 0.25, "acc_stderr,none": 0.3, "sample_len": 8}
    results = {"results": {"task": values, "group": group}, "n-samples": {"task": {"effective": 8}}}
    scores = eval_benchmarks.scores_of(results)
    assert {"exact_match (strict)", "exact_match (loose)", "acc"} <= scores["task"].keys()
    assert scores["group"]["questions"] == 8 and scores["group"]["acc_low"] == 0


def test_embedded_replies_are_judged_as_eval_llm_does():
    row = {"answers": ["42"], "check": "exact"}
    assert is_right_reply("<think>\n6 * 7\n</think>\n\n42", row) and not is_right_reply("<think>\n42", row)
    assert not is_right_reply('42\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>', row)


def test_damaged_scores_and_adapters_are_named_before_the_work(monkeypatch, capsys, folder, tmp_path):
    adapter = tmp_path / "lora_32"
    shutil.copytree(folder, adapter)
    (adapter / "benchmarks.json").write_text('{"my_task": {')
    for words in ((), ("--weight", "lora")):
        with pytest.raises(SystemExit):
            run(monkeypatch, "--model_path", adapter, "--device", "cpu", *words)
        assert "benchmarks.json: cannot be read" in capsys.readouterr().err
    (adapter / "benchmarks.json").unlink()
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(SystemExit):
        run(monkeypatch, "--model_path", adapter, "--device", "cpu")
    assert "is an adapter" in capsys.readouterr().err
