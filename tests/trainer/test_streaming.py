"""Training on a stream: killed and resumed bit for bit, on other ranks too, through the one loop."""

import json
import threading

import pytest
import torch

from dataset import stream as module
from dataset.lm_dataset import PretrainDataset
from dataset.stream import StreamDataset
from dataset.units import UnitOptions
from tests.trainer.helpers import logged, run_ranks, tiny_model, tiny_run, train
from trainer.engine import steps_of_epoch

WINDOW = 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_TOKENS", 600)
    monkeypatch.setattr(module, "LEAST_ROWS", 4)


@pytest.fixture
def path(tmp_path):
    rows = [{"text": f"Row {number} says {number * number}. " * (1 + number % 4)} for number in range(150)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "a.jsonl")


def streaming_run(folder, path, tokenizer, world=None, flags=()):
    data = StreamDataset(PretrainDataset, path, tokenizer, UnitOptions("document", WINDOW), seed=42, say=None)
    if world is not None:
        data.start(world.rank, world.size)
    flags = ["--streaming", "1", "--max_steps", "9", "--save_interval", "3", *flags]
    return tiny_run(folder, data, world, tiny_model(vocab_size=len(tokenizer)), flags=flags)


@pytest.mark.parametrize("stop", [1, 4, 8])
def test_stopped_and_resumed_is_bit_identical(tmp_path, path, tokenizer, stop):
    straight = streaming_run(tmp_path / "straight", path, tokenizer)
    expected = train(straight)
    assert len(expected) == 9 and straight.progress.row == 36
    first = streaming_run(tmp_path / "cut", path, tokenizer)
    first.stop_asked = lambda: first.progress.step >= stop
    train(first)
    second = streaming_run(tmp_path / "cut", path, tokenizer, flags=["--from_resume", "1"])
    assert train(second) == expected
    for name, tensor in straight.bare_model.state_dict().items():
        assert torch.equal(tensor, second.bare_model.state_dict()[name]), name


def train_on_a_rank(world, folder, path, tokenizer, flags):
    run = streaming_run(folder, path, tokenizer, world, ["--batch_size", "2", *flags])
    train(run)


def test_two_ranks_go_on_as_one_and_one_as_two(tmp_path, path, tokenizer):
    """A run that started on two ranks has two lanes; on one rank it sees the same rows in each step."""
    run_ranks(train_on_a_rank, tmp_path, tmp_path / "two", path, tokenizer, [])
    expected = logged(streaming_run(tmp_path / "two", path, tokenizer), "loss")
    assert len(expected) == 9
    # Stopped after six steps: the checkpoint of step 6 goes on, on one rank.
    (tmp_path / "two" / "run" / "step-00000009.pth").unlink()
    one = streaming_run(tmp_path / "two", path, tokenizer, flags=["--from_resume", "1"])
    losses = train(one)
    assert one.train_data.num_lanes == 2 and one.progress.step == 9
    assert losses.keys() == expected.keys()
    assert all(abs(losses[step] - loss) < 1e-5 for step, loss in expected.items())


def test_changed_files_are_refused(tmp_path, path, tokenizer):
    first = streaming_run(tmp_path / "run", path, tokenizer)
    train(first)
    with open(path, "a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(ValueError, match="cannot resume: the data changed"):
        train(streaming_run(tmp_path / "run", path, tokenizer, flags=["--from_resume", "1"]))


def test_the_reader_stops_with_the_training(tmp_path, path, tokenizer):
    before = threading.active_count()
    run = streaming_run(tmp_path / "run", path, tokenizer)
    steps = steps_of_epoch(run)
    next(steps)
    assert threading.active_count() == before + 1
    steps.close()
    assert threading.active_count() == before


def test_flags_that_do_not_go_together(tmp_path):
    flags = ["--streaming", "1", "--max_steps", "0", "--packing", "0", "--dedup", "1", "--num_workers", "2"]
    with pytest.raises(ValueError) as caught:
        tiny_run(tmp_path, None, flags=flags)
    for words in ("say when to stop with --max_steps", "--packing 0 does", "--dedup 1 does", "--num_workers 2 does"):
        assert words in str(caught.value)
