"""Pure name maps between MiniMind, Qwen3 and Qwen3-MoE: dictionaries in, dictionaries out, no files.

The parameter names are the same in all three on disk. What differs: the configuration's keys, the RoPE tables that
MiniMind's `.pth` files may carry, and the fused experts that transformers 5 holds in memory.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3MoeConfig

_SHARED_FIELDS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
    "hidden_act max_position_embeddings rms_norm_eps rope_parameters tie_word_embeddings initializer_range "
    "use_cache bos_token_id eos_token_id pad_token_id"
).split()
_EXPERT_FIELDS = "num_experts_per_tok moe_intermediate_size norm_topk_prob router_aux_loss_coef".split()


def config_from_hugging_face(config_dict: dict[str, Any]) -> dict[str, Any]:
    """A config.json of type qwen3 or qwen3_moe as `MiniMindConfig` fields; one of type minimind passes through.

    Fields that the file leaves out take Qwen3's defaults (its rope_theta is 10,000), not ours. Existing weights with
    one expert per token and normalised weights open with the router frozen.

    Raises ValueError for another model type, and for Qwen3 options that MiniMind does not have.
    """
    model_type = config_dict.get("model_type")
    if model_type == "minimind":
        fields = {name: value for name, value in config_dict.items() if name != "model_type"}
    elif model_type in ("qwen3", "qwen3_moe"):
        fields = _fields_from_qwen3(config_dict)
    else:
        raise ValueError(f"model_type {model_type!r} is not supported: it must be qwen3, qwen3_moe or minimind")
    if fields.get("use_moe") and fields.get("num_experts_per_tok") == 1 and fields.get("norm_topk_prob", True):
        fields["router_frozen"] = True
    return fields


def _fields_from_qwen3(config_dict: dict[str, Any]) -> dict[str, Any]:
    use_moe = config_dict["model_type"] == "qwen3_moe"
    source = (Qwen3MoeConfig if use_moe else Qwen3Config)(**config_dict)
    refused = []
    if source.attention_bias:
        refused.append("attention_bias")
    layer_types = getattr(source, "layer_types", None) or []
    if source.use_sliding_window or any(kind != "full_attention" for kind in layer_types):
        refused.append("use_sliding_window")
    if source.attention_dropout:
        refused.append("attention_dropout (use dropout)")
    if use_moe and (source.mlp_only_layers or source.decoder_sparse_step != 1):
        refused.append("mlp_only_layers / decoder_sparse_step")
    if refused:
        raise ValueError(f"This Qwen3 model uses what MiniMind does not have: {', '.join(refused)}")
    fields = {name: getattr(source, name, None) for name in _SHARED_FIELDS}
    fields |= {"use_moe": use_moe, "dtype": source.dtype, "rope_theta": source.rope_parameters["rope_theta"]}
    if use_moe:
        fields |= {name: getattr(source, name) for name in _EXPERT_FIELDS} | {"num_experts": source.num_experts}
    return fields


def config_to_hugging_face(fields: dict[str, Any]) -> dict[str, Any]:
    """`MiniMindConfig` fields as a config.json that transformers 4 and 5, vLLM, SGLang and llama.cpp's converter read.

    Both spellings are written where versions differ: `rope_theta` beside `rope_parameters` (and `rope_scaling` when
    there is scaling), `num_experts` beside `num_local_experts`, `torch_dtype` beside `dtype`.
    """
    use_moe = fields["use_moe"]
    result = {name: fields[name] for name in _SHARED_FIELDS}
    result |= {
        "model_type": "qwen3_moe" if use_moe else "qwen3",
        "architectures": ["Qwen3MoeForCausalLM" if use_moe else "Qwen3ForCausalLM"],
        "rope_theta": fields["rope_parameters"]["rope_theta"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "transformers_version": fields.get("transformers_version"),
    }
    if fields["rope_parameters"]["rope_type"] != "default":
        result["rope_scaling"] = dict(fields["rope_parameters"])
    if fields.get("dtype") is not None:
        result["dtype"] = result["torch_dtype"] = fields["dtype"]
    if use_moe:
        result |= {name: fields[name] for name in _EXPERT_FIELDS}
        result["num_experts"] = result["num_local_experts"] = fields["num_experts"]
        result |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return result


def config_to_minimind(fields: dict[str, Any]) -> dict[str, Any]:
    """`MiniMindConfig` fields as the config.json of MiniMind's native form; its own code opens it.

    Raises ValueError for what that form cannot say.
    """
    rope = fields["rope_parameters"]
    if rope["rope_type"] not in ("default", "yarn"):
        raise ValueError(f"MiniMind has no rope_type {rope['rope_type']}")
    names = [name for name in _SHARED_FIELDS if name != "rope_parameters"]
    if fields["use_moe"]:
        names += [*_EXPERT_FIELDS, "num_experts"]
    result = {"model_type": "minimind", "architectures": ["MiniMindForCausalLM"], "use_moe": fields["use_moe"]}
    result |= {name: fields[name] for name in names} | {"rope_theta": rope["rope_theta"], "dropout": 0.0}
    scaling = dict(rope) if rope["rope_type"] == "yarn" else None
    return result | {"rope_scaling": scaling, "inference_rope_scaling": scaling is not None}


_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")


def state_from_minimind(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A MiniMind `.pth` state dict as ours: wrappers' prefixes and RoPE tables dropped, floating tensors in fp32.

    `lm_head.weight` is filled in from the embedding when the file leaves it out.
    Raises ValueError when there is no embedding, which every such file has.
    """
    result = {}
    for name, tensor in state.items():
        name = _WRAPPERS.sub("", name)
        if not name.endswith(("freqs_cos", "freqs_sin", "rotary_emb.inv_freq")):
            result[name] = tensor.float() if tensor.is_floating_point() else tensor
    if "model.embed_tokens.weight" not in result:
        examples = ", ".join(list(state)[:3]) or "nothing"
        raise ValueError(f"Not a MiniMind state dict: it holds {examples}, but no model.embed_tokens.weight")
    result.setdefault("lm_head.weight", result["model.embed_tokens.weight"])
    return result


