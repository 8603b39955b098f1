"""Cross-entropy of every token from hidden states and the head's weight, without all logits in fp32.

Logits of a batch are its largest tensor: 8,192 tokens x 6,400 words are 210 MB in fp32, and several such copies
would be made. Here only supervised positions get logits at all, in the compute dtype, and fp32 exists for one chunk
of rows at a time. The forward pass already replaces a chunk's logits by d loss / d logits = softmax - one-hot, so the
backward pass is two matrix products and nothing else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model.fast_path import gradient_product

IGNORED_LABEL = -100
# Rows that are in fp32 at once. 128 rows x 6,400 words x 4 bytes = 3.3 MB: stays in a core's cache.
CHUNK_ROWS = 128


class _SelectedTokenLoss(torch.autograd.Function):
    """(hidden (n, H), weight (V, H), labels (n,)) -> losses (n,); hidden and weight share a dtype."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, needs_gradient: bool) -> Tensor:
        logits = hidden @ weight.t()
        losses = torch.empty(len(labels), dtype=_exact_dtype(hidden), device=hidden.device)
        for rows, chunk_labels, loss in zip(
            logits.split(CHUNK_ROWS), labels.split(CHUNK_ROWS), losses.split(CHUNK_ROWS), strict=True
        ):
            dtype, column = losses.dtype, chunk_labels[:, None]
            probabilities = rows.softmax(dim=-1, dtype=dtype)
            # log(sum(exp(z))) = max z - log(max p), exact however small the label's own probability is.
            normaliser = rows.amax(dim=-1).to(dtype) - probabilities.amax(dim=-1).log_()
            torch.sub(normaliser, rows.gather(1, column)[:, 0], out=loss)
            if needs_gradient:
                probabilities.scatter_add_(1, column, probabilities.new_full(column.shape, -1.0))
                rows.copy_(probabilities)
        if needs_gradient:
            ctx.save_for_backward(hidden, weight, logits)
        return losses

    @staticmethod
    def backward(ctx, loss_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, logits_gradient = ctx.saved_tensors
        scale = loss_gradient.to(hidden.dtype)[:, None]
        hidden_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            hidden_gradient = (logits_gradient @ weight).mul_(scale)
        if ctx.needs_input_grad[1]:
            weight_gradient = gradient_product(hidden * scale, logits_gradient).t().contiguous()
        return hidden_gradient, weight_gradient, None, None


def _exact_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(hidden @ weight.T)[label] for each row, in nats.

    Args:
        hidden: (N, H), in any floating dtype; under autocast the products run in autocast's dtype.
        weight: (V, H), the output head.
        labels: (N,) int64, -100 where a row has no loss; best on the CPU, since a GPU must be waited for to count them.

    Returns:
        (N,) fp32 (fp64 for fp64 input), 0 where the label is -100. Differentiable once, with any gradient per row.
    """
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(hidden.device.type, enabled=False):
        supervised = (labels != IGNORED_LABEL).nonzero()[:, 0]
        # Filled up to whole chunks with rows that weigh nothing: logits of a new size in every batch took 0.7 GiB more
        # at `base`, since freed memory never fitted, and each new size of product takes 3 to 9 ms to make ready.
        count = len(supervised)
        places = F.pad(supervised, (0, -count % CHUNK_ROWS))
        chosen = labels[places].clamp_min(0).to(hidden.device, non_blocking=True)
        places = places.to(hidden.device, non_blocking=True)
        selected = hidden.index_select(0, places).to(dtype)
        losses = _SelectedTokenLoss.apply(selected, weight.to(dtype), chosen, needs_gradient)[:count]
        supervised = places[:count]
        return torch.zeros(len(hidden), dtype=losses.dtype, device=losses.device).index_copy(0, supervised, losses)
