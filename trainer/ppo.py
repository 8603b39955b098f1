"""PPO (Schulman et al. 2017, arXiv:1707.06347) on packed rollouts: a critic, generalised advantages, clipped values.

With r_k the reward of a rollout's k-th drawn token (its reward at the last one, less the divergence from the reference
at each) and V_k the critic's value of what stood before that token,
    delta_k = r_k + gamma V_k+1 - V_k        A_k = delta_k + gamma lambda A_k+1        (V and A are 0 behind the last)
are its advantages (Schulman et al. 2016, arXiv:1506.02438, eq. 16), and R_k = A_k + V_k what the critic should have
said. V begins at the first round's mean reward. A round's advantages are shifted and scaled to mean 0 and deviation 1,
unless all was foreseen. A token's loss is
    -min(ratio A, clip(ratio) A) + value_weight / 2 max((V - R)^2, (V_clipped - R)^2).
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from model.model_minimind import MiniMindForCausalLM, MiniMindModel
from trainer.config import Settings, flag
from trainer.distributed import all_reduce_sum, model_hash
from trainer.losses import Batch, StepContext, add_balance_loss, count_tokens
from trainer.policy import clipped_losses, log_probs_at, starting_model
from trainer.rollout import Rollout, RolloutArguments
from trainer.rollout_data import RolloutRows, Round, prepare_rollouts
from trainer.run import Run


@dataclasses.dataclass
class PPOArguments(RolloutArguments):
    """How rollouts are learned from. All of it is bound to a run."""

    _argument_group_name = "ppo"
    _may_change = ()

    critic: Literal["separate", "shared"] = flag(
        "separate", "separate: a copy of the model that judges; shared: a head on the model that is trained"
    )
    clip_low: float = flag(0.2, "a token's ratio to the sampler counts down to 1 minus this")
    clip_high: float = flag(0.2, "and up to 1 plus this")
    clip_value: float = flag(0.2, "a value counts up to this far from the one that the critic had said")
    value_weight: float = flag(0.1, "weight of the critic's loss")
    gamma: float = flag(1.0, "how much a later reward counts, a token")
    gae_lambda: float = flag(0.95, "how much an advantage looks beyond the next value")
    beta: float = flag(0.0, "divergence from the starting weights, taken off each token's reward; 0: no reference")

    def problems(self) -> list[str]:
        """What is out of range, by flag."""
        problems = super().problems()
        for name in ("clip_low", "clip_high", "clip_value", "value_weight"):
            if not 0 < getattr(self, name) < 1e6:
                problems.append(f"--{name} {getattr(self, name):g} must be above 0")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                problems.append(f"--{name} {getattr(self, name):g} must lie in [0, 1]")
        if not 0 <= self.beta < 1e6:
            problems.append(f"--beta {self.beta:g} must not be negative (and below a million)")
        return problems


class Critic(nn.Module):
    """What reward is still to come, at each token: a vector on the last hidden states, of its own backbone if any."""

    def __init__(self, size: int, backbone: MiniMindModel | None) -> None:
        super().__init__()
        self.backbone = backbone
        self.weight = nn.Parameter(torch.zeros(size))  # so that all values begin alike, see `begin_at_mean`
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        """(rows, window) fp32 values of what stands before each token; 0 before the first."""
        if self.backbone is not None:
            states = self.backbone(input_ids=batch["input_ids"], document_ids=batch["document_ids"])
            hidden = states.last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):  # values are compared with rewards: no rounding
            return F.pad((hidden.float() @ self.weight + self.bias)[:, :-1], (1, 0))


def add_critic(model: MiniMindForCausalLM, settings: Settings) -> list[str]:
    """Give the model a critic; see `Stage.adapt`."""
    backbone = copy.deepcopy(model.model) if settings.stage.critic == "separate" else None
    model.critic = Critic(model.config.hidden_size, backbone)
    count = sum(parameter.numel() for parameter in model.critic.parameters())
    return [f"critic: {settings.stage.critic}, {count / 1e6:.2f}M parameters"]


def remove_critic(model: MiniMindForCausalLM) -> None:
    """Leave the policy alone; see `Stage.detach`. A copy of the model may have none."""
    if hasattr(model, "critic"):
        del model.critic


@dataclasses.dataclass(frozen=True)
class PPOLoss:
    """The loss of packed rollouts; its terms are the tokens. See `trainer.losses` for how a loss is called."""

    arguments: PPOArguments

    def __call__(
        self, model: nn.Module, batch: Batch, context: StepContext
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The sum over tokens, their number, and logs.

        Args:
            model: the policy with its critic, possibly wrapped.
            batch: each (rows, window): input_ids, labels, document_ids, and of each label its `advantages`, `returns`,
                and the `behaviour` and `values` that it was drawn with. Without these it is taken as drawn just now.
            context: of the step.
        """
        arguments = self.arguments
        compute = policy_and_values(model, batch, arguments)
        output = model(input_ids=batch["input_ids"], document_ids=batch["document_ids"], compute=compute)
        log_probs, values = output.computed.unbind()
        now = {"behaviour": log_probs.detach(), "values": values.detach(), "returns": values.detach() + 1}
        known = {name: batch[name].to(log_probs, non_blocking=True) if name in batch else now[name] for name in now}
        advantages = batch["advantages"].to(log_probs) if "advantages" in batch else torch.ones_like(log_probs)
        drawn = F.pad(batch["labels"][:, 1:] >= 0, (1, 0)).to(log_probs.device)
        difference = log_probs - known["behaviour"]
        losses, logs = clipped_losses(difference.exp(), advantages, 1 - arguments.clip_low, 1 + arguments.clip_high)
        nearby = known["values"] + (values - known["values"]).clamp(-arguments.clip_value, arguments.clip_value)
        squared = torch.maximum((values - known["returns"]).square(), (nearby - known["returns"]).square())
        logs |= {"value_loss": 0.5 * squared.detach(), "drift": (difference.exp() - 1 - difference).detach()}
        losses = losses + arguments.value_weight * 0.5 * squared
        loss_sum = torch.where(drawn, losses, 0).sum(dtype=torch.float64)
        sums = {f"{name}_sum": torch.where(drawn, value, 0).sum(dtype=torch.float64) for name, value in logs.items()}
        sums["loss_sum"] = loss_sum.detach()
        return add_balance_loss(loss_sum, sums, model, output, context), count_tokens(batch)[0], sums


