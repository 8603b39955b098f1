"""Packed data sets: what every row holds, what is counted, what is refused."""

import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataset.chat import plain_encoder, render_messages
from dataset.lm_dataset import (
    IGNORED_LABEL,
    MixtureDataset,
    PretrainDataset,
    SFTDataset,
    collate_rows,
)
from dataset.order import EMPTY_ROW, SkipBatchSampler
from tests.dataset.helpers import chat, pieces_of, write
from tests.model.helpers import tiny_model

TEXTS = ["A short one.", "第二个文件。", "A third, longer document that is cut at the end of a row. " * 4, "x"]


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=30), st.integers(4, 80), st.booleans())
def test_every_pretraining_token_is_a_target_once(tokenizer, tmp_path_factory, texts, window, packing):
    path = write(tmp_path_factory.mktemp("data") / "a.jsonl", [{"text": text} for text in texts])
    data = PretrainDataset(path, tokenizer, window, packing=packing, say=None)
    targets, starts = [], []
    for index in range(len(data)):
        row = data[index]
        assert len(row["input_ids"]) == window if packing else (row["document_ids"] == 1).all()
        assert (row["labels"] != IGNORED_LABEL).any()
        for tokens, labels in pieces_of(row):
            targets += labels[1:]
            starts.append(tokens[0])
    encode = plain_encoder(tokenizer).encode
    expected = [token for text in texts for token in [*encode(text).ids, tokenizer.pad_token_id]]
    assert targets == expected
    if packing:
        fill = [int((data[index]["document_ids"] > 0).sum()) for index in range(len(data))]
        assert all(size == window for size in fill[:-1])
    summary = data.summary
    assert summary.supervised_tokens == len(expected) and summary.documents == len(texts)
    assert summary.tokens == len(expected) + len(starts)
    assert summary.bytes == sum(len(text.encode()) for text in texts)
    assert summary.rows == len(data)


