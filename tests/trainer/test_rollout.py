"""Rollouts: ids and log-probabilities are the sampler's own, tools are played to the end, rounds are cut and kept."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from dataset.chat import render_messages, render_prompt
from dataset.tools import TOOL_SCHEMAS
from model.decoding import GeneratedReply
from tests.eval.helpers import write_rows
from tests.trainer.helpers import close, logged, run_ranks, train, weights_of
from tests.trainer.rollouts import ending_model, prompts_of, run_of, stage_words, train_rollouts, write_home
from trainer.losses import StepContext
from trainer.policy import group_advantages
from trainer.results import save_model
from trainer.reward_model import RewardModel
from trainer.rewards import REWARDS, Reply, WeightedReward
from trainer.rollout import Rollout, RolloutArguments, blocks_of, judge, play, sampler_of
from trainer.rollout_data import draw
from trainer.stage import run_stage
from trainer.train_grpo import STAGE


@pytest.fixture
def home(tmp_path):
    return write_home(tmp_path)


def naive_log_probs(model, rollout, temperature):
    """The log-probabilities of a rollout's ids, by one forward pass over it alone."""
    with torch.no_grad():
        logits = model(torch.tensor([rollout.ids])).logits[0].float() / temperature
    values = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(rollout.ids[1:])[:, None])[:, 0]
    return [0.0, *values.tolist()]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("overrides", [{}, {"use_moe": True}], ids=["dense", "moe"])
def test_ids_and_log_probabilities_are_the_samplers(home, tokenizer, temperature, overrides):
    model, items = ending_model(tokenizer, **overrides), prompts_of(home, tokenizer).items
    arguments = RolloutArguments(max_new_tokens=8, temperature=temperature)
    stop_ids = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    sample = sampler_of(model, stop_ids, 8, temperature, seed=3)
    pairs = [(number, which) for number in (0, 5, 2) for which in range(4)]
    rollouts = play(sample, pairs, items, tokenizer, arguments, 64, "0")
    assert overrides or temperature != 1 or {one.reply.ended for one in rollouts} == {True, False}
    for one in rollouts:
        prompt = items[one.prompt]["input_ids"].tolist()
        assert one.ids[: len(prompt)] == prompt and not any(one.drawn[: len(prompt)])
        assert all(one.drawn[len(prompt) :]) and one.length == len(one.ids) - len(prompt) <= 8
        assert one.reply.ended == (one.ids[-1] == tokenizer.eos_token_id), "what ends a turn is drawn and trained too"
        expected = np.where(one.drawn, naive_log_probs(model, one, temperature), 0.0)
        np.testing.assert_allclose(one.log_probs, expected, atol=2e-5)
    alone = play(sample, [(5, 2)], items, tokenizer, arguments, 64, "0")[0]
    assert alone.ids == rollouts[6].ids, "noise belongs to the prompt and sample, whoever shares the block"
    other = play(sample, pairs, items, tokenizer, arguments, 64, "1")
    assert [one.ids for one in other] != [one.ids for one in rollouts], "another step draws other noise"


def test_a_prompts_samples_share_a_block():
    blocks = blocks_of(range(100), 8)
    assert [pair for block in blocks for pair in block] == [(n, s) for n in range(100) for s in range(8)]
    assert all(len(block) <= 128 and len(block) % 8 == 0 for block in blocks)
    assert len(blocks_of(range(3), 500)) == 3


