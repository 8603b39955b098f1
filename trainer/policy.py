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
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from dataset.lm_dataset import IGNORED_LABEL
from model.model_minimind import MiniMindForCausalLM
from model.token_loss import token_losses
from trainer.config import flag
from trainer.distributed import copy_of_model, model_hash
from trainer.losses import Batch, StepContext, add_balance_loss, count_tokens
from trainer.rollout import Rollout, RolloutArguments
from trainer.rollout_data import Round, has_contrast, prepare_rollouts
from trainer.run import Run

PER_TOKEN = ("advantages", "behaviour", "reference")


@dataclasses.dataclass
class PolicyArguments(RolloutArguments):
    """How rollouts are learned from. All of it is bound to a run."""

    _argument_group_name = "policy"
    _may_change = ()

    loss_type: Literal["grpo", "dr_grpo", "dapo", "cispo"] = flag("grpo", "how tokens are clipped, and averaged")
    clip_low: float = flag(0.2, "a token's ratio to the sampler counts down to 1 minus this")
    clip_high: float | None = flag(
        None, "and up to 1 plus this; by default as --clip_low, for dapo 0.28, for cispo 4, as in their papers"
    )
    beta: float = flag(0.0, "weight of the divergence from the weights that the run starts from; 0: no reference")

    @property
    def high(self) -> float:
        """The upper clip in force."""
        by_type = {"dapo": 0.28, "cispo": 4.0}
        return self.clip_high if self.clip_high is not None else by_type.get(self.loss_type, self.clip_low)

    @property
    def counts_tokens(self) -> bool:
        """Whether a term of the loss is a token, and not a rollout."""
        return self.loss_type in ("dapo", "cispo")

    def problems(self) -> list[str]:
        """What is out of range, by flag."""
        problems = super().problems()
        if not 0 < self.clip_low < 1:
            problems.append(f"--clip_low {self.clip_low:g} must lie between 0 and 1")
        if not self.high > 0:
            problems.append(f"--clip_high {self.high:g} must be above 0")
        if not 0 <= self.beta < 1e6:
            problems.append(f"--beta {self.beta:g} must not be negative (and below a million)")
        if self.num_generations < 2:
            problems.append(f"--num_generations {self.num_generations} must be at least 2: replies are compared")
        return problems


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """The loss of packed rollouts; see `trainer.losses` for how a loss is called."""

    arguments: PolicyArguments
    reference: MiniMindForCausalLM | None = None

    def count(self, batch: Batch) -> Tensor:
        """(3,) float64: terms (rollouts, or tokens for dapo and cispo), supervised tokens and tokens of a micro-batch.

        A rollout whose tokens are all masked is a term too: it was drawn.
        """
        counts = count_tokens(batch)
        if not self.arguments.counts_tokens:
            counts[0] = batch["document_ids"].amax(dim=1).sum()
        return counts

    def __call__(
        self, model: nn.Module, batch: Batch, context: StepContext
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The sum over terms, their number, and logs.

        Args:
            model: the policy, possibly wrapped.
            batch: each (rows, window): input_ids, labels, document_ids, and of each label its `advantages`, its
                `behaviour`, the log-probability with which it was drawn, and that of the `reference`, if not of our
                own. A batch without them is taken as drawn just now, at advantage 1.
            context: of the step.
        """
        arguments = self.arguments
        compute = functools.partial(log_probs_at, labels=batch["labels"], temperature=arguments.temperature)
        output = model(input_ids=batch["input_ids"], document_ids=batch["document_ids"], compute=compute)
        log_probs = output.computed
        device = log_probs.device
        drawn = F.pad(batch["labels"][:, 1:] != IGNORED_LABEL, (1, 0)).to(device)
        documents = batch["document_ids"].to(device)
        now = log_probs.detach()
        values = {name: batch[name].to(log_probs, non_blocking=True) for name in PER_TOKEN if name in batch}
        advantages = values.get("advantages", torch.ones_like(now))
        difference = log_probs - values.get("behaviour", now)
        ratio = difference.exp()
        losses, logs = self.token_losses(log_probs, ratio, advantages)
        logs["drift"] = (ratio - 1 - difference).detach()
        if arguments.beta:
            difference = self.reference_log_probs(batch, values) - log_probs
            divergence = ratio * (difference.exp() - difference - 1)
            losses = losses + arguments.beta * divergence
            logs["divergence"] = divergence.detach()
        shares = self.shares(drawn, documents)
        dr_grpo = arguments.loss_type == "dr_grpo"
        weights = drawn / arguments.max_new_tokens if dr_grpo else shares
        loss_sum = (losses * weights).sum(dtype=torch.float64)
        sums = {"loss_sum": loss_sum.detach()}
        sums |= {f"{name}_sum": (value * shares).sum(dtype=torch.float64) for name, value in logs.items()}
        count = self.count(batch)[0]
        return add_balance_loss(loss_sum, sums, model, output, context), count, sums

    @torch.no_grad()
    def reference_log_probs(self, batch: Batch, values: dict[str, Tensor]) -> Tensor:
        """(rows, window) log-probabilities of the labels by the reference."""
        if self.reference is None:
            return values["reference"]
        states = self.reference.model(input_ids=batch["input_ids"], document_ids=batch["document_ids"])
        head = self.reference.lm_head.weight
        return log_probs_at(states.last_hidden_state, head, batch["labels"], self.arguments.temperature)

    def token_losses(self, log_probs: Tensor, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, without the divergence, and logs; all of one shape."""
        arguments = self.arguments
        if arguments.loss_type == "cispo":
            losses = -ratio.detach().clamp(max=1 + arguments.high) * advantages * log_probs
            clipped = ratio > 1 + arguments.high
            return losses, {"clipped": clipped.float(), "ratio": ratio.detach()}
        return clipped_losses(ratio, advantages, 1 - arguments.clip_low, 1 + arguments.high)

    def shares(self, drawn: Tensor, documents: Tensor) -> Tensor:
        """(rows, window) each token's share of a term, which is its rollout or itself; 0 where nothing was drawn."""
        weights = drawn.float()
        if self.arguments.counts_tokens:
            return weights
        # A row cannot hold more documents than slots, and asking how many there are would wait for a GPU.
        sizes = weights.new_zeros(len(weights), weights.shape[1] + 1).scatter_add(1, documents, weights)
        return weights / sizes.clamp(min=1).gather(1, documents)


def clipped_losses(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token of a policy whose ratio counts between two bounds only, and logs; all of one shape."""
    losses = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    return losses, {"clipped": clipped.float(), "ratio": ratio.detach()}


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


def group_advantages(rewards: Tensor, scale: bool) -> Tensor:
    """(prompts, replies) rewards -> how much better each reply is than its neighbours, in their deviations if `scale`.

    Dividing weighs prompts up that are nearly always or nearly never answered, which Dr. GRPO leaves out.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-4) if scale else centred


def annotate_groups(run: Run, groups: Sequence[Sequence[Rollout]], current: Round) -> None:
    """Give each token of a round its rollout's advantage, and say which rollouts teach nothing."""
    rewards = torch.tensor([[rollout.reward for rollout in group] for group in groups], dtype=torch.float64)
    advantages = group_advantages(rewards, scale=run.settings.stage.loss_type != "dr_grpo").flatten().numpy()
    current.values["advantages"] = np.repeat(advantages.astype(np.float32), current.lengths)
    arguments, drawn = run.settings.stage, np.add.reduceat(current.drawn.astype(np.int64), current.starts)
    if not arguments.beta and run.expert_loads is None:  # a divergence and the balance of experts teach at any reward
        current.terms = drawn if arguments.counts_tokens else np.ones_like(drawn)
        current.teaches = np.repeat([has_contrast(group) for group in groups], arguments.num_generations) & (drawn > 0)


def starting_model(run: Run) -> MiniMindForCausalLM:
    """A frozen copy of the weights that the run starts from; an adapter, which begins as no change, is merged in."""
    if hasattr(run.bare_model, "peft_config"):
        from trainer.lora import merged  # which imports PEFT

        copy = merged(run.bare_model)
    else:
        copy = copy_of_model(run.bare_model, run.world)
    if hasattr(copy, "critic"):
        del copy.critic
    return copy.eval().requires_grad_(False)


def prepare_policy(run: Run, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Set the loss, with the weights that the run starts from as its reference if it has one, and the rollouts."""
    arguments, data = run.settings.stage, run.train_data
    notes = prepare_rollouts(run, tokenizer)
    # Of rewards that are all the same even a divergence teaches nothing: at the first step its gradient is rounding
    # alone, 1e-10, which AdamW makes steps as long as any of.
    data.annotate, data.needs_contrast = annotate_groups, True
    reference = None
    if arguments.beta:
        run.fingerprints["reference"] = model_hash(run.bare_model)
        reference = starting_model(run)
    run.loss = PolicyLoss(arguments, reference)
    run.count = run.loss.count
    return notes
