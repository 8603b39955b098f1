"""PPO: advantages and loss by hand, any cut of a step, ranks, resume, early stop, and what is left behind."""

import json
import shutil
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dataset.lm_dataset import PromptDataset
from tests.model.helpers import tiny_model
from tests.trainer.helpers import close, logged, run_ranks, tiny_run, train, weights_of
from tests.trainer.rollouts import ending_model, stage_words, write_home
from trainer.losses import StepContext, count_tokens
from trainer.policy import PolicyArguments, prepare_policy
from trainer.ppo import PPOArguments, PPOLoss, add_critic, generalised_advantages, prepare_ppo
from trainer.results import save_model
from trainer.rollout_data import RolloutData, log_rewards
from trainer.stage import run_stage
from trainer.train_ppo import STAGE
from trainer.weights import open_model


def test_advantages_by_hand():
    found = generalised_advantages(np.array([0.0, -0.5, 1.0]), np.array([0.25, 0.5, 0.125]), gamma=0.5, gae_lambda=0.5)
    last = 1.0 - 0.125
    middle = -0.5 + 0.5 * 0.125 - 0.5 + 0.25 * last
    first = 0.0 + 0.5 * 0.5 - 0.25 + 0.25 * middle
    assert found.tolist() == [first, middle, last]
    rewards, values = np.random.default_rng(0).normal(size=(2, 9))
    plain = np.cumsum(rewards[::-1])[::-1] - values  # without discounts: what still came, less what was expected
    np.testing.assert_allclose(generalised_advantages(rewards, values, 1.0, 1.0), plain)
    following = np.append(values[1:], 0.0)
    np.testing.assert_allclose(generalised_advantages(rewards, values, 0.9, 0.0), rewards + 0.9 * following - values)


def with_critic(kind, seed=3, **overrides):
    model = tiny_model(seed, **overrides)
    add_critic(model, SimpleNamespace(stage=PPOArguments(critic=kind)))
    with torch.no_grad():
        model.critic.weight.normal_(0, 0.3)
        for parameter in model.critic.parameters():
            parameter.add_(0.01)
    return model


def made_up(lengths, seed=0):
    """Rollouts of the given (prompt, reply) lengths with made-up behaviours, values, returns and advantages."""
    generator = torch.Generator().manual_seed(seed)
    names = ("behaviour", "values", "returns", "advantages")
    return [
        {"ids": torch.randint(3, 97, (prompt + reply,), generator=generator), "prompt": prompt}
        | {name: torch.randn(prompt + reply, generator=generator) * 0.4 for name in names}
        for prompt, reply in lengths
    ]


def pack(made, rows):
    """A batch with the rollouts whose numbers `rows` lists by row."""
    length = max(sum(len(made[number]["ids"]) for number in row) for row in rows)
    batch = {name: torch.zeros(len(rows), length, dtype=torch.long) for name in ("input_ids", "document_ids")}
    batch["labels"] = torch.full((len(rows), length), -100)
    batch |= {name: torch.zeros(len(rows), length) for name in ("behaviour", "values", "returns", "advantages")}
    for index, row in enumerate(rows):
        position = 0
        for document, number in enumerate(row, start=1):
            one = made[number]
            middle, end = position + one["prompt"], position + len(one["ids"])
            batch["input_ids"][index, position:end], batch["document_ids"][index, position:end] = one["ids"], document
            batch["labels"][index, middle:end] = one["ids"][one["prompt"] :]
            for name in ("behaviour", "values", "returns", "advantages"):
                batch[name][index, middle:end] = one[name][one["prompt"] :]
            position = end
    return batch