def call_text(tool, **arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def scripted(tokenizer, *turns):
    """An engine that says the same to every prompt, turn by turn; None is a reply without an end."""
    said = iter(turns)

    def sample(prompts, keys):
        text, ended = next(said)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        stop = tokenizer.eos_token_id if ended else None
        return [GeneratedReply(list(ids), stop, [-0.5] * (len(ids) + ended)) for _ in prompts]

    return sample


def tool_item(tokenizer, ask="What is 3 * 14?"):
    tools = [TOOL_SCHEMAS["calculate"]]
    messages = [{"role": "user", "content": ask}]
    ids = torch.tensor(render_prompt(messages, tokenizer, tools))
    return {"input_ids": ids, "messages": messages, "tools": tools, "reference": None, "extra": {"gt": ["42"]}}


def played(tokenizer, *turns, rounds=3, window=1000):
    arguments = RolloutArguments(max_new_tokens=64, max_tool_rounds=rounds)
    return play(scripted(tokenizer, *turns), [(0, 0)], [tool_item(tokenizer)], tokenizer, arguments, window, "0")[0]


def test_tools_are_played_and_their_results_are_not_trained(tokenizer):
    call = call_text("calculate", expression="3 * 14")
    rollout = played(tokenizer, (call, True), ("The result is 42.", True))
    item = tool_item(tokenizer)
    whole = render_messages(
        [
            *item["messages"],
            {"role": "assistant", "tool_calls": [{"name": "calculate", "arguments": {"expression": "3 * 14"}}]},
            {"role": "tool", "content": "42"},
            {"role": "assistant", "content": "The result is 42."},
        ],
        tokenizer,
        item["tools"],
    )
    length = len(rollout.ids)
    assert rollout.ids == whole.input_ids[:length], "the very ids of the whole conversation"
    assert [int(drawn) for drawn in rollout.drawn] == whole.assistant_mask[:length]
    assert rollout.log_probs == [-0.5 * drawn for drawn in rollout.drawn]
    assert rollout.reply.calls == (("calculate", {"expression": "3 * 14"}, "42"),)
    assert REWARDS["success"](rollout.reply, item) == 1


def test_where_tools_end(tokenizer):
    call = call_text("calculate", expression="3 * 14")
    limited = played(tokenizer, (call, True), (call, True), rounds=1)
    assert len(limited.reply.calls) == 2 and limited.ids[-1] == tokenizer.eos_token_id
    assert REWARDS["success"](limited.reply, tool_item(tokenizer)) == 0, "a call is no answer"
    full = played(tokenizer, (call, True), window=len(tool_item(tokenizer)["input_ids"]) + 100)
    assert not full.reply.ended and len(full.ids) < 1000, "no room for another turn"
    cut = played(tokenizer, (call, False))
    assert cut.reply.calls == () and not cut.reply.ended
    other = played(tokenizer, (call_text("lookup", name="Emma", field="age"), True), ("42", True))
    assert other.reply.calls[0].result == "error: no tool 'lookup' here"
    assert REWARDS["success"](other.reply, tool_item(tokenizer)) == 0
    guessed = played(tokenizer, ("42", True))
    assert REWARDS["success"](guessed.reply, tool_item(tokenizer)) == 0, "an answer without a call is a guess"
    twice = played(tokenizer, (call, True), (call, True), ("42", True))
    assert REWARDS["success"](twice.reply, tool_item(tokenizer)) == 0, "the same call again"


def test_judging():
    def reply(ended):
        return Rollout(0, 0, [1, 2], [False, True], [0.0, -1.0], Reply("ab", {"content": "ab"}, ended, 1))

    rewards = [WeightedReward("a", 2.0, lambda *_: 0.25), WeightedReward("b", 1.0, lambda *_: 1)]
    done, cut = reply(True), reply(False)
    judge([done, cut], [{}], rewards, RolloutArguments())
    assert (done.reward, done.rewards) == (1.5, {"a": 0.25, "b": 1.0}) and cut.reward == 0
    judge([cut], [{}], rewards, RolloutArguments(overlong="mask"))
    assert cut.reward == 1.5
    for name, function in (("fails", lambda *_: [][0]), ("is_nan", lambda *_: math.nan), ("is_none", lambda *_: None)):
        with pytest.raises(ValueError, match=f"--rewards {name} .* reply 'ab'"):
            judge([done], [{}], [WeightedReward(name, 1.0, function)], RolloutArguments())


def test_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 4.0]])
    scaled = group_advantages(rewards, scale=True)
    assert scaled[0].tolist() == pytest.approx([0.8658, -0.8658, -0.8658, 0.8658], abs=1e-4)  # 0.5 / (0.57735 + 1e-4)
    assert scaled[1].tolist() == [0.0] * 4
    assert group_advantages(rewards, scale=False)[2].tolist() == [-1.0, -1.0, -1.0, 3.0]


def draw_with_a_failing_reward(world, home, tokenizer):
    run = run_of(home, tokenizer, home / f"rank{world.rank}", world, rewards=[f"{home}/rewards.py:fails_for_nine"])
    with pytest.raises(ValueError, match="--rewards fails_for_nine failed .* KeyError") as failure:
        draw(run, run.train_data.prompts, list(range(24)), 64, 1.0)
    (home / f"failure-{world.rank}").write_text(str(failure.value))


def test_a_reward_that_fails_on_one_rank_is_named_on_all(home, tokenizer):
    run_ranks(draw_with_a_failing_reward, home, home, tokenizer)
    first, second = ((home / f"failure-{rank}").read_text() for rank in range(2))
    assert first == second and "--rewards fails_for_nine failed" in first


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "cispo"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.02)])
def test_the_first_step_has_ratio_one_and_no_divergence(home, tokenizer, loss_type, dtype, tolerance):
    for temperature in (1.0, 0.7, 1.3):
        flags = ["--dtype", dtype]
        run = run_of(home, tokenizer, home, flags=flags, loss_type=loss_type, temperature=temperature, beta=0.1)
        batches, _ = next(run.train_data.steps(run))
        counts = sum(run.count(batch) for batch in batches)
        ratio = divergence = 0.0
        for batch in batches:
            with run.autocast():
                _, _, logs = run.loss(run.model, batch, StepContext(counts[0], counts[2]))
            ratio += float(logs["ratio_sum"])
            divergence += float(logs["divergence_sum"])
        assert ratio / float(counts[0]) == pytest.approx(1, abs=tolerance)
        assert abs(divergence) / float(counts[0]) < tolerance


