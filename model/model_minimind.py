"""The MiniMind language model: a pre-norm transformer that is Qwen3 (dense) or Qwen3-MoE, weight for weight.

Read top to bottom: norm, rotary positions, attention, layer, stack, head. The parts that only some models or some
callers need live beside it: experts in `moe.py`, the training loss in `token_loss.py`, sampling in `decoding.py`.

Shapes: B rows, T tokens, H hidden size, N query heads, K key/value heads, D head size, V vocabulary, L layers,
E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model.config import MiniMindConfig
from model.fast_path import add_update, compute_dtype, fused_linear, is_fast, packed_attention, rms_norm
from model.moe import FeedForward, MixtureOfExperts, Router, RouterStatistics
from model.packed_rows import (
    DocumentBatches,
    DocumentBounds,
    batch_documents,
    bounded_attention,
    document_bounds,
    has_bounded_attention,
    packed_rows_mask,
    packed_rows_positions,
)
from model.token_loss import IGNORED_LABEL, token_losses


@dataclass
class MiniMindModelOutput(BaseModelOutputWithPast):
    """Qwen3Model's output, and what the routers did."""

    router_probability_sums: Tensor | None = None  # (L, E) fp32, differentiable: sums over tokens that are not padding
    expert_counts: Tensor | None = None  # (L, E) fp32: how many (token, choice) pairs went to each expert


@dataclass
class MiniMindOutput(CausalLMOutputWithPast):
    """Qwen3ForCausalLM's output, the loss of every token, and what the routers did."""

    token_losses: Tensor | None = None  # (B, T) fp32 nats: -log p(labels[t] | tokens before t); 0 without a label
    computed: Tensor | None = None  # what `compute` gave
    router_probability_sums: Tensor | None = None
    expert_counts: Tensor | None = None


class MiniMindRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich, arXiv:1910.07467), in fp32 inside, x's dtype outside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        if is_fast(hidden):
            return rms_norm(hidden, self.weight, self.eps, compute_dtype(hidden))
        return F.rms_norm(hidden, self.weight.shape, self.weight.to(hidden.dtype), self.eps)


class MiniMindRotary(nn.Module):
    """Cosines and sines of RoPE (Su et al., arXiv:2104.09864), scaled as `config.rope_parameters` says.

    Frequencies are computed from the config when first needed and are no buffer: a buffer would be uninitialised
    memory after `from_pretrained`, which builds models on the meta device, and would be rounded by `model.half()`.
    """

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__()
        self.config = config
        self._frequencies: Tensor | None = None  # (D / 2,) fp32
        self._scale = 1.0

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions (B, T) -> cosines and signed sines (B, T, 1, D) in `dtype`; the angles themselves are fp32."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            with torch.inference_mode(False):  # kept for training too, even when decoding came first
                self._frequencies, self._scale = self._compute_frequencies(positions.device)
        with torch.autocast(positions.device.type, enabled=False):
            angles = positions[..., None, None].float() * self._frequencies
            cosines, sines = angles.cos() * self._scale, angles.sin() * self._scale
            return torch.cat((cosines, cosines), -1).to(dtype), torch.cat((-sines, sines), -1).to(dtype)

    def _compute_frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        parameters = self.config.rope_parameters
        if parameters["rope_type"] != "default":
            return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](self.config, device)
        size = self.config.head_dim
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (i, i + D / 2) of states (B, T, heads, D) by its position's angle; sines are [-sin, sin]."""
    return states * cosines + states.roll(states.shape[-1] // 2, dims=-1) * sines


@dataclass
class Surroundings:
    """What every layer of a forward pass shares, computed once."""

    rope: tuple[Tensor, Tensor]  # cosines and signed sines (B, T, 1, D)
    mask: Tensor | None = None  # (B, 1, T, past + T), or None: plain causal, or `documents` say it
    documents: DocumentBatches | None = None  # packed rows on the fast path of a CPU
    bounds: DocumentBounds | None = None  # packed rows on CUDA
    is_real: Tensor | None = None  # (B * T,) bool: not padding; None when nothing is


class MiniMindAttention(nn.Module):
    """Grouped-query attention with RMSNorm on every query and key head."""

    def __init__(self, config: MiniMindConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.o_proj.starts_at_zero = config.zero_init_output
        self.q_norm = MiniMindRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = MiniMindRMSNorm(config.head_dim, config.rms_norm_eps)

    def project(self, hidden: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """hidden (B, T, H) -> queries (B, N, T, D), keys and values (B, K, T, D); positions are already in."""
        by_head = (*hidden.shape[:-1], -1, self.head_dim)
        queries = rotate(self.q_norm(self.q_proj(hidden).view(by_head)), *rope)
        keys = rotate(self.k_norm(self.k_proj(hidden).view(by_head)), *rope)
        values = self.v_proj(hidden).view(by_head)
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def forward(self, hidden: Tensor, around: Surroundings, past_key_values: Cache | None) -> Tensor:
        """hidden (B, T, H) -> (B, T, H)."""
        if around.documents is not None:
            fused = fused_linear(hidden, [self.q_proj, self.k_proj, self.v_proj], compute_dtype(hidden))
            weights = self.q_norm.weight, self.k_norm.weight
            return self.o_proj(packed_attention(fused, *weights, around.rope, self.q_norm.eps, around.documents))
        queries, keys, values = self.project(hidden, around.rope)
        if past_key_values is not None:
            keys, values = past_key_values.update(keys, values, self.layer_index)
        if around.bounds is not None:
            attended = bounded_attention(queries, keys, values, around.bounds)
        else:
            attended = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=around.mask,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=around.mask is None and queries.shape[2] > 1,
                enable_gqa=True,
            )
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class MiniMindLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: MiniMindConfig, layer_index: int) -> None:
        super().__init__()
        self.self_attn = MiniMindAttention(config, layer_index)
        self.mlp = MixtureOfExperts(config) if config.use_moe else FeedForward(config, config.intermediate_size)
        self.input_layernorm = MiniMindRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = MiniMindRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Tensor, around: Surroundings, past_key_values: Cache | None = None
    ) -> tuple[Tensor, RouterStatistics | None]:
        """hidden (B, T, H) -> (B, T, H), and the router's statistics when the layer has experts."""
        attended = self.self_attn(self.input_layernorm(hidden), around, past_key_values)
        hidden = add_update(hidden, self.dropout(attended))
        normed, statistics = self.post_attention_layernorm(hidden), None
        if isinstance(self.mlp, MixtureOfExperts):
            fed, statistics = self.mlp(normed, around.is_real)
        else:
            fed = self.mlp(normed)
        return add_update(hidden, self.dropout(fed)), statistics


