"""Optimizers: Muon for the matrices and AdamW for the rest, or AdamW alone."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.muon import Muon

ADAM_BETAS = (0.9, 0.95)
# Of AdamW's rate beside Muon. At the whole rate, 5e-3, one step moves a router's logits by 2 at width 512: after 300
# steps the first of two experts had over 0.9 of the weight for 65 % of the tokens, so most of the second was wasted.
ROUTER_SHARE = 0.1
# Of Muon's rate, for experts' gate and up projections. Validation loss at `mini` after 300 steps of 4,080 tokens: dense
# 2.2244, experts at the whole rate 2.2263, gate and up at half 2.2183, all three at half 2.2306; another seed: dense
# 2.1820, gate and up at half 2.1539. (Two experts' weights sum to 1, which halves what each down projection adds.)
EXPERT_SHARE = 0.5


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


def is_expert_input(name: str) -> bool:
    """True for the matrices of an expert that read the stream: its gate and up projections."""
    return ".experts." in name and name.endswith(("gate_proj.weight", "up_proj.weight"))


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
        learning_rate: peak of Muon, or of AdamW alone; experts' gate and up projections take `EXPERT_SHARE` of Muon's.
        weight_decay: decoupled decay of the matrices, times the learning rate at each step.
        embedding_learning_rate: peak of AdamW for embeddings, head and norms when Muon has the matrices; routers take
            `ROUTER_SHARE` of it.
    """
    muon = optimizer == "muon"
    rest_rate = learning_rate if not muon or embedding_learning_rate is None else embedding_learning_rate
    groups = {
        "matrices": ("Muon" if muon else "AdamW", learning_rate, weight_decay),
        "experts' gate, up": ("Muon", learning_rate * EXPERT_SHARE, weight_decay),  # empty without Muon
        "embeddings, norms": ("AdamW", rest_rate, 0.0),
        "routers": ("AdamW", rest_rate * ROUTER_SHARE if muon else rest_rate, 0.0),
    }
    members: dict[str, list[nn.Parameter]] = {name: [] for name in groups}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            members[_group_of(name, parameter, muon)].append(parameter)

    param_groups: dict[str, list[dict[str, Any]]] = {"Muon": [], "AdamW": []}
    table = []
    for name, (kind, rate, decay) in groups.items():
        if members[name]:
            param_groups[kind].append({"params": members[name], "lr": rate, "peak_lr": rate, "weight_decay": decay})
            parameters = sum(parameter.numel() for parameter in members[name])
            table.append(ParameterGroup(kind, name, len(members[name]), parameters, rate, decay))
    optimizers: list[torch.optim.Optimizer] = []
    if param_groups["Muon"]:
        optimizers.append(Muon(param_groups["Muon"], lr=learning_rate))
    if param_groups["AdamW"]:  # an adapter is all matrices
        optimizers.append(torch.optim.AdamW(param_groups["AdamW"], betas=ADAM_BETAS, eps=1e-8, fused=True))
    return optimizers, table


def _group_of(name: str, parameter: nn.Parameter, muon: bool) -> str:
    if not is_hidden_matrix(name, parameter):
        return "routers" if is_router(name) else "embeddings, norms"
    return "experts' gate, up" if muon and is_expert_input(name) else "matrices"
