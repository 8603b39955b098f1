"""Continuing a run: which checkpoint, what may have changed since, and what must not."""

import time
from typing import Any

import torch

from dataset.stream import StreamDataset
from trainer.checkpoint import restore_rng
from trainer.config import raise_problems
from trainer.engine import Progress, Run, estimate_total_steps, is_due, log_evaluation, rows_per_step

# A change of these makes the continuation another run: its rows, its schedule or its optimizer state no longer fit.
BINDING = {
    "data": ("max_seq_len", "packing", "loss_on", "train_on", "reasoning", "dedup", "text_as", "streaming"),
    "optimization": (
        "optimizer",
        "learning_rate",
        "embedding_learning_rate",
        "weight_decay",
        "grad_clip",
        "schedule",
        "warmup_ratio",
        "decay_ratio",
        "min_lr_ratio",
        "seed",
        "dtype",
    ),
}


def resume(run: Run) -> list[str]:
    """Put the run where its newest good checkpoint stands, or start fresh, moving an older run's folder aside.

    Returns:
        Notes for the user.

    Raises:
        ValueError: a setting changed that would make the continuation wrong; names each one.
    """
    folder = run.checkpoints.folder
    if not run.settings.run.from_resume:
        notes = []
        if run.world.is_main and folder.exists() and any(folder.iterdir()):
            aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}")
            folder.rename(aside)
            notes.append(f"an older run's folder was moved to {aside}")
        if run.world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
        return notes
    found = run.checkpoints.load_newest()
    if found is None:
        if run.world.is_main:
            folder.mkdir(parents=True, exist_ok=True)
        return [f"--from_resume 1: no checkpoint in {folder}, so this run starts fresh"]
    state, path, passed_over = found
    notes = keep_rows_per_step(run, state["rows_per_step"])
    check_unchanged(run, state)
    restore(run, state)
    run.tracker.cut_back(run.progress.step)
    if is_due(run.progress.step, run.settings.run.eval_interval) and run.progress.step < run.total_steps:
        log_evaluation(run)
    return [
        *(f"passed over {reason}" for reason in passed_over),
        *notes,
        f"resumed from {path}, step {run.progress.step}",
    ]


def keep_rows_per_step(run: Run, rows: int) -> list[str]:
    """A step keeps its rows on another number of ranks or with another batch size: the accumulation makes up for it."""
    optimization = run.settings.optimization
    before, rest = optimization.accumulation_steps, rows % (optimization.batch_size * run.world.size)
    if rest or rows_per_step(run) == rows:
        return []
    optimization.accumulation_steps = rows // (optimization.batch_size * run.world.size)
    run.total_steps = estimate_total_steps(run)
    return [
        f"accumulation_steps is {optimization.accumulation_steps}, not {before}, so that a step keeps its {rows} rows"
    ]


def check_unchanged(run: Run, state: dict[str, Any]) -> None:
    """Raise one ValueError that names everything that differs from the checkpoint and may not."""
    before, now = state["settings"], run.settings.to_dict()
    problems = [
        f"--{name} is {now[group][name]} and was {before[group].get(name)}"
        for group, names in BINDING.items()
        for name in names
        if now[group][name] != before[group].get(name)
    ]
    problems += [
        f"the {name} changed (fingerprint {value[:12]}, was {state['fingerprints'].get(name, '')[:12]})"
        for name, value in run.fingerprints.items()
        if value != state["fingerprints"].get(name)
    ]
    if rows_per_step(run) != state["rows_per_step"]:
        share = state["rows_per_step"] // run.world.size
        divisors = ", ".join(str(size) for size in range(1, share + 1) if share % size == 0)
        if share * run.world.size != state["rows_per_step"]:
            divisors = f"none fits {run.world.size} ranks"
        problems.append(
            f"a step had {state['rows_per_step']} rows, which --batch_size {run.settings.optimization.batch_size} on "
            f"{run.world.size} ranks does not divide; batch sizes that do: {divisors}"
        )
    if run.total_steps != state["total_steps"]:
        problems.append(f"the run has {run.total_steps} steps and had {state['total_steps']} (--epochs, --max_steps)")
    shapes = {name: tuple(tensor.shape) for name, tensor in run.bare_model.state_dict().items()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in state["model"].items()}:
        problems.append("the model has another shape")
    raise_problems([f"cannot resume: {problem}" for problem in problems])


def restore(run: Run, state: dict[str, Any]) -> None:
    """Undo `engine.save_checkpoint`."""
    run.bare_model.load_state_dict(state["model"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    run.scaler.load_state_dict(state["scaler"])
    run.progress = Progress(**state["progress"])
    if isinstance(run.train_data, StreamDataset):
        run.train_data.start(run.world.rank, run.world.size, state["stream"])
    if state["expert_loads"] is not None:
        run.expert_loads = state["expert_loads"].to(run.world.device)
    generators = state["random"]
    if len(generators) == run.world.size:
        restore_rng(generators[run.world.rank], run.world.device)
    else:
        # Another number of ranks draws other dropout masks anyway; keep them apart, and the same on each restart.
        torch.manual_seed(run.settings.optimization.seed + run.progress.step * 1000 + run.world.rank)