def loss_by_hand(model, made, arguments):
    """The mean over all drawn tokens, rollout by rollout and token by token."""
    total, count = 0.0, 0
    for one in made:
        ids = one["ids"][None]
        states = model.model(input_ids=ids).last_hidden_state[0]
        log_probs = (states @ model.lm_head.weight.t() / arguments.temperature).log_softmax(-1)
        judged = states if arguments.critic == "shared" else model.critic.backbone(input_ids=ids).last_hidden_state[0]
        values = judged @ model.critic.weight + model.critic.bias
        for place in range(one["prompt"], len(one["ids"])):
            ratio = (log_probs[place - 1, one["ids"][place]] - one["behaviour"][place]).exp()
            bounded = ratio.clamp(1 - arguments.clip_low, 1 + arguments.clip_high)
            value, before, wanted = values[place - 1], one["values"][place], one["returns"][place]
            nearby = before + (value - before).clamp(-arguments.clip_value, arguments.clip_value)
            worse = torch.maximum((value - wanted) ** 2, (nearby - wanted) ** 2)
            advantage = one["advantages"][place]
            total = total - torch.minimum(ratio * advantage, bounded * advantage)
            total = total + arguments.value_weight * worse / 2
            count += 1
    return total / count


LENGTHS = [(3, 5), (6, 1), (4, 9), (2, 2), (8, 4), (5, 7)]


@pytest.mark.parametrize("critic", ["separate", "shared"])
@pytest.mark.parametrize("overrides", [{}, {"use_moe": True}], ids=["dense", "moe"])
@pytest.mark.parametrize("rows", [[[0, 3], [1, 2, 5], [4]], [[0], [1], [2], [3], [4], [5]]], ids=["packed", "padded"])
def test_loss_and_gradient_are_those_by_hand(critic, overrides, rows):
    arguments = PPOArguments(critic=critic, temperature=0.8, value_weight=0.7, clip_high=0.3)
    model, made = with_critic(critic, **overrides), made_up(LENGTHS)
    expected = loss_by_hand(model, made, arguments)
    expected.backward()
    wanted = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    loads = torch.full((2, 4), 0.25, dtype=torch.float64) if overrides else None
    loss, total = PPOLoss(arguments), 0.0
    batches = [pack(made, rows[:2]), pack(made, rows[2:])]
    counts = sum(count_tokens(batch) for batch in batches)
    for batch in batches:
        one = loss(model, batch, StepContext(counts[0], counts[2], loads))[2]
        value = loss(model, batch, StepContext(counts[0], counts[2], loads))[0] / counts[0]
        total += float(one["loss_sum"] / counts[0])
        if not overrides:
            value.backward()
    assert total == pytest.approx(expected.item(), abs=1e-5)
    for name in wanted if not overrides else ():
        gradient = model.get_parameter(name).grad
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5 * float(wanted[name].abs().max()))


@pytest.fixture
def home(tmp_path):
    return write_home(tmp_path)


def ppo_run(home, tokenizer, folder, world=None, overrides=None, flags=(), seed=2, **stage):
    prompts = PromptDataset(home / "prompts.jsonl", tokenizer, say=None)
    model = ending_model(tokenizer, seed, **(overrides or {}))
    options = {"rewards": [f"{home}/rewards.py:odd"], "rollout_prompts": 8, "num_generations": 2, "max_new_tokens": 8}
    arguments = PPOArguments(**(options | {"num_iterations": 2} | stage))
    add_critic(model, SimpleNamespace(stage=arguments))
    flags = ["--max_seq_len", 64, "--batch_size", 4, "--epochs", 1, "--learning_rate", 0.003, *flags]
    run = tiny_run(folder, RolloutData(prompts), world, model, {"prompts": prompts}, flags)
    run.settings.stage = arguments
    run.checkpoints.folder.mkdir(parents=True, exist_ok=True)
    run.evaluate, run.total_steps = log_rewards, run.estimate_total_steps()
    prepare_ppo(run, tokenizer)
    return run


