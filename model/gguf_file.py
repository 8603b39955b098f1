"""A model as one GGUF file, which llama.cpp, Ollama and what is built on them read.

Refused is what llama.cpp would load and compute differently: `model_problems` and `tokenizer_problems` say why. The
tensor names are those of its own converter for qwen3 and qwen3moe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from model.config import MiniMindConfig
from model.convert import stack_experts

QUANTIZATIONS = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "bf16": gguf.LlamaFileType.MOSTLY_BF16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}
"""What weight matrices are stored as; vectors and routers are always float32."""

# llama.cpp cuts text by a pattern of its own that only bears this name ("qwen2"): any other would be cut wrongly.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GENERATION_TAG = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")

_TENSOR_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def write_gguf(
    path: Path,
    config: MiniMindConfig,
    state: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    quantize: str,
    name: str,
) -> None:
    """Write a model of ours with its tokenizer and chat template.

    Args:
        state: names as in `MiniMindForCausalLM.state_dict()`; a tied head is left out of the file.
        quantize: one of `QUANTIZATIONS`.
        name: what programs show as the model's name.

    Raises:
        ValueError: llama.cpp would compute something else, or a weight does not fit the precision.
    """
    problems = model_problems(config) + tokenizer_problems(tokenizer, config.vocab_size)
    if problems:
        raise ValueError("; ".join(problems))
    writer = gguf.GGUFWriter(None, "qwen3moe" if config.use_moe else "qwen3")
    writer.add_name(name)
    writer.add_file_type(QUANTIZATIONS[quantize])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add_shape(writer, config)
    _add_tokenizer(writer, tokenizer, config)
    for tensor_name, array in gguf_tensors(config, state):
        kind = _stored_type(tensor_name, array, quantize)
        writer.add_tensor(tensor_name, _quantized(tensor_name, array, kind), raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_problems(config: MiniMindConfig) -> list[str]:
    """Why llama.cpp would not compute what this model computes; empty when it does."""
    problems = []
    if config.use_moe and not config.norm_topk_prob:
        problems.append(
            "norm_topk_prob is off: llama.cpp always makes the weights of a token's experts sum to 1, so its answers "
            "would be others; only models with norm_topk_prob can become GGUF"
        )
    if config.hidden_act != "silu":
        problems.append(f"hidden_act is {config.hidden_act}: llama.cpp computes qwen3 with silu")
    kind = config.rope_parameters["rope_type"]
    if kind not in ("default", "linear", "yarn"):
        problems.append(f"rope_type is {kind}: only default, linear and yarn are written to GGUF")
    return problems


def tokenizer_problems(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> list[str]:
    """Why llama.cpp would cut text into other tokens; empty when it does not."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    problems = []
    if state["model"]["type"] != "BPE":
        problems.append(f"the tokenizer is {state['model']['type']}, not byte-level BPE")
        return problems
    steps = (state["pre_tokenizer"] or {}).get("pretokenizers", [state["pre_tokenizer"]])
    patterns = [step["pattern"].get("Regex") for step in steps if step and step["type"] == "Split"]
    if patterns != [QWEN2_PATTERN]:
        problems.append(
            "the tokenizer does not cut text by Qwen2's pattern, the only one that is written to GGUF; train one with "
            "python scripts/train_tokenizer.py"
        )
    if not any(step and step["type"] == "ByteLevel" for step in steps):
        problems.append("the tokenizer is not byte-level")
    if state["normalizer"] not in (None, {"type": "NFC"}):
        problems.append(f"the tokenizer normalises text by {state['normalizer']['type']}; llama.cpp normalises nothing")
    if len(tokenizer) > vocab_size:
        problems.append(f"the tokenizer has {len(tokenizer)} tokens, the model {vocab_size}")
    return problems


def _add_shape(writer: gguf.GGUFWriter, config: MiniMindConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
    if config.use_moe:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, config: MiniMindConfig) -> None:
    vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    tokens, kinds = [], []
    for index in range(config.vocab_size):
        tokens.append(vocabulary.get(index, f"[PAD{index}]"))  # rows of the embedding that no token has
        if index not in vocabulary:
            kinds.append(gguf.TokenType.UNUSED)
        elif index in added:
            kinds.append(gguf.TokenType.CONTROL if added[index].special else gguf.TokenType.USER_DEFINED)
        else:
            kinds.append(gguf.TokenType.NORMAL)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for add, index in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if index is not None:
            add(index)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(template_for_llama_cpp(tokenizer.chat_template))


