"""Mixture of experts: a router picks `num_experts_per_tok` SwiGLU experts for each token.

Two implementations with the same weights and results: "grouped" sorts the tokens by expert once, so each expert
makes one product over its own contiguous rows; "reference" loops over the experts with masks, to read and to test
against. No capacity limit: no token is ever dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from model.config import MiniMindConfig
from model.fast_path import blocks, compute_dtype, exact_logits, grouped_swiglu, is_fast

# On a CPU every size of a matrix product is made ready before its first use: a layer of eight experts took 17 % longer
# with new sizes each time. So experts get rows in multiples of `ROWS_STEP`, at the cost of 1 % more rows, and what
# exceeds a multiple of `PART_ROWS` makes a product of its own: few sizes, which soon have all been there. Without the
# second rule a micro-batch of `mini` with eight experts took 1.26 times dense's, with it 1.08 to 1.15.
ROWS_STEP = 32
PART_ROWS = 1024

# What a layer tells about its routing: probability sums (E,) differentiable and pick counts (E,), both fp32.
RouterStatistics = tuple[Tensor, Tensor]


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202): down(act(gate(x)) * up(x)). The dense layers' part, and one expert."""

    def __init__(self, config: MiniMindConfig, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.down_proj.starts_at_zero = config.zero_init_output
        self.activation = ACT2FN[config.hidden_act]
        self.is_silu = config.hidden_act == "silu"

    @property
    def is_plain(self) -> bool:
        """Whether it is made of plain matrices and SiLU, so that hand-written kernels may take its place."""
        projections = (self.gate_proj, self.up_proj, self.down_proj)
        return self.is_silu and all(type(module) is nn.Linear for module in projections)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (..., H)."""
        if self.is_plain and is_fast(hidden):
            rows, projections = hidden.flatten(0, -2), [self.gate_proj, self.up_proj, self.down_proj]
            return grouped_swiglu(rows, [len(rows)], [projections], compute_dtype(hidden)).view(hidden.shape)
        return self.down_proj(self.activation(self.gate_proj(hidden)) * self.up_proj(hidden))


class Router(nn.Module):
    """Softmax over all experts in fp32, then the best k, normalised to sum 1 with `norm_topk_prob`."""

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.num_chosen = config.num_experts_per_tok
        self.normalised = config.norm_topk_prob

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden (N, H) -> probabilities (N, E), weights (N, k), chosen experts (N, k); fp32 whatever the autocast."""
        if is_fast(hidden) and self.weight.dtype == torch.float32:
            return self.choose(exact_logits(hidden, self.weight))
        with torch.autocast(hidden.device.type, enabled=False):
            return self.choose(F.linear(hidden.float(), self.weight.float()))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same from the router's logits (N, E)."""
        probabilities = logits.softmax(dim=-1)
        weights, chosen = probabilities.topk(self.num_chosen, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return probabilities, weights, chosen


class MixtureOfExperts(nn.Module):
    """The feed-forward part of an MoE layer, with Qwen3-MoE's parameter names (one module per expert)."""

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = nn.ModuleList(
            FeedForward(config, config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        self.implementation = config.moe_implementation
        if config.router_frozen:
            self.gate.weight.requires_grad_(False)

    def forward(self, hidden: Tensor, is_real: Tensor | None) -> tuple[Tensor, RouterStatistics]:
        """hidden (B, T, H), is_real (B * T,) bool or None (no padding) -> output (B, T, H), statistics."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        probabilities, weights, chosen = self.gate(rows)
        run = run_grouped if self.implementation == "grouped" else run_reference
        output = run(rows, weights, chosen, self.experts)
        return output.view(hidden.shape), self._statistics(probabilities, chosen, is_real)

    def _statistics(self, probabilities: Tensor, chosen: Tensor, is_real: Tensor | None) -> RouterStatistics:
        ones = torch.ones_like(chosen, dtype=torch.float32)
        if is_real is not None:
            probabilities = probabilities * is_real[:, None]
            ones = ones * is_real[:, None]
        counts = torch.zeros(len(self.experts), device=chosen.device)
        counts.scatter_add_(0, chosen.flatten(), ones.flatten())
        return probabilities.sum(dim=0), counts


def run_grouped(rows: Tensor, weights: Tensor, chosen: Tensor, experts: Sequence[Callable]) -> Tensor:
    """Rows sorted by expert once, so that each expert makes one product over rows that lie together.

    rows (N, H), weights and chosen (N, k), experts: functions (n, H) -> (n, H) -> weighted sums (N, H).
    """
    order = chosen.flatten().argsort(stable=True)  # slots (row * k + choice) in the order of their experts
    places = torch.arange(len(order), device=order.device)  # where they lie
    if prefers_grouped_products(rows, experts):
        numbers = torch.arange(len(experts), device=order.device)
        ends, count = torch.searchsorted(chosen.flatten()[order], numbers, right=True), len(order)
        run = functools.partial(_run_together, ends=ends, experts=experts)
    else:
        sizes = torch.bincount(chosen.flatten(), minlength=len(experts))
        step = ROWS_STEP if is_fast(rows) and _are_plain(experts) else 1
        most = len(order) + len(experts) * (step - 1)
        padded = (sizes + step - 1) // step * step
        places += ((padded - sizes).cumsum(0) - (padded - sizes))[chosen.flatten()[order]]
        # As many places as there can ever be: with tensors of one size in every layer a step took 1.8 % less time.
        run, count = functools.partial(_run_each, sizes=padded.tolist(), experts=experts), most
    place_of_slot = torch.empty_like(order)
    place_of_slot[order] = places
    place_of_slot = place_of_slot.view_as(chosen)
    row_of_place = order.new_zeros(count)  # unused places read the first row, and nobody reads them
    row_of_place[places] = order // chosen.shape[1]
    results = run(_Gather.apply(rows, row_of_place, place_of_slot))
    return _Combine.apply(results, weights.to(results.dtype), row_of_place, place_of_slot)


def prefers_grouped_products(rows: Tensor, experts: Sequence[Callable]) -> bool:
    """Whether `F.grouped_mm` runs all experts: for bfloat16 on CUDA, where nobody then waits to know their sizes, and
    under the compiler, whose graph the sizes would break. On a CPU it is no faster than one product each.
    """
    on_cuda = rows.device.type == "cuda" and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    if compute_dtype(rows) != torch.bfloat16 or not (on_cuda or torch.compiler.is_compiling()):
        return False
    # Its kernels read 16 bytes at a time.
    return _are_plain(experts) and all(size % 8 == 0 for size in experts[0].gate_proj.weight.shape)


def _are_plain(experts: Sequence[Callable]) -> bool:
    return all(isinstance(expert, FeedForward) and expert.is_plain for expert in experts)


def _run_together(grouped: Tensor, ends: Tensor, experts: Sequence[FeedForward]) -> Tensor:
    """grouped (M, H), rows before ends[0] for the first expert and so on -> (M, H)."""
    dtype, offsets = compute_dtype(grouped), ends.int()
    gate_up = torch.stack([torch.cat((expert.gate_proj.weight, expert.up_proj.weight)) for expert in experts])
    down = torch.stack([expert.down_proj.weight for expert in experts])
    with torch.autocast(grouped.device.type, enabled=False):
        gate, up = F.grouped_mm(grouped.to(dtype), gate_up.to(dtype).mT, offs=offsets).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, down.to(dtype).mT, offs=offsets)


def _run_each(grouped: Tensor, sizes: list[int], experts: Sequence[Callable]) -> Tensor:
    """grouped (M, H), the first sizes[0] rows for the first expert and so on -> (M, H), 0 for rows of nobody."""
    if is_fast(grouped) and _are_plain(experts):
        parts = [(part, expert) for size, expert in zip(sizes, experts, strict=True) for part in _parts(size)]
        matrices = [[expert.gate_proj, expert.up_proj, expert.down_proj] for _, expert in parts]
        return grouped_swiglu(grouped, [size for size, _ in parts], matrices, compute_dtype(grouped))
    # An expert without rows still runs in training: its gradient is then zero, not missing, on every rank alike.
    is_needed = [size > 0 or torch.is_grad_enabled() for size in sizes]
    parts = zip(experts, grouped.split(sizes), is_needed, strict=True)
    return torch.cat([expert(part) for expert, part, needed in parts if needed])


def _parts(size: int) -> list[int]:
    """An expert's rows as a multiple of `PART_ROWS` and what is left; at least one part, if an empty one."""
    whole = size // PART_ROWS * PART_ROWS
    return [part for part in (whole, size - whole) if part] or [0]


def run_reference(rows: Tensor, weights: Tensor, chosen: Tensor, experts: Sequence[Callable]) -> Tensor:
    """The same by definition: every expert sees every row, with weight 0 where it was not chosen."""
    output = torch.zeros_like(rows)
    for number, expert in enumerate(experts):
        weight = (weights * (chosen == number)).sum(dim=-1, keepdim=True)
        output = output + weight * expert(rows)
    return output


class _Gather(torch.autograd.Function):
    """rows (N, H) -> rows[row_of_place] (N * k, H). Backward gathers too: no atomic adds, so it is deterministic."""

    @staticmethod
    def forward(ctx, rows: Tensor, row_of_place: Tensor, place_of_slot: Tensor) -> Tensor:
        ctx.save_for_backward(place_of_slot)
        return rows.index_select(0, row_of_place)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (place_of_slot,) = ctx.saved_tensors
        return F.embedding_bag(place_of_slot, gradient, mode="sum"), None, None


class _Combine(torch.autograd.Function):
    """results (N * k, H), weights (N, k) -> each row's weighted sum of its k results (N, H), in one pass."""

    @staticmethod
    def forward(ctx, results: Tensor, weights: Tensor, row_of_place: Tensor, place_of_slot: Tensor) -> Tensor:
        ctx.save_for_backward(results, weights, row_of_place, place_of_slot)
        return F.embedding_bag(place_of_slot, results, mode="sum", per_sample_weights=weights)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        results, weights, row_of_place, place_of_slot = ctx.saved_tensors
        weight_of_place = weights.new_zeros(len(results))
        weight_of_place[place_of_slot.flatten()] = weights.flatten()
        result_gradient, weight_gradient = torch.empty_like(results), torch.empty_like(weights)
        for wanted, row, weight in blocks(result_gradient, row_of_place, weight_of_place):
            torch.index_select(gradient, 0, row, out=wanted).mul_(weight[:, None])
        for given, place, wanted in blocks(gradient, place_of_slot, weight_gradient):
            by_row = results.index_select(0, place.flatten()).view(*place.shape, -1)
            torch.linalg.vecdot(by_row, given[:, None], out=wanted)
        return result_gradient, weight_gradient, None, None
