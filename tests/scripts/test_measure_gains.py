"""The gains are measured by the stages' own commands, from one model, on the same items before and after."""

import json
import subprocess
import sys

import pytest

from scripts.measure_gains import Gain
from tests.e2e.test_readme import MY_REWARDS, ROOT
from tests.trainer.helpers import tiny_model


def test_a_gain_is_what_changed_and_its_share_of_what_was_wrong():
    before = {str(number): number < 60 for number in range(100)}
    after = {str(number): 5 <= number < 85 for number in range(100)}
    gain = Gain.of("sums", 42, before, after)
    assert (gain.before, gain.after, gain.paired.only_first, gain.paired.only_second) == (60, 80, 5, 25)
    closed, interval = gain.closed
    assert closed == pytest.approx(0.5)
    assert interval.low == pytest.approx(gain.paired.interval.low / 0.4) and interval.low < closed < interval.high
    assert "| sums | 42 | 100 | 60.0% (" in gain.row() and "+20.0% (" in gain.row() and "| 50% (" in gain.row()


@pytest.mark.slow
def test_every_stage_is_measured(tokenizer, tmp_path):
    for name in ("full_sft_32", "mid_train_32"):
        tiny_model(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=2).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    words = ["--model_path", tmp_path / "full_sft_32", "--start_path", tmp_path / "mid_train_32", "--seeds", "1"]
    words += ["--output", tmp_path / "gains", "--limit", "52"]
    command = [sys.executable, str(ROOT / "scripts/measure_gains.py"), *map(str, words)]
    (tmp_path / "brief.py").write_text(MY_REWARDS)
    tiny = "--max_steps 1 --device cpu --dtype float32"
    drawn = f"{tiny} --rewards {tmp_path}/brief.py:brief --overlong keep --rollout_prompts 4 --max_new_tokens 8"
    found = []
    for stages, more in ((["dpo", "distillation"], tiny), (["grpo", "agent"], drawn)):
        done = subprocess.run(
            [*command, "--stages", *stages, "--more", more], capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
        found += json.loads(done.stdout.splitlines()[-1])
    assert [gain["name"].partition(":")[0] for gain in found] == [
        "dpo",
        "dpo",
        "a student",
        "grpo",
        "grpo",
        "agent",
        "agent",
    ]
    for gain in found:
        assert 0 <= gain["after"] <= gain["paired"]["shared"] and gain["paired"]["missing"] == 0
    failing = subprocess.run([*command, "--stages", "dpo", "--more", "--beta -1"], capture_output=True, text=True)
    assert failing.returncode == 2 and "log.txt" in failing.stderr and "Traceback" not in failing.stderr
