"""What a run is made of and where it stands: plain data that the loop and its helpers work on."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dataset.lm_dataset import PackedDataset, collate_rows
from dataset.stream import StreamDataset
from trainer.checkpoint import CheckpointFolder
from trainer.config import Settings
from trainer.distributed import World
from trainer.losses import Batch, StepContext, count_tokens
from trainer.precision import Precision
from trainer.rollout import RolloutArguments
from trainer.track import Tracker


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
    best_step: int = 0
    best_validation_loss: float | None = None


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
    evaluate: Callable[["Run", int | None], dict[str, Any]]
    count: Callable[[Batch], torch.Tensor] = count_tokens
    progress: Progress = dataclasses.field(default_factory=Progress)
    expert_loads: torch.Tensor | None = None
    saved_step: int = 0
    fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    started_from: str | None = None
    stop_asked: Callable[[], bool] = lambda: False
    sample: Callable[["Run"], None] = lambda run: None
    ask: Callable[["Run"], None] = lambda run: None

    @property
    def bare_model(self) -> nn.Module:
        """The model without its distributed wrapper."""
        return getattr(self.model, "module", self.model)

    def autocast(self) -> contextlib.AbstractContextManager:
        """The compute precision of forward passes."""
        if not self.precision.use_autocast:
            return contextlib.nullcontext()
        return torch.autocast(self.world.device.type, self.precision.dtype)

    def loader(self, data: Dataset, batch_sampler: Any, num_workers: int = 0) -> DataLoader:
        """A loader of collated micro-batches, pinned for CUDA."""
        # A loader draws a seed for its workers from torch's generator; its own keeps that out of the training's state.
        return DataLoader(
            data,
            batch_sampler=batch_sampler,
            collate_fn=collate_rows,
            num_workers=num_workers,
            pin_memory=self.world.device.type == "cuda",
            generator=torch.Generator(),
        )

    @property
    def rows_per_step(self) -> int:
        """Rows that one full optimizer step consumes over all micro-batches and ranks; of rollouts, their prompts."""
        optimization, stage = self.settings.optimization, self.settings.stage
        if isinstance(stage, RolloutArguments):
            return stage.rollout_prompts
        return optimization.batch_size * optimization.accumulation_steps * self.world.size

    def estimate_total_steps(self) -> int:
        """Optimizer steps of the whole run: `--max_steps`, or what the epochs take (a stream has no end)."""
        optimization, stage = self.settings.optimization, self.settings.stage
        steps = stage.steps if isinstance(stage, RolloutArguments) else 1
        return optimization.max_steps or (
            optimization.epochs * math.ceil(len(self.train_data) / self.rows_per_step) * steps
        )
