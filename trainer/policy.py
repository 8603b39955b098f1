"""Policy-gradient losses on packed rollouts: GRPO, Dr. GRPO, DAPO and CISPO.

A row holds several rollouts, each a document: its prompt, and the tokens that the model drew, the end of turn among
them, which are its labels. With r = exp(log p - log p_behaviour) and a rollout's advantage A, a token's loss is
    grpo, dr_grpo, dapo   -min(r A, clip(r, 1 - low, 1 + high) A)
    cispo                 -sg(min(r, 1 + high)) A log p
plus beta r (exp(d) - d - 1), d = log p_reference - log p: the estimate k3 of the divergence from the reference
(Schulman 2020, "Approximating KL divergence"), with r before it so that its gradient is the divergence's own
(DeepSeek-V3.2, 2025, arXiv:2512.02556). What differs besides is what the tokens' losses are divided by:
    grpo           each rollout's own length, then the number of rollouts      (Shao et al. 2024, arXiv:2402.03300)
    dr_grpo        the longest length allowed, then the number of rollouts     (Liu et al. 2025, arXiv:2503.20783)
    dapo, cispo    the number of tokens     (Yu et al. 2025, arXiv:2503.14476; MiniMax 2025, arXiv:2506.13585)
"""

import dataclasses
import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dataset.lm_dataset import IGNORED_LABEL
from model.token_loss import token_losses
from trainer.config import flag
from trainer.losses import Batch, StepContext, add_balance_loss, count_tokens


@dataclasses.dataclass
class PolicyArguments:
    """How rollouts are learned from. All of it is bound to a run."""

    _argument_group_name = "policy"
    _may_change = ()

    loss_type: Literal["grpo", "dr_grpo", "dapo", "cispo"] = flag("grpo", "how tokens are clipped, and averaged")
    clip_low: float = flag(0.2, "a token's ratio to the sampler counts down to 1 minus this")
    clip_high: float | None = flag(
        None, "and up to 1 plus this; by default as --clip_low, for dapo 0.28, for cispo 4, as in their papers"
    )
    beta: float = flag(0.0, "weight of the divergence from the weights that the run starts from; 0: no reference")
    temperature: float = flag(1.0, "of the sampling; the log-probabilities that are trained are those at it")
    max_new_tokens: int = flag(128, "longest reply")

    @property
    def high(self) -> float:
        """The upper clip in force."""
        by_type = {"dapo": 0.28, "cispo": 4.0}
        return self.clip_high if self.clip_high is not None else by_type.get(self.loss_type, self.clip_low)

    def problems(self) -> list[str]:
        """What is out of range, by flag."""
        problems = [] if 0 < self.clip_low < 1 else [f"--clip_low {self.clip_low:g} must lie between 0 and 1"]
        if not self.high > 0:
            problems.append(f"--clip_high {self.high:g} must be above 0")
        if self.beta < 0:
            problems.append(f"--beta {self.beta:g} must not be negative")
        if not self.temperature > 0:
            problems.append(f"--temperature {self.temperature:g} must be above 0: a greedy policy explores nothing")
        if self.max_new_tokens < 1:
            problems.append(f"--max_new_tokens {self.max_new_tokens} must be at least 1")
        return problems


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """The loss of packed rollouts; see `trainer.losses` for how a loss is called."""

    arguments: PolicyArguments

    def count(self, batch: Batch) -> Tensor:
        """(3,) float64: terms (rollouts, or tokens for dapo and cispo), supervised tokens and tokens of a micro-batch.

        A rollout whose tokens are all masked is a term too: it was drawn.
        """
        counts = count_tokens(batch)
        if self.arguments.loss_type in ("grpo", "dr_grpo"):
            counts[0] = batch["document_ids"].amax(dim=1).sum()
        return counts

    def __call__(
        self, model: nn.Module, batch: Batch, context: StepContext
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The sum over terms, their number, and logs.

        Args:
            model: the policy, possibly wrapped.
            batch: input_ids, labels, document_ids, each (rows, window); `advantages` (rows, documents); `behaviour`
                (rows, window), log-probabilities of the labels when they were drawn; with beta `reference` (rows,
                window), those of the reference.
            context: of the step.
        """
        arguments = self.arguments
        compute = functools.partial(log_probs_at, labels=batch["labels"], temperature=arguments.temperature)
        output = model(input_ids=batch["input_ids"], document_ids=batch["document_ids"], compute=compute)
        log_probs = output.computed
        device = log_probs.device
        drawn = F.pad(batch["labels"][:, 1:] != IGNORED_LABEL, (1, 0)).to(device)
        documents = batch["document_ids"].to(device)
        advantages = F.pad(batch["advantages"].to(log_probs), (1, 0)).gather(1, documents)
        behaviour = batch["behaviour"].to(log_probs)
        ratio = (log_probs - behaviour).exp()
        losses, logs = self.token_losses(log_probs, ratio, advantages)
        if arguments.beta:
            difference = batch["reference"].to(log_probs) - log_probs
            divergence = ratio * (difference.exp() - difference - 1)
            losses = losses + arguments.beta * divergence
            logs["divergence"] = divergence.detach()
        weights = self.weights(drawn, documents)
        loss_sum = (losses * weights).sum(dtype=torch.float64)
        sums = {"loss_sum": loss_sum.detach()}
        sums |= {f"{name}_sum": (value * weights).sum(dtype=torch.float64) for name, value in logs.items()}
        count = self.count(batch)[0]
        return add_balance_loss(loss_sum, sums, model, output, context), count, sums

    def token_losses(self, log_probs: Tensor, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, without the divergence, and logs; all of one shape."""
        arguments = self.arguments
        if arguments.loss_type == "cispo":
            losses = -ratio.detach().clamp(max=1 + arguments.high) * advantages * log_probs
            clipped = ratio > 1 + arguments.high
        else:
            low, high = 1 - arguments.clip_low, 1 + arguments.high
            losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
            clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
        return losses, {"clipped": clipped.float(), "ratio": ratio.detach()}

    def weights(self, drawn: Tensor, documents: Tensor) -> Tensor:
        """(rows, window) what each token's loss is multiplied with before the sum; 0 where nothing was drawn."""
        weights = drawn.float()
        if self.arguments.loss_type == "dr_grpo":
            return weights / self.arguments.max_new_tokens
        if self.arguments.loss_type == "grpo":
            sizes = weights.new_zeros(len(weights), int(documents.max()) + 1).scatter_add(1, documents, weights)
            return weights / sizes.clamp(min=1).gather(1, documents)
        return weights


def log_probs_at(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """(rows, window) log-probabilities of the labels at a temperature, 0 without a label.

    Args:
        hidden: (rows, window, H), the last hidden states.
        weight: (V, H), the head.
        labels: (rows, window), not shifted, -100 where there is none.
        temperature: of the sampling.
    """
    next_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    if temperature != 1:
        hidden = hidden / temperature
    losses = token_losses(hidden.flatten(0, 1), weight, next_labels.flatten())
    return -losses.view(labels.shape).roll(1, dims=1)
