"""Every entry: by path from a foreign folder and as a module, with --help in groups; stages also on two ranks."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_readme import ROLLOUTS, TINY_RUN, TINY_SHAPE, write_user_files

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("trainer/train_*.py", "scripts/[a-z]*.py", "eval/eval_*.py", "eval/report.py")
    for path in ROOT.glob(pattern)
)
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
BIN = Path(sys.executable).parent


def run(words, folder, expected=0):
    done = subprocess.run(words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    assert done.returncode == expected, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("entry", ENTRIES)
def test_help_by_path_and_as_a_module(entry, tmp_path):
    by_path = run([sys.executable, str(ROOT / entry), "--help"], tmp_path)
    as_module = run([sys.executable, "-m", entry.removesuffix(".py").replace("/", "."), "--help"], ROOT)
    usage = re.compile(r"usage: \S+")
    assert usage.sub("", by_path).split() == usage.sub("", as_module).split()
    groups = [line for line in by_path.splitlines() if re.fullmatch(r"[a-z ]+:", line) and line != "options:"]
    assert groups, "no groups in --help"
    assert "(default: " in by_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.xdist_group("torchrun")
def test_all_stages_on_two_ranks_from_a_foreign_folder(tmp_path):
    write_user_files(tmp_path)
    with socket.socket() as free:  # not the default port, which another test's torchrun may hold at the same time
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", str(port)]
    folders = ["--save_dir", str(tmp_path / "out"), "--checkpoint_dir", str(tmp_path / "checkpoints")]
    folders += ["--cache_dir", str(tmp_path / "cache")]
    tiny = TINY_RUN.replace(" --preset nano", "").split()
    stages = {
        "trainer/train_pretrain.py": ["--data_path", "my_text.jsonl", "--preset", "nano", *TINY_SHAPE.split()],
        "scripts/mid_train.py": ["--data_path", "my_text.jsonl:0.5", "my_chats.jsonl:0.5"],
        "trainer/train_full_sft.py": ["--data_path", "my_chats.jsonl"],
        "trainer/train_lora.py": ["--data_path", "my_chats.jsonl"],
        "trainer/train_dpo.py": ["--data_path", "my_pairs.jsonl"],
        "trainer/train_distillation.py": ["--data_path", "my_chats.jsonl"],
        "trainer/train_grpo.py": ["--data_path", "my_prompts.jsonl", *ROLLOUTS.split()],
        "trainer/train_ppo.py": ["--data_path", "my_prompts.jsonl", *ROLLOUTS.split()],
        "trainer/train_agent.py": ["--data_path", "my_tasks.jsonl", *ROLLOUTS.split()],
    }
    for script, words in stages.items():
        printed = run([*torchrun, str(ROOT / script), *folders, *tiny, *words], tmp_path)
        assert printed.count("saved ") == 1, "exactly one rank speaks"
        assert "x 2 ranks" in printed or "rollouts for step 1" in printed
    names = ("pretrain", "mid_train", "full_sft", "dpo", "distillation", "grpo", "ppo", "agent")
    for name in (f"{stage}_32" for stage in names):
        assert (tmp_path / "out" / name / "model.safetensors").is_file()
        assert (tmp_path / "out" / name / "README.md").read_text().startswith("---")
    assert (tmp_path / "out" / "lora_32" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_a_run_killed_by_a_signal_is_saved_and_goes_on(tmp_path):
    write_user_files(tmp_path)
    words = [
        sys.executable, str(ROOT / "trainer/train_pretrain.py"), "--data_path", "my_text.jsonl", "--preset", "nano",
        *TINY_SHAPE.split(), "--batch_size", "2", "--max_seq_len", "64", "--max_steps", "4000", "--log_interval", "1",
        "--dtype", "float32", "--eval_iters", "1", "--save_dir", str(tmp_path / "out"),
        "--checkpoint_dir", str(tmp_path / "checkpoints"),
    ]  # fmt: skip
    process = subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 20/"):
            process.terminate()
            break
    rest = process.stdout.read()
    assert process.wait(60) == 128 + 15
    assert "saved; go on with the same command and --from_resume 1" in rest
    stopped = int(re.search(r"stopped at step (\d+)", rest)[1])
    assert (tmp_path / "checkpoints/pretrain_32" / f"step-{stopped:08d}.pth").is_file()
    process = subprocess.Popen(
        [*words, "--from_resume", "1"], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    first = next(line for line in process.stdout if re.match(r"step \d+/4000 \| loss", line))
    process.terminate()
    process.communicate()
    assert first.startswith(f"step {stopped + 1}/")
