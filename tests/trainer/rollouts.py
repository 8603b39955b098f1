"""Models, prompts and rewards for tests of rollouts."""

import torch

from tests.eval.helpers import write_rows
from tests.model.helpers import tiny_model

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
