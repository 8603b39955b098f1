"""The model's configuration: every field explicit, checked, and saved as a plain Qwen3 / Qwen3-MoE config.

In memory the model type is `minimind`. On disk it is `qwen3` (dense) or `qwen3_moe`, so whatever opens a
Qwen3 folder opens ours; reading maps both back to `MiniMindConfig`. The maps live in `model/convert.py`.
"""

from __future__ import annotations

import json
import math
from typing import Any

from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from model.convert import config_from_hugging_face, config_to_hugging_face

# RoPE variants whose frequencies do not depend on the length at hand, so that a cache never becomes stale.
SUPPORTED_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
MOE_IMPLEMENTATIONS = ("grouped", "reference")

# Experts of the presets: eight of half the dense width, two per token, weights normalised. Total and active size
# equal those of four full experts with one per token, but there the normalised weight is w / w = 1 and the
# router would learn nothing from the language-model loss.
_EIGHT_HALF_EXPERTS = {"use_moe": True, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}

PRESETS: dict[str, dict[str, Any]] = {
    # 5.0M: for a CPU. Heads of 64 rather than 32: half as many attention scores for the same width.
    "nano": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    # 25.8M
    "mini": {"hidden_size": 512, "num_hidden_layers": 8, "num_key_value_heads": 2, "intermediate_size": 1408},
    # 63.9M
    "base": {"hidden_size": 768, "num_hidden_layers": 8},
    # 104.0M
    "large": {"hidden_size": 768, "num_hidden_layers": 16, "num_key_value_heads": 2, "intermediate_size": 2048},
}
PRESETS["nano-moe"] = PRESETS["nano"] | _EIGHT_HALF_EXPERTS  # 12.7M, 5.0M active
PRESETS["base-moe"] = PRESETS["base"] | _EIGHT_HALF_EXPERTS  # 198M, 64M active


def default_intermediate_size(hidden_size: int) -> int:
    """Width of the feed-forward part: pi times the hidden size, rounded up to a multiple of 64."""
    return math.ceil(hidden_size * math.pi / 64) * 64


