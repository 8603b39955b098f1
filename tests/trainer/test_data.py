"""What each stage reads by itself."""

import pytest

from tests.dataset.helpers import chat, pieces_of, write
from trainer.config import DataArguments
from trainer.data import build_sft_data


def test_the_embedded_conversations_alone_are_mixed_by_themselves(tokenizer, tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", [chat(f"{number}?", "Yes.") for number in range(400)])
    monkeypatch.setattr("trainer.data.ensure_builtin_corpus", lambda folder: {"sft.train": path, "sft.val": path})

    def with_empty_thinking(**flags):
        arguments = DataArguments(max_seq_len=128, cache_dir=str(tmp_path / "cache"), **flags)
        rows, _ = build_sft_data(arguments, tokenizer, 0, None)
        conversations = [tokenizer.decode(ids) for index in range(len(rows)) for ids, _ in pieces_of(rows[index])]
        return sum("<think>" in text for text in conversations) / len(conversations)

    assert with_empty_thinking() == pytest.approx(0.2, abs=0.08)  # a standard deviation is 0.02
    assert with_empty_thinking(thinking_mix=[1, 0, 0]) == 0
    assert with_empty_thinking(data_path=[str(path)]) == 0
    assert with_empty_thinking(data_path=[str(path)], thinking_mix=[0, 0, 1]) == 1
