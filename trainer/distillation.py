"""Distillation: a student learns a teacher's whole distribution over the next token, not only the token that came."""

import dataclasses
import functools
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from dataset.lm_dataset import IGNORED_LABEL
from model.model_minimind import MiniMindForCausalLM, count_parameters
from model.token_divergence import Teacher, token_divergences
from trainer.config import FolderChoice, flag
from trainer.distributed import model_hash
from trainer.losses import Batch, StepContext, add_balance_loss
from trainer.run import Run
from trainer.weights import find_folder, load_tokenizer, open_model


@dataclasses.dataclass
class DistillationArguments:
    """The teacher, and what is learned from it. All of it is bound to a run."""

    _argument_group_name = "distillation"
    _may_change = ()

    teacher: str = flag("full_sft", "a model folder, or the name of a finished stage in --save_dir; same vocabulary")
    direction: Literal["forward", "reverse"] = flag(
        "forward", "forward: KL(teacher || student), covers all that the teacher says; reverse: its best part"
    )
    # 150 steps of the quickstart's student: 85.5 % right without a teacher, 85.6 % at 1 and 0.5, 90.1 % at 2 and 0.9.
    temperature: float = flag(2.0, "divides both sides' logits; above 1 the teacher's lesser choices count more")
    distillation_weight: float = flag(0.9, "share of the divergence; the rest is the data's own loss")

    def problems(self) -> list[str]:
        """What is out of range, by flag."""
        problems = [] if self.temperature > 0 else [f"--temperature {self.temperature:g} must be above 0"]
        if not 0 < self.distillation_weight <= 1:
            problems.append(f"--distillation_weight {self.distillation_weight:g} must lie above 0 and up to 1")
        return problems


@dataclasses.dataclass(frozen=True)
class DistillationLoss:
    """The loss of a batch; see `trainer.losses` for how it is called.

    share x temperature^2 x KL + (1 - share) x cross-entropy, over supervised tokens. The square keeps the gradient's
    size at any temperature (Hinton et al. 2015, section 2).
    """

    arguments: DistillationArguments
    teacher: MiniMindForCausalLM

    def __call__(
        self, model: nn.Module, batch: Batch, context: StepContext
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The sum over supervised tokens, their number, and logs. batch: input_ids, labels, document_ids."""
        arguments = self.arguments
        with torch.no_grad():
            states = self.teacher.model(input_ids=batch["input_ids"], document_ids=batch["document_ids"])
        lesson = Teacher(
            states.last_hidden_state,
            self.teacher.lm_head.weight,
            arguments.temperature,
            arguments.direction == "reverse",
        )
        compare = functools.partial(token_divergences, labels=batch["labels"], teacher=lesson)
        output = model(**batch, return_token_losses=True, compute=compare)
        divergence = output.computed.sum(dtype=torch.float64)
        cross_entropy = output.token_losses.sum(dtype=torch.float64)
        share = arguments.distillation_weight
        loss_sum = share * arguments.temperature**2 * divergence + (1 - share) * cross_entropy
        logs = {
            "loss_sum": loss_sum.detach(),
            "divergence_sum": divergence.detach(),
            "cross_entropy_sum": cross_entropy.detach(),
        }
        count = (batch["labels"][:, 1:] != IGNORED_LABEL).sum()
        return add_balance_loss(loss_sum, logs, model, output, context), count, logs


def prepare_distillation(run: Run, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Open the teacher and set the run's loss.

    Raises:
        ValueError: no such model, or one of another vocabulary.
    """
    arguments = run.settings.stage
    name = arguments.teacher
    path = name if "/" in name or Path(name).is_dir() else None
    try:
        folder = find_folder(FolderChoice(weight=name, model_path=path, save_dir=run.settings.run.save_dir))
        teacher, its_tokenizer = open_model(folder), load_tokenizer(folder)
    except ValueError as error:
        raise ValueError(f"--teacher {name}: {error}") from error
    sizes = teacher.config.vocab_size, run.bare_model.config.vocab_size
    if its_tokenizer.get_vocab() != tokenizer.get_vocab() or sizes[0] != sizes[1]:
        raise ValueError(
            f"--teacher {name}: its vocabulary ({len(its_tokenizer):,} tokens, {sizes[0]:,} logits) is not the "
            f"student's ({len(tokenizer):,} tokens, {sizes[1]:,} logits); give the student --tokenizer_path {folder}"
        )
    window, places = run.settings.data.max_seq_len, teacher.config.max_position_embeddings
    if places < window:
        raise ValueError(f"--teacher {name}: it reads {places:,} tokens, and --max_seq_len is {window:,}")
    run.fingerprints["teacher"] = model_hash(teacher)
    run.loss = DistillationLoss(arguments, teacher.to(run.world.device).eval().requires_grad_(False))
    return [f"teacher: {folder}, {count_parameters(teacher)[0] / 1e6:.2f}M parameters"]