@pytest.mark.parametrize(
    ("overrides", "stage", "flags"),
    [
        ({}, {"num_mini_batches": 2, "num_iterations": 2, "beta": 0.05}, ()),
        ({"use_moe": True}, {"loss_type": "dapo", "dynamic_sampling": 1}, ()),
        ({}, {"loss_type": "cispo", "overlong": "mask"}, ()),
        ({}, {"num_iterations": 2, "beta": 0.05}, ("--parallel", "fsdp", "--max_steps", 2)),
    ],
    ids=["grpo", "moe_dapo", "cispo", "fsdp"],  # FSDP's products are not fused: AdamW enlarges how they round
)
def test_two_ranks_learn_as_one_does(home, tokenizer, overrides, stage, flags):
    one = train_rollouts(None, home / "one", home, tokenizer, overrides, 4, stage, flags)
    run_ranks(train_rollouts, home, home / "two", home, tokenizer, overrides, 2, stage, flags)
    paths = [home / ranks / "run" / "metrics.jsonl" for ranks in ("one", "two")]
    runs = [SimpleNamespace(tracker=SimpleNamespace(metrics_path=path)) for path in paths]
    for name in ("loss", "gradient_norm", "ratio", "rollout_reward", "rollout_reply_tokens", "validation_reward"):
        alone, together = (logged(run, name) for run in runs)
        assert alone and close(alone, together, 1e-4 if name == "gradient_norm" else 1e-5), name
    assert len(one) > 10


def test_the_stage_resumes_in_the_middle_of_a_round_bit_for_bit(home, tokenizer, capsys):
    save_model(ending_model(tokenizer), tokenizer, home / "out" / "full_sft_32")
    straight = run_stage(STAGE, stage_words(home, "--checkpoint_dir", home / "a"))
    printed = capsys.readouterr().out
    assert (
        straight == home / "out" / "grpo_32" and "rollouts for step 1 | reward" in printed and "ratio 1.000" in printed
    )
    first = load_file(straight / "model.safetensors")
    shutil.copytree(home / "a", home / "b")
    (home / "b" / "grpo_32" / "step-00000008.pth").unlink()  # what is left was saved behind the second of four steps
    shutil.rmtree(straight)
    run_stage(STAGE, stage_words(home, "--checkpoint_dir", home / "b", "--from_resume", 1))
    assert "step-00000006.pth, step 6" in capsys.readouterr().out
    again = load_file(straight / "model.safetensors")
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    records = [[json.loads(line) for line in (home / name / "grpo_32" / "metrics.jsonl").open()] for name in "ab"]
    rewards = [[(r["step"], r["rollout_reward"]) for r in part if "rollout_reward" in r] for part in records]
    assert rewards[0] == rewards[1] and [step for step, _ in rewards[0]] == [1, 5]
    (home / "b" / "grpo_32" / "step-00000008.pth").unlink()
    with pytest.raises(ValueError, match="--beta is 0.3 and was 0.05"):
        run_stage(STAGE, stage_words(home, "--checkpoint_dir", home / "b", "--from_resume", 1, "--beta", 0.3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("overrides", [{}, {"use_moe": True}], ids=["dense", "moe"])
def test_half_precision_draws_and_trains(home, tokenizer, dtype, overrides):
    run = run_of(home, tokenizer, home, overrides=overrides, flags=["--dtype", dtype], num_iterations=2)
    before = weights_of(run)
    train(run)
    assert run.progress.step == run.total_steps == 6 and run.progress.skipped_steps == 0
    assert run.scaler.is_enabled() == (dtype == "float16")
    after = weights_of(run)
    assert all(torch.isfinite(after[name]).all() for name in after)
    assert any(not torch.equal(before[name], after[name]) for name in after)
    assert all(abs(ratio - 1) < 0.05 for step, ratio in logged(run, "ratio").items() if step % 2)


def test_it_learns_what_is_rewarded(home, tokenizer):
    run = run_of(home, tokenizer, home, flags=["--epochs", 8, "--learning_rate", 0.01], num_generations=8)
    train(run)
    rewards = list(logged(run, "rollout_reward").values())
    assert len(rewards) == 24 and sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2


def test_dynamic_sampling_takes_other_prompts_in_place_of_those_that_teach_nothing(home, tokenizer):
    run = run_of(home, tokenizer, home, dynamic_sampling=1, rollout_prompts=3, num_generations=2)
    steps = run.train_data.steps(run)
    _, rows = next(steps)
    assert rows > 3, "with two replies to a prompt, about half of the prompts teach nothing"
    current_rewards = logged(run, "rollout_useful")
    assert 0 < current_rewards[1] < 1
    run.progress.row += rows
    batches, _ = next(steps)
    assert all((batch["advantages"] != 0).any() for batch in batches)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--rewards", "{home}/rewards.py:same", "--overlong", "mask"],
            "no reply to any of the 24 prompts got another reward",
        ),
        (["--rewards", "{home}/rewards.py:broken"], "--rewards broken failed on the reply"),
        (["--rewards", "{home}/rewards.py:endless"], "--rewards endless gave nan"),
        (["--rewards", "{home}/rewards.py:missing"], "has no function 'missing'"),
        (["--num_generations", 1], "--num_generations 1 must be at least 2"),
        (["--max_new_tokens", 60], "--max_seq_len 64: the longest prompt has"),
        (["--accumulation_steps", 2], "--accumulation_steps 2: a step takes the micro-batches"),
        (["--packing", 0, "--dedup", 1], "--packing 0 does not go with rollouts"),
        (
            ["--train_on", "last", "--thinking_mix", 0, 0, 1],
            r"(?s)--train_on last does.*--thinking_mix \[0.0, 0.0, 1.0\]",
        ),
        (["--temperature", 0], "--temperature 0 must be above 0"),
        (["--top_p", 0.9], "unknown flag --top_p"),
        (["--num_mini_batches", 9], "--num_mini_batches 9 must be at most --rollout_prompts 4"),
    ],
)
def test_mistakes_are_named(home, tokenizer, words, message):
    save_model(ending_model(tokenizer), tokenizer, home / "out" / "full_sft_32")
    words = [str(word).format(home=home) for word in words]
    with pytest.raises(ValueError, match=message):
        run_stage(STAGE, stage_words(home, "--checkpoint_dir", home / "a", *words))


