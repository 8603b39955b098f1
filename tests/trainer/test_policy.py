"""Policy losses: beside TRL's own trainer, by hand, over cuts of a step."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.model.helpers import tiny_model
from trainer.losses import StepContext
from trainer.policy import PolicyArguments, PolicyLoss, log_probs_at
from trainer.results import save_model

LOSSES = {
    "grpo": {},
    "grpo_kl": {"beta": 0.2},
    "dr_grpo": {"loss_type": "dr_grpo", "max_new_tokens": 12},
    "dapo": {"loss_type": "dapo"},
    "cispo": {"loss_type": "cispo", "clip_high": 0.3},
    "grpo_warm": {"temperature": 0.7, "clip_high": 0.4},
}


def rollouts(vocabulary, count=6, seed=0):
    """Prompts and drawn tokens of unequal lengths, advantages, and log-probabilities of an earlier policy."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high):
        return torch.randint(
            3, vocabulary, (int(torch.randint(low, high, (1,), generator=generator)),), generator=generator
        )

    made = []
    for _ in range(count):
        prompt, reply = draw(3, 9), draw(1, 12)
        made.append({
            "prompt": prompt,
            "reply": reply,
            "advantage": float(torch.randn((), generator=generator)),
            "noise": 0.5 * torch.randn(len(reply), generator=generator),
            "reference_noise": 0.3 * torch.randn(len(reply), generator=generator),
        })  # fmt: skip
    return made


def packed(made, rows):
    """A batch with the rollouts whose numbers `rows` lists by row; behaviours are filled in by `with_log_probs`."""
    length = max(sum(len(made[n]["prompt"]) + len(made[n]["reply"]) for n in row) for row in rows)
    batch = {name: torch.zeros(len(rows), length, dtype=torch.long) for name in ("input_ids", "document_ids")}
    batch["labels"] = torch.full((len(rows), length), -100)
    batch["noise"], batch["reference_noise"] = torch.zeros(len(rows), length), torch.zeros(len(rows), length)
    batch["advantages"] = torch.zeros(len(rows), length)
    for index, row in enumerate(rows):
        position = 0
        for document, number in enumerate(row, start=1):
            one = made[number]
            middle, end = position + len(one["prompt"]), position + len(one["prompt"]) + len(one["reply"])
            batch["input_ids"][index, position:middle], batch["input_ids"][index, middle:end] = (
                one["prompt"],
                one["reply"],
            )
            batch["labels"][index, middle:end] = one["reply"]
            batch["document_ids"][index, position:end] = document
            batch["noise"][index, middle:end] = one["noise"]
            batch["reference_noise"][index, middle:end] = one["reference_noise"]
            batch["advantages"][index, middle:end] = one["advantage"]
            position = end
    return batch


@torch.no_grad()
def with_log_probs(batch, model, temperature):
    """The batch with log-probabilities of a sampler and a reference that are near the model's, but not equal."""
    states = model.model(input_ids=batch["input_ids"], document_ids=batch["document_ids"]).last_hidden_state
    log_probs = log_probs_at(states, model.lm_head.weight, batch["labels"], temperature)
    noise, reference_noise = batch.pop("noise"), batch.pop("reference_noise")
    return batch | {"behaviour": log_probs + noise, "reference": log_probs + reference_noise}


def padded(made, model, temperature):
    """The same rollouts as TRL wants them: prompts padded on the left, replies on the right."""
    one_a_row = with_log_probs(packed(made, [[n] for n in range(len(made))]), model, temperature)
    prompts, replies = (max(len(one[name]) for one in made) for name in ("prompt", "reply"))
    shapes = {"prompt": (len(made), prompts), "completion": (len(made), replies)}
    inputs = {
        f"{name}_{kind}": torch.zeros(shape, dtype=torch.long)
        for name, shape in shapes.items()
        for kind in ("ids", "mask")
    }
    for name in ("old", "ref"):
        inputs[f"{name}_per_token_logps"] = torch.zeros(len(made), replies)
    for row, one in enumerate(made):
        prompt, reply = len(one["prompt"]), len(one["reply"])
        inputs["prompt_ids"][row, prompts - prompt :], inputs["prompt_mask"][row, prompts - prompt :] = one["prompt"], 1
        inputs["completion_ids"][row, :reply], inputs["completion_mask"][row, :reply] = one["reply"], 1
        inputs["old_per_token_logps"][row, :reply] = one_a_row["behaviour"][row, prompt : prompt + reply]
        inputs["ref_per_token_logps"][row, :reply] = one_a_row["reference"][row, prompt : prompt + reply]
    inputs["advantages"] = torch.tensor([one["advantage"] for one in made])
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    return inputs


