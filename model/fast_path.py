"""The fast path of training on a CPU: the same mathematics as the plain modules, with fewer passes over memory.

At these sizes a CPU spends as long on moving activations as on matrix products. Each function below is one plain
expression of `model_minimind.py` with its backward pass written by hand; a test holds both against each other.

- `fused_linear`: one product for q, k, v. Only the step's copy of the weights is fused; parameters, gradients and saved
  names stay apart.
- `rms_norm`: keeps the input and one number per row, and writes the dtype that the next product reads.
- `grouped_swiglu`: a feed-forward part, or all experts of a layer; keeps nothing but the fused gate/up product.
- `packed_attention`: q/k norm, RoPE and attention inside documents. Documents of like length are gathered into one
  batch, so a row of eight short documents costs eight small triangles instead of one large square.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.packed_rows import DocumentBatches

FAST_TOKENS = 256
# Attention probabilities of a layer are kept for the backward pass up to this size, and computed again above it.
KEPT_PROBABILITY_BYTES = 64 * 2**20
# What elementwise steps work on at a time, so that what one of them writes is still in the cache when the next reads
# it: half of the time of a norm's backward pass at 8,192 x 512, three quarters of that of SwiGLU.
BLOCK_BYTES = 2 * 2**20
# Columns of a weight gradient that are computed at a time: bfloat16 products over 8,160 rows reach 58 to 84 % of the
# peak for 2,432 to 4,864 columns together, 84 to 92 % in such parts, narrow side first.
PRODUCT_COLUMNS = 1024
# Below so many rows (an expert's) a weight gradient is computed as (O, M) x (M, H), the layout that it is kept in:
# nothing needs to be transposed, which takes up to 15 % less time below 4,096 rows and 2 to 7 % more at 8,160.
NARROW_FIRST_ROWS = 4096

_copies: contextvars.ContextVar[dict | None] = contextvars.ContextVar("weights cast for products", default=None)


def is_fast(hidden: Tensor) -> bool:
    """Whether the functions below take over for hidden (..., H): many tokens on a CPU, not compiled.

    With few tokens, as in decoding, putting weights together would cost more than it saves. CUDA and the compiler have
    fused kernels of their own.
    """
    many = hidden.shape[:-1].numel() >= FAST_TOKENS
    return many and hidden.device.type == "cpu" and not torch.compiler.is_compiling()


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that matrix products run in: autocast's when it is on, else the tensor's own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def fused_linear(hidden: Tensor, modules: list[nn.Module], dtype: torch.dtype) -> Tensor:
    """hidden (..., H) -> (..., sum of the modules' outputs): all products in one, in `dtype`."""
    if any(type(module) is not nn.Linear for module in modules):  # LoRA, quantised: they must run their own forward
        return torch.cat([module(hidden) for module in modules], dim=-1)
    with torch.autocast(hidden.device.type, enabled=False):
        rows = hidden.reshape(-1, hidden.shape[-1]).to(dtype)
        return _FusedLinear.apply(rows, *[module.weight for module in modules]).view(*hidden.shape[:-1], -1)


@contextlib.contextmanager
def weights_cast_once() -> Iterator[None]:
    """While it is open no weight changes, so each is cast for its products once, not once a micro-batch."""
    token = _copies.set({})
    try:
        yield
    finally:
        _copies.reset(token)


def _stack(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Weight matrices under one another in `dtype`, in one pass over memory."""
    if len(matrices) == 1 and matrices[0].dtype == dtype:
        return matrices[0]
    copies, key = _copies.get(), (dtype, *map(id, matrices))
    if copies is not None and key in copies:
        return copies[key][0]
    sizes = [len(matrix) for matrix in matrices]
    stacked = torch.empty(sum(sizes), *matrices[0].shape[1:], dtype=dtype, device=matrices[0].device)
    for part, matrix in zip(stacked.split(sizes), matrices, strict=True):
        part.copy_(matrix)
    if copies is not None:
        copies[key] = stacked, matrices  # which it keeps alive, so that no other gets one of these ids
    return stacked


class _FusedLinear(torch.autograd.Function):
    """rows (M, H), matrices (O, H) -> rows times all matrices (M, sum of O), in the rows' dtype."""

    @staticmethod
    def forward(ctx, rows: Tensor, *matrices: Tensor) -> Tensor:
        stacked = _stack(matrices, rows.dtype)
        ctx.save_for_backward(rows, stacked)
        ctx.sizes, ctx.dtype = [len(matrix) for matrix in matrices], matrices[0].dtype
        return rows @ stacked.t()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, stacked = ctx.saved_tensors
        row_gradient = gradient @ stacked if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:]):
            return row_gradient, *[None for _ in ctx.sizes]
        return row_gradient, *_weight_gradients(rows, gradient, ctx.sizes, ctx.dtype)


