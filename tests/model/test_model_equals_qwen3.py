"""Our model is transformers' Qwen3 / Qwen3-MoE with the same weights: logits, caches, padding, generation, files."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

from model.config import yarn_rope_parameters
from model.model_minimind import MiniMindForCausalLM, load_model
from tests.model.helpers import VOCABULARY, random_tokens, tiny_model

logging.disable_progress_bar()

SHAPES = {
    "dense": {},
    "untied, one key head": {"tie_word_embeddings": False, "num_key_value_heads": 1, "rope_theta": 500.0},
    "wide heads": {"head_dim": 24, "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    "experts": {"use_moe": True},
    "one raw expert": {"use_moe": True, "num_experts_per_tok": 1, "norm_topk_prob": False},
    "three of eight": {"use_moe": True, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "yarn": {"rope_parameters": yarn_rope_parameters(1e4, 4.0, 16), "max_position_embeddings": 64},
}


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, tmp_path_factory):
    """Ours, and transformers' own model opened from the folder that ours saved."""
    ours = tiny_model(seed=len(request.param), **SHAPES[request.param])
    folder = tmp_path_factory.mktemp("model")
    ours.save_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(theirs) is (Qwen3MoeForCausalLM if ours.config.use_moe else Qwen3ForCausalLM)
    return ours, theirs, folder


