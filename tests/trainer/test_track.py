"""Metrics: one continuous record on the disk, and the same numbers to a service when asked."""

import json
import sys
import types

import pytest

from trainer.track import Tracker, format_seconds


class FakeService(types.ModuleType):
    """A module with wandb's and SwanLab's interface that remembers what it was told."""

    def __init__(self, name):
        super().__init__(name)
        self.told, self.logged, self.finished = None, [], False
        self.Html = self.Text = lambda text: ("text", text)

    def init(self, **settings):
        self.told = settings
        return types.SimpleNamespace(id="run-7", log=self.log, finish=lambda: setattr(self, "finished", True))

    def log(self, values, step):
        self.logged.append((step, values))


OPTIONS = {"project": "p", "name": "n", "config": {"a": 1}}


@pytest.mark.parametrize(("service", "folder_key"), [("wandb", "dir"), ("swanlab", "log_dir")])
def test_a_service_gets_numbers_and_samples(tmp_path, monkeypatch, service, folder_key):
    module = FakeService(service)
    monkeypatch.setitem(sys.modules, service, module)
    tracker = Tracker(tmp_path / "metrics.jsonl")
    tracker.start(service, mode="cloud", folder=tmp_path, **OPTIONS)
    assert module.told == OPTIONS | {"mode": "online", folder_key: str(tmp_path)}
    tracker.log(3, {"loss": 1.5, "expert_load": [[0.5, 0.5]], "samples": [{"prompt": "Hi", "reply": "Hello"}]})
    tracker.finish()
    assert module.logged == [(3, {"loss": 1.5, "samples/0": ("text", "Hi\n\nHello")})] and module.finished
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["expert_load"] == [[0.5, 0.5]]
    assert tracker.run_id == "run-7"


def test_a_resumed_run_goes_on_with_its_id(tmp_path, monkeypatch):
    module = FakeService("wandb")
    monkeypatch.setitem(sys.modules, "wandb", module)
    tracker = Tracker(tmp_path / "metrics.jsonl")
    tracker.run_id = "run-3"  # from the checkpoint
    tracker.start("wandb", mode="offline", folder=tmp_path, **OPTIONS)
    assert (module.told["id"], module.told["resume"], module.told["mode"]) == ("run-3", "allow", "offline")


def test_a_service_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="--tracker wandb: not installed; pip install wandb"):
        Tracker(tmp_path / "metrics.jsonl").start("wandb", mode="offline", folder=tmp_path, **OPTIONS)


def test_a_service_that_cannot_log_in_is_one_message(tmp_path, monkeypatch):
    module = FakeService("swanlab")
    module.init = lambda **_: (_ for _ in ()).throw(KeyError("no key"))
    monkeypatch.setitem(sys.modules, "swanlab", module)
    with pytest.raises(ValueError, match="--tracker swanlab did not start in mode cloud.*--tracker_mode offline"):
        Tracker(tmp_path / "metrics.jsonl").start("swanlab", mode="cloud", folder=tmp_path, **OPTIONS)


def test_a_silent_rank_writes_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = Tracker(None)
    tracker.start("wandb", mode="offline", folder=tmp_path, **OPTIONS)
    tracker.log(1, {"loss": 1.0})
    tracker.say("hello")
    tracker.cut_back(0)
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_cut_back_keeps_the_training_line_of_the_step_and_nothing_after(tmp_path):
    tracker = Tracker(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        tracker.log(step, {"loss": float(step)})
        tracker.log(step, {"train_loss": float(step)})
        tracker.log(step, {"samples": []})
    with open(tracker.metrics_path, "a") as file:
        file.write('{"step": 1, "half')
    tracker.cut_back(2)
    records = [json.loads(line) for line in tracker.metrics_path.read_text().splitlines()]
    assert [(record["step"], *(set(record) - {"step"})) for record in records] == [
        (1, "loss"),
        (1, "train_loss"),
        (1, "samples"),
        (2, "loss"),
    ]


def test_a_full_disk_is_one_message(tmp_path):
    with pytest.raises(ValueError, match="metrics.jsonl: cannot be written"):
        Tracker(tmp_path / "missing" / "metrics.jsonl").log(1, {})


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (3599, "59m59s"), (7500, "2h05m")])
def test_durations(seconds, text):
    assert format_seconds(seconds) == text