def test_pretraining_rows_over_ranks_and_epochs_hold_every_token_once(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": text + str(number)} for number in range(20) for text in TEXTS])
    data = PretrainDataset(path, tokenizer, 32, say=None)
    everything = sorted(label for index in range(len(data)) for label in data[index]["labels"].tolist())
    for world_size, batch_size in ((1, 4), (3, 2)):
        seen = []
        for rank in range(world_size):
            for rows in SkipBatchSampler(len(data), batch_size, rank, world_size, seed=1, epoch=2):
                batch = collate_rows([data[row] for row in rows])
                seen += batch["labels"].flatten().tolist()
        labels = [label for label in seen if label != IGNORED_LABEL]
        assert sorted(labels) == [label for label in everything if label != IGNORED_LABEL]


def test_conversations_are_as_the_renderer_says(tokenizer, tmp_path):
    rows = [chat(f"question {number} " * (number % 5), f"answer {number}") for number in range(50)]
    data = SFTDataset(write(tmp_path / "a.jsonl", rows), tokenizer, 96, say=None)
    expected = []
    for row in rows:
        rendered = render_messages(row["conversations"], tokenizer)
        labels = [
            token if trained else IGNORED_LABEL
            for token, trained in zip(rendered.input_ids, rendered.assistant_mask, strict=True)
        ]
        expected.append((rendered.input_ids, labels))
    found = [piece for index in range(len(data)) for piece in pieces_of(data[index])]
    assert sorted(found) == sorted(expected)
    assert data.summary.conversations == 50 and data.summary.fill_rate > 0.9
    assert data.summary.supervised_tokens == sum(label >= 0 for _, labels in expected for label in labels)


def test_control_like_text_in_documents_stays_text(tokenizer, tmp_path):
    data = PretrainDataset(write(tmp_path / "a.jsonl", [{"text": "<|im_end|><think>"}]), tokenizer, 32, say=None)
    tokens = pieces_of(data[0])[0][0]
    assert tokens[0] == tokens[-1] == tokenizer.pad_token_id
    assert not set(tokens[1:-1]) & set(tokenizer.get_added_vocab().values())
    assert tokenizer.decode(tokens[1:-1]) == "<|im_end|><think>"


def test_mixture_of_documents_and_conversations(tokenizer, tmp_path):
    rows = [{"text": TEXTS[2]}, chat("Hello?", "Yes."), {"text": "Short."}, chat("你好", "你好！")]
    path = write(tmp_path / "a.jsonl", rows)
    options = {"tokenizer": tokenizer, "max_length": 40, "say": None}
    assistant, every = MixtureDataset(path, **options), MixtureDataset(path, **options, loss_on="all")
    assert assistant.summary.documents == every.summary.documents == 2
    assert assistant.summary.conversations == 2
    assert every.summary.supervised_tokens > assistant.summary.supervised_tokens
    for data in (assistant, every):
        for index in range(len(data)):
            for tokens, labels in pieces_of(data[index]):
                is_chat = tokens[0] == tokenizer.bos_token_id
                everything = all(label >= 0 for label in labels[1:])
                assert everything == (not is_chat or data is every)
    text, talk = (MixtureDataset(path, **options, only=kind) for kind in ("document", "conversation"))
    assert (text.summary.documents, text.summary.conversations) == (2, 0)
    assert (talk.summary.documents, talk.summary.conversations) == (0, 2)
    assert len(MixtureDataset(write(tmp_path / "b.jsonl", rows[:1]), **options, only="conversation")) == 0


def test_weights_are_token_shares(tokenizer, tmp_path):
    first = write(tmp_path / "a.jsonl", [{"text": f"letter {number}"} for number in range(200)])
    second = write(tmp_path / "b.jsonl", [{"text": f"字母 {number}"} for number in range(100)])

    def mixture(*weights):
        sources = [f"{path}:{weight}" for path, weight in zip((first, second), weights, strict=True)]
        return MixtureDataset(sources, tokenizer, 64, say=None)

    data = mixture(0.25, 0.75)
    texts = [tokenizer.decode(tokens) for index in range(len(data)) for tokens, _ in pieces_of(data[index])]
    tokens = [sum(len(tokenizer(text).input_ids) for text in texts if word in text) for word in ("letter", "字母")]
    assert abs(tokens[1] / sum(tokens) - 0.75) < 0.02
    passes = data.summary.passes
    assert passes[str(first)] < 1 < passes[str(second)]
    counts = {text: texts.count(text) for text in set(texts)}
    assert max(count for text, count in counts.items() if "letter" in text) == 1
    chinese = {count for text, count in counts.items() if "字母" in text}
    assert max(chinese) - min(chinese) <= 1 and len([text for text in counts if "字母" in text]) == 100
    assert data.summary.fingerprint == mixture(0.25, 0.75).summary.fingerprint
    assert data.summary.fingerprint != mixture(0.5, 0.5).summary.fingerprint


def test_long_conversations_are_shortened_or_counted(tokenizer, tmp_path):
    turns = [message for number in range(9) for message in chat(f"question {number}", "yes")["conversations"]]
    rows = [{"conversations": turns}, chat("why? " * 60, "no"), chat("ok?", "yes " * 60), chat("fine?", "yes")]
    data = SFTDataset(write(tmp_path / "a.jsonl", rows), tokenizer, 24, say=None)
    assert data.summary.shortened == 2
    assert data.summary.skipped == {"longer than the window: no answer fits behind its prompt": 1}
    assert data.summary.conversations == 3
    assert all((data[index]["labels"] >= 0).any() for index in range(len(data)))
    with pytest.raises(ValueError, match="a.jsonl: no usable row; 1 longer than the window: no answer fits"):
        SFTDataset(write(tmp_path / "a.jsonl", rows[1:2]), tokenizer, 24, say=None)


def test_only_oversize_answers_still_train(tokenizer, tmp_path):
    rows = [chat("ok?", "yes " * 100)] * 5
    data = SFTDataset(write(tmp_path / "a.jsonl", rows), tokenizer, 16, say=None)
    assert len(data) == 5 and data.summary.fill_rate == 1.0


def test_train_on_last(tokenizer, tmp_path):
    row = {"conversations": chat("a?", "first")["conversations"] + chat("b?", "second")["conversations"]}
    data = SFTDataset(write(tmp_path / "a.jsonl", [row]), tokenizer, 64, train_on="last", say=None)
    labels = data[0]["labels"]
    assert tokenizer.decode(labels[labels >= 0]) == "second<|im_end|>"


def test_empty_row_is_fully_masked(tokenizer, tmp_path):
    data = SFTDataset(write(tmp_path / "a.jsonl", [chat("a", "b")]), tokenizer, 32, say=None)
    row = data[EMPTY_ROW]
    assert (row["labels"] == IGNORED_LABEL).all() and not row["document_ids"].any()
    assert (row["input_ids"] == tokenizer.pad_token_id).all()
    for index in (1, -2):
        with pytest.raises(IndexError, match=f"row {index} of 1"):
            data[index]
    batch = collate_rows([data[0], row])
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()} == {
        name: (torch.Size([2, 32]), torch.int64) for name in ("input_ids", "labels", "document_ids")
    }


