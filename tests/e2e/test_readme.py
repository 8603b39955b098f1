"""Every command of the README really runs: with tiny settings, from a foreign folder, in the README's order.

A command that is in the README and not run here fails the test, and so does a command that the Chinese README lacks.
"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dataset.tools import tools_json

ROOT = Path(__file__).resolve().parents[2]
SETUP = ("python3 -m venv", "pip install")
MAKE = ("make ",)
SERVES = re.compile(r"serve_openai_api|web_demo")
"""These go on until they are stopped; commands behind them find them running."""

MY_REWARDS = "def brief(reply, row):\n    return 1 / (1 + len(reply.text))\n"
ROLLOUTS = "--rewards my_rewards.py:brief --overlong keep --rollout_prompts 4 --num_generations 2 --max_new_tokens 8"
ROLLOUTS += " --max_seq_len 256"
TINY_RUN = "--max_steps 2 --batch_size 2 --max_seq_len 64 --eval_iters 1 --device cpu --dtype float32 --preset nano"
TINY_SHAPE = " --hidden_size 32 --num_hidden_layers 1"


def readme_commands(name: str) -> list[str]:
    """The lines of the README's bash blocks, in order."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")]


def make_commands(target: str) -> list[str]:
    """The Python commands that a target of the Makefile runs, and those of the targets that it needs."""
    done = subprocess.run(["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.removeprefix(".venv/bin/") for line in done.stdout.splitlines() if line.startswith(".venv/bin/python")]


def is_run_here(command: str) -> bool:
    return not command.startswith(SETUP + MAKE)


def write_user_files(folder: Path) -> None:
    """The files that the README calls my_*, with a few rows each."""
    texts = [
        {"text": f"The number {index} comes after {index - 1}. 数字{index}在{index - 1}之后。" * 3}
        for index in range(60)
    ]
    chats = [
        {"conversations": [{"role": "user", "content": f"Say {index}."}, {"role": "assistant", "content": f"{index}!"}]}
        for index in range(60)
    ]
    questions = [
        {
            "id": "q1",
            "family": "say",
            "language": "en",
            "conversations": [{"role": "user", "content": "Say 3."}],
            "answers": ["3!"],
            "check": "exact",
        }
    ]
    pairs = [{"prompt": f"Say {index}.", "chosen": f"{index}!", "rejected": "No."} for index in range(60)]
    prompts = [
        {"conversations": [{"role": "user", "content": f"Say {index}."}], "gt": [f"{index}"]} for index in range(20)
    ]
    tools = [{"role": "system", "content": "", "tools": tools_json(("calculate",))}]
    tasks = [row | {"conversations": [*tools, *row["conversations"]]} for row in prompts]
    files = {"my_text": texts, "my_chats": chats, "my_questions": questions, "my_pairs": pairs}
    files |= {"my_prompts": prompts, "my_tasks": tasks}
    (folder / "my_rewards.py").write_text(MY_REWARDS)
    for name, rows in files.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "shakespeare.txt").write_text("".join(row["text"] + "\n" for row in texts), encoding="utf-8")
    (folder / "run.yaml").write_text("learning_rate: 0.005\ndata_path: [my_text.jsonl]\n", encoding="utf-8")


def tiny(command: str, folder: Path) -> str:
    """The same command with absolute script paths and flags that make it small; the README's own flags stay."""
    command = re.sub(r"(?<= )(\w+/\w+\.py)", lambda match: str(ROOT / match[1]), command)
    for name in ("my_tokenizer", "shakespeare_tokenizer"):
        command = command.replace(f"out/{name}", str(folder / "out" / name))
    command = command.replace(" model/tokenizer", f" {ROOT}/model/tokenizer")
    out, checkpoints = folder / "out", folder / "checkpoints"
    if "train_tokenizer.py" in command:
        words = "--vocab_size 400 --max_documents 50"
        return f"{command} {words}" + ("" if "--save_dir" in command else f" --save_dir {out}/tokenizer")
    if re.search(r"train_\w+\.py|mid_train\.py", command):
        starts_from_nothing = "train_pretrain.py" in command
        moe = " --num_experts 4" if "nano-moe" in command else ""
        shape = TINY_SHAPE + moe if starts_from_nothing else ""
        run = TINY_RUN if starts_from_nothing and "--preset" not in command else TINY_RUN.replace(" --preset nano", "")
        run = run.replace("--max_steps 2 ", "") if "--max_steps" in command else run
        command = re.sub(r"--max_steps \d+", "--max_steps 2", command)
        run += f" {ROLLOUTS}" if re.search(r"train_(grpo|ppo|agent)\.py", command) else ""
        if re.search(r"train_(dpo|grpo|ppo|agent)\.py", command) and "--data_path" not in command:
            run += " --max_seq_len 1024"  # the embedded pairs and tools are long in a vocabulary of 400
        return f"{command} {run}{shape} --save_dir {out} --checkpoint_dir {checkpoints} --cache_dir {folder}/cache"
    if "prepare_data.py" in command:
        return f"{command} --save_dir {out}/data_card --cache_dir {folder}/cache"
    if re.search(r"eval_(contamination|tokenizer)\.py", command):
        return command
    if "eval_benchmarks.py" in command:
        return f"{command.replace('--limit 200', '--limit 4')} --save_dir {out} --device cpu"
    if "eval_llm.py" in command:
        command = command.replace("out/my_chat_256", f"{out}/my_chat_32")
        return f"{command} --save_dir {out} --max_questions 4 --max_batches 1 --max_new_tokens 4 --device cpu"
    if "report.py" in command:
        return f"{command} --out_dir {out} --max_questions 4 --device cpu"
    if "plan_run.py" in command or command.startswith(("head ", "tail ")):
        return command
    if "benchmark.py" in command:
        words = "--turns 1 --seconds 0 --window 32 --micro_batch 64 --step 128 --new_tokens 2"
        return command.replace("--preset mini", "--preset nano") + f" {words}"
    command = re.sub(r"\bout/(full_sft|from_minimind)_256", f"{out}/\\1_32", command)
    command = command.replace("full_sft_256", "full_sft_32")
    if "chat.py" in command:
        return f"{command} --save_dir {out} --max_new_tokens 4 --device cpu"
    if "convert_model.py" in command:
        return f"{command} --save_dir {out}"
    if SERVES.search(command):
        port = "" if "serve_openai" in command else " --port 0"
        return f"{command}{port} --save_dir {out} --slots 2 --threads 1"
    raise AssertionError(f"the README has a command that this test does not know: {command}")


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    write_user_files(folder)
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("torchrun")
def test_every_command_of_the_readme_runs(workspace):
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }
    commands = [command for command in readme_commands("README.md") if is_run_here(command)]
    assert len(commands) >= 50
    with contextlib.ExitStack() as running:
        run_all(commands, workspace, environment, running)
    for name in (
        "pretrain_32",
        "mid_train_32",
        "full_sft_32",
        "my_base_32",
        "my_chat_32",
        "my_stream_32",
        "my_lora_merged_32",
        "from_minimind_32",
        "shakespeare_32",
        "pretrain_moe_32_moe",
    ):
        assert (workspace / "out" / name / "model.safetensors").is_file(), name
    assert (workspace / "out" / "my_lora_32" / "adapter_model.safetensors").is_file()
    assert (workspace / "out" / "full_sft_32" / "full_sft_32-q8_0.gguf").is_file()
    assert (workspace / "out" / "report.md").is_file()
    assert (workspace / "out" / "data_card" / "lengths.png").is_file()


