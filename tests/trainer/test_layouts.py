"""Ranks and layouts: one rank, DDP and FSDP train the same, and each goes on where another left off."""

import json

import pytest
import torch

from tests.trainer.helpers import (
    TINY_MOE,
    RandomRows,
    close,
    logged,
    run_ranks,
    tiny_model,
    tiny_run,
    train,
    weights_of,
)
from trainer.distributed import gather_objects
from trainer.evaluation import estimate_loss

# Muon iterates in bfloat16, where another order of sums can round otherwise.
OPTIMIZERS = {
    "adamw": (["--learning_rate", 0.003], 1e-6),
    "muon": (["--optimizer", "muon", "--learning_rate", 0.001], 1e-4),
}
# What two ranks are given so that a step has the eight rows that it has on one.
LAYOUTS = {
    "one": None,
    "ddp": ["--batch_size", 4],
    "ddp-x2": ["--batch_size", 2, "--accumulation_steps", 2],
    "fsdp": ["--batch_size", 4, "--parallel", "fsdp"],
    "fsdp-x2": ["--batch_size", 2, "--accumulation_steps", 2, "--parallel", "fsdp"],
}
ONE_RANK = ["--batch_size", 8]


def rows():
    return RandomRows(75)  # the last step of the epoch has three rows


def train_on_a_rank(world, folder, overrides, flags, stop_at):
    run = tiny_run(folder, rows(), world, tiny_model(**overrides), {"text": RandomRows(9, seed=5)}, flags)
    run.stop_asked = lambda: run.progress.step >= stop_at
    train(run)
    sums = {name: sums.to_tensor().tolist() for name, sums in estimate_loss(run).items()}
    weights = weights_of(run)
    if world.is_main:
        (folder / "evaluation.json").write_text(json.dumps(sums))
        torch.save(weights, folder / "weights.pth")


def train_in(layout, folder, tmp_path, overrides, flags, stop_at=10**6):
    """Losses by step of a run in a layout, until a step or to its end."""
    if layout == "one":
        run = tiny_run(folder, rows(), None, tiny_model(**overrides), flags=[*ONE_RANK, *flags])
        run.stop_asked = lambda: run.progress.step >= stop_at
        return train(run)
    run_ranks(train_on_a_rank, tmp_path, folder, overrides, [*LAYOUTS[layout], *flags], stop_at)
    return logged(tiny_run(folder, rows(), None, tiny_model(**overrides)), "loss")


@pytest.mark.parametrize("overrides", [{}, TINY_MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_are_one_rank(tmp_path, overrides, optimizer):
    flags, tolerance = OPTIMIZERS[optimizer]
    one = tiny_run(
        tmp_path / "one", rows(), None, tiny_model(**overrides), {"text": RandomRows(9, seed=5)}, [*ONE_RANK, *flags]
    )
    losses = train(one)
    assert len(losses) == 10
    for layout in ("ddp", "fsdp", "fsdp-x2"):
        assert close(losses, train_in(layout, tmp_path / layout, tmp_path, overrides, flags), tolerance), layout
        if layout.endswith("x2"):
            continue  # its evaluations have half as many rows
        evaluation = json.loads((tmp_path / layout / "evaluation.json").read_text())
        for name, sums in estimate_loss(one).items():
            assert evaluation[name] == pytest.approx(sums.to_tensor().tolist(), rel=1e-5 if tolerance < 1e-5 else 1e-3)


def test_reduced_precision_is_nearly_the_same(tmp_path):
    flags = ["--dtype", "bfloat16", "--learning_rate", 0.003]
    losses = {layout: train_in(layout, tmp_path / layout, tmp_path, TINY_MOE, flags) for layout in ("ddp", "fsdp")}
    assert close(losses["ddp"], losses["fsdp"], 0.02)


CHANGES = [("one", "ddp"), ("ddp", "one"), ("one", "fsdp-x2"), ("fsdp", "one"), ("ddp-x2", "fsdp"), ("fsdp", "ddp")]


@pytest.mark.parametrize(("first", "second"), CHANGES)
def test_another_layout_goes_on_with_the_same_rows(tmp_path, first, second):
    overrides = TINY_MOE if "fsdp" in (first, second) else {}
    flags = ["--max_steps", 13, "--save_interval", 3, *OPTIMIZERS["adamw"][0]]  # into the second epoch
    straight = train_in("one", tmp_path / "straight", tmp_path, overrides, flags)
    train_in(first, tmp_path / "cut", tmp_path, overrides, flags, stop_at=4)
    losses = train_in(second, tmp_path / "cut", tmp_path, overrides, [*flags, "--from_resume", 1])
    assert len(losses) == 13 and close(straight, losses, 1e-6)


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_resume_bit_for_bit(tmp_path, layout):
    flags = ["--max_steps", 8, "--optimizer", "muon", "--dtype", "bfloat16", "--save_interval", 3]
    overrides = TINY_MOE | {"dropout": 0.1}
    straight = train_in(layout, tmp_path / "straight", tmp_path, overrides, flags)
    train_in(layout, tmp_path / "cut", tmp_path, overrides, flags, stop_at=5)
    assert train_in(layout, tmp_path / "cut", tmp_path, overrides, [*flags, "--from_resume", 1]) == straight
    expected, found = (torch.load(tmp_path / name / "weights.pth", weights_only=True) for name in ("straight", "cut"))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def poison_one_rank(world, folder, parallel, dtype, where):
    run = tiny_run(folder, RandomRows(16), world, flags=["--parallel", parallel, "--dtype", dtype])
    before = weights_of(run)
    run.total_steps = 1
    unscale, loss_of = run.scaler.unscale_, run.loss

    def poison_a_gradient(optimizer):
        unscale(optimizer)
        if world.rank == 1:
            gradient = run.bare_model.lm_head.weight.grad
            getattr(gradient, "_local_tensor", gradient).fill_(float("nan"))

    def poison_the_loss(model, batch, context):
        loss, count, logs = loss_of(model, batch, context)
        return loss * (float("nan") if world.rank == 1 else 1.0), count, logs

    if where == "loss":
        run.loss = poison_the_loss
    else:  # the loss is sound; this rank's gradient of one tensor is not, after the ranks have exchanged theirs
        run.scaler.unscale_ = poison_a_gradient
    scale = run.scaler.get_scale()
    train(run)
    assert run.progress.step == 1
    assert run.progress.skipped_steps == (dtype == "float32"), "float16's own overflows are not counted"
    assert all(torch.equal(before[name], after) for name, after in weights_of(run).items())
    scales = gather_objects(run.scaler.get_scale())
    assert scales[0] == scales[1] == (scale / 2 if dtype == "float16" else scale)
    (folder / f"unharmed-{world.rank}").touch()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(("dtype", "where"), [("float32", "loss"), ("float32", "gradient"), ("float16", "gradient")])
def test_one_bad_rank_skips_the_step_everywhere(tmp_path, parallel, dtype, where):
    run_ranks(poison_one_rank, tmp_path, tmp_path, parallel, dtype, where)
    assert sorted(path.name for path in tmp_path.glob("unharmed-*")) == ["unharmed-0", "unharmed-1"]
