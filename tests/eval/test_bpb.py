"""Sums of losses: against a loop by hand, against transformers' Qwen3, and bytes against the text's own."""

import json
import math

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from dataset.lm_dataset import MixtureDataset, collate_rows
from dataset.order import SkipBatchSampler
from dataset.token_bytes import token_byte_lengths
from eval.bpb import LossSums, evaluate_bpb
from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from tests.trainer.helpers import run_ranks
from trainer.distributed import all_reduce_sum

TEXTS = ["The cat sat on the mat.", "米拉住在山谷里。", "naïve façade 🙂 42", "x"]


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = MiniMindConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        zero_init_output=False, initializer_range=0.3,
    )  # fmt: skip
    return MiniMindForCausalLM(config)


def packed_row(documents, length=64, control=None):
    """One row of several documents; `control` ends each, as in the training data."""
    row = {
        "input_ids": torch.zeros(length, dtype=torch.long),
        "labels": torch.full((length,), -100),
        "document_ids": torch.zeros(length, dtype=torch.long),
    }
    position = 0
    for number, ids in enumerate(documents, start=1):
        ids = torch.tensor(ids + ([] if control is None else [control]))
        end = position + len(ids)
        row["input_ids"][position:end] = ids
        row["labels"][position + 1 : end] = ids[1:]
        row["document_ids"][position:end] = number
        position = end
    return row


def test_sums_add_up_and_survive_a_reduction():
    total = LossSums(2.0, 4, 1.0, 8) + LossSums(6.0, 4, 3.0, 8)
    assert total == LossSums(8.0, 8, 4.0, 16)
    assert total.loss == 1.0 and total.perplexity == pytest.approx(math.e)
    assert total.bits_per_byte == pytest.approx(4.0 / 16 / math.log(2))
    two_ranks = total.to_tensor() + total.to_tensor()
    assert LossSums.from_tensor(two_ranks) == total + total
    assert total.to_tensor().dtype == torch.float64


def test_nothing_supervised_is_nan_and_a_hopeless_loss_is_infinite():
    assert math.isnan(LossSums().loss) and math.isnan(LossSums().bits_per_byte) and math.isnan(LossSums().perplexity)
    assert LossSums(1e4, 1).perplexity == math.inf


def by_hand(model, tokenizer, control):
    """One document at a time, one token at a time."""
    lengths = token_byte_lengths(tokenizer)
    sums = LossSums()
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [control]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        for place in range(1, len(ids)):
            nats = -torch.log_softmax(logits[place - 1], dim=-1)[ids[place]].item()
            num_bytes = int(lengths[ids[place]])
            sums = sums + LossSums(nats, 1, nats if num_bytes else 0.0, num_bytes)
    return sums


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_equals_a_loop_by_hand_whatever_the_packing_and_batch(model, tokenizer, batch_size):
    control = tokenizer.eos_token_id
    documents = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    rows = [packed_row(documents[:2], control=control), packed_row(documents[2:], control=control)]
    if batch_size == 4:
        rows = [packed_row([document], control=control) for document in documents]
    batches = [collate_rows(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]
    sums = evaluate_bpb(model, batches, None, token_byte_lengths(tokenizer))
    expected = by_hand(model, tokenizer, control)
    assert (sums.tokens, sums.bytes) == (expected.tokens, expected.bytes)
    assert sums.nats == pytest.approx(expected.nats, rel=1e-5)
    assert sums.bits_per_byte == pytest.approx(expected.bits_per_byte, abs=1e-4)
    # The ends of turns are predicted too, but their nats are not the text's.
    assert sums.text_nats < sums.nats


def test_equals_transformers_qwen3(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    qwen = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(qwen).__name__ == "Qwen3ForCausalLM"
    control = tokenizer.eos_token_id
    documents = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    batch = collate_rows([packed_row(documents, length=96, control=control)])
    sums = evaluate_bpb(model, [batch], None, token_byte_lengths(tokenizer))
    assert sums.bits_per_byte == pytest.approx(by_hand(qwen, tokenizer, control).bits_per_byte, abs=1e-4)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A file of documents that fit a window of 64, and an odd number of rows of them."""
    rows = [{"text": f"{text} {number}"} for number in range(13) for text in TEXTS]
    path = tmp_path_factory.mktemp("texts") / "val.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_is_unchanged_by_packing(model, tokenizer, texts):
    found = []
    for window, batch_size in ((64, 3), (200, 2), (512, 1)):
        rows = MixtureDataset(str(texts), tokenizer, window, say=None)
        loader = DataLoader(rows, batch_size=batch_size, collate_fn=collate_rows)
        found.append(evaluate_bpb(model, loader, None, token_byte_lengths(tokenizer)))
    assert len({(sums.tokens, sums.bytes) for sums in found}) == 1
    for sums in found[1:]:
        assert sums.bits_per_byte == pytest.approx(found[0].bits_per_byte, abs=1e-5)


def of_one_rank(world, model, tokenizer, texts, folder):
    rows = MixtureDataset(str(texts), tokenizer, 64, say=None)
    sampler = SkipBatchSampler(len(rows), batch_size=2, rank=world.rank, world_size=world.size, seed=1)
    loader = DataLoader(rows, batch_sampler=sampler, collate_fn=collate_rows)
    sums = evaluate_bpb(model, loader, None, token_byte_lengths(tokenizer))
    total = LossSums.from_tensor(all_reduce_sum(sums.to_tensor()))
    found = total.to_dict() | {"rows": len(rows), "own_tokens": sums.tokens}
    (folder / f"{world.size}-{world.rank}.json").write_text(json.dumps(found))


def test_is_unchanged_by_the_number_of_ranks(model, tokenizer, texts, tmp_path):
    for ranks in (1, 2, 3):
        run_ranks(of_one_rank, tmp_path, model, tokenizer, texts, tmp_path, ranks=ranks)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    alone = found.pop("1-0")
    assert len(found) == 5 and alone["rows"] % 6, "the rows must not divide evenly"
    for sums in found.values():
        assert (sums["tokens"], sums["bytes"]) == (alone["tokens"], alone["bytes"]) and sums["own_tokens"] < sums[
            "tokens"
        ]
        assert sums["bits_per_byte"] == pytest.approx(alone["bits_per_byte"], abs=1e-6)


def test_takes_so_many_batches_and_leaves_the_model_as_it_was(model, tokenizer):
    batch = collate_rows([packed_row([[40, 41, 42]])])
    drawn = []

    def loader():
        for index in range(5):
            drawn.append(index)
            yield batch

    model.train()
    sums = evaluate_bpb(model, loader(), 2, token_byte_lengths(tokenizer))
    assert drawn == [0, 1] and sums.tokens == 4
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_restores_the_mode_after_an_error(model, tokenizer):
    model.train()
    with pytest.raises(ValueError, match="needs labels"):
        evaluate_bpb(model, [{"input_ids": torch.ones(1, 4, dtype=torch.long)}], None, token_byte_lengths(tokenizer))
    assert model.training
