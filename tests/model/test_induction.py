"""A new model looks back: at the token before, and at what followed the last time."""

import pytest
import torch

from model.config import MiniMindConfig
from model.induction import start_with_induction
from model.model_minimind import MiniMindForCausalLM

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 128,
}
LAYOUTS = {
    "grouped": {},
    "one key head": {"num_key_value_heads": 1},
    "a key head each": {"num_key_value_heads": 4},
    "rope 10,000": {"rope_theta": 1e4},
    "heads of 96": {"hidden_size": 384, "head_dim": 96},
    "mixture of experts": {"use_moe": True, "num_experts": 4, "num_experts_per_tok": 2},
    "head of its own": {"tie_word_embeddings": False},
}
LENGTH = 40


def new_model(**overrides) -> MiniMindForCausalLM:
    torch.manual_seed(0)
    return MiniMindForCausalLM(MiniMindConfig(**(SHAPE | overrides))).eval()


def twice(rows: int = 4) -> torch.Tensor:
    """(rows, 2 * LENGTH) different random tokens, and the same again."""
    once = torch.stack([torch.randperm(SHAPE["vocab_size"])[:LENGTH] for _ in range(rows)])
    return torch.cat([once, once], dim=1)


@torch.no_grad()
def attention_of(model: MiniMindForCausalLM, layer: int, ids: torch.Tensor) -> torch.Tensor:
    """(B, heads, T, T) attention probabilities of a layer."""
    seen = {}
    attention = model.model.layers[layer].self_attn
    handle = attention.register_forward_pre_hook(lambda module, inputs: seen.update(hidden=inputs[0]))
    model(input_ids=ids)
    handle.remove()
    positions = torch.arange(ids.shape[1])[None]
    queries, keys, _ = attention.project(seen["hidden"], model.model.rotary(positions, torch.float32))
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    scores = queries @ keys.transpose(-1, -2) / attention.head_dim**0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_heads_attend_to_the_token_before_and_the_one_before_that(layout):
    model = new_model(**LAYOUTS[layout])
    assert start_with_induction(model)
    peaks = attention_of(model, 0, twice()).argmax(-1)
    places = torch.arange(2 * LENGTH)
    for head in (0, 1):
        right = (peaks[:, head, 8:] == (places - head - 1)[8:]).float().mean()
        assert right > 0.9, f"head {head}: {right:.2f}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_second_layer_attends_to_what_followed_the_last_time(layout):
    model = new_model(**LAYOUTS[layout])
    start_with_induction(model)
    weights = attention_of(model, 1, twice())
    again = torch.arange(LENGTH + 2, 2 * LENGTH)
    followed = weights[:, :, again, again - LENGTH + 1]
    assert followed.mean(dim=(0, 2)).max() > 3 / LENGTH, "an even spread gives less than 1 / LENGTH"


@torch.no_grad()
def test_a_repeated_sequence_is_likelier_the_second_time_before_any_training():
    ids = twice(8)

    def gain(model):
        losses = torch.nn.functional.cross_entropy(
            model(input_ids=ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        )
        return (losses[:, : LENGTH - 1].mean() - losses[:, LENGTH + 1 :].mean()).item()

    plain = gain(new_model())
    model = new_model()
    start_with_induction(model)
    assert abs(plain) < 0.02
    assert gain(model) > 0.1


def test_the_draw_follows_the_seed():
    states = []
    for _ in range(2):
        model = new_model()
        start_with_induction(model)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    "overrides", [{"num_hidden_layers": 1}, {"hidden_size": 128}, {"num_attention_heads": 1, "num_key_value_heads": 1}]
)
def test_too_small_a_model_stays_as_it_was(overrides):
    model = new_model(**overrides)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not start_with_induction(model)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_an_untied_head_starts_as_the_embedding_so_that_copies_reach_it():
    model = new_model(tie_word_embeddings=False)
    start_with_induction(model)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
