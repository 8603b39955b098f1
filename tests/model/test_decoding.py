"""The sampler: greedy equals transformers, rows do not depend on their batch, filters and stops do what they say."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from model.decoding import CACHE_STEP, Decoder, GeneratedReply, _Batch, generate_tokens, stream_tokens
from model.sampling import Sampling
from tests.model.helpers import VOCABULARY, random_tokens, tiny_model

STOP = [2, 13, 29, 47]


def some_prompts(count: int = 9) -> list[list[int]]:
    lengths = [(7 * number) % 29 + 1 for number in range(count)]
    return [random_tokens(1, length, seed=number)[0].tolist() for number, length in enumerate(lengths)]


def greedy_by_transformers(model, prompt: list[int], count: int) -> GeneratedReply:
    tokens = torch.tensor([prompt])
    arguments = {"max_new_tokens": count, "do_sample": False, "eos_token_id": STOP, "pad_token_id": 0}
    ids = model.generate(tokens, attention_mask=torch.ones_like(tokens), **arguments)[0, len(prompt) :].tolist()
    return GeneratedReply(ids[:-1], ids[-1]) if ids[-1] in STOP else GeneratedReply(ids)


@pytest.mark.parametrize("fields", [{}, {"use_moe": True}, {"tie_word_embeddings": False, "num_key_value_heads": 4}])
def test_greedy_equals_transformers_generate(fields):
    model, prompts = tiny_model(seed=7, **fields), some_prompts()
    expected = [greedy_by_transformers(model, prompt, 60) for prompt in prompts]
    assert {reply.stop_id is None for reply in expected} == {True, False}  # rows leave the batch at different times
    assert generate_tokens(model, prompts, 60, STOP, batch_size=4) == expected
    assert generate_tokens(Decoder(model), prompts, 60, STOP) == expected
    for prompt, reply in zip(prompts[:3], expected[:3], strict=True):
        assert list(stream_tokens(model, prompt, 60, STOP)) == reply.ids


def test_the_cache_grows_beyond_its_first_size():
    model, prompts = tiny_model(), some_prompts(2)
    count = CACHE_STEP * 2 + 5
    replies = generate_tokens(model, prompts, count, [])
    assert [len(reply.ids) for reply in replies] == [count, count]
    tokens = torch.tensor([prompts[1] + replies[1].ids])
    assert model(tokens).logits[0, len(prompts[1]) - 1 : -1].argmax(-1).tolist() == replies[1].ids


def test_samples_depend_on_seed_and_row_only():
    model, prompts = tiny_model(initializer_range=0.05), some_prompts()
    arguments = {"temperature": 0.9, "top_k": 30, "top_p": 0.9}
    replies = generate_tokens(model, prompts, 30, STOP, **arguments, seed=5)
    assert generate_tokens(model, prompts, 30, STOP, **arguments, seed=5, batch_size=2) == replies
    assert generate_tokens(model, prompts, 30, STOP, **arguments, seed=6) != replies
    assert list(stream_tokens(model, prompts[0], 30, STOP, **arguments, seed=5)) == replies[0].ids
    same = generate_tokens(model, [prompts[0]] * 2, 30, [], **arguments)
    assert same[0] != same[1]  # the same prompt twice draws twice


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.7), (1.0, 12, 0.6)]
)
def test_samples_follow_the_filtered_distribution(temperature, top_k, top_p):
    """Uniforms on a grid give each token its probability times the number of draws, to within one."""
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
    probabilities = (logits[0] / temperature).double().softmax(0)
    order = probabilities.argsort(descending=True)
    kept = order[:top_k] if top_k else order
    share = probabilities[kept] / probabilities[kept].sum()
    kept = kept[: int((share.cumsum(0) < top_p).sum()) + 1]
    expected = torch.zeros(VOCABULARY, dtype=torch.float64)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    draws = 4000
    uniforms = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    chosen = Sampling(temperature, top_k, top_p).choose(logits.expand(draws, -1), uniforms)
    counts = torch.bincount(chosen, minlength=VOCABULARY)
    assert (counts - expected * draws).abs().max() <= 1.01
    assert not counts[expected == 0].any()


def test_top_p_looks_at_all_tokens_when_the_best_are_not_enough(monkeypatch):
    logits = torch.cat((torch.zeros(2, VOCABULARY), torch.eye(1, VOCABULARY) * 50))
    uniforms = torch.tensor([0.01, 0.99, 0.5], dtype=torch.float64)
    expected = Sampling(1.0, 0, 0.95).choose(logits, uniforms)
    monkeypatch.setattr("model.sampling.TOP_P_CANDIDATES", 4)
    chosen = Sampling(1.0, 0, 0.95).choose(logits, uniforms)
    assert torch.equal(chosen, expected) and chosen[2] == 0 and chosen[0] != chosen[1]


def test_uniforms_differ_between_seeds_and_rows():
    draws = {tuple(Sampling(1.0, seed=seed).uniforms(row, 3).tolist()) for seed in range(5) for row in range(5)}
    assert len(draws) == 25


def test_bfloat16_decoding_follows_fp32_while_logits_are_apart():
    model, prompts = tiny_model(), some_prompts()
    exact = generate_tokens(model, prompts, 8, [])
    rounded = generate_tokens(model, prompts, 8, [], dtype=torch.bfloat16)
    for prompt, one, other in zip(prompts, exact, rounded, strict=True):
        for place, (first, second) in enumerate(zip(one.ids, other.ids, strict=True)):
            if first != second:
                logits = model(torch.tensor([prompt + one.ids[:place]])).logits[0, -1]
                assert logits[first] - logits[second] < 0.05 * logits.abs().max()
                break


def test_bfloat16_rounds_where_transformers_rounds():
    """Rounded elsewhere, the logits are 1 to 2 % apart."""
    model, prompt = tiny_model(seed=7, num_hidden_layers=4).bfloat16(), some_prompts()[3]
    theirs = Qwen3ForCausalLM(Qwen3Config(**model.config.to_hugging_face_dict())).bfloat16().eval()
    theirs.load_state_dict(model.state_dict())
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)  # `.bfloat16` has rounded its frequencies
    decoder = Decoder(model)
    with torch.inference_mode():
        for length in range(5, 25, 5):
            mine = _Batch(decoder, [prompt[:length]]).advance()[0].float()
            other = theirs(torch.tensor([prompt[:length]])).logits[0, -1].float()
            assert (mine - other).norm() < 2e-3 * other.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("use_moe", [False, True])
def test_autocast_around_it_changes_nothing(use_moe, dtype):
    model, prompts = tiny_model(use_moe=use_moe), some_prompts(3)
    expected = generate_tokens(model, prompts, 8, STOP)
    with torch.autocast("cpu", dtype):
        assert generate_tokens(model, prompts, 8, STOP) == expected


def test_the_model_is_left_as_it_was():
    model = tiny_model(dropout=0.5).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = generate_tokens(model, some_prompts(2), 5, [])
    assert model.training and first == generate_tokens(model, some_prompts(2), 5, [])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_layer_with_an_adapter_decodes_with_it():
    class Shifted(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden) + hidden @ self.delta.t()

    model = tiny_model()
    adapted = Shifted(32, 64, bias=False)
    adapted.weight = model.model.layers[0].self_attn.q_proj.weight
    adapted.delta = torch.nn.Parameter(torch.randn(64, 32) * 0.2)
    model.model.layers[0].self_attn.q_proj = adapted
    prompt = some_prompts(4)[3]
    assert generate_tokens(model, [prompt], 20, STOP)[0] == greedy_by_transformers(model, prompt, 20)


def test_a_reply_ends_at_the_last_position():
    model = tiny_model(max_position_embeddings=24)
    prompts = [some_prompts()[1][:4], some_prompts()[4][:10] * 2]
    replies = generate_tokens(model, prompts, 50, [])
    assert [len(prompt) + len(reply.ids) for prompt, reply in zip(prompts, replies, strict=True)] == [24, 24]


def test_nothing_asked_gives_nothing():
    assert generate_tokens(tiny_model(), [], 5, STOP) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"prompts": [[]]}, "prompt 0 has 0 tokens"),
        ({"prompts": [[5], [3] * 600]}, "prompt 1 has 600 tokens"),
        ({"prompts": [[VOCABULARY]]}, "outside the vocabulary"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"prompts": [[5]], "max_new_tokens": 3, "stop_ids": STOP} | change
    with pytest.raises(ValueError, match=message):
        generate_tokens(tiny_model(), **arguments)


def test_training_goes_on_after_decoding():
    """What decoding leaves in the model (RoPE frequencies) must be usable with gradients."""
    model = tiny_model()
    generate_tokens(model, some_prompts(2), 3, [])
    tokens = random_tokens(2, 10)
    model.train()(tokens, labels=tokens).loss.backward()
    assert not model.model.rotary._frequencies.is_inference()


@pytest.mark.parametrize("fields", [{}, {"use_moe": True}], ids=["dense", "moe"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_the_models_own_at_the_temperature(fields, temperature):
    model, prompts = tiny_model(seed=7, initializer_range=0.05, **fields), some_prompts()
    replies = generate_tokens(model, prompts, 20, STOP, temperature, batch_size=4, keep_log_probs=True)
    assert {reply.stop_id is None for reply in replies} == {True, False}
    for prompt, reply in zip(prompts, replies, strict=True):
        drawn = [*reply.ids, *([] if reply.stop_id is None else [reply.stop_id])]
        logits = model(torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(drawn)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(reply.log_probs), expected, rtol=1e-5, atol=1e-6)


def test_noise_belongs_to_its_key_whatever_the_batch():
    model, prompts = tiny_model(initializer_range=0.05), some_prompts()
    keys = [f"3:{number}" for number in range(len(prompts))]
    replies = generate_tokens(model, prompts, 20, STOP, 1.0, seed=5, noise_keys=keys)
    backwards = generate_tokens(model, prompts[::-1], 20, STOP, 1.0, seed=5, batch_size=2, noise_keys=keys[::-1])
    assert replies == backwards[::-1]
    assert replies != generate_tokens(model, prompts, 20, STOP, 1.0, seed=5, noise_keys=[f"4:{key}" for key in keys])
