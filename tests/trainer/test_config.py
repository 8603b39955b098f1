"""Flags: stage defaults, the YAML file below them, and one clear message for each mistake."""

import subprocess
import sys

import pytest

from trainer.config import (
    ROOT,
    DataArguments,
    ModelArguments,
    OptimizationArguments,
    RunArguments,
    Settings,
    parse_arguments,
)

GROUPS = (ModelArguments, DataArguments, OptimizationArguments, RunArguments)


def parse(*words, defaults=None):
    return Settings(*parse_arguments(*GROUPS, description="test", defaults=defaults, arguments=words))


def test_flags_override_the_file_and_the_file_overrides_the_stage(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("batch_size: 3\nlearning_rate: 1e-4\ndata_path: [a.jsonl, b.jsonl:0.5]\nuse_wandb: true\n")
    settings = parse("--config", str(path), "--batch_size", "7", defaults={"learning_rate": 0.5, "seed": 9})
    assert settings.optimization.batch_size == 7
    assert settings.optimization.learning_rate == 1e-4
    assert settings.optimization.seed == 9
    assert settings.data.data_path == ["a.jsonl", "b.jsonl:0.5"]
    assert settings.run.use_wandb == 1


def test_saved_settings_are_a_config_file(tmp_path):
    import yaml

    settings = parse("--batch_size", "5", "--hidden_size", "64")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings.to_dict()))
    again = parse("--config", str(path))
    again.run.config = None
    assert again == settings


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--batchsize", "3"], "unknown flag --batchsize (did you mean --batch_size?)"),
        (["--batch", "3"], "unknown flag --batch"),
        (["--batch_size", "many"], "--batch_size/--batch-size: invalid int value: 'many'"),
        (["--optimizer", "sgd"], "invalid choice: 'sgd'"),
        (["--use_moe", "2"], "invalid choice"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_a_wrong_flag_is_named(words, expected):
    with pytest.raises(ValueError, match=".") as caught:
        parse(*words)
    assert expected in str(caught.value)


def test_an_unknown_key_of_the_file_is_named(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("bach_size: 3\n")
    with pytest.raises(ValueError, match=r"unknown setting bach_size \(did you mean batch_size\?\)"):
        parse("--config", str(path))


def test_all_problems_are_reported_at_once():
    settings = parse("--batch_size", "0", "--warmup_ratio", "2", "--keep_last", "1", "--learning_rate", "-1")
    with pytest.raises(ValueError, match=".") as caught:
        settings.validate()
    for flag in ("--batch_size 0", "--warmup_ratio 2.0", "--keep_last 1", "--learning_rate -1.0"):
        assert flag in str(caught.value)


def test_entries_start_with_the_same_lines():
    entries = [
        *ROOT.glob("trainer/train_*.py"),
        *ROOT.glob("scripts/[a-z]*.py"),
        *ROOT.glob("eval/eval_*.py"),
        ROOT / "eval/report.py",
    ]
    assert len(entries) >= 7
    heads = set()
    for entry in entries:
        lines = entry.read_text(encoding="utf-8").splitlines()
        start = next(number for number, line in enumerate(lines) if line.startswith("import gc, pathlib, sys"))
        heads.add(tuple(line for line in lines[start : start + 4] if line))
    assert len(heads) == 1, heads


@pytest.mark.parametrize("module", ["trainer.train_pretrain"])
def test_a_users_mistake_is_one_line_and_exit_code_2(module, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", module, "--batch_siz", "3"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.strip().startswith("error: unknown flag --batch_siz")
    assert "Traceback" not in done.stderr