def state_to_minimind(state: dict[str, Tensor], dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """Our state dict as MiniMind saves it: the same names, the head beside the embedding, everything in `dtype`."""
    result = {name: tensor.detach().to(dtype) for name, tensor in state.items()}
    result.setdefault("lm_head.weight", result["model.embed_tokens.weight"])
    return result


def config_from_state(state: dict[str, Tensor]) -> dict[str, Any]:
    """`MiniMindConfig` fields that tensors' shapes tell; a `.pth` carries no config.

    What shapes cannot tell is left to the config's defaults, but for experts: MiniMind routes each token to one
    with normalised weights, so those models come with that and the router frozen.
    Raises ValueError that names the first tensor that is missing.
    """
    try:
        vocab_size, hidden_size = state["model.embed_tokens.weight"].shape
        head_dim = state["model.layers.0.self_attn.q_norm.weight"].shape[0]
        queries, keys = (state[f"model.layers.0.self_attn.{part}_proj.weight"].shape[0] for part in "qk")
        layers = {name.split(".")[2] for name in state if name.startswith("model.layers.")}
        experts = {match[2] for name in state if (match := _EXPERT.match(name)) and name.startswith("model.layers.0.")}
        first = "experts.0.gate_proj" if experts else "gate_proj"
        width = state[f"model.layers.0.mlp.{first}.weight"].shape[0]
    except KeyError as error:
        raise ValueError(f"Not a MiniMind state dict: it has no {error.args[0]}") from error
    head = state.get("lm_head.weight")
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": len(layers),
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": keys // head_dim,
        "head_dim": head_dim,
        "tie_word_embeddings": head is None or torch.equal(head, state["model.embed_tokens.weight"]),
    }
    if not experts:
        return fields | {"intermediate_size": width}
    routing = {"num_experts_per_tok": 1, "norm_topk_prob": True, "router_frozen": True}
    return fields | routing | {"use_moe": True, "num_experts": len(experts), "moe_intermediate_size": width}


def stack_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per-expert tensors as one each: `experts.{gate,up,down}_proj.weight` (E, O, H); all others as they are."""
    result, parts = {}, {}
    for name, tensor in state.items():
        if match := _EXPERT.fullmatch(name):
            parts.setdefault(f"{match[1]}.{match[3]}_proj.weight", {})[int(match[2])] = tensor
        else:
            result[name] = tensor
    return result | {name: torch.stack([found[number] for number in sorted(found)]) for name, found in parts.items()}


def fuse_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Per-expert tensors as transformers 5 holds them in memory: `experts.gate_up_proj` (E, 2 I, H), `down_proj`."""
    result = {}
    for name, tensor in (stacked := stack_experts(state)).items():
        prefix, _, part = name.removesuffix(".weight").rpartition(".")
        if not prefix.endswith(".mlp.experts"):
            result[name] = tensor
        elif part == "gate_proj":
            result[f"{prefix}.gate_up_proj"] = torch.cat((tensor, stacked[f"{prefix}.up_proj.weight"]), dim=1)
        elif part == "down_proj":
            result[f"{prefix}.down_proj"] = tensor
    return result


def split_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `fuse_experts`."""
    result = {}
    for name, tensor in state.items():
        prefix, _, part = name.rpartition(".")
        if not prefix.endswith(".mlp.experts"):
            result[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            pieces = zip(("gate", "up"), expert.chunk(2), strict=True) if part == "gate_up_proj" else [("down", expert)]
            result |= {f"{prefix}.{number}.{piece}_proj.weight": weight for piece, weight in pieces}
    return result