def test_prompts_without_an_answer_are_named(home, tokenizer):
    save_model(ending_model(tokenizer), tokenizer, home / "out" / "full_sft_32")
    write_rows(
        home / "prompts.jsonl", [{"conversations": [{"role": "user", "content": f"Say {n}."}]} for n in range(5)]
    )
    with pytest.raises(ValueError, match="--rewards number: 5 of 5 prompts have no number as their answer .* 'Say 0.'"):
        run_stage(STAGE, stage_words(home, "--checkpoint_dir", home / "a", "--rewards", "number"))


@pytest.mark.parametrize("labels", [1, 2])
def test_a_reward_model_judges_as_it_does_alone(home, tokenizer, labels):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_labels=labels, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    judging = Qwen3ForSequenceClassification(config).eval()
    judging.save_pretrained(home / "judge")
    tokenizer.save_pretrained(home / "judge")
    model, items = RewardModel(str(home / "judge"), torch.device("cpu")), prompts_of(home, tokenizer).items
    replies = [Reply.of("Yes."), Reply.of("No, that is much too long for a short answer.")]
    found = model(replies, items[:2])
    for value, reply, item in zip(found, replies, items, strict=False):
        messages = [*item["messages"], {"role": "assistant", "content": reply.text}]
        ids = torch.tensor([render_messages(messages, tokenizer).input_ids])
        with torch.no_grad():
            logits = judging(input_ids=ids).logits[0]
        assert value == pytest.approx(float((logits[0] if labels == 1 else logits[1] - logits[0]).sigmoid()), abs=1e-5)
    save_model(ending_model(tokenizer), tokenizer, home / "out" / "full_sft_32")
    words = stage_words(home, "--checkpoint_dir", home / "a", "--reward_model", home / "judge")
    folder = run_stage(STAGE, words)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert any(0 < record.get("rollout_reward_reward_model", 0) < 1 for record in records)
    with pytest.raises(ValueError, match=f"--reward_model {home}/out: no config.json there"):
        RewardModel(str(home / "out"), torch.device("cpu"))
    with pytest.raises(ValueError, match="is no classifier, it lacks score.weight"):
        RewardModel(str(home / "out" / "full_sft_32"), torch.device("cpu"))
    with pytest.raises(ValueError, match="cannot be opened"):
        (home / "judge" / "model.safetensors").write_bytes(b"broken")
        RewardModel(str(home / "judge"), torch.device("cpu"))
