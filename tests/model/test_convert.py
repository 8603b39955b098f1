"""Name maps: MiniMind's files, transformers' fused experts, and what shapes tell about a bare state dict."""

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from model.config import MiniMindConfig
from model.convert import config_from_state, fuse_experts, split_experts, state_from_minimind, state_to_minimind
from model.model_minimind import MiniMindForCausalLM
from tests.model.helpers import random_tokens, tiny_model


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False}, {"use_moe": True}])
def test_a_minimind_file_becomes_our_model_and_back(fields):
    if fields.get("use_moe"):
        fields = fields | {"num_experts_per_tok": 1, "router_frozen": True}
    ours = tiny_model(**fields)
    half = state_to_minimind(ours.state_dict())
    assert {tensor.dtype for tensor in half.values()} == {torch.float16}
    exact = state_to_minimind(ours.state_dict(), torch.float32)
    file = {"module._orig_mod." + name: tensor for name, tensor in exact.items()}
    file |= {"model.freqs_cos": torch.zeros(8, 4), "model.freqs_sin": torch.zeros(8, 4)}
    state = state_from_minimind(file)
    config = MiniMindConfig(**config_from_state(state))
    for name in (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "use_moe",
    ):
        assert getattr(config, name) == getattr(ours.config, name)
    assert config.tie_word_embeddings == ours.config.tie_word_embeddings
    opened = MiniMindForCausalLM(config).eval()
    opened.load_state_dict(state)
    tokens = random_tokens(2, 20)
    assert torch.equal(opened(tokens).logits, ours(tokens).logits)
    rounded = state_from_minimind(half)
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(rounded[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_file_without_head_takes_the_embedding():
    state = tiny_model().state_dict()
    del state["lm_head.weight"]
    assert torch.equal(state_from_minimind(state)["lm_head.weight"], state["model.embed_tokens.weight"])


def test_other_files_are_refused():
    with pytest.raises(ValueError, match="transformer.wte.*no model.embed_tokens.weight"):
        state_from_minimind({"transformer.wte": torch.zeros(1)})
    state = tiny_model().state_dict()
    del state["model.layers.0.self_attn.q_norm.weight"]
    with pytest.raises(ValueError, match="q_norm"):
        config_from_state(state)


def test_fused_experts_are_those_of_transformers_and_split_exactly():
    ours = tiny_model(use_moe=True)
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**ours.config.to_hugging_face_dict())).eval()
    fused = fuse_experts(ours.state_dict())
    theirs.load_state_dict(fused)  # strict: every name and shape
    tokens = random_tokens(2, 20)
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens).logits, rtol=0, atol=1e-5)
    back = split_experts(fused)
    assert back.keys() == ours.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in ours.state_dict().items())