def template_for_llama_cpp(template: str) -> str:
    """The chat template without `{% generation %}`, which is transformers' own; what it strips is still stripped."""
    return _GENERATION_TAG.sub(r"{#\1 \2#}", template)


def gguf_tensors(config: MiniMindConfig, state: dict[str, Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's names and float32 arrays, experts of a layer stacked (E, O, H)."""
    for name, tensor in stack_experts(state).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem = name.removesuffix(".weight")
        prefix = ""
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem):
            prefix, stem = f"blk.{match[1]}.", match[2]
        yield f"{prefix}{_TENSOR_NAMES[stem]}.weight", tensor.detach().to("cpu", torch.float32).contiguous().numpy()


def _stored_type(name: str, array: np.ndarray, quantize: str) -> gguf.GGMLQuantizationType:
    if array.ndim == 1 or "ffn_gate_inp" in name:
        return gguf.GGMLQuantizationType.F32
    kind = gguf.GGMLQuantizationType[quantize.upper()]
    if quantize == "q8_0" and array.shape[-1] % 32:
        return gguf.GGMLQuantizationType.F16  # blocks of 32 do not fit: what llama.cpp's converter does
    return kind


def _quantized(name: str, array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    if kind == gguf.GGMLQuantizationType.F16 and np.abs(array).max(initial=0.0) > np.finfo(np.float16).max:
        raise ValueError(f"{name} holds values beyond float16's 65,504; use --quantize bf16, f32 or q8_0")
    return gguf.quants.quantize(array, kind)


def modelfile(gguf_name: str, config: dict[str, Any]) -> str:
    """An Ollama Modelfile for such a file beside it: the chat template in Ollama's own language, and sampling.

    Args:
        gguf_name: the file's name, in the same folder.
        config: sampling settings: temperature, top_p, num_ctx.
    """
    parameters = "".join(f"PARAMETER {name} {value}\n" for name, value in config.items())
    return f'FROM ./{gguf_name}\nTEMPLATE """{_OLLAMA_TEMPLATE}"""\nPARAMETER stop "<|im_end|>"\n{parameters}'


# The same turns as model/tokenizer/chat_template.jinja writes when thinking is neither asked for nor turned off.
_OLLAMA_TEMPLATE = """\
{{- $system := .System }}{{- if .Tools }}<|im_start|>system
{{ if $system }}{{ $system }}

{{ end }}Tools:{{ range .Tools }}
{{ .Function }}{{ end }}<|im_end|>
{{ else if $system }}<|im_start|>system
{{ $system }}<|im_end|>
{{ end }}
{{- range $i, $message := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if eq .Role "user" }}<|im_start|>user
{{ .Content }}<|im_end|>
{{ else if eq .Role "assistant" }}<|im_start|>assistant
{{ if .Thinking }}<think>
{{ .Thinking }}
</think>

{{ end }}{{ .Content }}
{{- range $j, $call := .ToolCalls }}{{ if or $j $message.Content }}
{{ end }}<tool_call>
{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}
</tool_call>{{ end }}{{ if not $last }}<|im_end|>
{{ end }}
{{- else if eq .Role "tool" }}<|im_start|>user
<tool_response>
{{ .Content }}
</tool_response><|im_end|>
{{ end }}
{{- if and $last (ne .Role "assistant") }}<|im_start|>assistant
{{ end }}
{{- end }}"""


class GGUFHeader(NamedTuple):
    """What a GGUF file says about its model: positions, the tokens that act as control, whether it is all float32."""

    context: int
    control_tokens: list[str]
    is_float32: bool


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read a GGUF file's description.

    Raises:
        ValueError: it is no GGUF file, or is cut off.
    """
    try:
        fields = gguf.GGUFReader(path).fields
        architecture = fields["general.architecture"].contents()
        tokens, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
        context = fields[f"{architecture}.context_length"].contents()
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{path}: not a GGUF file that can be read: {error!r}") from error
    acting = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    controls = [token for token, kind in zip(tokens, kinds, strict=True) if kind in acting]
    file_type = fields["general.file_type"].contents() if "general.file_type" in fields else None
    return GGUFHeader(context, controls, file_type == gguf.LlamaFileType.ALL_F32)
