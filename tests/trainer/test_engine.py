"""The loop: exact under any cut and any number of ranks, exact after a resume, unharmed by bad steps."""

import json

import pytest
import torch

from tests.trainer.helpers import TINY_MOE, RandomRows, close, tiny_model, tiny_run, train, weights_of
from trainer.checkpoint import load_verified
from trainer.engine import save_checkpoint
from trainer.losses import language_model_loss
from trainer.memory import advice_when_full


@pytest.mark.parametrize("overrides", [{}, TINY_MOE], ids=["dense", "moe"])
def test_8x1_is_4x2_is_2x4(tmp_path, overrides):
    rows, losses = RandomRows(77), []  # the last step of the epoch has 5 rows
    for batch, accumulation in ((8, 1), (4, 2), (2, 4)):
        flags = ["--batch_size", batch, "--accumulation_steps", accumulation]
        losses.append(train(tiny_run(tmp_path / str(batch), rows, model=tiny_model(**overrides), flags=flags)))
    assert len(losses[0]) == 10
    assert close(losses[0], losses[1], 1e-6) and close(losses[0], losses[2], 1e-6)
    assert len({round(loss, 6) for loss in losses[0].values()}) == 10


CONFIGURATIONS = {
    "adamw-float32": ({}, []),
    "muon-bfloat16": ({}, ["--optimizer", "muon", "--dtype", "bfloat16"]),
    "moe-dropout": (TINY_MOE | {"dropout": 0.1}, ["--accumulation_steps", "3", "--batch_size", "2"]),
    "float16-scaler": ({}, ["--dtype", "float16"]),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_stopped_and_resumed_is_bit_identical(tmp_path, name):
    overrides, flags = CONFIGURATIONS[name]
    rows = RandomRows(22)
    flags = [*flags, "--epochs", "2", "--save_interval", "3"]
    straight = tiny_run(tmp_path / "straight", rows, model=tiny_model(**overrides), flags=flags)
    expected = train(straight)

    first = tiny_run(tmp_path / "cut", rows, model=tiny_model(**overrides), flags=flags)
    first.stop_asked = lambda: first.progress.step >= 4
    train(first)
    assert first.progress.step == 4
    # A line of a step after the checkpoint, half written when the process died: the resume must drop it.
    with open(first.tracker.metrics_path, "a") as file:
        file.write('{"step": 5, "loss": 99.0}\n{"step": 6, "lo')
    second = tiny_run(
        tmp_path / "cut", rows, model=tiny_model(seed=7, **overrides), flags=[*flags, "--from_resume", "1"]
    )
    assert train(second) == expected
    assert second.progress.step == straight.progress.step == straight.total_steps
    for key, tensor in weights_of(straight).items():
        assert torch.equal(tensor, weights_of(second)[key]), key
    for before, after in zip(straight.optimizers, second.optimizers, strict=True):
        for index, state in before.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(after.state_dict()["state"][index][key])), (
                    key
                )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--learning_rate", "0.02"], "--learning_rate is 0.02 and was 0.01"),
        (["--batch_size", "3"], r"a step had 4 rows, which --batch_size 3 on 1 ranks .* that do: 1, 2, 4"),
        (["--epochs", "5"], "steps and had"),
        (["--seed", "1"], "--seed is 1 and was 42"),
        (["--optimizer", "muon"], "--optimizer is muon and was adamw"),
    ],
)
def test_a_changed_setting_is_refused_by_name(tmp_path, flags, expected):
    rows = RandomRows(8)
    train(tiny_run(tmp_path, rows))
    with pytest.raises(ValueError, match=expected):
        train(tiny_run(tmp_path, rows, flags=[*flags, "--from_resume", "1"]))


def test_changed_data_and_shape_are_refused(tmp_path):
    train(tiny_run(tmp_path, RandomRows(8)))
    other = RandomRows(8, seed=1)
    other.summary.fingerprint = "other"
    with pytest.raises(ValueError, match="the data changed"):
        train(tiny_run(tmp_path, other, flags=["--from_resume", "1"]))
    with pytest.raises(ValueError, match=r"another shape \(.*mlp.gate_proj.weight: \(96, 32\) here, \(64, 32\) there"):
        train(tiny_run(tmp_path, other, model=tiny_model(intermediate_size=96), flags=["--from_resume", "1"]))


def test_a_fresh_run_moves_the_old_folder_aside(tmp_path):
    rows = RandomRows(8)
    train(tiny_run(tmp_path, rows))
    train(tiny_run(tmp_path, rows))
    aside = [path for path in tmp_path.iterdir() if path.name.startswith("run.")]
    assert len(aside) == 1 and list(aside[0].glob("step-*.pth"))