class MiniMindPreTrainedModel(PreTrainedModel):
    """What transformers needs to know to build, load, save and checkpoint the model."""

    config_class = MiniMindConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MiniMindLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, initializer_range) everywhere, norms at one; output projections at zero with `zero_init_output`."""
        if getattr(module, "starts_at_zero", False):
            init.zeros_(module.weight)
        elif isinstance(module, Router):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        else:
            super()._init_weights(module)


class MiniMindModel(MiniMindPreTrainedModel):
    """Embedding, layers and the last norm: token ids -> hidden states."""

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(MiniMindLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = MiniMindRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = MiniMindRotary(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        document_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> MiniMindModelOutput:
        """Hidden states (B, T, H) after the last norm; see `MiniMindForCausalLM.forward` for the arguments."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and document_ids is None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if document_ids is None:
            around = self._surroundings(hidden, attention_mask, position_ids, past_key_values)
        elif past_key_values is not None or attention_mask is not None:
            raise ValueError("document_ids (packed rows) go without attention_mask and without a cache")
        else:
            around = self._packed_surroundings(hidden, document_ids, position_ids)
        hidden = self.dropout(hidden)
        all_hidden, all_statistics = [], []
        for layer in self.layers:
            if output_hidden_states:
                all_hidden.append(hidden)
            hidden, statistics = layer(hidden, around, past_key_values=past_key_values)
            all_statistics.append(statistics)
        hidden = self.norm(hidden)
        sums = counts = None
        if self.config.use_moe:
            sums, counts = (torch.stack(part) for part in zip(*all_statistics, strict=True))
        return MiniMindModelOutput(
            last_hidden_state=hidden,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*all_hidden, hidden) if output_hidden_states else None,
            router_probability_sums=sums,
            expert_counts=counts,
        )

    def _surroundings(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, past_key_values: Cache | None
    ) -> Surroundings:
        if position_ids is None:
            past_length = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None] + past_length
        mask = create_causal_mask(self.config, hidden, attention_mask, past_key_values, position_ids)
        is_real = None
        if attention_mask is not None and attention_mask.dim() == 2:
            is_real = attention_mask[:, -hidden.shape[1] :].bool().flatten()
        return Surroundings(self.rotary(position_ids, compute_dtype(hidden)), mask, is_real=is_real)

    def _packed_surroundings(self, hidden: Tensor, document_ids: Tensor, position_ids: Tensor | None) -> Surroundings:
        device, dtype = hidden.device, compute_dtype(hidden)
        if position_ids is None:
            position_ids = packed_rows_positions(document_ids).to(device, non_blocking=True)
        is_real = (document_ids != 0).flatten().to(device, non_blocking=True)
        around = Surroundings(self.rotary(position_ids, dtype), is_real=is_real)
        if self.training and self.config.dropout:
            around.mask = packed_rows_mask(document_ids.to(device), dtype)  # the kernels have no dropout
        elif self.config.fast_path and is_fast(hidden):
            heads = self.config.num_attention_heads, self.config.num_key_value_heads
            around.documents = batch_documents(document_ids, *heads, dtype)
        elif has_bounded_attention(device, dtype):
            around.bounds = document_bounds(document_ids, device)
        else:
            around.mask = packed_rows_mask(document_ids.to(device), dtype)
        return around