def yarn_rope_parameters(
    rope_theta: float = 1e6,
    factor: float = 16.0,
    original_max_position_embeddings: int = 2048,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> dict[str, Any]:
    """`rope_parameters` that stretch the context `factor` times at inference (YaRN, Peng et al., arXiv:2309.00071)."""
    return {
        "rope_type": "yarn",
        "rope_theta": rope_theta,
        "factor": factor,
        "original_max_position_embeddings": original_max_position_embeddings,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
    }


class MiniMindConfig(PretrainedConfig):
    """Shape and options of a MiniMind model.

    `head_dim`, `intermediate_size` and `moe_intermediate_size` follow from the other fields when left at None:
    hidden_size / num_attention_heads, `default_intermediate_size`, and intermediate_size * (1 / experts per token).
    `rope_parameters` (transformers' form) holds RoPE scaling; `rope_theta` in it wins over the field.

    Options that shape training only, and are not saved: `dropout` (embedding, residual and attention),
    `zero_init_output` (o_proj and down_proj start at zero), `router_frozen` (the router gets no gradient),
    `moe_implementation` ("grouped", or "reference": a readable loop with the same weights and results), `fast_path`
    (on a CPU, attention in packed rows by batches of documents instead of a mask; off for compiled layers).

    Raises ValueError that lists all problems of the given fields at once.
    """

    model_type = "minimind"
    keys_to_ignore_at_inference = ["past_key_values"]

    vocab_size: int = 6400
    hidden_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_parameters: dict | None = None
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    use_cache: bool = True
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    pad_token_id: int | None = 0

    use_moe: bool = False
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 5e-4

    dropout: float = 0.0
    zero_init_output: bool = True
    router_frozen: bool = False
    moe_implementation: str = "grouped"
    fast_path: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        problems = self._size_problems()
        if not problems:  # sizes that others follow from are sound
            if self.head_dim is None:
                self.head_dim = self.hidden_size // self.num_attention_heads
            if self.intermediate_size is None:
                self.intermediate_size = default_intermediate_size(self.hidden_size)
            if self.moe_intermediate_size is None:
                self.moe_intermediate_size = self.intermediate_size // self.num_experts_per_tok
        if self.rope_parameters is not None:
            self.rope_parameters = dict(self.rope_parameters)  # transformers completes it in place
        super().__post_init__(**kwargs)
        self.rope_theta = self.rope_parameters["rope_theta"]
        problems += self._option_problems()
        if problems:
            raise ValueError("The model configuration is not usable:\n" + "\n".join(f"- {text}" for text in problems))

    def _size_problems(self) -> list[str]:
        problems = []
        names = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
        names += ["max_position_embeddings"] + (["num_experts", "num_experts_per_tok"] if self.use_moe else [])
        optional = ["head_dim", "intermediate_size", "moe_intermediate_size"]
        for name in names + [name for name in optional if getattr(self, name) is not None]:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                problems.append(f"{name} is {value!r}: it must be a positive whole number")
        if problems:
            return problems
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            problems.append(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                f"{self.num_attention_heads}: change one of them, or set head_dim"
            )
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if head_dim % 2:
            problems.append(f"head_dim {head_dim} is odd: RoPE turns pairs of values, so it must be even")
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads {self.num_attention_heads} is not divisible by num_key_value_heads "
                f"{self.num_key_value_heads}: each key/value head serves the same number of query heads"
            )
        if self.use_moe and self.num_experts_per_tok > self.num_experts:
            problems.append(f"num_experts_per_tok {self.num_experts_per_tok} exceeds num_experts {self.num_experts}")
        return problems

    def _option_problems(self) -> list[str]:
        problems = []
        if self.hidden_act not in ACT2FN:
            problems.append(f"hidden_act {self.hidden_act!r} is unknown: use 'silu'")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout is {self.dropout}: it must lie in [0, 1)")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            if not getattr(self, name) > 0:
                problems.append(f"{name} is {getattr(self, name)}: it must be above 0")
        rope_type = self.rope_parameters["rope_type"]
        if rope_type not in SUPPORTED_ROPE_TYPES:
            problems.append(f"rope_type {rope_type!r} is not supported: use one of {', '.join(SUPPORTED_ROPE_TYPES)}")
        if self.moe_implementation not in MOE_IMPLEMENTATIONS:
            problems.append(
                f"moe_implementation {self.moe_implementation!r} is unknown: use {' or '.join(MOE_IMPLEMENTATIONS)}"
            )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and isinstance(self.vocab_size, int) and not 0 <= token < self.vocab_size:
                    problems.append(f"{name} {token} lies outside the vocabulary of {self.vocab_size} tokens")
        if self.router_weight_is_constant and not self.router_frozen:
            problems.append(
                "num_experts_per_tok 1 with norm_topk_prob True makes every expert weight w / w = 1, so the router "
                "gets no gradient from the language-model loss: set norm_topk_prob False, take 2 experts per token, "
                "or set router_frozen True to go on training existing weights with the router as it is"
            )
        return problems

    @property
    def router_weight_is_constant(self) -> bool:
        """True when the chosen expert's weight is always 1 (one expert per token, normalised)."""
        return bool(self.use_moe and self.num_experts_per_tok == 1 and self.norm_topk_prob)

    @classmethod
    def from_preset(cls, name: str, overrides: dict[str, Any] | None = None) -> MiniMindConfig:
        """The preset `name` with some fields replaced. Raises ValueError for an unknown preset or field."""
        overrides = overrides or {}
        if name not in PRESETS:
            raise ValueError(f"Unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
        known = cls.__dataclass_fields__
        if unknown := sorted(set(overrides) - set(known)):
            raise ValueError(f"Unknown model configuration field(s) {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(**(PRESETS[name] | overrides))

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: str, **kwargs: Any) -> tuple[dict, dict]:
        """Read config.json (Qwen3, Qwen3-MoE or our own) as a dictionary of our fields."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return config_from_hugging_face(config_dict), kwargs

    def to_hugging_face_dict(self) -> dict[str, Any]:
        """The plain Qwen3 / Qwen3-MoE form that goes to disk."""
        return config_to_hugging_face(self.to_dict())

    def to_json_file(self, json_file_path: str, use_diff: bool = True) -> None:
        """Write the Qwen3 form; overrides transformers, whose `save_pretrained` calls it."""
        with open(json_file_path, "w", encoding="utf-8") as writer:
            json.dump(self.to_hugging_face_dict(), writer, indent=2, sort_keys=True)
            writer.write("\n")
