"""Which checkpoint is continued: damaged, foreign, wrong or dangerous ones are passed over, and the run says why."""

import pickle
import random
import re
import zipfile

import pytest
import torch

from tests.trainer.helpers import RandomRows, logged, tiny_model, tiny_run, train, weights_of
from trainer.checkpoint import load_verified, save_atomically
from trainer.resume import resume

FLAGS = ["--max_steps", "6", "--save_interval", "2"]


@pytest.fixture
def interrupted(tmp_path):
    """A run of six steps that stopped after four: checkpoints of steps 2 and 4; and the whole run's losses."""
    rows = RandomRows(24)
    expected = train(tiny_run(tmp_path / "straight", rows, flags=FLAGS))
    cut = tiny_run(tmp_path / "cut", rows, flags=FLAGS)
    cut.stop_asked = lambda: cut.progress.step >= 4
    train(cut)
    return rows, expected, tmp_path / "cut"


def again(rows, folder):
    return tiny_run(folder, rows, model=tiny_model(seed=9), flags=[*FLAGS, "--from_resume", "1"])


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1000])


def empty(path):
    path.write_bytes(b"")


def foreign(path):
    torch.save({"model": {"weight": torch.zeros(3)}, "step": 4, "epoch": 1}, path)


def a_list(path):
    torch.save([1, 2, 3], path)


def a_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "hello")


def a_pickle(path):
    path.write_bytes(pickle.dumps({"step": 4}))


class Evil:
    def __reduce__(self):
        return (print, ("this code ran",))


def code(path):
    save_atomically(load_verified(path) | {"evil": Evil()}, path)


def other_shape(path):
    state = load_verified(path)
    state["model"]["model.norm.weight"] = torch.ones(33)
    save_atomically(state, path)


def other_moments(path):
    state = load_verified(path)
    state["optimizers"][0]["state"][0]["exp_avg"] = torch.zeros(3, 3)
    save_atomically(state, path)


def other_groups(path):
    state = load_verified(path)
    first = state["optimizers"][0]["param_groups"][0]
    state["optimizers"][0]["param_groups"].append(first | {"params": [first["params"].pop()]})
    save_atomically(state, path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncated, "not a whole checkpoint file"),
        (empty, "not a whole checkpoint file"),
        (foreign, "not a checkpoint of this pipeline"),
        (a_list, "not a checkpoint of this pipeline"),
        (a_zip, "not a checkpoint that torch can read"),
        (a_pickle, "not a whole checkpoint file"),
        (code, "holds more than tensors and plain values"),
        (other_shape, r"the model has another shape \(model.norm.weight: \(32,\) here, \(33,\) there\)"),
        (other_moments, "the optimizer's state has another shape"),
        (other_groups, "its optimizer groups the parameters otherwise"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_newest_is_passed_over(interrupted, damage, reason, capsys):
    rows, expected, folder = interrupted
    damage(folder / "run" / "step-00000004.pth")
    run = again(rows, folder)
    notes = resume(run)
    assert any(note.startswith("passed over ") and "step-00000004.pth" in note for note in notes)
    assert re.search(reason, "\n".join(notes))
    assert notes[-1].endswith("step-00000002.pth, step 2")
    assert "this code ran" not in capsys.readouterr().out
    assert train(again(rows, folder)) == expected, "the resumed run ends as the undisturbed one"


def test_all_bad_is_an_error_and_nothing_is_touched(interrupted):
    rows, _, folder = interrupted
    for path in (folder / "run").glob("step-*.pth"):
        empty(path)
    with pytest.raises(ValueError, match="no usable checkpoint: .*00004.pth.*00002.pth.*--from_resume 0"):
        resume(again(rows, folder))
    assert (folder / "run" / "metrics.jsonl").stat().st_size


def test_every_flipped_bit_is_noticed_or_harmless(interrupted):
    rows, _, folder = interrupted
    path = folder / "run" / "step-00000004.pth"
    whole, draw = path.read_bytes(), random.Random(0)
    whole_run = again(rows, folder)
    resume(whole_run)
    fallen_back = 0
    for _ in range(20):
        place, flipped = draw.randrange(len(whole)), bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        run = again(rows, folder)
        notes = resume(run)
        if run.progress.step == 4:  # the bit lies in padding
            assert all(torch.equal(tensor, weights_of(run)[name]) for name, tensor in weights_of(whole_run).items())
        else:
            assert run.progress.step == 2 and "passed over" in notes[0]
            fallen_back += 1
    assert fallen_back >= 10


def test_a_checkpoint_of_before_with_fewer_fields_is_read(interrupted):
    rows, expected, folder = interrupted
    path = folder / "run" / "step-00000004.pth"
    state = load_verified(path)
    del state["progress"]["best_step"], state["progress"]["best_validation_loss"], state["settings"]["run"]["tracker"]
    state["progress"]["of_another_version"] = 1
    save_atomically(state, path)
    assert train(again(rows, folder)) == expected


def test_harmless_changes_are_told(interrupted):
    rows, _, folder = interrupted
    flags = [*FLAGS, "--from_resume", "1", "--log_interval", "3", "--keep_last", "4"]
    notes = resume(tiny_run(folder, rows, flags=flags))
    assert "--log_interval is 3, was 1" in notes and "--keep_last is 4, was 2" in notes
    assert not any("from_resume" in note for note in notes)


def test_an_evaluation_cut_short_is_made_again_and_one_that_was_made_is_not_twice(tmp_path):
    rows, flags = RandomRows(24), [*FLAGS, "--eval_interval", "2"]
    validation = {"text": RandomRows(8, seed=3)}
    straight = tiny_run(tmp_path / "straight", rows, validation=validation, flags=flags)
    train(straight)
    expected = logged(straight, "validation_loss")
    assert list(expected) == [2, 4]
    for lines_lost in (0, 1):  # killed after the evaluation of step 4, or before it was written
        folder = tmp_path / str(lines_lost)
        cut = tiny_run(folder, rows, validation=validation, flags=flags)
        cut.total_steps = 6
        cut.stop_asked = lambda run=cut: run.progress.step >= 5
        train(cut)
        (folder / "run" / "step-00000005.pth").unlink()
        path = folder / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        place = next(index for index, line in enumerate(lines) if '"step": 4' in line and "validation_loss" in line)
        path.write_text("".join(lines[: place + 1 - lines_lost]))
        run = tiny_run(folder, rows, validation=validation, flags=[*flags, "--from_resume", "1"])
        assert train(run) == logged(straight, "loss")
        records = [line for line in path.read_text().splitlines() if "validation_loss" in line]
        assert logged(run, "validation_loss") == expected and len(records) == 2


def test_best_is_the_checkpoint_of_the_lowest_validation_loss(tmp_path):
    rows, validation = RandomRows(48), {"text": RandomRows(8, seed=3)}
    flags = ["--eval_interval", "2", "--learning_rate", "0.05", "--schedule", "constant", "--save_interval", "5"]
    run = tiny_run(tmp_path, rows, validation=validation, flags=flags)
    train(run)
    losses = logged(run, "validation_loss")
    best = min(losses, key=losses.get)
    assert best < max(losses), "random labels: training longer makes it worse"
    state = load_verified(tmp_path / "run" / "best.pth")
    assert state["step"] == run.progress.best_step == best
    assert state["progress"]["best_validation_loss"] == losses[best]