def left_padded(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, mask = random_tokens(3, length), torch.ones(3, length, dtype=torch.long)
    mask[0, :5], mask[1, :1] = 0, 0
    return tokens, mask


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@torch.no_grad()
def test_logits(pair):
    ours, theirs, _ = pair
    tokens = random_tokens(2, 40)
    assert_close(ours(tokens).logits, theirs(tokens).logits)
    assert_close(ours(tokens, logits_to_keep=3).logits, theirs(tokens).logits[:, -3:])
    many = random_tokens(8, 40)  # more than 256 tokens: the fast path's norms and products
    assert_close(ours(many).logits, theirs(many).logits)


@torch.no_grad()
def test_logits_of_padded_batches(pair):
    ours, theirs, _ = pair
    tokens, mask = left_padded(20)
    for padding in (mask, mask.flip(1)):
        positions = (padding.cumsum(1) - 1).clamp(min=0)
        for position_ids in (None, positions):
            arguments = {"attention_mask": padding, "position_ids": position_ids}
            real = padding.bool()
            assert_close(ours(tokens, **arguments).logits[real], theirs(tokens, **arguments).logits[real])


@torch.no_grad()
def test_logits_with_a_cache(pair):
    ours, theirs, _ = pair
    tokens, mask = left_padded(24)
    whole = theirs(tokens, attention_mask=mask).logits
    cache, logits = DynamicCache(config=ours.config), []
    for start, end in ((0, 10), (10, 11), (11, 18), (18, 24)):
        output = ours(tokens[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        logits.append(output.logits)
    assert cache.get_seq_length() == 24
    assert_close(torch.cat(logits, dim=1)[mask.bool()], whole[mask.bool()])


@torch.no_grad()
def test_greedy_generation(pair):
    ours, theirs, _ = pair
    tokens, mask = left_padded(12)
    arguments = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(tokens, **arguments)
    assert torch.equal(ours.generate(tokens, **arguments), expected)
    assert torch.equal(ours.generate(tokens, **arguments, cache_implementation="static"), expected)


@torch.no_grad()
def test_folders_open_both_ways(pair, tmp_path):
    ours, theirs, folder = pair
    tokens = random_tokens(2, 30)
    expected = ours(tokens).logits
    theirs.save_pretrained(tmp_path)
    for path in (folder, tmp_path):
        assert torch.equal(load_model(str(path)).eval()(tokens).logits, expected)
        assert torch.equal(MiniMindForCausalLM.from_pretrained(path).eval()(tokens).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_models_made_by_transformers_open_as_ours(kind, tmp_path):
    fields = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(1)
    if kind == "dense":
        theirs = Qwen3ForCausalLM(Qwen3Config(**fields))
    else:
        theirs = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**fields, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
        )
    theirs.eval().save_pretrained(tmp_path)
    tokens = random_tokens(2, 30)
    assert_close(load_model(str(tmp_path)).eval()(tokens).logits, theirs(tokens).logits)


@torch.no_grad()
def test_yarn_beyond_the_original_context():
    """Switching scaling on at inference changes the logits, and to exactly what transformers computes."""
    ours = tiny_model(max_position_embeddings=256)
    scaled = tiny_model(rope_parameters=yarn_rope_parameters(1e6, 16.0, 16), max_position_embeddings=256)
    scaled.load_state_dict(ours.state_dict())
    fields = scaled.config.to_hugging_face_dict()
    theirs = Qwen3ForCausalLM(Qwen3Config(**fields)).eval()
    theirs.load_state_dict(ours.state_dict())
    tokens = random_tokens(1, 200)
    assert_close(scaled(tokens).logits, theirs(tokens).logits)
    assert (scaled(tokens).logits - ours(tokens).logits).abs().max() > 1e-3


@torch.no_grad()
def test_beams_and_several_samples_run():
    model, tokens = tiny_model(), random_tokens(2, 6)
    beams = model.generate(tokens, max_new_tokens=5, num_beams=3, do_sample=False, pad_token_id=0)
    torch.manual_seed(0)
    samples = model.generate(tokens, max_new_tokens=5, do_sample=True, num_return_sequences=3, pad_token_id=0)
    assert beams.shape[0] == 2 and samples.shape[0] == 6


def test_labels_alone_give_the_mean_loss_of_qwen3(pair):
    ours, theirs, _ = pair
    tokens = random_tokens(2, 30)
    labels = tokens.clone()
    labels[0, :9] = -100
    torch.testing.assert_close(ours(tokens, labels=labels).loss, theirs(tokens, labels=labels).loss)


@torch.no_grad()
def test_hidden_states_are_those_of_qwen3():
    ours = tiny_model()
    theirs = Qwen3ForCausalLM(Qwen3Config(**ours.config.to_hugging_face_dict())).eval()
    theirs.load_state_dict(ours.state_dict())
    tokens = random_tokens(2, 9)
    pairs = zip(
        ours(tokens, output_hidden_states=True).hidden_states,
        theirs(tokens, output_hidden_states=True).hidden_states,
        strict=True,
    )
    for mine, other in pairs:
        assert_close(mine, other)


def test_attention_weights_are_refused():
    with pytest.raises(ValueError, match="output_attentions"):
        tiny_model()(random_tokens(1, 4), output_attentions=True)


def test_positions_are_right_after_any_construction(tmp_path):
    """Built on the meta device, cast to half precision, moved: the frequencies come from the config each time."""
    ours = tiny_model()
    ours.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = MiniMindForCausalLM(ours.config)
    built = empty.to_empty(device="cpu").eval()
    built.load_state_dict(ours.state_dict())
    built.tie_weights()
    tokens = random_tokens(1, 50)
    assert torch.equal(built(tokens).logits, ours(tokens).logits)
    half = tiny_model().to(torch.bfloat16)
    half(tokens)
    assert half.model.rotary._frequencies.dtype == torch.float32
    assert not dict(ours.named_buffers())


@pytest.mark.parametrize("fault", ["missing", "unexpected", "mismatched"])
def test_files_that_do_not_fit_are_refused(tmp_path, fault):
    from safetensors.torch import load_file, save_file

    tiny_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    if fault == "missing":
        del tensors[name]
    elif fault == "mismatched":
        tensors[name] = tensors[name][:-1].clone()
    else:
        name = "model.layers.2.mlp.up_proj.weight"
        tensors[name] = torch.zeros(3)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name):
        load_model(str(tmp_path))


def test_activation_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model().train()
        if checkpointing:
            model.activation_checkpointing_enable()
        tokens = random_tokens(2, 20)
        model(tokens, labels=tokens).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_zero_output_projections_and_initial_spread():
    from model.config import MiniMindConfig

    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig.from_preset("nano", {"use_moe": True}))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            assert not parameter.any()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