def test_bad_rows_are_counted_and_named(tokenizer, tmp_path):
    rows = [chat("a", "b")] * 60
    bad = [
        {"text": "x"},
        {"conversations": [{"role": "user", "content": "x"}]},
        {"conversations": [{"role": "user"}, 3]},
    ]
    path = write(tmp_path / "a.jsonl", rows + bad)
    said = []
    data = SFTDataset(path, tokenizer, 32, say=said.append)
    assert (data.summary.rows_read, data.summary.bad_rows, data.summary.conversations) == (63, 3, 60)
    assert f"{path}:61: a {{'text'}} row is a document; here conversations are expected" in said[0]
    assert f"{path}:62: the conversation has no assistant message" in said[0]
    assert f"{path}:63: message 2: is a number" in said[0]
    with pytest.raises(ValueError, match="a.jsonl:61: .*strict: no bad row"):
        SFTDataset(path, tokenizer, 32, strict=True, say=None)
    with pytest.raises(ValueError, match="4 of 5 rows cannot be used"):
        SFTDataset(write(tmp_path / "b.jsonl", bad + [{"x": 1}] + rows[:1]), tokenizer, 32, say=None)


def test_pretraining_takes_chat_rows_and_text_files(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    chats = write(tmp_path / "b.jsonl", [{"question": "2+2?", "answer": "4"}])
    data = PretrainDataset([tmp_path / "a.txt", chats], tokenizer, 32, say=None)
    assert [tokenizer.decode(tokens[1:-1]) for tokens, _ in pieces_of(data[0])] == ["one\n\ntwo\n", "2+2?\n4"]
    assert PretrainDataset(tmp_path / "a.txt", tokenizer, 32, text_as="paragraph", say=None).summary.documents == 2


def test_held_out_parts_are_disjoint(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": f"row {number}"} for number in range(300)])
    whole, train, validation = (
        PretrainDataset(path, tokenizer, 32, part=part, say=None).summary.documents
        for part in ("all", "train", "validation")
    )
    assert whole == 300 == train + validation and 5 <= validation <= 30
    single = write(tmp_path / "b.jsonl", [chat("a", "b")])
    assert len(SFTDataset(single, tokenizer, 32, part="validation", say=None)) == 0


def test_fingerprint_follows_content_and_window(tokenizer, tmp_path):
    def fingerprint(texts, window=32):
        path = write(tmp_path / "a.jsonl", [{"text": text} for text in texts])
        return PretrainDataset(path, tokenizer, window, say=None).summary.fingerprint

    first = fingerprint(TEXTS)
    assert first == fingerprint(TEXTS)
    assert len({first, fingerprint(TEXTS[::-1]), fingerprint(TEXTS[:-1]), fingerprint(TEXTS, 33)}) == 4


def test_storage_and_workers(tokenizer, tmp_path):
    data = PretrainDataset(write(tmp_path / "a.jsonl", [{"text": TEXTS[2]}]), tokenizer, 32, say=None)
    assert data.tokens.dtype == np.uint16
    again = pickle.loads(pickle.dumps(data))
    assert all(torch.equal(data[0][name], again[0][name]) for name in data[0])
    assert json.loads(json.dumps(data.summary.to_dict()))["rows"] == len(data)


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"loss_on": "user"}, "loss_on='user' must be"),
        ({"train_on": "first"}, "train_on='first' must be"),
        ({"max_length": 3}, "max_length 3 is too short"),
        ({"part": "test"}, "part='test' must be"),
        ({"only": "chat"}, "only='chat' must be"),
    ],
)
def test_unknown_options(tokenizer, tmp_path, options, problem):
    path = write(tmp_path / "a.jsonl", [chat("a", "b")])
    with pytest.raises(ValueError, match=problem):
        MixtureDataset(path, tokenizer, **{"max_length": 32, "say": None, **options})


@given(
    st.lists(st.sampled_from(TEXTS), min_size=1, max_size=20),
    st.integers(4, 60),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 12),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_token_once_over_an_epoch_whoever_runs_it(
    tokenizer, tmp_path_factory, texts, window, batch, ranks, stop, ranks_after, batch_after, packing
):
    """For any rows, window, batch, world size and stop point; the run goes on with other ranks and batches."""
    path = write(tmp_path_factory.mktemp("data") / "a.jsonl", [{"text": text} for text in texts])
    data = PretrainDataset(path, tokenizer, window, packing=packing, say=None)

    def run(skip, batch_size, world_size, steps=None):
        consumed, labels = 0, []
        for rank in range(world_size):
            sampler = SkipBatchSampler(len(data), batch_size, rank, world_size, 5, 2, skip, lengths=data.group_lengths)
            for rows in list(sampler)[:steps]:
                labels += collate_rows([data[row] for row in rows])["labels"].flatten().tolist()
                consumed += sum(row != EMPTY_ROW for row in rows)
        return consumed, labels

    consumed, before = run(0, batch, ranks, stop)
    _, after = run(consumed, batch_after, ranks_after)
    encode = plain_encoder(tokenizer).encode
    expected = sorted(token for text in texts for token in [*encode(text).ids, tokenizer.pad_token_id])
    assert sorted(label for label in before + after if label != IGNORED_LABEL) == expected


