"""Batched decoding: prompts in, token ids out.

`Decoder` runs the same weights as `MiniMindForCausalLM` without its modules: weights lie as the processor reads them
best, q/k/v and gate/up are one product each, and keys and values go into a preallocated cache. At small sizes most of a
token's time is the cost of calling operations, so the fewer calls the better. In half precision it rounds where
transformers' Qwen3 rounds, so that both say the same.

Rows are independent: a row's sample depends on its prompt, the seed and its index, never on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.model_minimind import MiniMindForCausalLM, rotate
from model.moe import MixtureOfExperts, run_grouped
from model.sampling import Sampling

CACHE_STEP = 128  # the cache grows by at least so many tokens
PACKED_ROWS = 64  # weights are laid out for about so many rows; it serves one as well


@dataclass
class GeneratedReply:
    """What one prompt led to: the new ids without the stop token, and the stop token that ended them, if one did.

    `log_probs` are those of the ids, and of the stop token behind them, at the sampling temperature; if asked for.
    """

    ids: list[int]
    stop_id: int | None = None
    log_probs: list[float] = field(default_factory=list)


@dataclass
class _Layer:
    input_norm: Tensor  # (H,)
    qkv: _Weight  # ((N + 2 K) D, H)
    head_norm: Tensor  # (N + K, D)
    output: _Weight  # (H, N D)
    feed_norm: Tensor  # (H,)
    feed: Callable[[Tensor], Tensor]  # (B, T, H) -> (B, T, H)


class Decoder:
    """The weights of a model arranged for decoding; a copy, so build it anew after the weights changed.

    `dtype` casts the copy (bfloat16 halves the memory that each token reads); by default it is the model's own.
    """

    @torch.no_grad()
    def __init__(self, model: MiniMindForCausalLM, dtype: torch.dtype | None = None) -> None:
        self.config = model.config
        self.dtype = dtype or model.dtype
        self.device = model.device
        self.rotary = model.model.rotary
        was_training = model.training
        model.eval()
        self.embedding = model.model.embed_tokens.weight.detach().to(self.dtype)
        self.norm = model.model.norm.weight.detach().to(self.dtype)
        self.head = self._joined([model.lm_head])
        self.layers = [self._layer(layer) for layer in model.model.layers]
        model.train(was_training)

    def _joined(self, modules: list[nn.Module]) -> _Weight:
        """The modules' weights under one another in our dtype."""
        weight = torch.cat([_effective_weight(module) for module in modules]).to(self.dtype)
        packed = _packed(weight)
        return _Weight(packed, weight if packed is not weight and has_slow_packed_rows(self.dtype) else None)

    def _layer(self, layer: nn.Module) -> _Layer:
        attention, experts = layer.self_attn, isinstance(layer.mlp, MixtureOfExperts)
        heads, key_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        query_norm, key_norm = attention.q_norm.weight, attention.k_norm.weight
        return _Layer(
            input_norm=layer.input_layernorm.weight.to(self.dtype),
            qkv=self._joined([attention.q_proj, attention.k_proj, attention.v_proj]),
            head_norm=torch.cat((query_norm.expand(heads, -1), key_norm.expand(key_heads, -1))).to(self.dtype),
            output=self._joined([attention.o_proj]),
            feed_norm=layer.post_attention_layernorm.weight.to(self.dtype),
            feed=self._experts(layer.mlp) if experts else self._feed_forward(layer.mlp),
        )

    def _feed_forward(self, module: nn.Module) -> Callable[[Tensor], Tensor]:
        gate_up, down = self._joined([module.gate_proj, module.up_proj]), self._joined([module.down_proj])
        activation = module.activation

        def feed(rows: Tensor) -> Tensor:
            gate, up = _multiply(rows, gate_up).chunk(2, dim=-1)
            return _multiply(activation(gate).mul_(up), down)

        return feed

    def _experts(self, module: MixtureOfExperts) -> Callable[[Tensor], Tensor]:
        router = module.gate.weight.detach().float()
        experts = [self._feed_forward(expert) for expert in module.experts]

        def feed(rows: Tensor) -> Tensor:
            flat = rows.flatten(0, -2)
            _, weights, chosen = module.gate.choose(F.linear(flat.float(), router))
            if len(flat) > 1:
                return run_grouped(flat, weights, chosen, experts).view_as(rows)
            pairs = zip(weights[0].tolist(), chosen[0].tolist(), strict=True)
            return sum(weight * experts[number](rows) for weight, number in pairs)

        return feed


