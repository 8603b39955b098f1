"""Rounds of rollouts: cut into steps, left out where nothing is taught, made again, and at their end."""

import dataclasses
from itertools import islice

import numpy as np
import pytest
import torch

from tests.trainer.helpers import logged, train
from tests.trainer.rollouts import run_of, write_home
from trainer.losses import StepContext
from trainer.rewards import WeightedReward


@pytest.fixture
def home(tmp_path):
    return write_home(tmp_path)


def test_each_rollout_is_trained_as_often_as_asked_and_its_prompt_consumed_once(home, tokenizer):
    run = run_of(home, tokenizer, home, num_mini_batches=2, num_iterations=3, rollout_prompts=10, beta=0.05)
    assert run.total_steps == 3 * 6  # 24 prompts: 10, 10 and 4
    steps, seen = list(islice(run.train_data.steps(run), 6)), []
    assert [rows for _, rows in steps] == [0] * 5 + [10]
    assert run.train_data.round is None
    for batches, _ in steps:
        seen.append([])
        for batch in batches:
            assert (batch["behaviour"][batch["labels"] == -100] == 0).all()
            for row in range(len(batch["input_ids"])):
                for document in range(1, int(batch["document_ids"][row].max()) + 1):
                    inside = batch["document_ids"][row] == document
                    seen[-1].append(tuple(batch["input_ids"][row][inside].tolist()))
                    assert len(set(batch["advantages"][row][inside].tolist())) == 1
    first, second = sorted(seen[0]), sorted(seen[1])
    assert len(first) == len(second) == 20
    assert [sorted(one) for one in seen] == [first, second] * 3


def test_a_short_last_round_has_fewer_mini_batches(home, tokenizer):
    run = run_of(home, tokenizer, home, rollout_prompts=20, num_mini_batches=5)
    train(run)  # 20 prompts make five steps, the other four make four
    assert run.progress.epoch == 1 and run.progress.step == run.total_steps == 10
    assert list(logged(run, "rollout_reward")) == [1, 6, 10]


def test_a_step_that_failed_is_made_again(home, tokenizer):
    run = run_of(home, tokenizer, home, num_mini_batches=2)
    steps = run.train_data.steps(run)
    next(steps)
    assert run.train_data.state()["step"] == 0, "saved in the middle of the step"
    run.progress.step += 1
    assert run.train_data.state()["step"] == 1, "saved behind it"
    next(steps)
    assert run.train_data.state()["step"] == 1
    run.progress.step += 1
    assert run.train_data.state() is None


def test_a_run_that_has_learned_everything_ends(home, tokenizer, capsys):
    run = run_of(home, tokenizer, home, flags=["--max_steps", 50], overlong="mask")
    odd = run.train_data.rewards
    run.train_data.rewards = [WeightedReward("same", 1.0, lambda reply, row: 0.5)]
    run.progress.step, run.progress.epoch = 7, 1
    for rewards in ([odd[0]], [WeightedReward("same", 1.0, lambda reply, row: 0.5)]):
        run.train_data.rewards = rewards
        found = run.train_data.new_round(run)
        assert found == (rewards[0] is odd[0])
    assert run.total_steps == 7 and "nothing is left to learn" in capsys.readouterr().out


def test_masked_overlong_replies_teach_nothing_and_count(home, tokenizer):
    run = run_of(home, tokenizer, home, overlong="mask", max_new_tokens=2, beta=0.05)
    batches, _ = next(run.train_data.steps(run))
    ends = tokenizer.eos_token_id
    trained = whole = 0
    for batch in batches:
        for ids, labels, documents in zip(batch["input_ids"], batch["labels"], batch["document_ids"], strict=True):
            for document in range(1, int(documents.max()) + 1):
                inside = documents == document
                whole += 1
                has_labels = bool((labels[inside] != -100).any())
                trained += has_labels
                assert has_labels == (ids[inside][-1] == ends)
    counts = sum(run.count(batch) for batch in batches)
    assert 0 < trained < whole == counts[0] == 32


def test_nothing_is_left_out_where_all_rollouts_teach(home, tokenizer):
    for overrides, stage in (({"use_moe": True}, {}), ({}, {"beta": 0.1})):
        run = run_of(home, tokenizer, home, overrides=overrides, **stage)
        assert run.train_data.new_round(run) and run.train_data.round.teaches is None
    run = run_of(home, tokenizer, home)
    assert run.train_data.new_round(run)
    current = run.train_data.round
    current.teaches[:] = False
    rows = current.part(1, 64)
    assert sum(int(row["document_ids"].max()) for row in (rows[index] for index in range(len(rows)))) == 32
    values = np.concatenate([rows[index]["advantages"].numpy() for index in range(len(rows))])
    assert set(values) <= {0.0, *current.values["advantages"]}, "as they are, if no rollout of a step teaches"


@pytest.mark.parametrize("overlong", ["zero", "mask"])
@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "cispo"])
def test_what_teaches_nothing_is_left_out_of_the_same_gradient(home, tokenizer, loss_type, overlong):
    run = run_of(home, tokenizer, home, loss_type=loss_type, overlong=overlong, num_mini_batches=2, num_generations=2)
    assert run.train_data.new_round(run)
    current, found = run.train_data.round, []
    assert current.rows == 8 and 0 < current.teaches.sum() < len(current.teaches) == 16
    for current.step in range(2):
        for left_out in (True, False):
            whole = dataclasses.replace(current, teaches=current.teaches if left_out else None)
            batches = run.train_data.micro_batches(run, whole)
            counts, loss_sum = sum(run.count(batch) for batch in batches), 0.0
            run.model.zero_grad()
            for batch in batches:
                loss, _, logs = run.loss(run.model, batch, StepContext(counts[0], counts[2]))
                (loss / counts[0]).backward()
                loss_sum += float(logs["loss_sum"] / counts[0])
            gradients = {name: one.grad.clone() for name, one in run.model.named_parameters() if one.grad is not None}
            found.append((loss_sum, float(counts[2]), gradients))
        (loss, tokens, gradients), (expected, all_tokens, wanted) = found[-2:]
        assert loss == pytest.approx(expected, abs=1e-6) and tokens < all_tokens and gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5 * float(wanted[name].abs().max()))
