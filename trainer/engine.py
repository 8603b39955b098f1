"""The one training loop. Every stage runs `train_epoch`; read it from top to bottom."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from dataset.order import SkipBatchSampler
from dataset.stream import StreamDataset, merge_states
from model.config import MiniMindConfig
from model.fast_path import weights_cast_once
from trainer.checkpoint import capture_rng, map_tensors
from trainer.distributed import (
    all_reduce_sum,
    any_rank,
    clip_gradients,
    copy_of_whole,
    gather_objects,
    gradient_sync,
)
from trainer.hardware import hand_back_freed_memory
from trainer.losses import Batch, StepContext
from trainer.meter import Meter
from trainer.precision import note_overflow
from trainer.rollout_data import RolloutData
from trainer.run import Run
from trainer.schedule import get_lr


def train_epoch(run: Run) -> bool:
    """Train from the cursor to the end of its epoch.

    Returns:
        True if the run goes on; False if it has made all its steps or was asked to stop (then it is saved).
    """
    options, world, progress = run.settings.run, run.world, run.progress
    meter = Meter(run)
    clock = time.perf_counter()
    for micro_batches, rows in meter.timed(steps_of_epoch(run)):
        rates = set_learning_rates(run)

        # The loss of a step is its global sum over its global count, so the count comes first, over all ranks.
        counts = all_reduce_sum(sum(run.count(batch) for batch in micro_batches))
        context = StepContext(terms=counts[0], tokens=counts[2], expert_loads=run.expert_loads)
        with weights_cast_once():
            for position, batch in enumerate(micro_batches):
                batch = to_device(batch, world.device)
                with gradient_sync(run.model, enabled=position == len(micro_batches) - 1):
                    with run.autocast():
                        loss_sum, _, logs = run.loss(run.model, batch, context)
                    # Gradients are averaged over ranks; the world size turns that back into their sum.
                    mean_loss = loss_sum * (world.size / counts[0].clamp(min=1))
                    run.scaler.scale(mean_loss).backward()
                meter.add(logs)

        for optimizer in run.optimizers:
            run.scaler.unscale_(optimizer)
        gradient_norm = clip_gradients(run.model, run.settings.optimization.grad_clip or math.inf)
        # One rank's bad gradient must stop the step on every rank, or their weights part ways. (To know it is the only
        # time in a step that a GPU is waited for.)
        usable = not any_rank(not bool(torch.isfinite(gradient_norm)))
        if usable:
            for optimizer in run.optimizers:
                run.scaler.step(optimizer)
        else:
            note_overflow(run.scaler)
        run.scaler.update()
        for optimizer in run.optimizers:
            optimizer.zero_grad(set_to_none=True)
        run.expert_loads = meter.expert_loads(run.expert_loads)

        progress.step += 1
        progress.row += rows
        progress.tokens += int(counts[2])
        progress.supervised_tokens += int(counts[1])
        progress.seconds += time.perf_counter() - clock
        meter.end_step(counts, gradient_norm, usable)

        last = progress.step >= run.total_steps
        if last or is_due(progress.step, options.log_interval):
            meter.report(rates)
        run.checkpoints.writer.check()  # what went wrong while a checkpoint was written in the background
        stop = any_rank(run.stop_asked())
        if stop or last or is_due(progress.step, options.save_interval):
            save_checkpoint(run)
        if stop or last:
            return False
        after_step(run)
        clock = time.perf_counter()
    progress.epoch, progress.row = progress.epoch + 1, 0
    if run.saved_step != progress.step:
        save_checkpoint(run)
    return True


def after_step(run: Run) -> None:
    """What is due between two steps: an evaluation, questions, samples. Nothing of it touches the training."""
    step, options = run.progress.step, run.settings.run
    if is_due(step, options.eval_interval):
        evaluate_and_keep_best(run)
        run.ask(run)
    if is_due(step, options.sample_interval):
        run.sample(run)
    if run.world.device.type == "cpu":
        hand_back_freed_memory(step)


def steps_of_epoch(run: Run) -> Iterator[tuple[list[Batch], int]]:
    """The optimizer steps left in this epoch: this rank's micro-batches, and the rows that all ranks consume.

    The order of rows is a pure function of (seed, epoch), so the cursor alone says where to go on. The last step of an
    epoch has what is left, and is a step like any other. A stream has no end and knows itself where it stands; rollouts
    are drawn by the weights as they are, and prepare their own batches.
    """
    optimization, world = run.settings.optimization, run.world
    if isinstance(run.train_data, RolloutData):
        yield from run.train_data.steps(run)
        return
    if isinstance(run.train_data, StreamDataset):
        batches, rows_left = run.train_data.batches(optimization.batch_size), math.inf
    else:
        batches, rows_left = rows_of_epoch(run), len(run.train_data) - run.progress.row
    micro_batches: list[Batch] = []
    with contextlib.closing(batches):
        for batch in batches:
            micro_batches.append(batch)
            consumed = len(micro_batches) * optimization.batch_size * world.size
            if len(micro_batches) == optimization.accumulation_steps or consumed >= rows_left:
                rows = min(run.rows_per_step, rows_left)
                yield micro_batches, rows
                rows_left -= rows
                micro_batches = []


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its token ids on the device.

    Labels and document ids stay on the CPU, where counting tokens and finding documents waits for no GPU; the model
    takes over what follows from them.
    """
    return batch | {"input_ids": batch["input_ids"].to(device, non_blocking=True)}