def gradient_product(narrow: Tensor, wide: Tensor) -> Tensor:
    """narrow (M, h), wide (M, n) -> narrow.T @ wide (h, n): on a CPU in parts of `PRODUCT_COLUMNS`."""
    if wide.device.type != "cpu" or wide.shape[1] <= 1.5 * PRODUCT_COLUMNS:
        return narrow.t() @ wide
    product = wide.new_empty(narrow.shape[1], wide.shape[1])
    for part, result in zip(wide.split(PRODUCT_COLUMNS, 1), product.split(PRODUCT_COLUMNS, 1), strict=True):
        torch.mm(narrow.t(), part, out=result)
    return product


def _weight_gradients(rows: Tensor, gradient: Tensor, sizes: Sequence[int] | int, dtype: torch.dtype) -> list[Tensor]:
    """rows (M, H), gradient (M, sum of `sizes`) of their product -> gradients of the matrices (size, H) in `dtype`."""
    if len(rows) < NARROW_FIRST_ROWS:
        return [part.to(dtype) for part in (gradient.t() @ rows).split(sizes)]
    columns = gradient_product(rows, gradient).split(sizes, dim=1)
    return [column.t().contiguous().to(dtype) for column in columns]


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of all tensors (M, ...): on a CPU `BLOCK_BYTES` of the first at a time, elsewhere all at once."""
    first = tensors[0]
    rows = max(BLOCK_BYTES * len(first) // max(first.nbytes, 1) if first.device.type == "cpu" else len(first), 1)
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def _inverse_root_mean_square(rows: Tensor, eps: float) -> Tensor:
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.promote_types(rows.dtype, torch.float32))
    return norm.square_().div_(rows.shape[-1]).add_(eps).rsqrt_()


class _RMSNorm(torch.autograd.Function):
    """x (M, H), weight (H,) -> x / rms(x) * weight in `dtype`; fp32 inside."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        output = torch.empty_like(rows, dtype=dtype)
        scale = rows.new_empty(len(rows), 1, dtype=torch.promote_types(rows.dtype, torch.float32))
        for row, inverse, result in blocks(rows, scale, output):
            inverse.copy_(_inverse_root_mean_square(row, eps))
            result.copy_((row * inverse).mul_(weight))
        ctx.save_for_backward(rows, weight, scale)
        return output

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weight, scale = ctx.saved_tensors
        result = torch.empty_like(rows)
        weight_gradient = torch.zeros_like(scale[0] * weight)
        for row, inverse, given, wanted in blocks(rows, scale, gradient, result):
            normed = row * inverse
            given = given.to(normed.dtype, copy=True)
            product = given * normed
            weight_gradient += product.sum(dim=0)
            dot = torch.mv(product, weight.to(product.dtype)).div_(-rows.shape[-1])[:, None]
            wanted.copy_(given.mul_(weight).addcmul_(normed, dot).mul_(inverse))
        return result, weight_gradient.to(weight.dtype), None, None


