"""Our own training as a contestant: the real stage with its real loop, which hands over between two steps."""

import dataclasses
import os
import time
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from eval.bpb import evaluate_bpb
from model.model_minimind import MiniMindForCausalLM
from scripts.benchmarking.turns import Baton
from trainer.config import Settings
from trainer.data import Data, build_pretrain_data, build_sft_data
from trainer.distributed import init_distributed_mode
from trainer.engine import train_epoch
from trainer.hardware import flops_per_token
from trainer.losses import language_model_loss
from trainer.run import Run
from trainer.stage import Stage, assemble, read_settings
from trainer.track import Tracker
from trainer.weights import init_model

SEED = 42
NEVER = 10**9
NOTES = 10  # the grid of validation losses; on GSM8K and Shakespeare one takes a third of the time of `nano`'s run


@dataclasses.dataclass(frozen=True)
class Task:
    """What all contestants train on, and in which portions.

    Attributes:
        data: "documents" or "conversations".
        words: flags of ours that say the shape and the data; peers take their shape and rows from the same.
        window: slots in a row.
        rows: rows in a micro-batch.
        accumulation: micro-batches in a step.
        folder: where caches and checkpoints may go.
        steps: steps of the whole run, for its schedule; 0: no end.
        settling_steps: steps of one micro-batch each, before the first turn, in which routers find their balance.
    """

    data: str
    words: tuple[str, ...]
    window: int
    rows: int
    accumulation: int
    folder: str
    steps: int = 0
    settling_steps: int = 0

    def settings(self) -> Settings:
        """The flags of ours that are this task."""
        words = [*self.words, "--max_seq_len", self.window, "--batch_size", self.rows, "--max_steps"]
        words += [self.steps or NEVER, "--accumulation_steps", self.accumulation, "--epochs", NEVER]
        words += ["--save_interval", NEVER, "--eval_interval", 0, "--log_interval", NEVER]
        # Checkpoints, at the end of an epoch, go to a folder of this process.
        words += ["--save_dir", Path(self.folder) / "out", "--checkpoint_dir", Path(self.folder) / str(os.getpid())]
        words += ["--cache_dir", Path(self.folder) / "cache", "--device", "cpu"]
        return read_settings(self.stage(), [str(word) for word in words])

    def stage(self) -> Stage:
        """The stage of ours that trains on such data."""
        build = build_pretrain_data if self.data == "documents" else build_sft_data
        return Stage("benchmark", "benchmark", build, language_model_loss, {})

    def model_and_data(self) -> tuple[MiniMindForCausalLM, PreTrainedTokenizerBase, Data]:
        """What a peer takes from us: shape (our model), tokenizer, and the same pieces, each a row of its own."""
        settings = self.settings()
        settings.data.packing = 0
        model, tokenizer, _ = init_model(settings.model, None, torch.device("cpu"), self.window)
        return model, tokenizer, self.stage().build_data(settings.data, tokenizer, SEED, None)


def prepare(task: Task) -> Run:
    """A run of ours, ready for its first step."""
    settings = task.settings()
    run, *_ = assemble(task.stage(), settings, init_distributed_mode("cpu"))
    run.tracker = Tracker(None)
    return run


def describe(run: Run) -> dict[str, float]:
    """What the referee wants to know of our run."""
    lengths = run.train_data.plan.piece_lengths
    mean_length = float((lengths.astype("float64") ** 2).sum() / lengths.sum())
    return {"flops_per_token": flops_per_token(run.bare_model, mean_length)}


def train_ours(task: Task, baton: Baton) -> None:
    """Train without end, for the speed."""
    run = prepare(task)
    optimization, before = run.settings.optimization, [0]

    def after_step() -> bool:
        tokens = run.progress.tokens - before[0]
        before[0] = run.progress.tokens
        if run.progress.step > task.settling_steps:
            baton.step(tokens, lambda: describe(run))
        elif run.progress.step == task.settling_steps:
            optimization.accumulation_steps = task.accumulation
            baton.wait()
        return False

    run.stop_asked = after_step
    if task.settling_steps:
        optimization.accumulation_steps = 1
    else:
        baton.wait()
    while train_epoch(run):
        pass


@torch.no_grad()
def validation_loss(model: MiniMindForCausalLM, rows: torch.utils.data.Dataset) -> float:
    """Mean nats of a validation set's tokens in float32; it leaves no trace in the model."""
    loader = torch.utils.data.DataLoader(rows, batch_size=16)
    return evaluate_bpb(model, loader, None, torch.ones(model.config.vocab_size, dtype=torch.int64)).loss


def train_ours_to_the_end(task: Task, baton: Baton) -> None:
    """Train all steps in one turn and note [(seconds of training so far, validation loss)] from half of the way on."""
    run = prepare(task)
    curve: list[tuple[float, float]] = []
    clock = [0.0, 0.0]  # seconds that count, and when they last began

    def after_step() -> bool:
        step, total = run.progress.step, run.total_steps
        clock[0] += time.perf_counter() - clock[1]
        if step * 2 >= total and step % max(total // NOTES, 1) == 0 or step == total:
            curve.append((clock[0], validation_loss(run.bare_model, run.validation_data["text"])))
        baton.step(run.progress.tokens, lambda: curve)
        clock[1] = time.perf_counter()
        return False

    run.stop_asked = after_step
    baton.wait()
    clock[1] = time.perf_counter()
    while train_epoch(run):
        pass
