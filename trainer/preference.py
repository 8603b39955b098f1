"""Preference training: DPO and IPO on packed pairs, with the reference's log-probabilities computed once and kept.

DPO: Rafailov et al. 2023, arXiv:2305.18290, eq. 7; IPO: Azar et al. 2023, arXiv:2310.12036, eq. 17; the SFT term: Pang
et al. 2024, arXiv:2404.19733, eq. 1. A pair's two sides are neighbouring documents of one row, the chosen one first.
"""

import dataclasses
import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from dataset.lm_dataset import IGNORED_LABEL, DPODataset
from dataset.order import SkipBatchSampler
from trainer.config import flag
from trainer.distributed import all_reduce_sum, main_decides, model_hash
from trainer.losses import Batch, StepContext, add_balance_loss, count_tokens
from trainer.run import Run

CACHE_FORMAT = 1  # raise it when the same weights and data give other values
MODEL_INPUTS = ("input_ids", "labels", "document_ids")


@dataclasses.dataclass
class PreferenceArguments:
    """What is learned from a pair. All of it is bound to a run: it may not change when the run is resumed."""

    _argument_group_name = "preference"
    _may_change = ()

    loss_type: Literal["sigmoid", "ipo"] = flag("sigmoid", "sigmoid: DPO; ipo: a margin to reach and keep")
    beta: float = flag(0.1, "how much the model is held to the reference: higher is closer")
    length_normalization: Literal[0, 1] = flag(
        0, "1: log-probabilities a token, so that long answers count no more (ipo always does)"
    )
    label_smoothing: float = flag(0.0, "share of pairs that are taken to be the wrong way round (sigmoid only)")
    sft_weight: float = flag(0.0, "weight of the chosen side's own loss a token, which keeps it likely")

    def problems(self) -> list[str]:
        """What is out of range, by flag."""
        problems = [] if 0 < self.beta < 1e6 else [f"--beta {self.beta:g} must be above 0 (and below a million)"]
        if not 0 <= self.label_smoothing < 0.5:
            problems.append(f"--label_smoothing {self.label_smoothing:g} must lie in [0, 0.5)")
        if self.label_smoothing and self.loss_type == "ipo":
            problems.append(f"--label_smoothing {self.label_smoothing:g} does not go with --loss_type ipo")
        if not 0 <= self.sft_weight < 1e6:
            problems.append(f"--sft_weight {self.sft_weight:g} must not be negative (and below a million)")
        return problems


