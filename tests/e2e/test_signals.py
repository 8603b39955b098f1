"""Asked to stop, interrupted, killed, out of disk: the documented exit code, nothing lost, the next start goes on."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_readme import write_user_files

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 90
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("torchrun")]


class Command:
    """A pretraining run of so many steps that only a signal ends it."""

    def __init__(self, folder, *flags, torchrun=()):
        words = [sys.executable]
        if torchrun:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            words = [str(Path(sys.executable).parent / "torchrun"), "--nproc_per_node", "2", "--master_port", str(port)]
            words += torchrun
        words += [str(ROOT / "trainer/train_pretrain.py"), "--data_path", "my_text.jsonl", "--device", "cpu"]
        words += "--preset nano --hidden_size 32 --num_hidden_layers 1 --max_seq_len 64 --dtype float32".split()
        words += "--max_steps 100000 --save_interval 50 --log_interval 1 --eval_interval 0 --eval_iters 1".split()
        words += ["--save_dir", "out", "--checkpoint_dir", "checkpoints", "--cache_dir", "cache", *flags]
        self.folder, self.printed = folder, folder / f"printed-{time.monotonic_ns()}.txt"
        with open(self.printed, "w") as file:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            self.process = subprocess.Popen(
                words, cwd=folder, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def text(self):
        return self.printed.read_text()

    def wait_for(self, pattern, count=1):
        """The last match of the pattern, once it was printed so many times."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(found := re.findall(pattern, self.text())) < count:
            assert time.monotonic() < deadline and self.process.poll() is None, self.text()[-3000:]
            time.sleep(0.05)
        return found[-1]

    def rank(self, number):
        """The process number of a rank."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if child.environ().get("RANK") == str(number):
                    return child.pid
        raise AssertionError("no such rank")

    def end(self, expected):
        assert self.process.wait(PATIENCE_SECONDS) == expected, self.text()[-3000:]
        return self.text()

    def stop_for_good(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    write_user_files(tmp_path)
    commands = []

    def begin(*flags, torchrun=()):
        commands.append(Command(tmp_path, *flags, torchrun=torchrun))
        return commands[-1]

    yield begin
    for command in commands:
        command.stop_for_good()


def logged_steps(folder):
    path = folder / "checkpoints/pretrain_32/metrics.jsonl"
    return [record["step"] for record in map(json.loads, path.read_text().splitlines()) if "loss" in record]


def test_every_way_to_stop_two_ranks(start, tmp_path):
    step = r"step (\d+)/100000 \| loss"
    one = start("--batch_size", "2", torchrun=["--shutdown-timeout", "60"])
    one.wait_for(step, 5)
    one.process.send_signal(signal.SIGTERM)  # torchrun hands it on to all ranks
    stopped = re.search(r"stopped at step (\d+), saved", one.end(1))

    two = start("--batch_size", "2", "--from_resume", "1", torchrun=["--max-restarts", "1"])
    assert two.wait_for(r"resumed from .*, step (\d+)") == stopped[1]
    two.wait_for(r"step (\d*50)/100000 \| loss", 2)
    time.sleep(0.5)  # the checkpoint is written
    os.kill(two.rank(1), signal.SIGKILL)
    resumed = int(two.wait_for(r"resumed from .*, step (\d+)", 2))  # torchrun starts it again, and it resumes by itself
    assert "error: rank 1 is gone" in two.text() and resumed > int(stopped[1])
    two.wait_for(rf"step {resumed + 5}/100000 \| loss")
    os.killpg(two.process.pid, signal.SIGINT)  # as a terminal does: torchrun and the ranks get it, and they once more
    stopped = re.search(r"stopped at step (\d+), saved", two.end(1))

    three = start("--batch_size", "2", "--from_resume", "1", torchrun=["--max-restarts", "0"])
    assert three.wait_for(r"resumed from .*, step (\d+)") == stopped[1]
    three.wait_for(step, 5)
    os.kill(three.rank(1), signal.SIGTERM)  # asked of one rank, done by all
    stopped = re.search(r"stopped at step (\d+), saved", three.end(1))
    assert three.text().count("exitcode: 143") + three.text().count("exitcode  : 143") >= 2

    four = start("--batch_size", "4", "--from_resume", "1")  # the same rows a step on one rank
    assert four.wait_for(r"resumed from .*, step (\d+)") == stopped[1]
    four.wait_for(step, 5)
    four.process.send_signal(signal.SIGINT)
    stopped = re.search(r"stopped at step (\d+), saved", four.end(130))
    assert logged_steps(tmp_path) == list(range(1, int(stopped[1]) + 1)), "every step once, none missing"


def test_a_disk_that_fills_up_loses_nothing(start, tmp_path):
    one = start("--batch_size", "2")
    one.wait_for(r"step 1\d\d/100000 \| loss")
    resource.prlimit(one.process.pid, resource.RLIMIT_FSIZE, (2**19, 2**19))  # files may not grow beyond 512 KiB
    text = one.end(2)
    assert re.search(r"error: .*step-\d+\.pth: could not be written \(.*File too large.*MiB are free there", text)
    assert "Traceback" not in text
    files = sorted(path.name for path in (tmp_path / "checkpoints/pretrain_32").iterdir())
    assert not [name for name in files if "writing" in name]
    two = start("--batch_size", "2", "--from_resume", "1")
    assert two.wait_for(r"resumed from .*/(step-\d+\.pth)") == [name for name in files if "step" in name][-1]
