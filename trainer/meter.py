"""What a run measures between two progress lines."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trainer.distributed import all_reduce_sum
from trainer.hardware import flops_per_token, hardware_metrics, matmul_peak, peak_memory_gib
from trainer.run import Run
from trainer.track import format_seconds


class Meter:
    """Sums between two progress lines, kept on the device so that measuring does not slow the step."""

    def __init__(self, run: Run):
        self.run = run
        self.expert_counts: torch.Tensor | None = None
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self.terms = self.tokens = 0.0
        self.gradient_norm = torch.zeros(())
        self.steps = 0
        self.waited_seconds = 0.0
        self.seconds = self.run.progress.seconds

    def timed(self, steps: Iterable[Any]) -> Iterator[Any]:
        """The same items; the time that each one takes to come is time waiting for data."""
        steps = iter(steps)
        while True:
            started = time.perf_counter()
            item = next(steps, None)
            self.waited_seconds += time.perf_counter() - started
            if item is None:
                return
            yield item

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
        progress, limit = self.run.progress, self.run.settings.run.max_bad_steps
        self.terms, self.tokens, self.steps = self.terms + counts[0], self.tokens + counts[2], self.steps + 1
        self.gradient_norm = gradient_norm
        # A loss scale above 1 that overflows only needs to shrink; that is float16 at work, not a broken run.
        excused = self.run.precision.use_scaler and self.run.scaler.get_scale() >= 1
        if usable or excused:
            progress.bad_steps_in_a_row = 0
            return
        progress.skipped_steps += 1
        progress.bad_steps_in_a_row += 1
        self.run.tracker.say(f"step {progress.step}: loss or gradient is not finite; the step was skipped on all ranks")
        if progress.bad_steps_in_a_row >= limit:
            good = self.run.checkpoints.steps()
            raise ValueError(
                f"step {progress.step} (epoch {progress.epoch}, up to row {progress.row}): {limit} steps in a row "
                f"without a finite gradient (--max_bad_steps); the last good checkpoint is "
                f"{good[0] if good else 'none'}; try a lower --learning_rate"
            )

    def report(self, rates: list[float]) -> None:
        """Print and log the mean over the steps since the last report."""
        run, progress = self.run, self.run.progress
        names = sorted(self.sums)
        if not names or not self.steps:
            return
        values = all_reduce_sum(torch.stack([self.sums[name].double() for name in names]))
        sums = dict(zip(names, values.tolist(), strict=True))
        terms, tokens, norm = max(float(self.terms), 1), float(self.tokens), float(self.gradient_norm)
        seconds = max(progress.seconds - self.seconds, 1e-9)
        loss = sums.pop("loss_sum") / terms
        left = (run.total_steps - progress.step) * progress.seconds / max(progress.step, 1)
        peak = matmul_peak(run.world.device, run.precision.dtype) * run.world.size
        metrics = {
            "epoch": progress.epoch,
            "tokens": progress.tokens,
            "supervised_tokens": progress.supervised_tokens,
            "loss": loss,
            "learning_rate": rates[0],
            "learning_rates": rates,
            "gradient_norm": norm,
            "gradient_norm_clipped": min(norm, run.settings.optimization.grad_clip or norm),
            "tokens_per_second": tokens / seconds,
            "model_flops_utilization": tokens / seconds * flops_per_token(run.bare_model) / peak,
            "data_wait_share": self.waited_seconds / seconds,
            "elapsed_seconds": progress.seconds,
            "skipped_steps": progress.skipped_steps,
            "peak_memory_gib": peak_memory_gib(run.world.device),
            **hardware_metrics(run.world.device),
        }
        if "balance_sum" in sums:
            metrics["balance_loss"] = sums.pop("balance_sum") / max(tokens, 1)
            metrics["expert_load"] = [[round(share, 4) for share in layer] for layer in run.expert_loads.tolist()]
        # What else a stage's loss logs is a sum over its terms.
        others = {name.removesuffix("_sum"): value / terms for name, value in sums.items()}
        metrics |= others
        run.tracker.log(progress.step, metrics)
        shown = "".join(f"{name} {value:.3f} | " for name, value in others.items())
        run.tracker.say(
            f"step {progress.step}/{run.total_steps} | loss {loss:.4f} | {shown}lr {rates[0]:.2e} | "
            f"grad {norm:.2f} | {tokens / seconds:,.0f} tokens/s | MFU {metrics['model_flops_utilization']:.0%} | "
            f"{format_seconds(progress.seconds)}, {format_seconds(left)} left"
        )
        self.reset()
