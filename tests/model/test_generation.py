"""The contracts of transformers' `generate`: every way of asking gives what its own Qwen3 and Qwen3-MoE give."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from model.model_minimind import MiniMindForCausalLM
from tests.model.helpers import VOCABULARY, random_tokens, tiny_model


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "moe"])
def pair(request, tmp_path_factory):
    """Ours and transformers' own, from one folder."""
    folder = tmp_path_factory.mktemp("generation")
    tiny_model(use_moe=request.param, eos_token_id=2, pad_token_id=0).save_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(theirs).__name__.startswith("Qwen3")
    return MiniMindForCausalLM.from_pretrained(folder).eval(), theirs


class NeverEven(LogitsProcessor):
    """Forbids even tokens."""

    def __call__(self, input_ids, scores):
        scores[:, ::2] = float("-inf")
        return scores


class AfterFive(StoppingCriteria):
    """Stops once five tokens are new."""

    def __call__(self, input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 15)


WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "diverse answers": {"do_sample": True, "num_return_sequences": 3},
    "several beams": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "logits processor": {"logits_processor": LogitsProcessorList([NeverEven()])},
    "stopping criterion": {"stopping_criteria": StoppingCriteriaList([AfterFive()])},
    "many ends": {"eos_token_id": list(range(2, VOCABULARY, 9))},
    "min and max": {"min_new_tokens": 8, "max_new_tokens": 8},
    "forced words": {"suppress_tokens": [5, 6, 7], "begin_suppress_tokens": [8]},
}


def generated(model, way, rows=2, **options):
    torch.manual_seed(0)
    tokens = random_tokens(1 if "prompt_lookup_num_tokens" in WAYS[way] else rows, 10)
    asked = {"max_new_tokens": 20, "do_sample": False} | WAYS[way] | options
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **asked)


@pytest.mark.parametrize("way", list(WAYS))
def test_every_way_of_asking_gives_the_same_tokens(pair, way):
    ours, theirs = pair
    assert torch.equal(generated(ours, way), generated(theirs, way))


def test_left_padding_changes_nothing(pair):
    ours, theirs = pair
    tokens, mask = random_tokens(3, 12), torch.ones(3, 12, dtype=torch.long)
    for row, empty in enumerate((0, 3, 7)):
        tokens[row, :empty], mask[row, :empty] = 0, 0
    batch = ours.generate(tokens, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assert torch.equal(batch, theirs.generate(tokens, attention_mask=mask, max_new_tokens=10, do_sample=False))
    for row, empty in enumerate((0, 3, 7)):
        alone = ours.generate(tokens[row : row + 1, empty:], max_new_tokens=10, do_sample=False)
        kept = batch[row, 12:][: alone.shape[1] - (12 - empty)]
        assert torch.equal(kept, alone[0, 12 - empty :])


def test_scores_and_hidden_states_come_along(pair):
    results = []
    for model in pair:
        result = generated(
            model, "greedy", return_dict_in_generate=True, output_scores=True, output_logits=True,
            output_hidden_states=True,
        )  # fmt: skip
        assert isinstance(result.past_key_values, DynamicCache)
        results.append(result)
    ours, theirs = results
    assert torch.equal(ours.sequences, theirs.sequences)
    for mine, other in zip(ours.logits + ours.scores, theirs.logits + theirs.scores, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
    for mine, other in zip(ours.hidden_states[0], theirs.hidden_states[0], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)


def test_a_cache_goes_on_where_it_was_left(pair):
    ours, _ = pair
    tokens = random_tokens(2, 10)
    whole = ours.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None)
    for cache in (DynamicCache(config=ours.config), StaticCache(config=ours.config, max_cache_len=64)):
        first = ours.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None, past_key_values=cache)
        second = ours.generate(first, max_new_tokens=6, do_sample=False, eos_token_id=None, past_key_values=cache)
        assert torch.equal(second, whole)


def test_position_ids_are_taken_as_given(pair):
    ours, theirs = pair
    tokens, positions = random_tokens(2, 6), torch.tensor([[0, 1, 2, 10, 11, 12]] * 2)
    with torch.no_grad():
        mine, other = (model(input_ids=tokens, position_ids=positions).logits for model in pair)
        plain = ours(input_ids=tokens).logits
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)
    assert (mine - plain).abs().max() > 1e-3


class Collected(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streaming_and_assisted_generation(pair):
    ours, _ = pair
    tokens, streamer = random_tokens(1, 10), Collected()
    expected = ours.generate(tokens, max_new_tokens=15, do_sample=False, streamer=streamer)
    assert streamer.tokens == expected[0].tolist() and streamer.ended
    assistant = tiny_model(seed=1, num_hidden_layers=1)
    assisted = ours.generate(tokens, max_new_tokens=15, do_sample=False, assistant_model=assistant)
    assert torch.equal(assisted, expected)


def test_stop_strings(tokenizer):
    model = tiny_model(vocab_size=len(tokenizer))
    ids = tokenizer("Hello there", return_tensors="pt")["input_ids"]
    free = model.generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] :]
    stop = tokenizer.decode(free[3:5])
    stopped = model.generate(ids, max_new_tokens=30, do_sample=False, stop_strings=[stop], tokenizer=tokenizer)
    text = tokenizer.decode(stopped[0, ids.shape[1] :])
    assert stop in text and len(stopped[0]) - ids.shape[1] <= 5
