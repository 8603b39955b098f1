"""The one training loop. Every stage runs `train_epoch`; read it from top to bottom."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dataset.lm_dataset import PackedDataset, collate_rows
from dataset.order import SkipBatchSampler
from dataset.stream import StreamDataset, merge_states
from eval.bpb import LossSums, evaluate_bpb
from model.config import MiniMindConfig
from trainer.checkpoint import CheckpointFolder, capture_rng
from trainer.config import Settings
from trainer.distributed import World, all_reduce_sum, any_rank, gather_objects, gradient_sync
from trainer.losses import Batch, StepContext, count_tokens
from trainer.precision import Precision
from trainer.schedule import get_lr
from trainer.track import Tracker, format_seconds

# A loss that stays unusable is a broken run, not bad luck: stop and say so.
MAX_BAD_STEPS = 20


@dataclasses.dataclass
class Progress:
    """Where a run stands. Saved whole in every checkpoint.

    `step` counts optimizer steps, skipped ones included; `row` the rows of this epoch that all ranks together consumed.
    """

    step: int = 0
    epoch: int = 0
    row: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    skipped_steps: int = 0
    bad_steps_in_a_row: int = 0


@dataclasses.dataclass
class Run:
    """Everything that the loop works with; put together by `trainer.stage.run_stage`."""

    settings: Settings
    world: World
    precision: Precision
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler
    loss: Callable[[nn.Module, Batch, StepContext], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
    train_data: PackedDataset | StreamDataset
    validation_data: dict[str, PackedDataset]
    token_bytes: torch.Tensor
    total_steps: int
    tracker: Tracker
    checkpoints: CheckpointFolder
    progress: Progress = dataclasses.field(default_factory=Progress)
    expert_loads: torch.Tensor | None = None
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    stop_asked: Callable[[], bool] = lambda: False
    sample: Callable[["Run"], None] = lambda run: None

    @property
    def bare_model(self) -> nn.Module:
        """The model without its distributed wrapper."""
        return getattr(self.model, "module", self.model)

    def autocast(self) -> contextlib.AbstractContextManager:
        """The compute precision of forward passes."""
        if not self.precision.use_autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, self.precision.dtype)


def train_epoch(run: Run) -> bool:
    """Train from the cursor to the end of its epoch.

    Returns:
        True if the run goes on; False if it has made all its steps or was asked to stop (then it is saved).
    """
    optimization, world, progress = run.settings.optimization, run.world, run.progress
    meter = Meter(run)
    clock = time.perf_counter()
    for micro_batches, rows in steps_of_epoch(run):
        rate = set_learning_rate(run)

        # The loss of a step is its global sum over its global count, so the count comes first, over all ranks.
        counts = all_reduce_sum(sum(count_tokens(batch) for batch in micro_batches))
        context = StepContext(supervised_tokens=counts[0], tokens=counts[1], expert_loads=run.expert_loads)
        for position, batch in enumerate(micro_batches):
            with gradient_sync(run.model, enabled=position == len(micro_batches) - 1):
                with run.autocast():
                    loss_sum, _, logs = run.loss(run.model, batch, context)
                # DDP averages gradients over ranks; the world size turns that back into their sum.
                mean_loss = loss_sum * (world.size / counts[0].clamp(min=1))
                run.scaler.scale(mean_loss).backward()
            meter.add(logs)

        for optimizer in run.optimizers:
            run.scaler.unscale_(optimizer)
        limit = optimization.grad_clip or math.inf
        gradient_norm = nn.utils.clip_grad_norm_(run.model.parameters(), limit)
        # One rank's bad gradient must stop the step on every rank, or their weights part ways.
        usable = not any_rank(not bool(torch.isfinite(gradient_norm)), world.device)
        if usable:
            for optimizer in run.optimizers:
                run.scaler.step(optimizer)
        run.scaler.update()
        for optimizer in run.optimizers:
            optimizer.zero_grad(set_to_none=True)
        run.expert_loads = meter.expert_loads(run.expert_loads)

        progress.step += 1
        progress.row += rows
        progress.tokens += int(counts[1])
        progress.supervised_tokens += int(counts[0])
        progress.seconds += time.perf_counter() - clock
        meter.end_step(counts, gradient_norm, usable)

        last = progress.step >= run.total_steps
        if progress.step % run.settings.run.log_interval == 0 or last:
            meter.report(rate)
        stop = any_rank(run.stop_asked(), world.device)
        if stop or last or progress.step % run.settings.run.save_interval == 0:
            save_checkpoint(run)
        if stop:
            return False
        if not last and is_due(progress.step, run.settings.run.eval_interval):
            log_evaluation(run)
        if not last and is_due(progress.step, run.settings.run.sample_interval):
            run.sample(run)
        if last:
            return False
        clock = time.perf_counter()
    progress.epoch, progress.row = progress.epoch + 1, 0
    return True


def steps_of_epoch(run: Run) -> Iterator[tuple[list[Batch], int]]:
    """The optimizer steps left in this epoch: this rank's micro-batches, and the rows that all ranks consume.

    The order of rows is a pure function of (seed, epoch), so the cursor alone says where to go on. The last step of an
    epoch has what is left, and is a step like any other. A stream has no end and knows itself where it stands.
    """
    optimization, world = run.settings.optimization, run.world
    if isinstance(run.train_data, StreamDataset):
        batches, rows_left = run.train_data.batches(optimization.batch_size), math.inf
    else:
        batches, rows_left = rows_of_epoch(run), len(run.train_data) - run.progress.row
    rows_per_step = optimization.batch_size * world.size * optimization.accumulation_steps
    micro_batches: list[Batch] = []
    with contextlib.closing(batches):
        for batch in batches:
            micro_batches.append({name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items()})
            consumed = len(micro_batches) * optimization.batch_size * world.size
            if len(micro_batches) == optimization.accumulation_steps or consumed >= rows_left:
                rows = min(rows_per_step, rows_left)
                yield micro_batches, rows
                rows_left -= rows
                micro_batches = []


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
    yield from make_loader(run, run.train_data, sampler)


def make_loader(run: Run, data: Dataset, batch_sampler: Any) -> DataLoader:
    """A loader of collated micro-batches, pinned for CUDA."""
    workers = run.settings.data.num_workers
    # A loader draws a seed for its workers from torch's generator; its own keeps that out of the training's state.
    return DataLoader(
        data,
        batch_sampler=batch_sampler,
        collate_fn=collate_rows,
        num_workers=workers,
        pin_memory=run.world.device.type == "cuda",
        generator=torch.Generator(),
    )


def is_due(step: int, interval: int) -> bool:
    """True at every `interval` steps; an interval of 0 is never due."""
    return interval > 0 and step % interval == 0


def set_learning_rate(run: Run) -> float:
    """Set every group's learning rate for the step to come; returns the first group's."""
    optimization = run.settings.optimization
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(
                run.progress.step,
                run.total_steps,
                group["peak_lr"],
                optimization.warmup_ratio,
                optimization.schedule,
                optimization.decay_ratio,
                optimization.min_lr_ratio,
            )
    return run.optimizers[0].param_groups[0]["lr"]


class Meter:
    """Sums between two progress lines, kept on the device so that measuring does not slow the step."""

    def __init__(self, run: Run):
        self.run = run
        self.expert_counts: torch.Tensor | None = None
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.supervised = self.tokens = 0.0
        self.gradient_norm = torch.zeros(())
        self.steps = 0
        self.seconds = self.run.progress.seconds

    def add(self, logs: dict[str, torch.Tensor]) -> None:
        """Take in the logs of one micro-batch."""
        for name, value in logs.items():
            if name == "expert_counts":
                self.expert_counts = value if self.expert_counts is None else self.expert_counts + value
            else:
                self.sums[name] = self.sums.get(name, 0.0) + value

    def expert_loads(self, previous: torch.Tensor | None) -> torch.Tensor | None:
        """(layers, experts) share of this step's tokens per expert over all ranks, for the next step's balance loss."""
        if self.expert_counts is None:
            return previous
        counts = all_reduce_sum(self.expert_counts.double())
        self.expert_counts = None
        return counts / counts.sum(dim=1, keepdim=True).clamp(min=1)

    def end_step(self, counts: torch.Tensor, gradient_norm: torch.Tensor, usable: bool) -> None:
        """Count a finished step, and stop a run whose steps are all unusable.

        Raises:
            ValueError: too many steps in a row had a loss or gradient that was not finite.
        """
        progress = self.run.progress
        self.supervised, self.tokens, self.steps = self.supervised + counts[0], self.tokens + counts[1], self.steps + 1
        self.gradient_norm = gradient_norm
        # A loss scale above 1 that overflows only needs to shrink; that is float16 at work, not a broken run.
        excused = self.run.precision.use_scaler and self.run.scaler.get_scale() >= 1
        if usable or excused:
            progress.bad_steps_in_a_row = 0
            return
        progress.skipped_steps += 1
        progress.bad_steps_in_a_row += 1
        self.run.tracker.say(f"step {progress.step}: loss or gradient is not finite; the step was skipped on all ranks")
        if progress.bad_steps_in_a_row >= MAX_BAD_STEPS:
            good = self.run.checkpoints.steps()
            raise ValueError(
                f"step {progress.step} (epoch {progress.epoch}, row {progress.row}): {MAX_BAD_STEPS} steps in a row "
                f"without a finite gradient; the last good checkpoint is {good[0] if good else 'none'}; "
                "try a lower --learning_rate"
            )

    def report(self, rate: float) -> None:
        """Print and log the mean over the steps since the last report."""
        run, progress = self.run, self.run.progress
        names = sorted(self.sums)
        if not names or not self.steps:
            return
        values = all_reduce_sum(torch.stack([self.sums[name].double() for name in names]))
        sums = dict(zip(names, values.tolist(), strict=True))
        supervised, tokens = float(self.supervised), float(self.tokens)
        seconds = max(progress.seconds - self.seconds, 1e-9)
        loss = sums["loss_sum"] / max(supervised, 1)
        left = (run.total_steps - progress.step) * progress.seconds / max(progress.step, 1)
        metrics = {
            "epoch": progress.epoch,
            "tokens": progress.tokens,
            "supervised_tokens": progress.supervised_tokens,
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": float(self.gradient_norm),
            "tokens_per_second": tokens / seconds,
            "elapsed_seconds": progress.seconds,
            "skipped_steps": progress.skipped_steps,
        }
        if "balance_sum" in sums:
            metrics["balance_loss"] = sums["balance_sum"] / max(tokens, 1)
            metrics["expert_load"] = [[round(share, 4) for share in layer] for layer in run.expert_loads.tolist()]
        run.tracker.log(progress.step, metrics)
        run.tracker.say(
            f"step {progress.step}/{run.total_steps} | loss {loss:.4f} | lr {rate:.2e} | "
            f"grad {float(self.gradient_norm):.2f} | {tokens / seconds:,.0f} tokens/s | "
            f"{format_seconds(progress.seconds)}, {format_seconds(left)} left"
        )
        self.reset()


@torch.no_grad()
def estimate_loss(run: Run, iterations: int | None = None) -> dict[str, LossSums]:
    """Loss sums of some training rows ("train") and of each validation set, over all ranks.

    Each set gives `iterations` batches, by default `--eval_iters`.

    The rows are the first of a fixed order, so that every evaluation of a run sees the same ones. It is another order
    than the training's: the rows that are trained first are also learned first, and then forgotten.
    """
    optimization, world = run.settings.optimization, run.world
    results = {}
    for name, data in {"train": run.train_data.preview, **run.validation_data}.items():
        sampler = SkipBatchSampler(
            num_rows=len(data),
            batch_size=optimization.batch_size,
            rank=world.rank,
            world_size=world.size,
            seed=optimization.seed + 1,
            epoch=0,
        )
        loader = make_loader(run, data, sampler)
        # The iterations are of the whole run, so that more ranks do not mean more rows.
        steps = min(len(sampler), math.ceil((iterations or run.settings.run.eval_iters) / world.size))
        with run.autocast():
            sums = evaluate_bpb(run.bare_model, loader, steps, run.token_bytes.to(world.device))
        results[name] = LossSums.from_tensor(all_reduce_sum(sums.to_tensor(world.device)))
    return results


def log_evaluation(run: Run, iterations: int | None = None) -> dict[str, Any]:
    """Evaluate, print, and append to metrics.jsonl: train_loss, validation_loss, validation_bpb, and both by source."""
    results = estimate_loss(run, iterations)
    metrics: dict[str, Any] = {"tokens": run.progress.tokens, "train_loss": results["train"].loss}
    validation = {name: sums for name, sums in results.items() if name != "train"}
    if validation:
        total = sum(validation.values(), LossSums())
        metrics |= {"validation_loss": total.loss, "validation_bpb": total.bits_per_byte}
        for name, sums in validation.items():
            metrics |= {f"validation_loss_{name}": sums.loss, f"validation_bpb_{name}": sums.bits_per_byte}
    run.tracker.log(run.progress.step, metrics)
    by_name = ", ".join(
        f"{name} {sums.loss:.4f} ({sums.bits_per_byte:.4f} bits per byte)" for name, sums in validation.items()
    )
    run.tracker.say(
        f"step {run.progress.step}/{run.total_steps} | train {results['train'].loss:.4f} | validation {by_name}"
    )
    return metrics


def save_checkpoint(run: Run) -> None:
    """Write everything that a bit-exact continuation needs; every rank takes part, rank 0 writes."""
    generators = gather_objects(capture_rng(run.world.device))
    stream = merge_states(gather_objects(run.train_data.state()))
    if not run.world.is_main:
        return
    state = {
        "model": run.bare_model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "scaler": run.scaler.state_dict(),
        "step": run.progress.step,
        "progress": dataclasses.asdict(run.progress),
        "total_steps": run.total_steps,
        "rows_per_step": rows_per_step(run),
        "random": generators,
        "stream": stream,
        "expert_loads": run.expert_loads,
        "settings": run.settings.to_dict(),
        "config": shape_fields(run.bare_model.config),
        "fingerprints": run.fingerprints,
        "tracker_id": run.tracker.run_id,
    }
    run.checkpoints.save(state, run.progress.step)


def shape_fields(config: MiniMindConfig) -> dict[str, Any]:
    """The model's configuration as plain values, from which `MiniMindConfig(**fields)` builds it again."""
    return {name: getattr(config, name) for name in MiniMindConfig.__annotations__}


def rows_per_step(run: Run) -> int:
    """Rows that one full optimizer step consumes over all micro-batches and ranks."""
    optimization = run.settings.optimization
    return optimization.batch_size * optimization.accumulation_steps * run.world.size


def estimate_total_steps(run: Run) -> int:
    """Optimizer steps of the whole run: `--max_steps`, or what the epochs take (a stream has no end)."""
    optimization = run.settings.optimization
    return optimization.max_steps or optimization.epochs * math.ceil(len(run.train_data) / rows_per_step(run))
