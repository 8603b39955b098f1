"""The benchmark runs every contestant, in turns, and says what it found; how fast they are is no test's business."""

import json
import subprocess
import sys

import pytest

from scripts.benchmarking.turns import Baton, Contestant, alternate
from tests.e2e.test_readme import ROOT, write_user_files

TINY = "--preset nano --turns 1 --seconds 0 --window 32 --micro_batch 64 --step 128"


def benchmark(folder, words):
    write_user_files(folder)
    command = [sys.executable, str(ROOT / "scripts/benchmark.py"), *words.split()]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def test_training_beside_the_padded_recipe(tmp_path):
    result, printed = benchmark(tmp_path, f"--measure pretrain {TINY} --data_path my_text.jsonl")
    ours, padded = result["contestants"]["ours"], result["contestants"]["padded float32 recipe"]
    assert ours["tokens_per_second"][0] > 0 and 0 < ours["model_flops_utilization"] < 1
    assert padded["first_times_faster"][0] == pytest.approx(
        ours["tokens_per_second"][0] / padded["tokens_per_second"][0], abs=0.01
    )
    assert "| padded float32 recipe |" in printed


@pytest.mark.slow
def test_fine_tuning_beside_trl(tmp_path):
    result, _ = benchmark(tmp_path, f"--measure sft {TINY} --data_path my_chats.jsonl")
    assert {"TRL packed", "TRL packed, activations kept", "TRL padded"} < set(result["contestants"])


@pytest.mark.slow
def test_experts_beside_dense(tmp_path):
    result, _ = benchmark(tmp_path, f"--measure moe {TINY} --settling_steps 2 --data_path my_text.jsonl")
    assert len(result["contestants"]) == 4


@pytest.mark.slow
def test_what_growing_costs(tmp_path):
    result, printed = benchmark(tmp_path, f"--measure scaling --scales experts {TINY} --data_path my_text.jsonl")
    assert len(result["experts"]["contestants"]) == 5
    assert result["experts"]["contestants"]["dense"]["first_times_faster"] == [1.0, 1.0, 1.0]
    assert "\nexperts:\n" in printed


@pytest.mark.slow
def test_the_time_to_a_loss(tmp_path):
    words = "--measure loss --preset nano --turns 2 --our_steps 2 --padded_steps 2 --window 32"
    result, _ = benchmark(tmp_path, f"{words} --data_path my_text.jsonl")
    assert result["goal"] > 0 and len(result["our_curves"]) == 2


def test_answers_beside_transformers(tmp_path):
    result, _ = benchmark(tmp_path, "--measure rollouts --preset nano --turns 1 --new_tokens 8")
    assert [(row["prompts"], row["replies"]) for row in result["rollouts"]] == [(64, 1), (8, 8)]
    assert all(1 < row["mean_length"] <= 8 for row in result["rollouts"]), "some end before the others"
    result, _ = benchmark(tmp_path, "--measure decoding --preset nano --turns 1 --new_tokens 4")
    assert [row["batch"] for row in result["decoding"]] == [1, 16, 64] * 2
    exact = [row["different_answers"] == row["that_parted_at_a_tie"] for row in result["decoding"]]
    assert all(exact)


def test_a_profile(tmp_path):
    result, printed = benchmark(tmp_path, f"--measure profile {TINY} --data_path my_text.jsonl")
    assert "aten::mm" in result["shares"] and "trace: " in printed


def _count_to(goal, baton: Baton):
    baton.wait()
    while True:
        baton.step(goal, lambda: goal)


def _fail(options, baton):
    raise ValueError(f"no {options}")


def test_turns_alternate_and_count():
    said = []
    contestants = [Contestant("one", _count_to, 1, steps=3), Contestant("two", _count_to, 2, steps=5)]
    laps = alternate(contestants, 2, 0.0, said.append, lambda: None)
    assert [(lap.steps, lap.tokens, lap.note) for lap in laps["one"]] == [(3, 3, 1)] * 2
    assert [(lap.steps, lap.tokens) for lap in laps["two"]] == [(5, 10)] * 2
    names = [line.split(": ")[1].split(",")[0] for line in said]
    assert names == "one two one two two one one two".split()


def test_a_contestant_that_fails_is_named():
    with pytest.raises(RuntimeError, match="(?s)'lame' failed.*no luck"):
        alternate([Contestant("lame", _fail, "luck")], 1, 0.0, print, lambda: None)