def test_a_round_has_the_advantages_of_its_rollouts(home, tokenizer):
    run = ppo_run(home, tokenizer, home, beta=0.2, gamma=0.9)
    with torch.no_grad():
        run.bare_model.critic.weight.normal_(0, 0.3)
        run.bare_model.lm_head.weight.mul_(1.1)  # away from the reference
    found = {}
    annotate = run.train_data.annotate
    run.train_data.annotate = lambda run, groups, current: found.update(
        groups=groups, current=(annotate(run, groups, current), current)[1]
    )
    next(run.train_data.steps(run))
    current, everything = found["current"], []
    rollouts = [rollout for group in found["groups"] for rollout in group]
    for start, rollout in zip(current.starts, rollouts, strict=True):
        ids = torch.tensor([rollout.ids])
        with torch.no_grad():
            critic = run.bare_model.critic
            values = critic.backbone(input_ids=ids).last_hidden_state[0] @ critic.weight + critic.bias
            states = annotate.reference.model(input_ids=ids).last_hidden_state[0]
            reference = (states @ annotate.reference.lm_head.weight.t()).log_softmax(-1)
        drawn = np.flatnonzero(rollout.drawn)
        rewards = [-0.2 * (rollout.log_probs[k] - float(reference[k - 1, rollout.ids[k]])) for k in drawn]
        rewards[-1] += rollout.reward
        before = np.array([float(values[k - 1]) for k in drawn])
        advantages = generalised_advantages(np.array(rewards), before, 0.9, 0.95)
        np.testing.assert_allclose(current.values["values"][start + drawn], before, atol=1e-5)
        np.testing.assert_allclose(current.values["returns"][start + drawn], advantages + before, atol=1e-4)
        everything += [(start + k, advantage) for k, advantage in zip(drawn, advantages, strict=True)]
    places, raw = map(np.array, zip(*everything, strict=True))
    whitened = (raw - raw.mean()) / raw.std()
    np.testing.assert_allclose(current.values["advantages"][places], whitened, atol=1e-3)


def train_ppo(world, folder, home, tokenizer, overrides, batch_size, stage, flags):
    flags = ["--batch_size", batch_size, "--max_steps", 6, *flags]
    run = ppo_run(home, tokenizer, folder, world, overrides, flags, **stage)
    train(run)
    run.evaluate(run, None)
    return weights_of(run)


@pytest.mark.parametrize(
    ("overrides", "stage", "flags"),
    [
        ({}, {"beta": 0.05, "num_mini_batches": 2}, ()),
        ({"use_moe": True}, {"critic": "shared"}, ()),
        ({}, {}, ("--parallel", "fsdp", "--max_steps", 2)),  # of the critic's one bias the second rank holds nothing
    ],
    ids=["dense_separate", "moe_shared", "fsdp"],  # FSDP's products are not fused: AdamW enlarges how they round
)
def test_two_ranks_learn_as_one_does(home, tokenizer, overrides, stage, flags):
    train_ppo(None, home / "one", home, tokenizer, overrides, 4, stage, flags)
    run_ranks(train_ppo, home, home / "two", home, tokenizer, overrides, 2, stage, flags)
    paths = [home / ranks / "run" / "metrics.jsonl" for ranks in ("one", "two")]
    runs = [SimpleNamespace(tracker=SimpleNamespace(metrics_path=path)) for path in paths]
    for name in ("loss", "gradient_norm", "value_loss", "rollout_reward", "validation_reward"):
        alone, together = (logged(run, name) for run in runs)
        assert alone and close(alone, together, 1e-4 if name == "gradient_norm" else 1e-5), name


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_the_stage_resumes_bit_for_bit_and_leaves_the_policy_behind(home, tokenizer, capsys, critic):
    save_model(ending_model(tokenizer), tokenizer, home / "out" / "full_sft_32")
    words = ["--critic", critic]
    straight = run_stage(STAGE, stage_words(home, "--checkpoint_dir", home / "a", *words))
    assert straight == home / "out" / "ppo_32" and f"critic: {critic}" in capsys.readouterr().out
    first = load_file(straight / "model.safetensors")
    assert not any("critic" in name for name in first) and open_model(straight)
    shutil.copytree(home / "a", home / "b")
    (home / "b" / "ppo_32" / "step-00000008.pth").unlink()
    shutil.rmtree(straight)
    run_stage(STAGE, stage_words(home, "--checkpoint_dir", home / "b", "--from_resume", 1, *words))
    again = load_file(straight / "model.safetensors")
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_a_round_that_drifted_ends_without_a_step(home, tokenizer, kind):
    flags = ["--learning_rate", 0.05]
    run = ppo_run(home, tokenizer, home, flags=flags, num_iterations=5, target_kl=1e-3)
    if kind == "grpo":
        run.settings.stage = PolicyArguments(
            rewards=run.settings.stage.rewards, rollout_prompts=8, num_generations=2, max_new_tokens=8,
            num_iterations=5, target_kl=1e-3,
        )  # fmt: skip
        del run.bare_model.critic
        prepare_policy(run, tokenizer)
    steps = run.train_data.steps(run)
    batches, rows = next(steps)
    assert rows == 0 and run.progress.row == 0
    with torch.no_grad():  # as if the first step had gone far
        run.bare_model.lm_head.weight.add_(torch.randn_like(run.bare_model.lm_head.weight) * 0.01)
    run.progress.step += 1
    following, rows = next(steps)
    assert run.progress.row == 8 and rows == 0, "the next step learns from new prompts"
    assert not torch.equal(following[0]["input_ids"][0, :40], batches[0]["input_ids"][0, :40])
    run.settings.stage.target_kl = 1e6
    assert len(list(islice(steps, 4))) == 4, "within bounds all steps of the round are made"


