"""Sliding windows: every token counts once, with enough before it; and documents by language."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from dataset.lm_dataset import MixtureDataset, collate_rows
from dataset.token_bytes import token_byte_lengths
from eval.bpb import LossSums, evaluate_bpb, evaluate_bpb_by, languages_of_documents
from eval.windows import SlidingWindows
from tests.model.helpers import tiny_model
from trainer.results import save_model

TEXTS = ["The lighthouse keeper counts the boats every morning. " * 12, "米拉住在红磨坊镇。" * 30, "Short.", "灯塔"]


@pytest.fixture(scope="module")
def data(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("windows") / "val.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    return MixtureDataset(str(path), tokenizer, 64, say=None)


def totals(model, rows, tokenizer, batch_size=3):
    loader = DataLoader(rows, batch_size=batch_size, collate_fn=collate_rows)
    return evaluate_bpb(model, loader, None, token_byte_lengths(tokenizer))


@given(window=st.integers(2, 80), share=st.floats(0.01, 1))
def test_every_token_counts_once_and_has_enough_before_it(data, window, share):
    stride = min(window - 1, max(1, int(window * share)))
    rows = SlidingWindows(data, window, stride)
    counted, of_document = 0, 0
    for row in range(len(rows)):
        item = rows[row]
        places = (item["labels"] != -100).nonzero().flatten().tolist()
        is_first = row in rows.first_rows
        of_document = 0 if is_first else of_document
        assert len(item["input_ids"]) <= window
        assert places == list(range(places[0], places[-1] + 1)) if places else True
        if not is_first:
            assert places[0] == window - stride
        counted += len(places)
    assert counted == sum(data.units.lengths[data.chosen] - 1)


@torch.no_grad()
def test_sums_are_those_of_a_loop_by_hand_with_transformers(data, tokenizer, tmp_path):
    model = tiny_model(vocab_size=len(tokenizer), initializer_range=0.2)
    save_model(model, tokenizer, tmp_path / "m")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    window, stride, nats, tokens = 48, 16, 0.0, 0
    for start, length in zip(data.units.starts[data.chosen], data.units.lengths[data.chosen], strict=True):
        ids = torch.from_numpy(data.units.tokens[start : start + length].astype("int64"))
        for target in range(1, length):
            # The first row that reaches the target, counted from the document's start.
            row = max(0, -(-(target + 1 - window) // stride))
            logits = theirs(ids[None, row * stride : target]).logits[0, -1]
            nats -= logits.log_softmax(-1)[ids[target]].item()
            tokens += 1
    sums = totals(model, SlidingWindows(data, window, stride), tokenizer)
    assert sums.tokens == tokens and sums.nats == pytest.approx(nats, rel=1e-5)
    assert totals(model, SlidingWindows(data, window, stride), tokenizer, 1).nats == pytest.approx(nats, rel=1e-5)


def test_a_window_over_all_is_the_plain_evaluation(data, tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=1024)
    longest = int(data.units.lengths.max())
    sliding = totals(model, SlidingWindows(data, longest, longest - 1), tokenizer)
    packed = totals(model, MixtureDataset(data.units.sources[0].path, tokenizer, longest, say=None), tokenizer)
    assert sliding.tokens == packed.tokens and sliding.bytes == packed.bytes
    assert sliding.nats == pytest.approx(packed.nats, rel=1e-5)


def test_a_stride_out_of_range_is_named(data):
    for stride in (0, 64):
        with pytest.raises(ValueError, match=f"the stride {stride} must lie in 1 to 63: a row's first token"):
            SlidingWindows(data, 64, stride)


def test_languages_of_packed_documents_add_up_to_the_whole(data, tokenizer):
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=1024)
    token_bytes = token_byte_lengths(tokenizer)
    loader = DataLoader(data, batch_size=2, collate_fn=collate_rows)
    parts = evaluate_bpb_by(languages_of_documents(tokenizer), model, loader, None, token_bytes)
    assert {number for number, sums in parts.items() if sums.tokens} == {0, 1}  # English and Chinese
    whole = evaluate_bpb(model, loader, None, token_bytes)
    total = sum(parts.values(), LossSums())
    assert total.nats == pytest.approx(whole.nats) and (total.tokens, total.bytes) == (whole.tokens, whole.bytes)
    rows = SlidingWindows(data, 1000, 999)  # documents uncut, after the token that parts them
    loader = DataLoader(rows, batch_size=2, collate_fn=collate_rows)
    parts = evaluate_bpb_by(languages_of_documents(tokenizer), model.eval(), loader, None, token_bytes)
    assert parts[1].bytes == sum(len(text.encode()) for text in TEXTS[1::2])