def test_resume_without_a_checkpoint_starts_fresh(tmp_path):
    assert len(train(tiny_run(tmp_path, RandomRows(8), flags=["--from_resume", "1"]))) == 2


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_max_steps_means_optimizer_steps(tmp_path, steps):
    run = tiny_run(tmp_path, RandomRows(10), flags=["--max_steps", steps, "--accumulation_steps", 2, "--batch_size", 2])
    assert list(train(run)) == list(range(1, steps + 1))


@pytest.mark.parametrize("overrides", [{"dropout": 0.1}, TINY_MOE], ids=["dropout", "moe"])
def test_activation_checkpointing_changes_nothing(tmp_path, overrides):
    losses = []
    for checkpointing in (False, True):
        model = tiny_model(**overrides)
        if checkpointing:
            model.activation_checkpointing_enable()
        losses.append(train(tiny_run(tmp_path / str(checkpointing), RandomRows(20), model=model)))
    assert losses[0] == losses[1] and len(losses[0]) == 5


def test_a_step_with_a_bad_gradient_changes_no_weight(tmp_path):
    run = tiny_run(tmp_path, RandomRows(12), flags=["--weight_decay", "0.5"])
    seen = {}

    def poisoned(model, batch, context):
        loss, count, logs = language_model_loss(model, batch, context)
        seen[run.progress.step] = weights_of(run)
        return (loss * float("nan") if run.progress.step == 1 else loss), count, logs

    run.loss = poisoned
    train(run)
    assert run.progress.step == 3 and run.progress.skipped_steps == 1
    assert all(torch.equal(seen[1][name], seen[2][name]) for name in seen[1])
    assert any(not torch.equal(seen[0][name], seen[1][name]) for name in seen[1])


def test_a_run_that_is_broken_for_good_stops_and_says_where(tmp_path):
    run = tiny_run(tmp_path, RandomRows(200), flags=["--save_interval", "5"])
    run.loss = lambda model, batch, context: (language_model_loss(model, batch, context)[0] * float("inf"), 0, {})
    with pytest.raises(ValueError, match=r"step 20 .*row 80.*20 steps in a row.*step-00000015.pth"):
        train(run)


def test_max_bad_steps_says_how_many(tmp_path):
    run = tiny_run(tmp_path, RandomRows(200), flags=["--max_bad_steps", "3"])
    run.loss = lambda model, batch, context: (language_model_loss(model, batch, context)[0] * float("inf"), 0, {})
    with pytest.raises(ValueError, match=r"step 3 .*3 steps in a row"):
        train(run)


def test_running_out_of_memory_saves_and_advises(tmp_path):
    run = tiny_run(tmp_path, RandomRows(40), flags=["--save_interval", "100"])

    def hungry(model, batch, context):
        if run.progress.step == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return language_model_loss(model, batch, context)

    run.loss = hungry
    with pytest.raises(ValueError, match=r"step 5; try --batch_size 2 --accumulation_steps 2 .*step-00000004.pth"):
        with advice_when_full(run):
            train(run)
    run.loss = language_model_loss
    resumed = tiny_run(tmp_path, RandomRows(40), flags="--from_resume 1 --batch_size 2 --accumulation_steps 2".split())
    straight = train(tiny_run(tmp_path / "straight", RandomRows(40)))
    assert close(train(resumed), straight, 1e-6)


def test_a_run_says_what_it_measures(tmp_path):
    run = tiny_run(tmp_path, RandomRows(16), flags=["--grad_clip", "0.5"])
    train(run)
    records = [json.loads(line) for line in run.tracker.metrics_path.read_text().splitlines()]
    for record in records:
        assert record["gradient_norm_clipped"] == min(record["gradient_norm"], 0.5)
        assert 0 < record["model_flops_utilization"] < 1 and 0 <= record["data_wait_share"] < 1
        assert record["peak_memory_gib"] > 0.05 and record["cpu_percent"] >= 0 and 0 < record["ram_used_percent"] < 100
        assert record["learning_rates"] == [record["learning_rate"]] * 2 and record["skipped_steps"] == 0


def test_a_checkpoint_holds_plain_values_and_float32(tmp_path):
    run = tiny_run(tmp_path, RandomRows(8), model=tiny_model(**TINY_MOE), flags=["--dtype", "bfloat16"])
    train(run)
    save_checkpoint(run)
    run.checkpoints.writer.wait()
    path, _ = run.checkpoints.find_newest()
    state = load_verified(path)
    assert all(tensor.dtype == torch.float32 for tensor in state["model"].values())
    assert state["expert_loads"].sum(dim=1).tolist() == pytest.approx([1, 1])
    assert state["settings"]["optimization"]["learning_rate"] == 0.01
