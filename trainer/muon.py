"""Muon: momentum whose update is made orthogonal (Jordan et al. 2024), for matrices of any number and kind.

As torch.optim.Muon, against which it is tested, but with better polynomials, four instead of five; matrices of one
shape go through them together; and a matrix of which ranks hold shares (FSDP) is gathered once for them, where DTensor
would exchange parts in every product.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trainer.distributed import share_of, whole
from trainer.precision import has_native_bfloat16

# Quintics x -> a x + b x^3 + c x^5, one after another, that bring singular values near 1. Each is the best for the
# interval that the one before it leaves (minimax, Amsel et al. 2025, "The Polar Express"), from [0.003, 1] on, and is
# stretched by 2 % so that rounding cannot leave the interval. Four of them end in [0.80, 1.20]; five times Jordan's
# (3.4445, -4.7750, 2.0315), a quarter more work, end in [0.68, 1.13], and train to the same loss (EXPERIMENTS.md).
QUINTICS = (
    (8.2193, -23.3375, 16.6266),
    (3.9641, -2.8377, 0.5158),
    (3.4368, -2.4752, 0.4762),
    (2.4413, -1.7285, 0.3957),
)
# Matrices that go through the polynomials together hold at most so many elements, or are one: more gain nothing and
# take memory, four times these.
STACK_ELEMENTS = 8 * 2**20


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, made orthogonal, with decoupled weight decay.

    Updates are scaled to AdamW's root mean square, 0.2 * sqrt(max(rows, columns)) (Liu et al. 2025), so that one
    learning rate serves matrices of any shape.

    Args:
        matrices: parameters of two dimensions.
        lr: learning rate.
        weight_decay: decay, times the learning rate at each step.
        momentum: share of the old momentum that is kept.
        quintics: coefficients of the polynomials that make an update orthogonal.

    The polynomials are computed in bfloat16, and in float32 by devices that would emulate it: a CPU with AVX512 alone
    has 55 GFLOP/s in bfloat16 and 220 in float32, and they were half of a `mini` step of 4,096 tokens there.

    Raises:
        ValueError: a parameter is not a matrix.
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        lr: float,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        quintics: Sequence[tuple[float, float, float]] = QUINTICS,
    ):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.quintics = quintics
        for group in self.param_groups:
            if any(parameter.ndim != 2 for parameter in group["params"]):
                raise ValueError("Muon is for matrices: every parameter must have two dimensions")
        native = has_native_bfloat16(self.param_groups[0]["params"][0].device)
        self.dtype = torch.bfloat16 if native else torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step from the parameters' gradients; those without one stay as they are."""
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    shapes.setdefault(tuple(sorted(parameter.shape)), []).append(parameter)
            for (rows, columns), alike in shapes.items():
                together = max(STACK_ELEMENTS // (rows * columns), 1)
                for first in range(0, len(alike), together):
                    self._step_together(alike[first : first + together], group)

    def _step_together(self, parameters: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        """One step of parameters of one shape, standing or lying."""
        updates = torch.stack([self._update(parameter, group["momentum"]) for parameter in parameters])
        for parameter, direction in zip(parameters, orthogonalize(updates, self.quintics), strict=True):
            if direction.shape != parameter.shape:
                direction = direction.t()
            rate = 0.2 * math.sqrt(max(parameter.shape)) * group["lr"]
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(share_of(direction, parameter), alpha=-rate)

    def _update(self, parameter: torch.nn.Parameter, momentum: float) -> torch.Tensor:
        """This step's update before it is made orthogonal, whole, lying (no more rows than columns)."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)
        buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        update = whole(parameter.grad.lerp(buffer, momentum)).to(self.dtype)
        return update.t() if update.shape[0] > update.shape[1] else update


def orthogonalize(matrices: torch.Tensor, quintics: Sequence[tuple[float, float, float]] = QUINTICS) -> torch.Tensor:
    """(M, rows, columns), rows <= columns -> about the nearest orthogonal matrix of each."""
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # singular values at most 1
    for a, b, c in quintics:
        square = x @ x.mT
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x