def rms_norm(rows: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`MiniMindRMSNorm` in one step that also casts to `dtype`."""
    with torch.autocast(rows.device.type, enabled=False):
        return _RMSNorm.apply(rows.reshape(-1, rows.shape[-1]), weight, eps, dtype).view_as(rows)


def _activate(gate_up: Tensor) -> Tensor:
    output = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    for rows, result in blocks(gate_up, output):
        gate, up = rows.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=result)
    return output


def _activate_backward(gate_up: Tensor, gradient: Tensor) -> None:
    """gate_up (M, 2 I) becomes its gradient, gradient (M, I) of the result becomes that result: no memory is taken."""
    for rows, given in blocks(gate_up, gradient):
        gate, up = rows.chunk(2, dim=-1)
        active, to_active = F.silu(gate), given * up
        to_up = active * given
        torch.mul(active, up, out=given)
        torch.ops.aten.silu_backward.grad_input(to_active, gate, grad_input=gate)
        up.copy_(to_up)


class _SwiGLU(torch.autograd.Function):
    """Rows (M, H) in groups -> each group's own down(silu(gate) * up) (M, H).

    Every product writes its group's rows of one result, so nothing is put together afterwards, and what lies between
    the products is done for all groups at once. What goes into the last product is not kept but computed again, which
    saves an eighth of the activations' memory and takes less than 1 % of the time. The backward pass writes over what
    was kept, so it can run only once (a second one is noticed and refused). `matrices`: gate, up (I, H) and down
    (H, I) of each group in turn.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, sizes: list[int], *matrices: Tensor) -> Tensor:
        gate_ups = [_stack(matrices[first : first + 2], rows.dtype) for first in range(0, len(matrices), 3)]
        downs = [_stack([matrix], rows.dtype) for matrix in matrices[2::3]]
        gate_up = rows.new_empty(len(rows), len(gate_ups[0]))
        _multiply_groups(rows, [weight.t() for weight in gate_ups], sizes, gate_up)
        output = torch.empty_like(rows)
        _multiply_groups(_activate(gate_up), [weight.t() for weight in downs], sizes, output)
        ctx.sizes, ctx.dtype = sizes, matrices[0].dtype
        ctx.save_for_backward(rows, gate_up, *gate_ups, *downs)
        return output

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, gate_up, *weights = ctx.saved_tensors
        sizes, gate_ups, downs = ctx.sizes, weights[: len(ctx.sizes)], weights[len(ctx.sizes) :]
        inner = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        _multiply_groups(gradient, downs, sizes, inner)
        _activate_backward(gate_up, inner)
        result, fed, row_gradient = gate_up, inner, torch.empty_like(rows)
        _multiply_groups(result, gate_ups, sizes, row_gradient)
        if not any(ctx.needs_input_grad[2:]):
            return row_gradient, None, *[None for _ in ctx.needs_input_grad[2:]]
        matrices = []
        for group in zip(*(_groups(tensor, sizes) for tensor in (rows, result, fed, gradient)), strict=True):
            group_rows, group_result, group_fed, group_gradient = group
            matrices += _weight_gradients(group_rows, group_result, group_fed.shape[1], ctx.dtype)
            matrices.append(gradient_product(group_gradient, group_fed).to(ctx.dtype))
        return row_gradient, None, *matrices