def trl_trainer(folder, tokenizer, arguments):
    options = {
        "loss_type": arguments.loss_type, "epsilon": arguments.clip_low, "beta": arguments.beta,
        "epsilon_high": arguments.high + (arguments.loss_type == "cispo"),  # TRL's is the ratio itself there
        "temperature": arguments.temperature, "max_completion_length": arguments.max_new_tokens,
    }  # fmt: skip
    config = GRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
        gradient_checkpointing=False, per_device_train_batch_size=6, num_generations=2, **options,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = Dataset.from_list([{"prompt": "hello"}] * 6)
    trainer = GRPOTrainer(
        model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config, train_dataset=rows,
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


@pytest.mark.parametrize("name", list(LOSSES))
def test_loss_and_gradient_are_trls(name, tokenizer, tmp_path):
    arguments = PolicyArguments(**LOSSES[name])
    model = tiny_model(2, vocab_size=len(tokenizer))
    save_model(model, tokenizer, tmp_path)
    made = rollouts(len(tokenizer))
    trainer = trl_trainer(tmp_path, tokenizer, arguments)
    expected = trainer._compute_loss(trainer.model, padded(made, model, arguments.temperature))
    expected.backward()

    batch = with_log_probs(packed(made, [[0, 3], [1, 2, 5], [4]]), model, arguments.temperature)
    loss = PolicyLoss(arguments)
    counts = loss.count(batch)
    total = loss(model, batch, StepContext(counts[0], counts[2]))[0] / counts[0]
    total.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    theirs = dict(trainer.model.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        gradient = theirs[parameter_name].grad
        atol = 1e-5 * float(gradient.abs().max())
        assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=atol), parameter_name


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("overrides", [{}, {"use_moe": True}], ids=["dense", "moe"])
def test_any_packing_and_cut_gives_the_same_gradient(name, overrides):
    loss, model, results = PolicyLoss(PolicyArguments(**LOSSES[name])), tiny_model(3, **overrides), []
    made = rollouts(97, count=7)
    loads = torch.full((2, 4), 0.25, dtype=torch.float64) if overrides else None
    for cut in ([[[0, 1, 2, 3, 4, 5, 6]]], [[[0, 3], [1, 2, 5]], [[4, 6]]], [[[n]] for n in range(7)]):
        batches = [with_log_probs(packed(made, rows), model, loss.arguments.temperature) for rows in cut]
        counts = sum(loss.count(batch) for batch in batches)
        model.zero_grad()
        for batch in batches:
            (loss(model, batch, StepContext(counts[0], counts[2], loads))[0] / counts[0]).backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", list(LOSSES))
def test_at_the_sampler_itself_the_ratio_is_one_and_the_divergence_zero(name):
    loss, model = PolicyLoss(PolicyArguments(**LOSSES[name])), tiny_model(3)
    exact = [one | {name: 0 * one[name] for name in ("noise", "reference_noise")} for one in rollouts(97)]
    batch = packed(exact, [[0, 3], [1, 2, 5], [4]])
    batch = with_log_probs(batch, model, loss.arguments.temperature)
    _, count, logs = loss(model, batch, StepContext(*(loss.count(batch)[[0, 2]])))
    assert logs["ratio_sum"].item() == pytest.approx(count.item(), rel=1e-6) and logs["clipped_sum"] == 0
    if loss.arguments.beta:
        assert abs(logs["divergence_sum"].item() / count) < 1e-6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"clip_low": 1.5}, "--clip_low 1.5 must lie between 0 and 1"),
        ({"clip_high": -0.1}, "--clip_high -0.1 must be above 0"),
        ({"beta": -1.0}, "--beta -1 must not be negative"),
        ({"temperature": 0.0}, "--temperature 0 must be above 0"),
        ({"max_new_tokens": 0}, "--max_new_tokens 0 must be at least 1"),
    ],
)
def test_flags_out_of_range_are_named(flags, message):
    assert any(message in problem for problem in PolicyArguments(**flags).problems())


def test_upper_clips_are_the_papers_by_default():
    assert [PolicyArguments(loss_type=name).high for name in ("grpo", "dr_grpo", "dapo", "cispo")] == [
        0.2,
        0.2,
        0.28,
        4.0,
    ]
    assert PolicyArguments(loss_type="dapo", clip_high=0.5).high == 0.5
