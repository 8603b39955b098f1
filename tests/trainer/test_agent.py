"""The stage with tools: any number of ranks learns the same, and it resumes in the middle of a round bit for bit."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dataset.chat import render_messages
from dataset.tools import TOOL_SCHEMAS, tools_json
from tests.eval.helpers import write_rows
from tests.model.helpers import tiny_model
from tests.trainer.helpers import close, logged, run_ranks
from tests.trainer.rollouts import stage_words, train_rollouts
from trainer.results import save_model
from trainer.stage import run_stage
from trainer.train_agent import STAGE

TASKS = 12
TOOLS = [TOOL_SCHEMAS["calculate"]]
OPTIONS = {"max_tool_rounds": 2, "max_new_tokens": 40, "rewards": ["success"], "num_iterations": 2, "beta": 0.05}


@pytest.fixture
def home(tmp_path):
    """A folder with questions about one product, and the calculator."""
    tools = {"role": "system", "content": "", "tools": tools_json(("calculate",))}
    rows = [{"conversations": [tools, {"role": "user", "content": ask(n)}], "gt": ["6"]} for n in range(TASKS)]
    write_rows(tmp_path / "prompts.jsonl", rows)
    (tmp_path / "rewards.py").write_text("def odd(reply, row):\n    return len(reply.text) % 2\n")
    return tmp_path


def ask(number):
    return f"Child {number} asks: what is 3 * 2?"


@pytest.fixture(scope="module")
def calling(tokenizer):
    """A function of a model's overrides; its model calls the calculator, rightly in a part of its samples."""

    def build(**overrides):
        model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512, **overrides)
        rows = [solved(n, tokenizer) for n in range(TASKS)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(60):
            row = rows[step % TASKS]
            ids, mask = torch.tensor([row.input_ids]), torch.tensor([row.assistant_mask], dtype=torch.bool)
            model(input_ids=ids, labels=ids.masked_fill(~mask, -100)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.eval()

    return build


def solved(number, tokenizer):
    """A task as a whole conversation."""
    call = {"name": "calculate", "arguments": {"expression": "3 * 2"}}
    messages = [
        {"role": "user", "content": ask(number)},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "6"},
    ]
    return render_messages(messages, tokenizer, TOOLS)


@pytest.mark.parametrize("overrides", [{}, {"use_moe": True}], ids=["dense", "moe"])
def test_two_ranks_learn_as_one_does(home, tokenizer, calling, overrides):
    model, flags = calling(**overrides), ["--max_seq_len", 512]
    one = train_rollouts(None, home / "one", home, tokenizer, None, 4, OPTIONS, flags, calling(**overrides))
    run_ranks(train_rollouts, home, home / "two", home, tokenizer, None, 2, OPTIONS, flags, model)
    paths = [home / ranks / "run" / "metrics.jsonl" for ranks in ("one", "two")]
    alone, together = (SimpleNamespace(tracker=SimpleNamespace(metrics_path=path)) for path in paths)
    for name in ("loss", "gradient_norm", "ratio", "rollout_reward", "rollout_tool_calls", "validation_reward"):
        tolerance = 1e-4 if name == "gradient_norm" else 1e-5
        assert logged(alone, name) and close(logged(alone, name), logged(together, name), tolerance), name
    assert all(logged(alone, "rollout_tool_calls").values()) and 0 < logged(alone, "rollout_reward")[1] < 1
    assert logged(alone, "ratio")[1] == pytest.approx(1, abs=1e-5) and len(one) > 10


def test_the_stage_resumes_in_the_middle_of_a_round_bit_for_bit(home, tokenizer, calling):
    save_model(calling(), tokenizer, home / "out" / "full_sft_32")
    words = [*stage_words(home, "--checkpoint_dir", home / "a"), "--max_seq_len", "512", "--max_new_tokens", "40"]
    words += ["--beta", "0", "--learning_rate", "3e-4"]
    words = [word.replace(f"{home}/rewards.py:odd", "success") for word in words]
    straight = run_stage(STAGE, words)
    first = load_file(straight / "model.safetensors")
    shutil.copytree(home / "a", home / "b")
    (home / "b" / "agent_32" / "step-00000008.pth").unlink()  # what is left was saved behind the second of four steps
    shutil.rmtree(straight)
    run_stage(STAGE, [*words, "--checkpoint_dir", str(home / "b"), "--from_resume", "1"])
    again = load_file(straight / "model.safetensors")
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    records = [[json.loads(line) for line in (home / name / "agent_32" / "metrics.jsonl").open()] for name in "ab"]
    calls = [[(r["step"], r["rollout_tool_calls"]) for r in part if "rollout_tool_calls" in r] for part in records]
    assert calls[0] == calls[1] and calls[0]
    saved = torch.load(home / "a" / "agent_32" / "step-00000006.pth", weights_only=True)
    teaches = saved["stream"]["teaches"]
    assert 0 < teaches.sum() < len(teaches), "some rollouts of the round that was resumed teach nothing"