def rows_of_epoch(run: Run) -> Iterator[Batch]:
    """This rank's micro-batches of the rows that are left in this epoch."""
    optimization, world = run.settings.optimization, run.world
    sampler = SkipBatchSampler(
        num_rows=len(run.train_data),
        batch_size=optimization.batch_size,
        rank=world.rank,
        world_size=world.size,
        seed=optimization.seed,
        epoch=run.progress.epoch,
        skip_rows=run.progress.row,
        lengths=run.train_data.group_lengths,
    )
    workers = run.settings.data.num_workers
    if workers is None:
        workers = 2 if world.device.type == "cuda" else 0
    yield from run.loader(run.train_data, sampler, workers)


def is_due(step: int, interval: int) -> bool:
    """True at every `interval` steps; an interval of 0 is never due."""
    return interval > 0 and step % interval == 0


def set_learning_rates(run: Run) -> list[float]:
    """Set every group's learning rate for the step to come; returns them, in the order of the optimizers' groups."""
    optimization = run.settings.optimization
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    for group in groups:
        group["lr"] = get_lr(
            run.progress.step,
            run.total_steps,
            group["peak_lr"],
            optimization.warmup_ratio,
            optimization.schedule,
            optimization.decay_ratio,
            optimization.min_lr_ratio,
        )
    return [group["lr"] for group in groups]


def evaluate_and_keep_best(run: Run, iterations: int | None = None) -> dict[str, Any]:
    """Evaluate, and let `best.pth` be this step's checkpoint if no validation loss was lower."""
    metrics = run.evaluate(run, iterations)
    loss, progress = metrics.get("validation_loss", math.inf), run.progress
    best = math.inf if progress.best_validation_loss is None else progress.best_validation_loss
    if progress.step and loss <= best and math.isfinite(loss):
        progress.best_step, progress.best_validation_loss = progress.step, loss
        if run.saved_step != progress.step:
            save_checkpoint(run)
        if run.world.is_main:
            run.checkpoints.mark_best(progress.step)
    return metrics


def save_checkpoint(run: Run) -> None:
    """Save everything that a bit-exact continuation needs; every rank takes part, rank 0 writes, in the background."""
    run.checkpoints.writer.wait()  # at most one copy of the weights at a time
    run.saved_step = run.progress.step
    generators = gather_objects(capture_rng(run.world.device))
    stream = run.train_data.state()
    if isinstance(run.train_data, StreamDataset):
        stream = merge_states(gather_objects(stream))
    state = {
        "model": run.bare_model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "scaler": run.scaler.state_dict(),
        "step": run.progress.step,
        "progress": dataclasses.asdict(run.progress),
        "total_steps": run.total_steps,
        "rows_per_step": run.rows_per_step,
        "random": generators,
        "stream": stream,
        "expert_loads": run.expert_loads,
        "settings": run.settings.to_dict(),
        "config": shape_fields(run.bare_model.config),
        "fingerprints": run.fingerprints,
        "started_from": run.started_from,
        "tracker_id": run.tracker.run_id,
    }
    state = map_tensors(state, lambda tensor: copy_of_whole(tensor, keep=run.world.is_main))
    if run.world.is_main:
        run.checkpoints.save(state, run.progress.step)


def shape_fields(config: MiniMindConfig) -> dict[str, Any]:
    """The model's configuration as plain values, from which `MiniMindConfig(**fields)` builds it again."""
    return {name: getattr(config, name) for name in MiniMindConfig.__annotations__}
