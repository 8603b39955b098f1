"""Models, prompts, rewards and runs for tests of rollouts."""

import torch

from dataset.lm_dataset import PromptDataset
from tests.eval.helpers import write_rows
from tests.model.helpers import tiny_model
from tests.trainer.helpers import tiny_run, train, weights_of
from trainer.policy import PolicyArguments, prepare_policy
from trainer.rollout_data import RolloutData, log_rewards

REWARD_FILE = '''
def odd(reply, row):
    """Text of odd length: a random model gets it about half the time."""
    return len(reply.text) % 2

def broken(reply, row):
    return {}["nothing"]

def fails_for_nine(reply, row):
    return {}["nothing"] if row["messages"][-1]["content"] == "Say 9." else 1.0

def endless(reply, row):
    return float("nan")

def same(reply, row):
    return 0.5
'''


def ending_model(tokenizer, seed=2, **overrides):
    """A random model that ends its turn at about every fourth token."""
    overrides = {"max_position_embeddings": 128} | overrides
    model = tiny_model(seed, vocab_size=len(tokenizer), **overrides)
    with torch.no_grad():
        states = model.model(input_ids=torch.arange(40, 104)[None]).last_hidden_state[0]
        usual = states.mean(dim=0)
        model.lm_head.weight[tokenizer.eos_token_id] = 8 * usual / usual.square().sum()
    return model


def write_home(folder):
    """A folder with prompts and reward functions."""
    rows = [
        {"conversations": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": str(n)}]}
        for n in range(24)
    ]
    write_rows(folder / "prompts.jsonl", rows)
    (folder / "rewards.py").write_text(REWARD_FILE)
    return folder


def prompts_of(home, tokenizer):
    """The prompts of a home."""
    return PromptDataset(home / "prompts.jsonl", tokenizer, say=None)


def run_of(home, tokenizer, folder, world=None, overrides=None, flags=(), model=None, **stage):
    """A run on rollouts that is ready to train."""
    prompts = prompts_of(home, tokenizer)
    model = model or ending_model(tokenizer, **(overrides or {}))
    flags = ["--max_seq_len", 64, "--batch_size", 2, "--epochs", 1, "--learning_rate", 0.003, *flags]
    run = tiny_run(folder, RolloutData(prompts), world, model, {"prompts": prompts}, flags)
    options = {"rewards": [f"{home}/rewards.py:odd"], "rollout_prompts": 8, "num_generations": 4, "max_new_tokens": 8}
    run.settings.stage = PolicyArguments(**(options | stage))
    run.checkpoints.folder.mkdir(parents=True, exist_ok=True)
    run.evaluate, run.total_steps = log_rewards, run.estimate_total_steps()
    prepare_policy(run, tokenizer)
    return run


def train_rollouts(world, folder, home, tokenizer, overrides, batch_size, stage, flags=(), model=None):
    """Train a run to its end and judge it; returns its weights."""
    flags = ["--batch_size", batch_size, "--max_steps", 6, *flags]
    run = run_of(home, tokenizer, folder, world, overrides, flags, model, **stage)
    train(run)
    run.evaluate(run, None)
    return weights_of(run)


def stage_words(home, *more):
    words = (
        "--batch_size 2 --max_seq_len 64 --max_steps 8 --eval_iters 2 --dtype float32 --device cpu --log_interval 1 "
    )
    words += (
        f"--save_interval 3 --save_dir {home}/out --cache_dir {home}/cache --learning_rate 0.003 --eval_interval 4 "
    )
    words += f"--data_path {home}/prompts.jsonl --rewards {home}/rewards.py:odd ended:0.1 --rollout_prompts 4 "
    words += "--num_generations 4 --num_mini_batches 2 --num_iterations 2 --max_new_tokens 8 --beta 0.05"
    return [*words.split(), *map(str, more)]
