"""Measuring a model in the middle of its training: losses of fixed rows, by source, over all ranks."""

import math
from typing import Any

import torch

from dataset.order import SkipBatchSampler
from eval.bpb import LossSums, evaluate_bpb
from trainer.distributed import all_reduce_sum
from trainer.run import Run


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
        # The iterations are of the whole run, so that more ranks do not mean more rows.
        steps = min(len(sampler), math.ceil((iterations or run.settings.run.eval_iters) / world.size))
        with run.autocast():
            sums = evaluate_bpb(run.bare_model, run.loader(data, sampler), steps, run.token_bytes.to(world.device))
        results[name] = LossSums.from_tensor(all_reduce_sum(sums.to_tensor(world.device)))
    return results


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