class MiniMindForCausalLM(MiniMindPreTrainedModel, GenerationMixin):
    """The language model: `MiniMindModel` and a head tied to the embedding (unless the config unties it)."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MiniMindConfig) -> None:
        super().__init__(config)
        self.model = MiniMindModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        document_ids: Tensor | None = None,
        return_token_losses: bool = False,
        compute: Callable[[Tensor, Tensor], Tensor] | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> MiniMindOutput | tuple:
        """Logits, as transformers' Qwen3ForCausalLM gives them, or the training losses of packed rows.

        Args:
            input_ids: (B, T) token ids; or `inputs_embeds` (B, T, H).
            attention_mask: (B, past + T), 0 for padding on either side.
            position_ids: (B, T); by default counted from the cache's length, or restarted at each document.
            labels: (B, T), not shifted, -100 = no loss. Alone they give the mean `loss` (transformers' contract).
            logits_to_keep: logits for the last so many positions only (0: all).
            document_ids: (B, T), packed rows: 0 padding, 1.. the documents of a row, which do not see each other.
            return_token_losses: needs labels; gives `token_losses` (B, T) and no logits.
            compute: of the last hidden states (B, T, H) and the head's weight (V, H), something else for a loss; it
                belongs inside this call, where DDP and FSDP see it. Its result is `computed`; there are no logits.

        Raises ValueError for arguments that contradict each other.
        """
        if output_attentions:
            raise ValueError("output_attentions is not supported: scaled_dot_product_attention keeps no weights")
        if return_token_losses and labels is None:
            raise ValueError("return_token_losses needs labels")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            document_ids=document_ids,
            output_hidden_states=output_hidden_states,
        )
        hidden = outputs.last_hidden_state
        logits = loss = losses = None
        if return_token_losses:
            losses = self._token_losses(hidden, labels)
        elif compute is None:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
            if labels is not None:
                loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        result = MiniMindOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            token_losses=losses,
            computed=None if compute is None else compute(hidden, self.lm_head.weight),
            router_probability_sums=outputs.router_probability_sums,
            expert_counts=outputs.expert_counts,
        )
        return result if return_dict is not False else result.to_tuple()

    def _token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """hidden (B, T, H), labels (B, T) -> (B, T): the hidden state at t - 1 predicts the label at t."""
        next_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        losses = token_losses(hidden.flatten(0, 1), self.lm_head.weight, next_labels.flatten())
        return losses.view_as(labels).roll(1, dims=1)  # the last place of a row never has a loss


def count_parameters(model: MiniMindForCausalLM) -> tuple[int, int]:
    """(all parameters, those that one token passes through): they differ by the experts that it does not visit."""
    total = sum(parameter.numel() for parameter in model.parameters())
    idle = 0
    if model.config.use_moe:
        expert = sum(parameter.numel() for parameter in model.model.layers[0].mlp.experts[0].parameters())
        idle = expert * (model.config.num_experts - model.config.num_experts_per_tok) * len(model.model.layers)
    return total, total - idle


def load_model(folder: str, dtype: torch.dtype = torch.float32) -> MiniMindForCausalLM:
    """Open a Qwen3 / Qwen3-MoE folder strictly: every tensor there, none left over, every shape right.

    Raises ValueError that names the first few tensors at fault; OSError when the folder has no model.
    """
    model, report = MiniMindForCausalLM.from_pretrained(
        folder, dtype=dtype, output_loading_info=True, local_files_only=True, ignore_mismatched_sizes=True
    )
    problems = []
    for key, meaning in (
        ("missing_keys", "not in the file"),
        ("unexpected_keys", "not in the model"),
        ("mismatched_keys", "of another shape"),
    ):
        if names := sorted(str(name) for name in report[key]):
            examples = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            problems.append(f"{len(names)} tensors {meaning}: {examples}")
    if problems:
        raise ValueError(
            f"The weights in {folder} do not fit their config.json ({'; '.join(problems)}). "
            "Make the weights and config.json come from the same model."
        )
    return model