def policy_and_values(model: nn.Module, batch: Batch, arguments: PPOArguments):
    """(hidden states, head) -> (2, rows, window): log-probabilities of the labels, and values before them."""
    critic = getattr(model, "module", model).critic

    def compute(hidden: Tensor, weight: Tensor) -> Tensor:
        log_probs = log_probs_at(hidden, weight, batch["labels"], arguments.temperature)
        return torch.stack([log_probs, critic(hidden, batch)])

    return compute


def generalised_advantages(rewards: np.ndarray, values: np.ndarray, gamma: float, gae_lambda: float) -> np.ndarray:
    """(tokens,) advantages of the tokens of one rollout, from their rewards and values."""
    advantages = np.zeros_like(values)
    following, next_value = 0.0, 0.0
    for place in reversed(range(len(values))):
        following = rewards[place] + gamma * next_value - values[place] + gamma * gae_lambda * following
        advantages[place], next_value = following, values[place]
    return advantages


@torch.no_grad()
def begin_at_mean(critic: Critic, rollouts: Sequence[Rollout]) -> None:
    """Let a critic that has learned nothing yet foresee the mean reward of its first round.

    From 0 it would find the last tokens of every reply better than the first ones until it has learned what rewards are
    like. (In 20 steps, 4 a round, held-out sums went from 91 to 84 % right so, to 87 % from the mean.)
    """
    if not critic.bias.any() and not critic.weight.any():
        critic.bias.fill_(float(np.mean([rollout.reward for rollout in rollouts])))


@dataclasses.dataclass
class Annotator:
    """Gives a round its values, returns and advantages; see `RolloutData.annotate`."""

    reference: MiniMindForCausalLM | None

    def __call__(self, run: Run, groups: Sequence[Sequence[Rollout]], current: Round) -> None:
        """Ask the critic, and the reference if there is one, about all tokens; all ranks together."""
        arguments = run.settings.stage
        rollouts = [rollout for group in groups for rollout in group]
        begin_at_mean(run.bare_model.critic, rollouts)
        values, reference = self.ask(run, current)
        rewards = np.zeros(len(values))
        if self.reference is not None:
            rewards -= arguments.beta * (current.values["behaviour"] - reference) * current.drawn
        advantages, returns = np.zeros_like(values), np.zeros_like(values)
        for start, length, rollout in zip(current.starts, current.lengths, rollouts, strict=True):
            drawn = start + np.flatnonzero(rollout.drawn[:length])
            rewards[drawn[-1]] += rollout.reward
            found = generalised_advantages(rewards[drawn], values[drawn], arguments.gamma, arguments.gae_lambda)
            advantages[drawn], returns[drawn] = found, found + values[drawn]
        taken = advantages[current.drawn]
        # All foreseen, such as the same reward for every reply: what is left is rounding (1e-7), which teaches nothing.
        scale = 1 / taken.std() if taken.std() > 1e-5 else 0.0
        advantages = np.where(current.drawn, (advantages - taken.mean()) * scale, 0)
        new = {"advantages": advantages, "returns": returns, "values": values}
        current.values |= {name: value.astype(np.float32) for name, value in new.items()}

    @torch.no_grad()
    def ask(self, run: Run, current: Round) -> tuple[np.ndarray, np.ndarray]:
        """(tokens,) float64 each: values, and log-probabilities of the drawn tokens by the reference."""
        rows = RolloutRows(current, np.arange(len(current.lengths)), current.values, run.settings.data.max_seq_len)
        found = torch.zeros(2, len(current.ids), dtype=torch.float64)
        model = run.model
        was_training = model.training
        model.eval()
        for batch, places in rows.batches(run.settings.optimization.batch_size, run.world.rank, run.world.size):
            batch["input_ids"] = batch["input_ids"].to(run.world.device)
            inputs = {"input_ids": batch["input_ids"], "document_ids": batch["document_ids"]}
            with run.autocast():
                both = model(**inputs, compute=policy_and_values(model, batch, run.settings.stage)).computed
                if self.reference is not None:
                    states = self.reference.model(**inputs).last_hidden_state
                    head = self.reference.lm_head.weight
                    both[0] = log_probs_at(states, head, batch["labels"], run.settings.stage.temperature)
            is_token = places >= 0
            found[:, places[is_token]] = both.flip(0)[:, is_token].double().cpu()
        model.train(was_training)
        return tuple(all_reduce_sum(found.to(run.world.device)).cpu().numpy())


def prepare_ppo(run: Run, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Set the loss, with the weights that the run starts from as its reference if it has one, and the rollouts."""
    arguments = run.settings.stage
    notes = prepare_rollouts(run, tokenizer)
    reference = None
    if arguments.beta:
        run.fingerprints["reference"] = model_hash(run.bare_model)
        reference = starting_model(run)
    run.train_data.annotate = Annotator(reference)
    run.loss = PPOLoss(arguments)
    return notes
