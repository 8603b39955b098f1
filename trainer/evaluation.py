"""Measuring a model in the middle of its training: losses of fixed rows, by source, over all ranks."""

import math
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from dataset.lm_dataset import PackedDataset
from dataset.order import SkipBatchSampler
from eval.bpb import LossSums, evaluate_bpb
from trainer.distributed import all_reduce_sum
from trainer.losses import StepContext
from trainer.run import Run


def fixed_batches(run: Run, data: PackedDataset, iterations: int | None = None) -> tuple[DataLoader, int]:
    """This rank's share of the rows that every evaluation of a run sees, and how many batches of them to take.

    They are the first of a fixed order, another one than the training's: the rows that are trained first are also
    learned first, and then forgotten. The iterations, by default `--eval_iters`, are of the whole run, so that more
    ranks do not mean more rows.
    """
    optimization, world = run.settings.optimization, run.world
    sampler = SkipBatchSampler(
        num_rows=len(data),
        batch_size=optimization.batch_size,
        rank=world.rank,
        world_size=world.size,
        seed=optimization.seed + 1,
        epoch=0,
    )
    steps = min(len(sampler), math.ceil((iterations or run.settings.run.eval_iters) / world.size))
    return run.loader(data, sampler), steps


@torch.no_grad()
def estimate_loss(run: Run, iterations: int | None = None) -> dict[str, LossSums]:
    """Loss sums of some training rows ("train") and of each validation set, over all ranks."""
    results = {}
    for name, data in {"train": run.train_data.preview, **run.validation_data}.items():
        loader, steps = fixed_batches(run, data, iterations)
        with run.autocast():
            sums = evaluate_bpb(run.bare_model, loader, steps, run.token_bytes.to(run.world.device))
        results[name] = LossSums.from_tensor(all_reduce_sum(sums.to_tensor(run.world.device)))
    return results


@torch.no_grad()
def estimate_objective(run: Run, data: PackedDataset, iterations: int | None = None) -> dict[str, float]:
    """Means of what the stage's own loss logs, `loss` among them, over all ranks, on rows of a data set."""
    model, device = run.bare_model, run.world.device
    loader, steps = fixed_batches(run, data, iterations)
    sums: dict[str, torch.Tensor] = {}
    terms = torch.zeros((), device=device)
    was_training = model.training
    model.eval()
    try:
        for batch in islice(loader, steps):
            counts = run.count(batch)
            batch["input_ids"] = batch["input_ids"].to(device)
            with run.autocast():
                _, _, logs = run.loss(model, batch, StepContext(counts[0], counts[2], run.expert_loads))
            terms += counts[0].to(terms)
            for name, value in logs.items():
                if name.endswith("_sum") and name != "balance_sum":
                    sums[name] = sums.get(name, torch.zeros((), device=device)) + value.float()
    finally:
        model.train(was_training)
    total = all_reduce_sum(torch.stack([terms, *(sums[name] for name in sorted(sums))])).tolist()
    return {
        name.removesuffix("_sum"): value / max(total[0], 1) for name, value in zip(sorted(sums), total[1:], strict=True)
    }


def log_objective(run: Run, iterations: int | None = None) -> dict[str, Any]:
    """Evaluate the stage's own loss, print, and append to metrics.jsonl: train_loss, validation_loss, and its logs."""
    metrics: dict[str, Any] = {"tokens": run.progress.tokens}
    metrics["train_loss"] = estimate_objective(run, run.train_data.preview, iterations)["loss"]
    said = []
    for name, data in run.validation_data.items():
        means = estimate_objective(run, data, iterations)
        metrics |= {f"validation_{key}": value for key, value in means.items()}
        said.append(f"{name} " + ", ".join(f"{key} {value:.4f}" for key, value in means.items()))
    run.tracker.log(run.progress.step, metrics)
    run.tracker.say(
        f"step {run.progress.step}/{run.total_steps} | train {metrics['train_loss']:.4f} | validation "
        + "; ".join(said)
    )
    return metrics


def log_evaluation(run: Run, iterations: int | None = None) -> dict[str, Any]:
    """Evaluate, print, and append to metrics.jsonl: train_loss, validation_loss, validation_bpb, and both by source."""
    results = estimate_loss(run, iterations)
    progress = run.progress
    metrics: dict[str, Any] = {"tokens": progress.tokens, "train_loss": results["train"].loss}
    validation = {name: sums for name, sums in results.items() if name != "train"}
    if validation:
        total = sum(validation.values(), LossSums())
        metrics |= {"validation_loss": total.loss, "validation_bpb": total.bits_per_byte}
        for name, sums in validation.items():
            metrics |= {f"validation_loss_{name}": sums.loss, f"validation_bpb_{name}": sums.bits_per_byte}
    run.tracker.log(progress.step, metrics)
    by_name = ", ".join(
        f"{name} {sums.loss:.4f} ({sums.bits_per_byte:.4f} bits per byte)" for name, sums in validation.items()
    )
    run.tracker.say(
        f"step {progress.step}/{run.total_steps} | train {results['train'].loss:.4f} | validation {by_name}"
    )
    return metrics
