"""Optimizers: Muon for the matrices and AdamW for the rest, or AdamW alone."""

from dataclasses import dataclass

import torch
from torch import nn

from trainer.muon import Muon

ADAM_BETAS = (0.9, 0.95)
# Of AdamW's rate beside Muon. At the whole rate, 5e-3, one step moves a router's logits by 2 at width 512: after 300
# steps the first of two experts had over 0.9 of the weight for 65 % of the tokens, so most of the second was wasted.
ROUTER_SHARE = 0.1


@dataclass(frozen=True)
class ParameterGroup:
    """One line of the table of groups that a run prints."""

    optimizer: str
    name: str
    tensors: int
    parameters: int
    learning_rate: float
    weight_decay: float


def is_router(name: str) -> bool:
    """True for the matrix that chooses a token's experts."""
    return name.endswith("mlp.gate.weight")


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """True for the matrices of attention, MLP and experts: neither embedding, head, norm nor router."""
    outer = ("embed_tokens", "lm_head")
    return parameter.ndim == 2 and not is_router(name) and not any(part in name for part in outer)


def build_optimizers(
    model: nn.Module,
    optimizer: str,
    learning_rate: float,
    weight_decay: float,
    embedding_learning_rate: float | None = None,
) -> tuple[list[torch.optim.Optimizer], list[ParameterGroup]]:
    """The optimizers of a run and the table of their groups.

    Every group remembers its peak as `peak_lr`; the engine scales it by the schedule. Weight decay is on matrices only.

    Args:
        model: whose trainable parameters are optimized; q, k, v, gate, up and each expert are matrices of their own.
        optimizer: "muon" or "adamw".
        learning_rate: peak of Muon, or of AdamW alone.
        weight_decay: decoupled decay of the matrices, times the learning rate at each step.
        embedding_learning_rate: peak of AdamW for embeddings, head and norms when Muon has the matrices; routers take
            `ROUTER_SHARE` of it.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = [parameter for name, parameter in named if is_hidden_matrix(name, parameter)]
    routers = [parameter for name, parameter in named if is_router(name)]
    rest = [parameter for name, parameter in named if not is_router(name) and not is_hidden_matrix(name, parameter)]
    rest_rate = learning_rate if optimizer == "adamw" or embedding_learning_rate is None else embedding_learning_rate
    router_rate = rest_rate * ROUTER_SHARE if optimizer == "muon" else rest_rate
    groups = [("embeddings, norms", rest, rest_rate, 0.0), ("routers", routers, router_rate, 0.0)]
    optimizers: list[torch.optim.Optimizer] = []
    table: list[ParameterGroup] = []
    if optimizer == "muon":
        muon = Muon(matrices, lr=learning_rate, weight_decay=weight_decay)
        muon.param_groups[0]["peak_lr"] = learning_rate
        optimizers.append(muon)
        table.append(_group("Muon", "matrices", matrices, learning_rate, weight_decay))
    else:
        groups.insert(0, ("matrices", matrices, learning_rate, weight_decay))
    adamw_groups = [
        {"params": parameters, "lr": rate, "peak_lr": rate, "weight_decay": decay}
        for _, parameters, rate, decay in groups
        if parameters
    ]
    if adamw_groups:  # an adapter is all matrices
        optimizers.append(torch.optim.AdamW(adamw_groups, betas=ADAM_BETAS, eps=1e-8, fused=True))
    table += [_group("AdamW", *group) for group in groups if group[1]]
    return optimizers, table


def _group(optimizer: str, name: str, tensors: list[nn.Parameter], rate: float, decay: float) -> ParameterGroup:
    return ParameterGroup(optimizer, name, len(tensors), sum(tensor.numel() for tensor in tensors), rate, decay)
