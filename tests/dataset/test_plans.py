"""Kept selections: mapped when nothing changed, made again when anything did, never half there."""

import json

import numpy as np
import pytest

from dataset import plans
from dataset.lm_dataset import MixtureDataset, PretrainDataset


@pytest.fixture(autouse=True)
def worth_keeping(monkeypatch):
    monkeypatch.setattr(plans, "LEAST_UNITS", 10)


@pytest.fixture
def path(tmp_path):
    rows = [{"text": f"Row {number} says " + "words " * (number % 40)} for number in range(80)]
    rows += [{"question": f"What is {number}?", "answer": "A number."} for number in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "a.jsonl")


def plans_in(folder):
    return sorted(path.name for path in folder.glob("plan-*"))


def same(first, second):
    assert first.summary == second.summary and len(first) == len(second)
    assert (np.asarray(first.chosen) == np.asarray(second.chosen)).all()
    for index in range(len(first)):
        for name, tensor in first[index].items():
            assert (tensor == second[index][name]).all(), name
    return True


@pytest.mark.parametrize("options", [{"part": "train"}, {"part": "validation"}, {"dedup": True, "only": "document"}])
def test_the_next_start_has_the_same_rows_without_packing(tokenizer, tmp_path, path, monkeypatch, options):
    options |= {"cache_dir": tmp_path / "cache", "say": None}
    memory = MixtureDataset(path, tokenizer, 32, **(options | {"cache_dir": None}))
    first = MixtureDataset(path, tokenizer, 32, **options)
    monkeypatch.setattr(MixtureDataset, "pack", None)  # whoever packs again fails
    second = MixtureDataset(path, tokenizer, 32, **options)
    assert same(memory, first) and same(first, second)
    assert isinstance(second.plan.piece_starts, np.memmap) and len(plans_in(tmp_path / "cache")) == 1


def test_whatever_changes_the_rows_changes_the_name(tokenizer, tmp_path, path):
    cache = tmp_path / "cache"
    common = {"cache_dir": cache, "say": None}
    for number, options in enumerate(
        (
            {},
            {"max_length": 48},
            {"part": "train"},
            {"part": "validation"},
            {"packing": False},
            {"loss_on": "all"},
            {"dedup": True},
            {"only": "document"},
            {"seed": 1},
        ),
        start=1,
    ):
        MixtureDataset(path, tokenizer, **({"max_length": 32} | common | options))
        assert len(plans_in(cache)) == number, options
    MixtureDataset(f"{path}:0.5", tokenizer, 32, **common)
    PretrainDataset(path, tokenizer, 32, **common)
    assert len(plans_in(cache)) == 11
    with open(path, "a") as file:
        file.write('{"text": "one more"}\n')
    PretrainDataset(path, tokenizer, 32, **common)
    assert len(plans_in(cache)) == 12


@pytest.mark.parametrize("name", ["summary.json", "chosen.npy", "row_pieces.npy"])
def test_a_damaged_one_is_made_again(tokenizer, tmp_path, path, name):
    options = {"cache_dir": tmp_path / "cache", "say": None}
    first = PretrainDataset(path, tokenizer, 32, **options)
    (folder,) = (tmp_path / "cache").glob("plan-*")
    (folder / name).write_bytes(b"{")
    assert same(first, PretrainDataset(path, tokenizer, 32, **options))
    assert (folder / name).stat().st_size > 1 and not list((tmp_path / "cache").glob(".plan*"))


def test_a_full_disk_is_one_message(tokenizer, tmp_path, path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(ValueError, match="plan-.*No space left on device.*--cache_dir"):
        PretrainDataset(path, tokenizer, 32, cache_dir=tmp_path / "cache", say=None)
    assert not list((tmp_path / "cache").glob("*plan*"))


def test_small_data_is_packed_each_time(tokenizer, tmp_path, path, monkeypatch):
    monkeypatch.setattr(plans, "LEAST_UNITS", 1000)
    PretrainDataset(path, tokenizer, 32, cache_dir=tmp_path / "cache", say=None)
    assert plans_in(tmp_path / "cache") == []
