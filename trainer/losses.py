"""Losses. Each returns (sum over its terms, their number, logs) and never a mean.

The engine divides by the global count over accumulation and ranks, so a step does not depend on how its rows were cut.
A term is a supervised token of a language model's loss, a pair of a preference loss.
"""

from dataclasses import dataclass

import torch
from torch import nn

from dataset.lm_dataset import IGNORED_LABEL
from model.config import MiniMindConfig
from model.model_minimind import MiniMindOutput

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepContext:
    """What a loss may know about the whole optimizer step that its micro-batch belongs to.

    Attributes:
        terms: how many terms the step's loss is the mean of, over all micro-batches and ranks (scalar).
        tokens: number of tokens that are not padding, likewise (scalar).
        expert_loads: (layers, experts) share of the previous step's tokens that each expert received; rows sum to 1.
            None for a dense model.
    """

    terms: torch.Tensor
    tokens: torch.Tensor
    expert_loads: torch.Tensor | None = None


def count_tokens(batch: Batch) -> torch.Tensor:
    """(3,) float64: terms of a language model's loss, which are the supervised tokens; these again; and all tokens.

    Padding is no token, and a row's first token is never predicted.
    """
    supervised = (batch["labels"][:, 1:] != IGNORED_LABEL).sum()
    return torch.stack([supervised, supervised, (batch["document_ids"] > 0).sum()]).to(torch.float64)


def language_model_loss(
    model: nn.Module, batch: Batch, context: StepContext
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Next-token cross-entropy, plus the balance loss of a mixture of experts.

    Args:
        model: MiniMindForCausalLM, possibly wrapped.
        batch: input_ids, labels, document_ids, each (rows, window).
        context: the step's global counts and the previous step's expert loads.

    Returns:
        The sum to differentiate (scalar float64), the supervised tokens in it, and logs: `loss_sum` (nats, without the
        balance loss), and for MoE `expert_counts` (layers, experts) and `balance_sum`.
    """
    output = model(**batch, return_token_losses=True)
    loss_sum = output.token_losses.sum(dtype=torch.float64)
    count = (batch["labels"][:, 1:] != IGNORED_LABEL).sum()
    logs = {"loss_sum": loss_sum.detach()}
    return add_balance_loss(loss_sum, logs, model, output, context), count, logs


def add_balance_loss(
    loss_sum: torch.Tensor,
    logs: dict[str, torch.Tensor],
    model: nn.Module,
    output: MiniMindOutput,
    context: StepContext,
) -> torch.Tensor:
    """A loss with the balance loss of a mixture of experts, whose logs are added; of a dense model as it is."""
    if output.router_probability_sums is None:
        return loss_sum
    balance_sum = balance_loss_sum(output.router_probability_sums, context.expert_loads)
    logs |= {"expert_counts": output.expert_counts, "balance_sum": balance_sum.detach()}
    # The engine divides everything by the terms; the balance loss is a mean over all tokens.
    share = context.terms / context.tokens.clamp(min=1)
    config = getattr(model, "module", model).config
    return loss_sum + config.router_aux_loss_coef * balance_sum * share


def balance_loss_sum(probability_sums: torch.Tensor, expert_loads: torch.Tensor) -> torch.Tensor:
    """Switch Transformer's balance loss (Fedus et al. 2021, eq. 4), summed over tokens and averaged over layers.

    The loads are those of the previous optimizer step, so the loss is linear in the tokens: it does not depend on how a
    batch is cut and needs no second forward. Equal loads give exactly 1 per token, and no gradient.

    Args:
        probability_sums: (layers, experts) router probabilities summed over tokens.
        expert_loads: (layers, experts) share of tokens that each expert received; rows sum to 1.
    """
    layers, experts = probability_sums.shape
    return experts * (probability_sums.double() * expert_loads).sum() / layers


def equal_expert_loads(config: MiniMindConfig, device: torch.device) -> torch.Tensor | None:
    """(layers, experts) loads of a run's first step: equal, so the balance loss has no gradient yet; None if dense."""
    if not config.use_moe:
        return None
    shape = (config.num_hidden_layers, config.num_experts)
    return torch.full(shape, 1 / config.num_experts, dtype=torch.float64, device=device)
