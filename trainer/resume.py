"""Continuing a run: which checkpoint, what may have changed since, and what must not."""

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import torch

from dataset.stream import StreamDataset
from trainer.checkpoint import load_verified, restore_rng
from trainer.config import raise_problems
from trainer.distributed import copy_like, is_restart, main_decides
from trainer.rollout import RolloutArguments
from trainer.rollout_data import RolloutData
from trainer.run import Progress, Run

# A change of these makes the continuation another run: its rows, its schedule or its optimizer state no longer fit.
BINDING = {
    "model": ("dropout", "router_aux_loss_coef"),
    "data": (
        "max_seq_len",
        "packing",
        "loss_on",
        "train_on",
        "reasoning",
        "thinking_mix",
        "dedup",
        "text_as",
        "streaming",
    ),
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
NAMES = {
    "tokenizer": "tokenizer, or its chat template,",
    "teacher": "teacher (--teacher)",
    "rewards": "files that judge (--rewards, --reward_model)",
    "reference": "model that the run starts from (--from_weight), which is its reference,",
}
# Of these a change is no news: they say how a command is to be read, or `keep_rows_per_step` has its own words.
UNREMARKABLE = {"from_resume", "config", "accumulation_steps"}


def resume(run: Run) -> list[str]:
    """Put the run where its newest good checkpoint stands, or start fresh, moving an older run's folder aside.

    A process that torchrun started again after a failure resumes whatever --from_resume says.

    Returns:
        Notes for the user.

    Raises:
        ValueError: a setting changed that would make the continuation wrong; names each one.
    """
    folder = run.checkpoints.folder
    if not run.settings.run.from_resume and not is_restart():
        return main_decides(lambda: _start_fresh(folder))
    found = main_decides(lambda: run.checkpoints.find_newest(lambda state: problem_with(run, state)))
    if found is None:
        note = f"--from_resume 1: no checkpoint in {folder}, so this run starts fresh"
        return [note, *main_decides(lambda: _start_fresh(folder))]
    path, passed_over = found
    if not path.is_file():  # another node, with a disk of its own
        raise ValueError(f"{path}: rank {run.world.rank} cannot see it; --checkpoint_dir must be on a shared disk")
    # Rank 0 has verified it; the others only map it.
    state = load_verified(path) if run.world.is_main else torch.load(path, weights_only=True, mmap=True)
    notes = keep_rows_per_step(run, state["rows_per_step"])
    check_unchanged(run, state)
    notes += harmless_changes(run, state)
    restore(run, state)
    run.tracker.cut_back(run.progress.step)
    if run.world.is_main:
        run.checkpoints.remove_leftovers()
    return [
        *(f"passed over {reason}" for reason in passed_over),
        *notes,
        f"resumed from {path}, step {run.progress.step}",
    ]


def _start_fresh(folder: Path) -> list[str]:
    notes = []
    if folder.exists() and any(folder.iterdir()):
        stamp = f"{folder.name}.{time.strftime('%Y%m%d-%H%M%S')}"
        names = itertools.chain([stamp], (f"{stamp}.{number}" for number in itertools.count(2)))
        aside = next(path for path in map(folder.with_name, names) if not path.exists())
        folder.rename(aside)
        notes.append(f"an older run's folder was moved to {aside}")
    folder.mkdir(parents=True, exist_ok=True)
    return notes


def problem_with(run: Run, state: Any) -> str | None:
    """Why this is no checkpoint that the run could go on with at all, whatever the settings say."""
    needed = {"model", "optimizers", "scaler", "step", "progress", "total_steps", "rows_per_step", "random", "stream"}
    needed |= {"expert_loads", "settings", "fingerprints"}
    if not isinstance(state, dict) or not needed <= state.keys():
        return "not a checkpoint of this pipeline"
    if len(state["optimizers"]) != len(run.optimizers):
        return None  # --optimizer changed, which `check_unchanged` says
    shapes = {name: tuple(tensor.shape) for name, tensor in run.bare_model.state_dict().items()}
    saved_shapes = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
    if shapes != saved_shapes:
        name = next(name for name in [*shapes, *saved_shapes] if shapes.get(name) != saved_shapes.get(name))
        return f"the model has another shape ({name}: {shapes.get(name)} here, {saved_shapes.get(name)} there)"
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        if group_sizes(optimizer.param_groups) != group_sizes(saved["param_groups"]):
            return "its optimizer groups the parameters otherwise (experts: written by an earlier version of this code)"
        for parameter, values in zip(parameters_of(optimizer), map(saved["state"].get, _indices(saved)), strict=True):
            if any(value.dim() and value.shape != parameter.shape for value in tensors_of(values)):
                return "the optimizer's state has another shape"
    return None


def group_sizes(groups: list[dict[str, Any]]) -> list[int]:
    """How many parameters each group of an optimizer has, or of its saved state."""
    return [len(group["params"]) for group in groups]


def _indices(saved: dict[str, Any]) -> list[int]:
    return [index for group in saved["param_groups"] for index in group["params"]]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """All parameters of an optimizer in the order in which its state dict counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def tensors_of(values: dict[str, Any] | None) -> list[torch.Tensor]:
    """The tensors among one parameter's moments."""
    return [value for value in (values or {}).values() if isinstance(value, torch.Tensor)]


def keep_rows_per_step(run: Run, rows: int) -> list[str]:
    """A step keeps its rows on another number of ranks or with another batch size: the accumulation makes up for it."""
    optimization = run.settings.optimization
    if isinstance(run.settings.stage, RolloutArguments):
        return []  # a step's prompts do not depend on batches and ranks
    before, rest = optimization.accumulation_steps, rows % (optimization.batch_size * run.world.size)
    if rest or run.rows_per_step == rows:
        return []
    optimization.accumulation_steps = rows // (optimization.batch_size * run.world.size)
    run.total_steps = run.estimate_total_steps()
    return [
        f"accumulation_steps is {optimization.accumulation_steps}, not {before}, so that a step keeps its {rows} rows"
    ]


def binding_settings(run: Run) -> dict[str, tuple[str, ...]]:
    """Names of settings that may not change, by group; a stage's own flags are bound but for its `_may_change`."""
    own = run.settings.stage
    if own is None:
        return BINDING
    names = (field.name for field in dataclasses.fields(own) if field.name not in own._may_change)
    return BINDING | {"stage": tuple(names)}


def check_unchanged(run: Run, state: dict[str, Any]) -> None:
    """Raise one ValueError that names everything that differs from the checkpoint and may not."""
    before, now = state["settings"], run.settings.to_dict()
    problems = [
        f"--{name} is {now[group][name]} and was {before.get(group, {}).get(name)}"
        for group, names in binding_settings(run).items()
        for name in names
        if now[group][name] != before.get(group, {}).get(name)
    ]
    problems += [
        f"the {NAMES.get(name, name)} changed (now {value[:12]}, was {state['fingerprints'].get(name, '')[:12]})"
        for name, value in run.fingerprints.items()
        if value != state["fingerprints"].get(name)
    ]
    if run.rows_per_step != state["rows_per_step"] and not isinstance(run.settings.stage, RolloutArguments):
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
    raise_problems([f"cannot resume: {problem}" for problem in problems])


def harmless_changes(run: Run, state: dict[str, Any]) -> list[str]:
    """What the user set otherwise than before and may."""
    return [
        f"--{name} is {value}, was {state['settings'][group][name]}"
        for group, values in run.settings.to_dict().items()
        for name, value in values.items()
        if name not in UNREMARKABLE | set(binding_settings(run).get(group, ()))
        and name in state["settings"].get(group, {})
        and value != state["settings"][group][name]
    ]


@torch.no_grad()
def restore(run: Run, state: dict[str, Any]) -> None:
    """Undo `engine.save_checkpoint`; every tensor is copied out of the mapped file."""
    for name, target in run.bare_model.state_dict().items():
        target.copy_(copy_like(state["model"][name], target))
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        moments = {
            index: {
                name: (copy_like(value, parameter) if value.dim() else value.clone())
                if isinstance(value, torch.Tensor)
                else value
                for name, value in saved["state"][index].items()
            }
            for index, parameter in zip(_indices(saved), parameters_of(optimizer), strict=True)
            if index in saved["state"]
        }
        optimizer.load_state_dict(saved | {"state": moments})
    run.scaler.load_state_dict(state["scaler"])
    known = {field.name for field in dataclasses.fields(Progress)}
    run.progress = Progress(**{name: value for name, value in state["progress"].items() if name in known})
    run.saved_step = run.progress.step
    run.tracker.run_id = state.get("tracker_id")
    run.started_from = state.get("started_from", run.started_from)  # what auto finds now may be newer
    if isinstance(run.train_data, StreamDataset):
        run.train_data.start(run.world.rank, run.world.size, state["stream"])
    if isinstance(run.train_data, RolloutData):
        run.train_data.restore(state["stream"])
    if state["expert_loads"] is not None:
        run.expert_loads = copy_like(state["expert_loads"], run.expert_loads)
    generators = state["random"]
    if len(generators) == run.world.size:
        restore_rng(generators[run.world.rank], run.world.device)
    else:
        # Another number of ranks draws other dropout masks anyway; keep them apart, and the same on each restart.
        torch.manual_seed(run.settings.optimization.seed + run.progress.step * 1000 + run.world.rank)