def count_pairs(batch: Batch) -> Tensor:
    """(3,) float64: pairs, supervised tokens and tokens of a micro-batch."""
    pairs = (batch["document_ids"].amax(dim=1) // 2).sum()
    return torch.cat([pairs.to(torch.float64)[None], count_tokens(batch)[1:]])


@dataclasses.dataclass(frozen=True)
class PreferenceLoss:
    """The loss of pairs; see `trainer.losses` for how a loss is called. `reference` is the frozen model's part."""

    arguments: PreferenceArguments

    def __call__(
        self, model: nn.Module, batch: Batch, context: StepContext
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The sum over pairs, their number, and sums over pairs of what is worth watching.

        Args:
            model: the policy, possibly wrapped.
            batch: input_ids, labels, document_ids, each (rows, window), and `reference` (rows, documents), the sum of
                the reference's log-probabilities over each document's supervised tokens.
            context: of the step.
        """
        output = model(**{name: batch[name] for name in MODEL_INPUTS}, return_token_losses=True)
        log_probs, tokens = sums_of_documents(output.token_losses, batch)
        reference = (
            batch["reference"].to(log_probs.device, non_blocking=True) if "reference" in batch else log_probs.detach()
        )
        losses, logs = self.pair_losses(pairs_of(log_probs), pairs_of(reference), pairs_of(tokens))
        is_pair = pairs_of(tokens)[..., 1] > 0
        sums = {f"{name}_sum": (value * is_pair).sum(dtype=torch.float64) for name, value in logs.items()}
        loss_sum = (losses * is_pair).sum(dtype=torch.float64)
        sums["loss_sum"] = loss_sum.detach()
        return add_balance_loss(loss_sum, sums, model, output, context), is_pair.sum(), sums

    def pair_losses(self, log_probs: Tensor, reference: Tensor, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each pair, and logs of each.

        Args:
            log_probs, reference, tokens: (..., 2), chosen and rejected: sums of log-probabilities, and their numbers.
        """
        arguments = self.arguments
        ratios = log_probs - reference
        if arguments.length_normalization or arguments.loss_type == "ipo":
            ratios = ratios / tokens.clamp(min=1)
        margins = ratios[..., 0] - ratios[..., 1]
        if arguments.loss_type == "ipo":
            losses = (margins - 1 / (2 * arguments.beta)) ** 2
        else:
            wrong = arguments.label_smoothing
            losses = -(1 - wrong) * F.logsigmoid(arguments.beta * margins)
            losses = losses - wrong * F.logsigmoid(-arguments.beta * margins)
        if arguments.sft_weight:
            losses = losses - arguments.sft_weight * log_probs[..., 0] / tokens[..., 0].clamp(min=1)
        ratios, margins = ratios.detach(), margins.detach()
        logs = {
            # Of the model alone, whatever the reference says; and the implicit reward's, where equal ones, as all are
            # before the first step, are half right.
            "preferred": (log_probs[..., 0] > log_probs[..., 1]).float(),
            "accuracy": (margins > 0).float() + 0.5 * (margins == 0).float(),
            "margin": arguments.beta * margins,
            "chosen_reward": arguments.beta * ratios[..., 0],
            "rejected_reward": arguments.beta * ratios[..., 1],
        }
        return losses, logs


def sums_of_documents(token_losses: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probability and number of the supervised tokens of each document, both (rows, an even number of documents).

    Args:
        token_losses: (rows, window) nats, 0 without a label.
        batch: labels and document_ids, (rows, window).
    """
    device = token_losses.device
    documents = batch["document_ids"].to(device, non_blocking=True)
    size = int(batch["document_ids"].max())
    size += size % 2
    supervised = F.pad((batch["labels"][:, 1:] != IGNORED_LABEL).float(), (1, 0)).to(device, non_blocking=True)
    sums = token_losses.new_zeros(len(documents), size + 1)
    log_probs = sums.scatter_add(1, documents, -token_losses)
    return log_probs[:, 1:], sums.scatter_add(1, documents, supervised)[:, 1:]


def pairs_of(values: Tensor) -> Tensor:
    """(rows, documents) -> (rows, pairs, 2)."""
    return values.unflatten(1, (-1, 2))


def prepare_preference(run: Run, _tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Give the pairs of all data sets the log-probabilities of the model as it is now; set the run's loss."""
    run.loss = PreferenceLoss(run.settings.stage)
    notes = []
    weights = model_hash(run.bare_model)
    run.fingerprints["reference"] = weights
    validation = {f"validation {name}": data for name, data in run.validation_data.items()}
    for name, data in {"training pairs": run.train_data, **validation}.items():
        path = reference_path(run, data, weights)
        values = main_decides(lambda path=path, data=data: load_reference(path, data))
        if values is None:
            run.tracker.say(f"reference: log-probabilities of {len(data):,} rows of {name}, once …")
            values = compute_reference(run, data)
            main_decides(lambda path=path, values=values: save_reference(path, values))
            notes.append(f"reference: log-probabilities of the {name} computed, kept in {path}")
        else:
            notes.append(f"reference: log-probabilities of the {name} from {path}")
        data.reference = values
    return notes


def reference_path(run: Run, data: DPODataset, weights: str) -> Path:
    """Where the reference's values are kept: another file for other weights, rows or precision."""
    content = json.dumps([CACHE_FORMAT, weights, data.summary.fingerprint, str(run.precision.dtype)])
    name = hashlib.sha256(content.encode()).hexdigest()[:32]
    return Path(run.settings.data.cache_dir) / f"reference-{name}.npy"


@torch.no_grad()
def compute_reference(run: Run, data: DPODataset) -> np.ndarray:
    """(documents of all rows,) float32 sums of log-probabilities, by all ranks together."""
    sampler = SkipBatchSampler(len(data), run.settings.optimization.batch_size, run.world.rank, run.world.size)
    first_piece = torch.from_numpy(np.array(data.plan.row_pieces))
    values = torch.zeros(int(first_piece[-1]))
    model = run.bare_model
    was_training = model.training
    model.eval()
    try:
        for rows, batch in zip(sampler, run.loader(data, sampler), strict=True):
            batch["input_ids"] = batch["input_ids"].to(run.world.device)
            with run.autocast():
                output = model(**{name: batch[name] for name in MODEL_INPUTS}, return_token_losses=True)
            log_probs, _ = sums_of_documents(output.token_losses, batch)
            for row, of_row in zip(rows, log_probs.cpu(), strict=True):
                if row >= 0:
                    first, last = first_piece[row : row + 2].tolist()
                    values[first:last] = of_row[: last - first]
    finally:
        model.train(was_training)
    return all_reduce_sum(values.to(run.world.device)).cpu().numpy()  # each value is one rank's alone


def load_reference(path: Path, data: DPODataset) -> np.ndarray | None:
    """The values that are kept; None where there are none that fit."""
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    fits = values.shape == (int(data.plan.row_pieces[-1]),) and values.dtype == np.float32
    return values if fits and np.isfinite(values).all() else None


def save_reference(path: Path, values: np.ndarray) -> None:
    """Keep them whole or not at all. Several runs may do so at the same time.

    Raises:
        ValueError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            np.save(file, values)
        temporary.replace(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error}); give another folder with --cache_dir") from error
    finally:
        temporary.unlink(missing_ok=True)
