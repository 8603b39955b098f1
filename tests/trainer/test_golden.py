"""Twenty steps of tiny runs against stored losses: what changes them is a change of the training, and must be meant.

After such a change: python -m tests.trainer.test_golden, look at the difference, and say in the commit why.
"""

import json
import platform
from pathlib import Path

import pytest
import torch

from dataset.lm_dataset import SFTDataset
from tests.conftest import ROOT
from tests.trainer.helpers import TINY_MOE, RandomRows, close, tiny_model, tiny_run, train
from trainer.weights import load_tokenizer

FOLDER = Path(__file__).parent / "golden"
# Muon iterates in bfloat16, where other machines round otherwise.
TOLERANCES = {"dense": 1e-5, "moe": 1e-5, "sft": 2e-3}


def dense(folder):
    return tiny_run(folder, RandomRows(80))


def moe(folder):
    return tiny_run(folder, RandomRows(80), model=tiny_model(**TINY_MOE), flags=["--learning_rate", "0.003"])


def sft(folder):
    tokenizer = load_tokenizer(ROOT / "model" / "tokenizer")
    lines = [
        {"question": f"What comes after {number}?", "answer": f"{number + 1}. " * (1 + number % 3)}
        for number in range(120)
    ]
    path = folder / "chats.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = SFTDataset(path, tokenizer, max_length=64, say=None)
    flags = ["--optimizer", "muon", "--max_steps", "20", "--max_seq_len", "64", "--accumulation_steps", "2"]
    return tiny_run(folder, rows, model=tiny_model(vocab_size=len(tokenizer)), flags=flags)


@pytest.mark.parametrize("run", [dense, moe, sft], ids=lambda run: run.__name__)
def test_losses_are_those_of_before(run, tmp_path):
    stored = json.loads((FOLDER / f"{run.__name__}.json").read_text())
    expected = {int(step): loss for step, loss in stored["losses"].items()}
    assert len(expected) == 20
    found = train(run(tmp_path))
    assert close(expected, found, TOLERANCES[run.__name__]), {"environment": stored["environment"], "found": found}


def main() -> None:
    """Store the losses as they are now."""
    import tempfile

    torch.set_num_threads(1)
    environment = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    for run in (dense, moe, sft):
        with tempfile.TemporaryDirectory() as folder:
            losses = train(run(Path(folder)))
        content = {"environment": environment, "losses": losses}
        (FOLDER / f"{run.__name__}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
