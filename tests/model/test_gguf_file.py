"""GGUF: what llama.cpp itself, run here, makes of our files, and what is refused since it would compute otherwise."""

import json

import gguf
import httpx2
import numpy as np
import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer

from model.config import yarn_rope_parameters
from model.gguf_file import QUANTIZATIONS, read_gguf_header, template_for_llama_cpp, write_gguf
from scripts.serving.engines import Load, running_engine
from tests.conftest import ROOT
from tests.hard_strings import hard_strings
from tests.model.helpers import tiny_model

SHAPES = {
    "dense": {},
    "moe": {"use_moe": True},
    "top-1": {"use_moe": True, "num_experts_per_tok": 1, "router_frozen": True},
    "untied": {"tie_word_embeddings": False},
    "yarn": {"rope_parameters": yarn_rope_parameters(factor=4.0, original_max_position_embeddings=32)},
}


def model_of(shape, tokenizer, **overrides):
    return tiny_model(vocab_size=len(tokenizer) + 7, hidden_size=64, **(SHAPES[shape] | overrides))


def written(path, model, tokenizer, quantize="f32"):
    write_gguf(path, model.config, model.state_dict(), tokenizer, quantize, "tiny")
    return path


class LlamaCpp:
    """A running llama.cpp, asked by its own protocol."""

    def __init__(self, engine):
        self.http = httpx2.Client(base_url=engine.url, headers={"Authorization": f"Bearer {engine.key}"}, timeout=60)

    def post(self, path, **body):
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def greedy(self, ids, count):
        """The next ids, and the log-probabilities of the likeliest first ones by id, if the first is whole text."""
        answer = self.post("/completion", prompt=ids, n_predict=count, temperature=0, return_tokens=True, n_probs=20)
        # Tokens that end within a character have no entry of their own.
        first = next(iter(answer.get("completion_probabilities", [])), None)
        if first is None or first["id"] != answer["tokens"][0]:
            return answer["tokens"], None
        return answer["tokens"], {entry["id"]: entry["logprob"] for entry in first["top_logprobs"]}


@pytest.fixture(scope="module", params=list(SHAPES))
def pair(request, tokenizer, tmp_path_factory):
    model = model_of(request.param, tokenizer)
    path = written(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model, tokenizer)
    with running_engine("llama.cpp", path, "tiny", Load(1, 256, 1, exact=True)) as engine:
        yield model, LlamaCpp(engine)


@torch.no_grad()
def test_llama_cpp_gives_our_logits_and_greedy_answers(pair, tokenizer):
    model, llama_cpp = pair
    compared = 0
    for text in ("Hello there", "你好，世界。" * 12, "1 + 1 = ", "Once upon a time", "<|im_start|>user\n"):
        ids = tokenizer(text)["input_ids"]
        log_probabilities = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        expected = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
        answer, likeliest = llama_cpp.greedy(ids, 16)
        assert answer == expected[0, len(ids) :].tolist()
        for index, value in (likeliest or {}).items():
            assert abs(log_probabilities[index].item() - value) < 1e-5
            compared += 1
    assert compared >= 40