def _effective_weight(module: nn.Module) -> Tensor:
    """The matrix of a linear module; of one with an adapter, what it does to each unit vector."""
    if type(module) is nn.Linear:
        return module.weight.detach()
    parameter = next(module.parameters())
    unit = torch.eye(module.in_features, dtype=parameter.dtype, device=parameter.device)
    return module(unit).t()


def _packed(weight: Tensor) -> Tensor:
    """The weight (O, H) as `_multiply` takes it: on a CPU in oneDNN's own layout, where it can be.

    All products of `mini` in turn take 5.2, 7.0 and 17.8 ms for 1, 16 and 64 rows in float32, where `F.linear` takes
    10.3, 18.1 and 35.7, and 2.4, 3.6 and 9.5 in bfloat16, where it takes 4.5, 6.4 and 12.6.
    """
    # A build of torch without oneDNN lacks these operators.
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return weight
    half = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if weight.dtype != torch.float32 and not half:
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)


def has_slow_packed_rows(dtype: torch.dtype) -> bool:
    """Whether one row takes longer by a packed weight than by a plain one: in float32 on processors with AMX.

    All products of `nano` in turn, one row: 0.3 ms plain, 0.6 packed; without AMX 2.4 and about half of that.
    """
    return dtype == torch.float32 and torch.cpu._is_amx_tile_supported()


class _Weight(NamedTuple):
    """A weight (O, H) as `_packed` lays it out, and plain for products of one row, where that is faster."""

    packed: Tensor
    plain: Tensor | None


def _multiply(rows: Tensor, weight: _Weight) -> Tensor:
    """rows (..., H), weight (O, H) -> (..., O)."""
    if weight.plain is not None and rows.numel() == rows.shape[-1]:
        return F.linear(rows, weight.plain)
    if weight.packed.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(rows, weight.packed, None, "none", [], "")
    return F.linear(rows, weight.packed)