def _groups(rows: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """The rows of each group; what lies behind the last one belongs to nobody."""
    return rows.split([*sizes, len(rows) - sum(sizes)])[: len(sizes)]


def _multiply_groups(rows: Tensor, weights: Sequence[Tensor], sizes: list[int], output: Tensor) -> None:
    for part, weight, result in zip(_groups(rows, sizes), weights, _groups(output, sizes), strict=True):
        torch.mm(part, weight, out=result)
    output[sum(sizes) :].zero_()


def grouped_swiglu(rows: Tensor, sizes: list[int], experts: list[list[nn.Linear]], dtype: torch.dtype) -> Tensor:
    """rows (M, H), the first sizes[0] of them for the first expert and so on -> (M, H) in `dtype`, 0 for those left.

    experts: gate, up and down projection of each; a dense layer is a single one.
    """
    with torch.autocast(rows.device.type, enabled=False):
        weights = [module.weight for expert in experts for module in expert]
        return _SwiGLU.apply(rows.to(dtype), sizes, *weights)


class _ExactLogits(torch.autograd.Function):
    """rows (M, H) of any precision, weight (E, H) float32 -> rows @ weight.T (M, E) in float32."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        logits = weight.new_empty(len(rows), len(weight))
        for block, result in blocks(rows, logits):
            torch.mm(block.to(weight.dtype), weight.t(), out=result)
        return logits

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        row_gradient = torch.empty_like(rows)
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None  # None: a frozen router
        for block, given, wanted in blocks(rows, gradient, row_gradient):
            wanted.copy_(given @ weight)
            if weight_gradient is not None:
                weight_gradient.addmm_(given.t(), block.to(weight.dtype))
        return row_gradient, weight_gradient


def exact_logits(rows: Tensor, weight: Tensor) -> Tensor:
    """A router's logits (M, E): rows (M, H) times weight (E, H) in float32, without a float32 copy of all rows."""
    with torch.autocast(rows.device.type, enabled=False):
        return _ExactLogits.apply(rows, weight)


def add_update(hidden: Tensor, update: Tensor) -> Tensor:
    """hidden (..., H) + update (..., H), which may be of lower precision, in hidden's dtype.

    A sum of float32 and bfloat16 would first make a float32 copy of the latter: added to instead, it takes 40 % of the
    time.
    """
    return hidden + update if update.dtype == hidden.dtype else update.to(hidden.dtype).add_(hidden)


class _PackedAttention(torch.autograd.Function):
    """Fused q, k, v (B, T, (N + 2 K) D) -> attended values (B, T, N D): head norm, RoPE, attention inside documents."""

    @staticmethod
    def forward(
        ctx,
        fused: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        rope: tuple[Tensor, Tensor],
        eps: float,
        documents: DocumentBatches,
    ) -> Tensor:
        size = query_weight.shape[0]
        num_keys = documents.value_slots.numel() // fused.shape[:-1].numel()
        num_heads = fused.shape[-1] // size - 2 * num_keys
        weight = torch.cat((query_weight.expand(num_heads, size), key_weight.expand(num_keys, size))).to(fused.dtype)
        by_head = fused.view(-1, num_heads + 2 * num_keys, size)
        cosines, sines = (table.flatten(0, 1) for table in rope)
        rotated = fused.new_empty(len(by_head), num_heads + num_keys, size)
        scale = fused.new_empty(len(by_head), num_heads + num_keys, 1)
        for heads, inverse, cosine, sine, result in blocks(by_head, scale, cosines, sines, rotated):
            states = heads[:, : num_heads + num_keys]
            inverse.copy_(_inverse_root_mean_square(states, eps))
            normed = (states * inverse).mul_(weight)
            torch.mul(normed, cosine, out=result).addcmul_(normed.roll(size // 2, -1), sine)
        gathered = rotated.view(-1, size).index_select(0, documents.state_rows)
        values = by_head.view(-1, size).index_select(0, documents.value_rows)

        output = torch.empty_like(gathered[: len(documents.output_rows)])
        ctx.documents, ctx.sizes = documents, (num_heads, num_keys, size)
        kept = []
        for stack, query, key, value, out in _stacks(documents, ctx.sizes, gathered, values, output):
            probabilities = _causal_softmax(query, key, stack.mask)
            torch.bmm(probabilities, value, out=out)
            kept.append(probabilities)
        if sum(part.nbytes for part in kept) > KEPT_PROBABILITY_BYTES:
            kept = []
        ctx.save_for_backward(fused, weight, scale, cosines, sines, gathered, values, *kept)
        return output.index_select(0, documents.output_slots).view(*fused.shape[:-1], num_heads * size)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        fused, weight, scale, cosines, sines, gathered, values, *kept = ctx.saved_tensors
        documents, (num_heads, num_keys, size) = ctx.documents, ctx.sizes
        output_gradient = gradient.reshape(-1, size).index_select(0, documents.output_rows)
        output_gradient.index_fill_(0, documents.unused_rows, 0.0)
        state_gradient, value_gradient = torch.empty_like(gathered), torch.empty_like(values)
        inputs = _stacks(documents, ctx.sizes, gathered, values, output_gradient)
        results = _stacks(documents, ctx.sizes, state_gradient, value_gradient, output_gradient)
        for number, ((stack, query, key, value, out), (_, to_query, to_key, to_value, _)) in enumerate(
            zip(inputs, results, strict=True)
        ):
            probabilities = kept[number] if kept else _causal_softmax(query, key, stack.mask)
            # A document's last queries come first and write the gradients of all its keys; the others add to them.
            beta = 0 if stack.end == stack.length else 1
            torch.baddbmm(to_value, probabilities.transpose(1, 2), out, beta=beta, out=to_value)
            scores = torch.bmm(out, value.transpose(1, 2))
            scores = torch.ops.aten._softmax_backward_data(scores, probabilities, -1, scores.dtype)
            torch.baddbmm(to_query, scores, key, beta=0, alpha=size**-0.5, out=to_query)
            torch.baddbmm(to_key, scores.transpose(1, 2), query, beta=beta, alpha=size**-0.5, out=to_key)

        result = torch.empty_like(fused)
        by_head, result_by_head = (part.view(-1, num_heads + 2 * num_keys, size) for part in (fused, result))
        slots = documents.state_slots.view(len(by_head), -1)
        weight_gradient = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for heads, inverse, cosine, sine, slot, wanted in blocks(by_head, scale, cosines, sines, slots, result_by_head):
            rotated = state_gradient.index_select(0, slot.flatten()).view(len(heads), -1, size)
            given = (rotated * cosine).addcmul_(rotated.roll(size // 2, -1), sine, value=-1)
            normed = heads[:, : num_heads + num_keys] * inverse
            product = given * normed
            weight_gradient += product.sum(dim=0, dtype=weight_gradient.dtype)
            dot = product.mul_(weight).sum(dim=-1, keepdim=True).div_(-size)
            given.mul_(weight).addcmul_(normed, dot)
            torch.mul(given, inverse, out=wanted[:, : num_heads + num_keys])
        from_values = value_gradient.index_select(0, documents.value_slots)
        result_by_head[:, num_heads + num_keys :] = from_values.view(-1, num_keys, size)
        return result, weight_gradient[:num_heads].sum(0), weight_gradient[num_heads:].sum(0), None, None, None


def _causal_softmax(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """query (batch, G Q, D), key (batch, L, D), mask (1, Q, L) -> probabilities (batch, G Q, L)."""
    mask = mask.expand(query.shape[1] // mask.shape[1], -1, -1).reshape(1, query.shape[1], -1)
    mask = mask.expand(len(query), -1, -1)
    return torch.baddbmm(mask, query, key.transpose(1, 2), alpha=query.shape[-1] ** -0.5).softmax(dim=-1)


def _stacks(documents: DocumentBatches, sizes: tuple[int, int, int], states: Tensor, values: Tensor, output: Tensor):
    """For each stack of n documents it and views: query (n K, G Q, D), key, value (n K, L, D), output (n K, G Q, D)."""
    num_heads, num_keys, size = sizes
    queries, keys = states.split((len(output), len(states) - len(output)))
    for stack in documents.stacks:
        batch, first_query, first_key = stack.documents * num_keys, stack.first_query, stack.first_key
        end_query = first_query + stack.documents * (stack.end - stack.begin)
        end_key = first_key + stack.documents * stack.length
        yield (
            stack,
            queries[first_query * num_heads : end_query * num_heads].view(batch, -1, size),
            keys[first_key * num_keys : end_key * num_keys].view(batch, -1, size)[:, : stack.end],
            values[first_key * num_keys : end_key * num_keys].view(batch, -1, size)[:, : stack.end],
            output[first_query * num_heads : end_query * num_heads].view(batch, -1, size),
        )


@torch.compiler.disable
def packed_attention(
    fused: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    rope: tuple[Tensor, Tensor],
    eps: float,
    documents: DocumentBatches,
) -> Tensor:
    """Causal grouped-query attention inside each document of packed rows.

    Args:
        fused: (B, T, (N + 2 K) D): queries, keys and values of `fused_linear`.
        query_weight, key_weight: (D,): the head norms' weights.
        rope: cosines and signed sines (B, T, 1, D) as `MiniMindRotary` gives them.

    Returns:
        (B, T, N D), in `fused`'s dtype.
    """
    with torch.autocast(fused.device.type, enabled=False):
        return _PackedAttention.apply(fused, query_weight, key_weight, rope, eps, documents)