def test_llama_cpp_cuts_text_as_we_do(tokenizer, tmp_path):
    path = written(tmp_path / "tiny.gguf", model_of("dense", tokenizer), tokenizer)
    strings = hard_strings()
    assert len(set(strings)) == 200
    with running_engine("llama.cpp", path, "tiny", Load(1, 64, 1)) as engine:
        llama_cpp = LlamaCpp(engine)
        for text in strings:
            normal = tokenizer.backend_tokenizer.normalizer.normalize_str(text)
            theirs = llama_cpp.post("/tokenize", content=normal, add_special=False, parse_special=True)["tokens"]
            assert theirs == tokenizer(text)["input_ids"], repr(text)


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "你好 <b>"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"type": "function", "id": "a", "function": {"name": "f", "arguments": '{"x": "1+1", "ü": 2}'}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "2"},
    {"role": "user", "content": "ok"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b> ü", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("options", [{}, {"open_thinking": True}, {"open_thinking": False}, {"enable_thinking": False}])
def test_llama_cpp_renders_our_chat_template(tokenizer, tmp_path, options):
    path = written(tmp_path / "tiny.gguf", model_of("dense", tokenizer), tokenizer)
    with running_engine("llama.cpp", path, "tiny", Load(1, 64, 1)) as engine:
        theirs = LlamaCpp(engine).post("/apply-template", messages=CHAT, tools=TOOLS, chat_template_kwargs=options)
    ours = tokenizer.apply_chat_template(CHAT, tools=TOOLS, tokenize=False, add_generation_prompt=True, **options)
    assert theirs["prompt"] == ours


def test_generation_tags_leave_what_they_strip():
    assert template_for_llama_cpp("a {%- generation -%} b {% endgeneration %} c") == "a {#- -#} b {# #} c"


@pytest.mark.parametrize("quantize", list(QUANTIZATIONS))
@torch.no_grad()
def test_each_precision_is_read_back_within_its_rounding(quantize, tokenizer, tmp_path):
    model = model_of("moe", tokenizer, moe_intermediate_size=40)  # 40 is no multiple of q8_0's blocks of 32
    path = written(tmp_path / "tiny.gguf", model, tokenizer, quantize)
    state, tolerance = model.state_dict(), {"f32": 0, "f16": 1e-3, "bf16": 8e-3, "q8_0": 1e-2}[quantize]
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    names = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "blk.1.attn_q.weight": state["model.layers.1.self_attn.q_proj.weight"],
        "blk.1.ffn_gate_inp.weight": state["model.layers.1.mlp.gate.weight"],
        "blk.0.ffn_down_exps.weight": torch.stack(
            [state[f"model.layers.0.mlp.experts.{number}.down_proj.weight"] for number in range(4)]
        ),
    }
    assert "output.weight" not in tensors, "a tied head is the embedding"
    for name, expected in names.items():
        read = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type).reshape(expected.shape)
        assert np.abs(read - expected.numpy()).max() <= tolerance * expected.abs().max().item(), name
    assert tensors["blk.1.ffn_gate_inp.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert read_gguf_header(path).is_float32 == (quantize == "f32")
    with running_engine("llama.cpp", path, "tiny", Load(1, 64, 1)) as engine:
        assert LlamaCpp(engine).greedy([5, 6, 7], 4)[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_moe": True, "norm_topk_prob": False}, "norm_topk_prob is off: llama.cpp always makes"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, "factor": 4.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}, "rope_type is llama3"),
    ],
)  # fmt: skip
def test_what_llama_cpp_would_compute_differently_is_refused(fields, message, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=message):
        written(tmp_path / "tiny.gguf", model_of("dense", tokenizer, **fields), tokenizer)


def test_a_tokenizer_that_cuts_otherwise_is_refused(tokenizer, tmp_path):
    other = AutoTokenizer.from_pretrained(ROOT / "model" / "tokenizer")
    state = json.loads(other.backend_tokenizer.to_str())
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+|[^\s\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert json.loads(other.backend_tokenizer.to_str()) != state
    with pytest.raises(ValueError, match="does not cut text by Qwen2's pattern"):
        written(tmp_path / "tiny.gguf", model_of("dense", other), other)


def test_values_beyond_float16_are_refused(tokenizer, tmp_path):
    model = model_of("dense", tokenizer)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match="ffn_up.weight holds values beyond float16"):
        written(tmp_path / "tiny.gguf", model, tokenizer, "f16")


def test_other_files_are_named(tmp_path):
    path = tmp_path / "x.gguf"
    for content in (b"", b"GGUF", b"not a model" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="x.gguf: not a GGUF file"):
            read_gguf_header(path)
