"""Checkpoints: atomic, verified, and never anything but tensors and plain values."""

import pickle
import random
import shutil
import threading

import numpy as np
import pytest
import torch

from trainer.checkpoint import (
    BackgroundWriter,
    CheckpointFolder,
    capture_rng,
    load_verified,
    map_tensors,
    restore_rng,
    save_atomically,
    size_in_bytes,
)


def state(step):
    return {"model": {"weight": torch.arange(1000.0) + step}, "step": step, "settings": {"name": "x", "value": None}}


def test_random_state_survives_the_file(tmp_path):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    np.random.normal()  # leaves a cached second value behind
    save_atomically(capture_rng(torch.device("cpu")), tmp_path / "rng.pth")
    expected = (random.random(), np.random.normal(), np.random.rand(), torch.rand(3).tolist())
    restore_rng(load_verified(tmp_path / "rng.pth"), torch.device("cpu"))
    assert (random.random(), np.random.normal(), np.random.rand(), torch.rand(3).tolist()) == expected


def test_the_newest_files_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path, keep_last=2)
    for step in (5, 10, 100, 15):
        folder.save(state(step), step)
    folder.writer.wait()
    assert [path.name for path in folder.steps()] == ["step-00000100.pth", "step-00000015.pth"]
    assert load_verified(folder.find_newest()[0])["step"] == 100


def test_a_flipped_bit_is_noticed_and_the_older_file_used(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(state(1), 1)
    folder.save(state(2), 2)
    folder.writer.wait()
    good = folder.path_of(2).read_bytes()
    generator = random.Random(0)
    for _ in range(20):
        place = generator.randrange(len(good))
        damaged = bytearray(good)
        damaged[place] ^= 1 << generator.randrange(8)
        (tmp_path / "step-00000002.pth").write_bytes(damaged)
        path, passed_over = folder.find_newest()
        loaded = load_verified(path)
        if path.name == "step-00000002.pth":  # the bit lies in padding: nothing that counts may differ
            assert torch.equal(loaded["model"]["weight"], state(2)["model"]["weight"])
        else:
            assert loaded["step"] == 1
            assert "step-00000002.pth" in passed_over[0]


@pytest.mark.parametrize("keep", [0, 1, 100, 2000])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "step-00000001.pth"
    save_atomically(state(1), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="not a whole checkpoint file"):
        load_verified(path)


def test_a_file_with_code_in_it_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    torch.save({"model": {}, "step": 1, "evil": Evil()}, tmp_path / "step-00000001.pth")
    with pytest.raises(ValueError, match="more than tensors and plain values"):
        load_verified(tmp_path / "step-00000001.pth")
    assert not (tmp_path / "harm").exists()
    (tmp_path / "step-00000002.pth").write_bytes(pickle.dumps({"model": {}}))
    with pytest.raises(ValueError, match="no usable checkpoint"):
        CheckpointFolder(tmp_path).find_newest(lambda state: None if "step" in state else "not a checkpoint")


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "step-00000001.pth"
    save_atomically(state(1), path)

    def fail(*_arguments, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(ValueError, match="No space left on device"):
        save_atomically(state(2), path)
    assert load_verified(path)["step"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001.pth"]


def test_an_error_of_the_background_surfaces_in_the_next_call(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    folder.save(state(1), 1)
    folder.writer.thread.join()
    with pytest.raises(ValueError, match="step-00000001.pth: could not be written .*No space left"):
        folder.writer.check()
    folder.writer.check()  # said once


def test_work_in_the_background_keeps_its_order(tmp_path):
    done, gate = [], threading.Event()
    writer = BackgroundWriter()
    writer.start(lambda: (gate.wait(10), done.append("first")))
    writer.start(lambda: done.append("second"))
    assert done == []
    gate.set()
    writer.wait()
    assert done == ["first", "second"]


def test_too_little_room_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(ValueError, match="no room for the next checkpoint: 0.0 MiB are needed and 0.0 MiB are free"):
        CheckpointFolder(tmp_path).save(state(1), 1)
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_stays_shared_and_counts_once(tmp_path):
    tied = torch.arange(1000.0)
    content = {"head": tied, "embedding": tied.detach(), "other": torch.zeros(10)}
    assert size_in_bytes(content) == 4040
    copies = map_tensors(content, torch.clone)
    assert copies["head"] is copies["embedding"] and copies["head"].data_ptr() != tied.data_ptr()
    save_atomically(copies, tmp_path / "a.pth")
    assert (tmp_path / "a.pth").stat().st_size < 8000


def test_no_checkpoint_is_none(tmp_path):
    assert CheckpointFolder(tmp_path / "missing").find_newest() is None