@pytest.mark.slow
def test_the_quickstarts_commands_run(tmp_path):
    write_user_files(tmp_path)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    first, behind = make_commands("quickstart"), make_commands("quickstart-full")
    behind = behind[len(first) :] if behind[: len(first)] == first else behind  # without a model it makes one first
    assert len(first) == len(behind) == 7
    run_all([*first, *behind], tmp_path, environment | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}, None)
    page = (tmp_path / "out" / "report.md").read_text()
    for name in ("pretrain", "mid_train", "full_sft", "dpo", "grpo", "agent", "ppo", "distillation"):
        assert f"| {name}_32 |" in page, name
    assert "(report_rewards.png)" in page


def run_all(commands, workspace, environment, running):
    """Run commands in turn; those that serve are left running until `running` closes."""
    for command in commands:
        if SERVES.search(command):
            words = shlex.split(tiny(command, workspace))
            process = subprocess.Popen(words, cwd=workspace, env=environment, stdout=subprocess.PIPE, text=True)
            running.callback(process.wait)
            running.callback(process.terminate)
            assert "http" in process.stdout.readline(), command
            continue
        done = subprocess.run(
            ["bash", "-c", tiny(command, workspace)],
            cwd=workspace,
            env=environment,
            capture_output=True,
            text=True,
            timeout=180,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert "Traceback" not in done.stderr, command


def test_both_readmes_have_the_same_commands():
    assert readme_commands("README.md") == readme_commands("README_zh.md")


@pytest.mark.parametrize("target", ["quickstart", "quickstart-full", "test"])
def test_make_targets_name_commands_that_exist(target):
    scripts = re.findall(r"python (\w+/\w+\.py)", "\n".join(make_commands(target)))
    assert scripts or target == "test"
    for script in scripts:
        assert (ROOT / script).is_file(), script


def test_the_setup_commands_name_files_that_exist():
    setup = [command for command in readme_commands("README.md") if command.startswith("pip install")]
    assert setup == [f"pip install -r requirements{extra}.txt" for extra in ("", "-dev", "-serve")]
    assert all(
        "==" in line or ">=" in line
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if line[:1] not in "#-"
    )
    assert all((ROOT / shlex.split(command)[-1]).is_file() for command in setup)
