"""kill -9 at any instant: the resumed run ends with the same losses, weights and optimizer state, bit for bit.

Whole stages run in forked children of this warm process, from their flags to the model folder. Together the
configurations hold every pair of the values that matter.
"""

import dataclasses
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time

import pytest
import torch

import scripts.mid_train
import trainer.train_full_sft
import trainer.train_pretrain
from tests.e2e.test_readme import write_user_files
from trainer import checkpoint
from trainer.checkpoint import CheckpointFolder, load_verified
from trainer.stage import run_stage

STAGES = {
    "pretrain": trainer.train_pretrain.STAGE,
    "mid_train": scripts.mid_train.STAGE,
    "full_sft": trainer.train_full_sft.STAGE,
}
DATA = {
    "pretrain": ["my_text.jsonl"],
    "mid_train": ["my_text.jsonl:0.5", "my_chats.jsonl:0.5"],
    "full_sft": ["my_chats.jsonl"],
}
STEPS = 12


@dataclasses.dataclass(frozen=True)
class Case:
    stage: str
    dtype: str
    use_moe: int
    optimizer: str
    accumulation: int
    dropout: float
    streaming: int

    def __str__(self):
        parts = ["moe" if self.use_moe else "dense", f"x{self.accumulation}", f"dropout{self.dropout}"]
        parts += ["streaming"] * self.streaming
        return "-".join([self.stage, self.dtype, self.optimizer, *parts])


CASES = [
    Case("pretrain", "float32", 1, "muon", 3, 0.1, 1),
    Case("pretrain", "bfloat16", 0, "adamw", 1, 0.1, 0),
    Case("pretrain", "float16", 1, "adamw", 3, 0.0, 0),
    Case("mid_train", "float32", 0, "muon", 1, 0.0, 0),
    Case("mid_train", "bfloat16", 1, "adamw", 1, 0.1, 1),
    Case("mid_train", "float16", 0, "muon", 3, 0.1, 0),
    Case("full_sft", "float32", 0, "adamw", 1, 0.0, 1),
    Case("full_sft", "bfloat16", 1, "muon", 3, 0.0, 0),
    Case("full_sft", "float16", 0, "muon", 1, 0.1, 1),
]
# Two kills for each case while it trains, by seed; two cases more, and five inside a save: twenty-five in all.
KILLS = [(case, seed) for case in CASES for seed in range(2)] + [(CASES[5], 2), (CASES[8], 2)]
# The first kills of these run in every suite: each stage and dtype, both optimizers, dense and MoE.
NOT_SLOW = (CASES[0], CASES[4], CASES[8])
MOMENTS_OF_A_SAVE = ("half written", "not yet renamed", "renamed", "before old ones go", "before best")


def test_the_cases_hold_every_pair_of_values():
    fields = [field.name for field in dataclasses.fields(Case)]
    values = {name: {getattr(case, name) for case in CASES} for name in fields}
    assert all(len(found) > 1 for found in values.values())
    for first, second in itertools.combinations(fields, 2):
        pairs = {(getattr(case, first), getattr(case, second)) for case in CASES}
        assert pairs == set(itertools.product(values[first], values[second])), (first, second)


def arguments(case, folder, data_folder, *more):
    words = ["--data_path", *(str(data_folder / name) for name in DATA[case.stage])]
    words += f"--from_weight none --preset nano{'-moe' if case.use_moe else ''} --use_moe {case.use_moe}".split()
    words += "--hidden_size 32 --num_hidden_layers 2 --batch_size 2 --max_seq_len 32 --device cpu".split()
    words += ["--num_experts", "4"] if case.use_moe else []
    words += f"--dtype {case.dtype} --optimizer {case.optimizer} --accumulation_steps {case.accumulation}".split()
    words += f"--dropout {case.dropout} --streaming {case.streaming} --max_steps {STEPS}".split()
    words += "--save_interval 2 --eval_interval 3 --eval_iters 1 --log_interval 1 --learning_rate 0.01".split()
    words += ["--save_dir", str(folder / "out"), "--checkpoint_dir", str(folder / "checkpoints")]
    return [*words, "--cache_dir", str(data_folder / "cache"), *map(str, more)]


def start(case, folder, data_folder, *more, before=None):
    """The stage in a child process; `before` runs there first."""
    child = multiprocessing.get_context("fork").Process(
        target=_child, args=(STAGES[case.stage], arguments(case, folder, data_folder, *more), folder, before)
    )
    child.start()
    return child


def _child(stage, words, folder, before):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "printed.txt", "a") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    torch.set_num_threads(1)
    sys.stdout = open(1, "w", closefd=False)
    if before is not None:
        before()
    run_stage(stage, words)


def finish(case, folder, data_folder, *more):
    child = start(case, folder, data_folder, *more)
    child.join(120)
    assert child.exitcode == 0, (folder / "printed.txt").read_text()[-3000:]