SIZES = st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 3))


@given(st.lists(SIZES, min_size=1, max_size=12), st.integers(4, 40))
def test_no_chat_row_is_without_labels_whatever_the_sizes(tokenizer, tmp_path_factory, sizes, window):
    """One row, nothing but oversize input, anything between: rows are whole and train something, or are counted."""
    rows = [
        {"messages": [message for _ in range(turns) for message in (
            {"role": "user", "content": "why " * question}, {"role": "assistant", "content": "so " * answer})]}
        for question, answer, turns in sizes
    ]  # fmt: skip
    path = write(tmp_path_factory.mktemp("data") / "a.jsonl", rows)
    try:
        data = SFTDataset(path, tokenizer, window, say=None)
    except ValueError as error:
        assert "no usable row" in str(error) and f"{len(sizes):,} longer than the window" in str(error)
        return
    for index in range(len(data)):
        for _, labels in pieces_of(data[index]):
            assert any(label != IGNORED_LABEL for label in labels)
    assert data.summary.conversations + sum(data.summary.skipped.values()) == len(sizes)


def test_without_packing_rows_are_as_long_as_their_piece(tokenizer, tmp_path):
    rows = [{"text": "word " * number} for number in range(1, 60)]
    path = write(tmp_path / "a.jsonl", rows)
    packed, alone = (PretrainDataset(path, tokenizer, 48, packing=packing, say=None) for packing in (True, False))
    assert packed.group_lengths is None and packed.summary.supervised_tokens == alone.summary.supervised_tokens
    sampler = SkipBatchSampler(len(alone), 4, lengths=alone.group_lengths)
    batches = [collate_rows([alone[index] for index in rows]) for rows in sampler]
    slots = sum(batch["input_ids"].numel() for batch in batches)
    assert alone.summary.tokens <= slots < len(alone) * 48
    for batch in batches:
        padding = batch["document_ids"] == 0
        assert (batch["labels"][padding] == IGNORED_LABEL).all() and (batch["document_ids"] <= 1).all()


@pytest.mark.parametrize("use_moe", [False, True], ids=["dense", "moe"])
def test_packed_losses_are_those_of_the_same_pieces_alone(tokenizer, tmp_path, use_moe):
    """Per-token losses over a data set, packed against one piece a row, in float32: documents and conversations."""
    rows = [{"text": text * (1 + number % 3)} for number, text in enumerate(TEXTS * 3)]
    rows += [chat(f"question {number} " * (number % 4), f"answer {number}") for number in range(12)]
    path = write(tmp_path / "a.jsonl", rows)
    model = tiny_model(use_moe=use_moe, vocab_size=len(tokenizer)).eval()
    data = MixtureDataset(path, tokenizer, 64, say=None)
    assert data.summary.documents and data.summary.conversations
    count = 0
    for index in range(len(data)):
        row = collate_rows([data[index]])
        with torch.no_grad():
            packed = model(**row, return_token_losses=True).token_losses
        for number in range(1, int(row["document_ids"].max()) + 1):
            place = (row["document_ids"] == number)[0]
            ids, labels = row["input_ids"][:, place], row["labels"][0, place]
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, :-1]
            trained = labels[1:] != IGNORED_LABEL
            alone = torch.nn.functional.cross_entropy(logits[trained], labels[1:][trained], reduction="none")
            found = packed[0, place][1:][trained]
            assert torch.allclose(found, alone, atol=1e-5), (index, number)
            count += len(alone)
    assert count == data.summary.supervised_tokens


def test_duplicates_are_counted_and_dropped_on_request(tokenizer, tmp_path):
    rows = [{"text": f"row {number % 30}"} for number in range(100)]
    path = write(tmp_path / "a.jsonl", rows)
    data = PretrainDataset(path, tokenizer, 32, dedup=True, say=None)
    assert (data.summary.documents, data.summary.duplicates) == (30, 70)
    assert PretrainDataset(path, tokenizer, 32, say=None).summary.duplicates == 0
    across = PretrainDataset([path, write(tmp_path / "b.jsonl", rows[:40])], tokenizer, 32, dedup=True, say=None)
    assert (across.summary.documents, across.summary.duplicates) == (30, 110)
    named = write(tmp_path / "c.jsonl", [chat("a", "b") | {"id": 1}, {"id": 2} | chat("a", "b"), chat("a", "c")])
    assert SFTDataset(named, tokenizer, 32, dedup=True, say=None).summary.duplicates == 1, "an id is no content"
