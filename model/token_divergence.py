"""Kullback-Leibler divergence of a student from a teacher at every supervised token, without all logits in fp32.

Hinton et al. 2015 (arXiv:1503.02531) with its temperature; the reverse direction as in Gu et al. 2023
(arXiv:2306.08543). As in `model.token_loss`, logits exist only at supervised positions and in fp32 for one chunk of
rows at a time, and the forward pass already replaces them by the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.fast_path import gradient_product
from model.token_loss import CHUNK_ROWS, IGNORED_LABEL

# Differences of two probabilities are often below 1e-6, of which float16 keeps 4 bits: at a temperature of 4 that is an
# error of 8 %. A scaler cannot help, since they are stored before it comes; so they are stored times 64.
HALF_PRECISION_SCALE = 64.0


@dataclass
class Teacher:
    """What the student is compared with.

    Attributes:
        hidden: (..., H') the teacher's last hidden states, at the student's positions.
        weight: (V, H') its output head.
        temperature: both sides' logits are divided by it.
        reverse: KL(student || teacher) instead of KL(teacher || student).
    """

    hidden: Tensor
    weight: Tensor
    temperature: float = 1.0
    reverse: bool = False


class _SelectedDivergence(torch.autograd.Function):
    """(hidden (n, H), weight (V, H), the teacher's (n, H') and (V, H')) -> divergences (n,)."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, theirs: Tensor, their_weight: Tensor, temperature: float, reverse: bool
    ) -> Tensor:
        logits = hidden @ weight.t()
        their_logits = theirs @ their_weight.t()
        exact = torch.promote_types(hidden.dtype, torch.float32)
        divergences = torch.empty(len(hidden), dtype=exact, device=hidden.device)
        parts = (tensor.split(CHUNK_ROWS) for tensor in (logits, their_logits, divergences))
        for rows, their_rows, result in zip(*parts, strict=True):
            student = (rows.to(divergences.dtype) / temperature).log_softmax(-1)
            teacher = (their_rows.to(divergences.dtype) / temperature).log_softmax(-1)
            if reverse:
                difference = student - teacher
                torch.sum(student.exp() * difference, -1, out=result)
                gradient = student.exp() * (difference - result[:, None])
            else:
                torch.sum(teacher.exp() * (teacher - student), -1, out=result)
                gradient = student.exp() - teacher.exp()
            rows.copy_(gradient * HALF_PRECISION_SCALE)
        ctx.save_for_backward(hidden, weight, logits)
        ctx.scale = 1 / (temperature * HALF_PRECISION_SCALE)
        return divergences

    @staticmethod
    def backward(ctx, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, logits_gradient = ctx.saved_tensors
        scale = (upstream * ctx.scale).to(hidden.dtype)[:, None]
        hidden_gradient = (logits_gradient @ weight).mul_(scale) if ctx.needs_input_grad[0] else None
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = gradient_product(hidden * scale, logits_gradient).t().contiguous()
        return hidden_gradient, weight_gradient, None, None, None, None


def token_divergences(hidden: Tensor, weight: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
    """The divergence of the two next-token distributions at each position that predicts a supervised token.

    Args:
        hidden: (B, T, H) the student's last hidden states; under autocast the products run in autocast's dtype.
        weight: (V, H), its output head.
        labels: (B, T) int64, not shifted, -100 where there is no loss; best on the CPU.
        teacher: see `Teacher`.

    Returns:
        (B, T) fp32 nats, at the place of the token that is predicted; 0 where the label is -100.
    """
    device = hidden.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else hidden.dtype
    next_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL).flatten()
    places = (next_labels != IGNORED_LABEL).nonzero()[:, 0].to(device, non_blocking=True)
    with torch.autocast(device.type, enabled=False):
        selected, theirs = (
            states.flatten(0, 1).index_select(0, places).to(dtype) for states in (hidden, teacher.hidden)
        )
        divergences = _SelectedDivergence.apply(
            selected, weight.to(dtype), theirs, teacher.weight.to(dtype), teacher.temperature, teacher.reverse
        )
    result = torch.zeros(labels.numel(), dtype=divergences.dtype, device=device).index_copy(0, places, divergences)
    return result.view(labels.shape).roll(1, dims=1)  # the last place of a row never has a loss
