"""Muon: momentum whose update is made orthogonal (Jordan et al. 2024), for matrices of any number and kind.

As torch.optim.Muon, against which it is tested, but matrices of one shape go through the iteration together, and a
matrix of which ranks hold shares (FSDP) is gathered once for it, where DTensor would exchange parts in every product.
"""

import math
from collections.abc import Iterable

import torch

from trainer.distributed import share_of, whole

# Quintic Newton-Schulz: x -> a x + b x^3 + c x^5 brings singular values in (0, 1] near 1 in five steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal, with decoupled weight decay.

    Updates are scaled to AdamW's root mean square, 0.2 * sqrt(max(rows, columns)) (Liu et al. 2025), so that one
    learning rate serves matrices of any shape.

    Args:
        matrices: parameters of two dimensions.
        lr: learning rate.
        weight_decay: decay, times the learning rate at each step.
        momentum: share of the old momentum that is kept.

    Raises:
        ValueError: a parameter is not a matrix.
    """

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], lr: float, weight_decay: float = 0.1, momentum: float = 0.95
    ):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for group in self.param_groups:
            if any(parameter.ndim != 2 for parameter in group["params"]):
                raise ValueError("Muon is for matrices: every parameter must have two dimensions")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step from the parameters' gradients; those without one stay as they are."""
        for group in self.param_groups:
            stacks: dict[tuple[int, int], list[tuple[torch.nn.Parameter, torch.Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update = self._update(parameter, group["momentum"])
                    stacks.setdefault(tuple(update.shape), []).append((parameter, update))
            for stack in stacks.values():
                directions = orthogonalize(torch.stack([whole(update) for _, update in stack]))
                for (parameter, _), direction in zip(stack, directions, strict=True):
                    if direction.shape != parameter.shape:
                        direction = direction.t()
                    rate = 0.2 * math.sqrt(max(parameter.shape)) * group["lr"]
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(share_of(direction, parameter), alpha=-rate)

    def _update(self, parameter: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        """This step's update before it is made orthogonal, lying (no more rows than columns)."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        update = parameter.grad.lerp(buffer, momentum)
        return update.t() if update.shape[0] > update.shape[1] else update


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """(M, rows, columns), rows <= columns -> about the nearest orthogonal matrix of each, in bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # singular values at most 1
    for _ in range(ITERATIONS):
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x