def result_of(folder):
    """Losses and evaluations by step, the bytes of the model's weights, and everything in the last checkpoint."""
    # A run that was killed before its first checkpoint starts again, and its folder is moved aside.
    (run_folder,) = [path for path in (folder / "checkpoints").iterdir() if "." not in path.name]
    losses, evaluations = {}, {}
    for line in (run_folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            assert record["step"] not in losses, "a step twice in metrics.jsonl"
            losses[record["step"]] = (record["loss"], record["gradient_norm"], record["tokens"])
        elif "train_loss" in record:
            assert record["step"] not in evaluations, "an evaluation twice in metrics.jsonl"
            evaluations[record["step"]] = {name: value for name, value in record.items() if "_" in name}
    (weights,) = (folder / "out").glob("*/model.safetensors")
    state = load_verified(CheckpointFolder(run_folder).find_newest()[0])
    best = load_verified(run_folder / "best.pth")["step"]
    return losses, evaluations, weights.read_bytes(), comparable(state), best


def comparable(state):
    """A checkpoint without what may differ: how long it took, and where it stands on the disk."""
    state["progress"].pop("seconds")
    flat = {}

    def visit(name, value):
        if isinstance(value, torch.Tensor):
            flat[name] = (value.dtype, value.shape, value.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key, item in value.items():
                visit(f"{name}/{key}", item)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                visit(f"{name}/{index}", item)
        else:
            flat[name] = value

    for key in ("model", "optimizers", "scaler", "progress", "random", "stream", "expert_loads"):
        visit(key, state[key])
    return flat


def same(first, second):
    for before, after, what in zip(first, second, ("losses", "evaluations", "weights", "state", "best"), strict=True):
        if isinstance(before, dict):
            assert before.keys() == after.keys(), what
            different = [key for key in before if before[key] != after[key]]
            assert not different, f"{what}: {different[:5]}"
        assert before == after, what
    return True


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_user_files(folder)
    return folder


@pytest.fixture(scope="module")
def straight_runs(data_folder, tmp_path_factory):
    """{case: (result, seconds)} of runs that nobody disturbs, made when asked for."""
    runs = {}

    def get(case):
        if case not in runs:
            folder = tmp_path_factory.mktemp("straight")
            finish(case, folder, data_folder)
            runs[case] = result_of(folder)
        return runs[case]

    return get


def logged_steps(folder):
    paths = list((folder / "checkpoints").glob("*/metrics.jsonl"))
    return paths[0].read_text().count('"loss"') if paths else 0


@pytest.mark.parametrize(
    ("case", "seed"),
    [
        pytest.param(case, seed, marks=[] if case in NOT_SLOW and seed == 0 else pytest.mark.slow)
        for case, seed in KILLS
    ],
    ids=str,
)
def test_killed_and_resumed_is_bit_identical(case, seed, data_folder, straight_runs, tmp_path):
    draw = random.Random(f"{case}-{seed}")
    step, delay = draw.randrange(1, STEPS), draw.random() * 0.05
    child = start(case, tmp_path, data_folder)
    while child.is_alive() and logged_steps(tmp_path) < step:
        time.sleep(0.002)
    time.sleep(delay)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    finish(case, tmp_path, data_folder, "--from_resume", 1)
    assert same(straight_runs(case), result_of(tmp_path))


def die_in_a_save(moment, number):
    """Make this process kill itself at that moment of its save with that number."""
    count = itertools.count(1)
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    if moment == "half written":
        write = torch.save

        def half(content, file):
            if next(count) < number:
                return write(content, file)
            write(content, file)
            file.truncate(file.tell() // 2)
            die()

        checkpoint.torch.save = half
    elif moment in ("not yet renamed", "renamed"):
        rename = os.replace

        def replace(source, target):
            is_due = str(target).endswith(".pth") and "step-" in str(target) and next(count) >= number
            if is_due and moment == "not yet renamed":
                die()
            rename(source, target)
            if is_due:
                die()

        checkpoint.os.replace = replace
    else:
        name = "steps" if moment == "before old ones go" else "_link_best"
        method = getattr(CheckpointFolder, name)

        def patched(self, *words):
            if next(count) >= number and self.writer.thread is not None:
                die()
            return method(self, *words)

        setattr(CheckpointFolder, name, patched)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "moment"), list(enumerate(MOMENTS_OF_A_SAVE)), ids=str)
def test_killed_inside_a_save(number, moment, data_folder, straight_runs, tmp_path):
    case = CASES[number]
    child = start(case, tmp_path, data_folder, before=lambda: die_in_a_save(moment, 2 + number % 3))
    child.join(120)
    assert child.exitcode == -signal.SIGKILL, (tmp_path / "printed.txt").read_text()[-2000:]
    assert 0 < logged_steps(tmp_path) < STEPS
    finish(case, tmp_path, data_folder, "--from_resume", 1)
    assert same(straight_runs(case), result_of(tmp_path))
    assert not list((tmp_path / "checkpoints").glob("*/.*.writing"))