def _normalise(rows: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps), in eps's dtype, rounded to x's dtype before the weight as Qwen3 does."""
    exact = rows.to(eps.dtype)
    norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
    scale = torch.addcmul(eps, norm, norm, value=1.0 / rows.shape[-1]).rsqrt_()
    return (exact * scale).to(rows.dtype).mul_(weight)


class _Batch:
    """Rows being decoded together, left-padded to one length, and their keys and values.

    The cache of each layer is (B, K, capacity, D) twice. Rows that are done are taken out once a quarter are.
    """

    def __init__(self, decoder: Decoder, prompts: list[list[int]]) -> None:
        self.decoder = decoder
        self.length = 0
        longest = max(len(prompt) for prompt in prompts)
        padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=decoder.device)
        self.padding = padding if int(padding.max()) else None  # (B,) empty places before each row
        self.cache = None
        self.eps = torch.tensor(decoder.config.rms_norm_eps, device=decoder.device)
        self._reserve(len(prompts), longest + CACHE_STEP)
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        self.tokens = torch.tensor(padded, device=decoder.device)

    def _reserve(self, rows: int, capacity: int) -> None:
        config, decoder = self.decoder.config, self.decoder
        shape = (len(decoder.layers), 2, rows, config.num_key_value_heads, capacity, config.head_dim)
        cache = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)
        if self.cache is not None:
            cache[..., : self.length, :] = self.cache[..., : self.length, :]
        positions = torch.arange(capacity, device=decoder.device)[None]
        self.cache, self.capacity = cache, capacity
        self.rope_table = [table[0] for table in decoder.rotary(positions, decoder.dtype)]  # (capacity, 1, D) each

    def advance(self) -> Tensor:
        """Run the tokens at hand through the layers -> logits (B, V) of the last one; the decoder's dtype counts."""
        with torch.autocast(self.decoder.device.type, enabled=False):
            return self._advance()

    def _advance(self) -> Tensor:
        decoder = self.decoder
        rows, count = self.tokens.shape
        end = self.length + count
        if end > self.capacity:
            self._reserve(rows, max(end + CACHE_STEP, self.capacity * 2))
        rope, mask = self._rope_and_mask(count, end)
        hidden = F.embedding(self.tokens, decoder.embedding)
        for number, layer in enumerate(decoder.layers):
            normed = _normalise(hidden, layer.input_norm, self.eps)
            attended = self._attend(normed, layer, self.cache[number], end, rope, mask)
            hidden = hidden + _multiply(attended, layer.output)
            hidden = hidden + layer.feed(_normalise(hidden, layer.feed_norm, self.eps))
        self.length = end
        return _multiply(_normalise(hidden[:, -1], decoder.norm, self.eps), decoder.head)

    def _rope_and_mask(self, count: int, end: int) -> tuple[list[Tensor], Tensor | None]:
        if self.padding is None:
            return [table[end - count : end] for table in self.rope_table], None
        places = torch.arange(end - count, end, device=self.padding.device)
        positions = (places - self.padding[:, None]).clamp_min_(0)
        keys = torch.arange(end, device=self.padding.device)
        allowed = (keys >= self.padding[:, None, None]) & (keys <= places[:, None])
        allowed |= keys == places[:, None]  # a padding place sees itself: a softmax over nothing would be NaN
        return [table[positions] for table in self.rope_table], allowed[:, None]

    def _attend(self, normed: Tensor, layer: _Layer, cache: Tensor, end: int, rope: list[Tensor], mask) -> Tensor:
        config = self.decoder.config
        count, heads, keys = normed.shape[1], config.num_attention_heads, config.num_key_value_heads
        fused = _multiply(normed, layer.qkv).view(*normed.shape[:2], -1, config.head_dim)
        states = rotate(_normalise(fused[:, :, : heads + keys], layer.head_norm, self.eps), *rope)
        cache[0, :, :, end - count : end] = states[:, :, heads:].transpose(1, 2)
        cache[1, :, :, end - count : end] = fused[:, :, heads + keys :].transpose(1, 2)
        past_keys, past_values = cache[0, :, :, :end], cache[1, :, :, :end]
        if count == 1:  # the queries of a group as that many queries of its key head: up to 4 times as fast as GQA
            queries = states[:, 0, :heads].unflatten(1, (keys, heads // keys))
            attended = F.scaled_dot_product_attention(queries, past_keys, past_values, attn_mask=mask)
            return attended.reshape(-1, 1, heads * config.head_dim)
        attended = F.scaled_dot_product_attention(
            states[:, :, :heads].transpose(1, 2),
            past_keys,
            past_values,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return attended.transpose(1, 2).flatten(2)

    def keep(self, rows: list[int]) -> None:
        """Keep these rows, in this order, and drop all others; a row may be kept several times."""
        index = torch.tensor(rows, device=self.decoder.device)
        self.cache = self.cache[:, :, :, :, : self.length].index_select(2, index)
        self.capacity = self.length  # the next token makes room
        self.tokens = self.tokens[index]
        if self.padding is not None:
            self.padding = self.padding[index]


@dataclass
class _Request:
    """What is decoded together: prompts by row number, and how."""

    prompts: dict[int, list[int]]
    max_new_tokens: int
    stop_ids: set[int]
    sampling: Sampling
    noise_keys: Sequence[int | str] | None = None  # by row number; the row numbers themselves by default
    keep_log_probs: bool = False


@torch.inference_mode()
def _decode(decoder: Decoder, request: _Request) -> Iterator[list[tuple[int, int, float]]]:
    """Decode prompts together; yields each step's (row, token, log-probability or 0), stop tokens included."""
    prompts, sampling, keys = request.prompts, request.sampling, request.noise_keys
    places = decoder.config.max_position_embeddings
    limits = {row: min(request.max_new_tokens, places - len(prompt)) for row, prompt in prompts.items()}
    rows = list(prompts)  # row numbers in the batch's order
    alive = set(rows)
    unique = list(dict.fromkeys(map(tuple, prompts.values())))  # samples of one prompt read it once
    batch = _Batch(decoder, [list(prompt) for prompt in unique])
    uniforms = None
    if sampling.temperature:
        noise = [sampling.uniforms(keys[row] if keys is not None else row, request.max_new_tokens) for row in rows]
        uniforms = torch.stack(noise)
    for step in range(max(limits.values())):
        logits = batch.advance()
        if step == 0 and len(unique) < len(rows):
            place_of = {prompt: place for place, prompt in enumerate(unique)}
            copies = [place_of[tuple(prompt)] for prompt in prompts.values()]
            logits = logits[copies]
            batch.keep(copies)
        chosen = sampling.choose(logits, uniforms[:, step] if uniforms is not None else None)
        log_probs = sampling.log_probs(logits, chosen).tolist() if request.keep_log_probs else [0.0] * len(rows)
        drawn = zip(rows, chosen.tolist(), log_probs, strict=True)
        yield (drawn := [one for one in drawn if one[0] in alive])
        alive.difference_update(row for row, token, _ in drawn if token in request.stop_ids or step + 1 == limits[row])
        if not alive:
            return
        batch.tokens = chosen[:, None]
        if len(alive) <= 0.75 * len(rows):
            kept = [place for place, row in enumerate(rows) if row in alive]
            rows = [rows[place] for place in kept]
            uniforms = uniforms[kept] if uniforms is not None else None
            batch.keep(kept)


def generate_tokens(
    model: MiniMindForCausalLM | Decoder,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_ids: list[int],
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 64,
    dtype: torch.dtype | None = None,
    noise_keys: Sequence[int | str] | None = None,
    keep_log_probs: bool = False,
) -> list[GeneratedReply]:
    """Continue every prompt; replies come in the order of the prompts.

    Args:
        model: the model, or a `Decoder` of it to use for several calls.
        prompts: token ids, at least one each.
        max_new_tokens: at most so many new tokens a prompt; the model's `max_position_embeddings` also ends a reply.
        stop_ids: a reply ends before any of these.
        temperature, top_k, top_p, seed: see `Sampling`. Row i of a call always draws the same noise for a seed.
        batch_size: prompts decoded together; they are sorted by length first.
        dtype: cast the decoding copy of the weights, for example to torch.bfloat16.
        noise_keys: what a prompt's noise depends on besides the seed, in place of its row number.
        keep_log_probs: give the log-probability of each token.

    Raises ValueError for an empty or too long prompt, or a sampling value out of range.
    """
    sampling = Sampling(temperature, top_k, top_p, seed)
    decoder = model if isinstance(model, Decoder) else Decoder(model, dtype)
    for number, prompt in enumerate(prompts):
        _check_prompt(prompt, f"prompt {number}", decoder)
    replies = [GeneratedReply([]) for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    stops = set(stop_ids)
    for first in range(0, len(prompts), batch_size):
        rows = by_length[first : first + batch_size]
        batch = {row: prompts[row] for row in rows}
        for drawn in _decode(decoder, _Request(batch, max_new_tokens, stops, sampling, noise_keys, keep_log_probs)):
            for row, token, log_prob in drawn:
                if token in stops:
                    replies[row].stop_id = token
                else:
                    replies[row].ids.append(token)
                if keep_log_probs:
                    replies[row].log_probs.append(log_prob)
    return replies


def stream_tokens(
    model: MiniMindForCausalLM | Decoder,
    prompt_ids: list[int],
    max_new_tokens: int,
    stop_ids: list[int],
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Iterator[int]:
    """Yield the new ids of one prompt as they come, without the stop token; arguments as in `generate_tokens`."""
    sampling = Sampling(temperature, top_k, top_p, seed)
    decoder = model if isinstance(model, Decoder) else Decoder(model, dtype)
    _check_prompt(prompt_ids, "the prompt", decoder)
    for drawn in _decode(decoder, _Request({0: prompt_ids}, max_new_tokens, set(stop_ids), sampling)):
        if drawn[0][1] in stop_ids:
            return
        yield drawn[0][1]


def _check_prompt(prompt: list[int], name: str, decoder: Decoder) -> None:
    limit = decoder.config.max_position_embeddings
    if not 0 < len(prompt) < limit:
        raise ValueError(f"{name} has {len(prompt)} tokens: it must have at least 1 and fewer than {limit}")
    if not 0 <= min(prompt) <= max(prompt) < decoder.config.vocab_size:
        raise ValueError(f"{name} has a token id outside the vocabulary of {decoder.config.vocab_size} tokens")