def test_what_is_rewarded_is_learned_and_the_critic_learns_to_foresee_it(home, tokenizer):
    run = ppo_run(home, tokenizer, home, flags=["--epochs", 8, "--learning_rate", 0.01], num_generations=8)
    train(run)
    rewards = list(logged(run, "rollout_reward").values())
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2
    run = ppo_run(home, tokenizer, home / "ended", flags=["--epochs", 8, "--learning_rate", 0.01], rewards=["ended"])
    train(run)
    losses = list(logged(run, "value_loss").values())
    assert sum(losses[-8:]) / 8 < 0.5 * sum(losses[:2]) / 2


def test_a_new_critic_foresees_the_mean_reward_of_its_first_round(home, tokenizer):
    run = ppo_run(home, tokenizer, home, flags=["--epochs", 1], num_iterations=1)
    critic = run.bare_model.critic
    assert not critic.weight.any() and not critic.bias.any()
    steps = run.train_data.steps(run)
    next(steps)
    mean = logged(run, "rollout_reward")[1]
    current = run.train_data.unfinished[2]
    values = current.values["values"][current.drawn]
    assert 0 < mean < 1 and critic.bias.item() == pytest.approx(mean, abs=1e-6) and np.allclose(values, mean)
    with torch.no_grad():
        critic.bias.fill_(3.0)  # as if it had learned
    run.progress.step += 1
    next(steps)
    assert critic.bias.item() == 3.0, "later rounds leave it alone"


def test_a_round_whose_rewards_are_all_the_same_teaches_nothing(home, tokenizer):
    (home / "same.py").write_text("def same(reply, row):\n    return 0.7\n")
    run = ppo_run(home, tokenizer, home, rewards=[f"{home}/same.py:same"], overlong="keep")
    next(run.train_data.steps(run))
    assert not run.train_data.unfinished[2].values["advantages"].any()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"clip_value": 0.0}, "--clip_value 0 must be above 0"),
        ({"gae_lambda": 1.5}, r"--gae_lambda 1.5 must lie in [0, 1]"),
        ({"target_kl": -1.0}, "--target_kl -1 must not be negative"),
        ({"beta": -1.0}, "--beta -1 must not be negative"),
        ({"rewards": ["nothing"]}, "there is no 'nothing'"),
    ],
)
def test_flags_out_of_range_are_named(flags, message):
    assert any(message in problem for problem in PPOArguments(**flags).problems())


def test_metrics_hold_what_the_critic_costs(home, tokenizer):
    run = ppo_run(home, tokenizer, home, flags=["--max_steps", 2])
    train(run)
    records = [json.loads(line) for line in run.tracker.metrics_path.open()]
    assert any({"value_loss", "drift", "clipped", "ratio"} <= record.keys() for record in records)
