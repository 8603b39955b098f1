"""Preference losses: by hand, beside TRL's own trainer, over cuts and ranks; the reference computed once and kept."""

import json
import math
import shutil

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

from dataset.lm_dataset import DPODataset, collate_rows
from model.model_minimind import load_model
from tests.model.helpers import tiny_model
from tests.trainer.helpers import close, run_ranks, tiny_run, train
from trainer.distributed import model_hash
from trainer.evaluation import log_objective
from trainer.losses import StepContext
from trainer.preference import (
    PreferenceArguments,
    PreferenceLoss,
    count_pairs,
    pairs_of,
    prepare_preference,
    sums_of_documents,
)
from trainer.results import save_model
from trainer.stage import run_stage
from trainer.train_dpo import STAGE

QUESTIONS = ["Where does Mira live?", "What is 2 + 3?", "米拉住在哪里？", "Who are you?", "Say something long."]
CHOSEN = ["Mira lives in Redmill.", "It is 5.", "米拉住在红磨坊镇。", "I am a small language model.", "No " * 20]
REJECTED = ["In Northport, I think, or somewhere else.", "6", "不知道", "I am a fox.", "Yes"]


def pair_rows():
    return [
        {
            "prompt": [{"role": "user", "content": question}],
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
        }
        for question, chosen, rejected in zip(QUESTIONS, CHOSEN, REJECTED, strict=True)
    ]


@pytest.fixture(scope="module")
def pairs_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in pair_rows()), encoding="utf-8")
    return path


def model_of(tokenizer, seed, **overrides):
    return tiny_model(seed, vocab_size=len(tokenizer), **overrides)


def context_of(batches):
    counts = sum(count_pairs(batch) for batch in batches)
    return StepContext(counts[0], counts[2], None)


def batches_of(tokenizer, path, reference, max_length=128, rows_a_batch=8):
    """All rows in batches, with the sums that a reference model gives."""
    data = DPODataset(str(path), tokenizer, max_length, say=None)
    batches = []
    for start in range(0, len(data), rows_a_batch):
        batch = collate_rows([data[index] for index in range(start, min(start + rows_a_batch, len(data)))])
        with torch.no_grad():
            losses = reference(**batch, return_token_losses=True).token_losses
        batches.append(batch | {"reference": sums_of_documents(losses, batch)[0]})
    return batches


def opened(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def padded_sides(tokenizer, path):
    """The same pairs as TRL wants them: a row a side, all chosen ones first. (Its own rows end with a line break.)"""
    data = DPODataset(str(path), tokenizer, 128, say=None)
    sides = [[], []]
    for index in range(len(data)):
        row = data[index]
        for document in range(1, int(row["document_ids"].max()) + 1):
            inside = row["document_ids"] == document
            sides[(document - 1) % 2].append((row["input_ids"][inside], row["labels"][inside] != -100))
    ids, masks = zip(*sides[0], *sides[1], strict=True)
    return {
        "input_ids": pad_sequence(list(ids), batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "completion_mask": pad_sequence(list(masks), batch_first=True).long(),
    }


LOSSES = {
    "sigmoid": ({}, {"loss_type": ["sigmoid"]}),
    "normalised": ({"length_normalization": 1, "beta": 2.0}, {"loss_type": ["sigmoid_norm"], "beta": 2.0}),
    "ipo": ({"loss_type": "ipo"}, {"loss_type": ["ipo"]}),
}


@pytest.mark.parametrize("name", list(LOSSES))
def test_loss_and_gradient_are_trls(name, tokenizer, pairs_path, tmp_path):
    ours, theirs = LOSSES[name]
    save_model(model_of(tokenizer, 1), tokenizer, tmp_path / "reference")
    save_model(model_of(tokenizer, 2), tokenizer, tmp_path / "policy")
    arguments = DPOConfig(
        output_dir=str(tmp_path / "trl"), max_length=128, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
        gradient_checkpointing=False, per_device_train_batch_size=5, precompute_ref_log_probs=False, **theirs,
    )  # fmt: skip
    trainer = DPOTrainer(
        model=opened(tmp_path / "policy"), ref_model=opened(tmp_path / "reference"), args=arguments,
        train_dataset=Dataset.from_list(pair_rows()), processing_class=tokenizer,
    )  # fmt: skip
    trainer.model.train()
    expected = trainer.compute_loss(trainer.model, padded_sides(tokenizer, pairs_path))
    expected.backward()

    policy = load_model(str(tmp_path / "policy")).float()
    batches = batches_of(tokenizer, pairs_path, load_model(str(tmp_path / "reference")).float())
    loss = PreferenceLoss(PreferenceArguments(**ours))
    context = context_of(batches)
    assert context.terms == 5
    total = sum(loss(policy, one, context)[0] for one in batches) / context.terms
    total.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
    theirs = dict(trainer.model.named_parameters())
    for parameter_name, parameter in policy.named_parameters():
        scale = theirs[parameter_name].grad.abs().max()
        assert torch.allclose(parameter.grad, theirs[parameter_name].grad, rtol=1e-4, atol=1e-5 * scale), parameter_name


@pytest.mark.parametrize("overrides", [{}, {"use_moe": True}], ids=["dense", "moe"])
def test_any_packing_and_cut_gives_the_same_gradient(tokenizer, pairs_path, overrides):
    policy, reference = model_of(tokenizer, 2, **overrides), model_of(tokenizer, 1, **overrides)
    loss, results = PreferenceLoss(PreferenceArguments(sft_weight=0.3)), []
    for max_length, rows_a_batch in ((128, 8), (128, 1), (256, 2), (512, 1)):
        batches = batches_of(tokenizer, pairs_path, reference, max_length, rows_a_batch)
        context = context_of(batches)
        if overrides:
            context = StepContext(context.terms, context.tokens, torch.full((2, 4), 0.25, dtype=torch.float64))
        policy.zero_grad()
        sum(loss(policy, batch, context)[0] for batch in batches).div(context.terms).backward()
        results.append({name: parameter.grad.clone() for name, parameter in policy.named_parameters()})
    for other in results[1:]:
        for name, gradient in results[0].items():
            assert torch.allclose(other[name], gradient, rtol=1e-4, atol=1e-6), name


def log_sigmoid(value):
    return -math.log1p(math.exp(-value))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # (chosen, rejected): log-probabilities -6 and -9 of 3 and 6 tokens, the reference's -7 and -8: margin 1 + 1 = 2
        ({"beta": 0.5}, -log_sigmoid(0.5 * 2)),
        ({"beta": 0.5, "label_smoothing": 0.1}, -0.9 * log_sigmoid(1) - 0.1 * log_sigmoid(-1)),
        ({"beta": 0.5, "length_normalization": 1}, -log_sigmoid(0.5 * (1 / 3 + 1 / 6))),
        ({"beta": 0.5, "loss_type": "ipo"}, (1 / 3 + 1 / 6 - 1) ** 2),
        ({"beta": 0.5, "sft_weight": 0.25}, -log_sigmoid(0.5 * 2) + 0.25 * 6 / 3),
    ],
)
def test_losses_by_hand(flags, expected):
    values = (torch.tensor([[pair]], dtype=torch.float64) for pair in ([-6.0, -9.0], [-7.0, -8.0], [3.0, 6.0]))
    losses, logs = PreferenceLoss(PreferenceArguments(**flags)).pair_losses(*values)
    assert losses.item() == pytest.approx(expected)
    assert logs["accuracy"].item() == 1


def test_the_first_step_is_ratio_one(tokenizer, pairs_path):
    model = model_of(tokenizer, 1)
    for batch in batches_of(tokenizer, pairs_path, model):
        loss, count, logs = PreferenceLoss(PreferenceArguments())(model, batch, context_of([batch]))
        assert loss.item() / count == pytest.approx(math.log(2), abs=1e-6)
        assert logs["accuracy_sum"].item() / count == 0.5 and abs(logs["margin_sum"].item()) < 1e-6


def test_sums_of_documents_by_hand():
    batch = {
        "labels": torch.tensor([[-100, 5, -100, 6, 7, -100], [-100, -100, 3, -100, -100, -100]]),
        "document_ids": torch.tensor([[1, 1, 2, 2, 2, 3], [1, 1, 1, 2, 0, 0]]),
    }
    losses = torch.tensor([[0, 1.0, 0, 2.0, 4.0, 0], [0, 0, 8.0, 0, 0, 0]])
    log_probs, tokens = sums_of_documents(losses, batch)
    assert log_probs.tolist() == [[-1, -6, 0, 0], [-8, 0, 0, 0]] and tokens.tolist() == [[1, 2, 0, 0], [1, 0, 0, 0]]
    assert pairs_of(tokens).tolist() == [[[1, 2], [0, 0]], [[1, 0], [0, 0]]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"beta": 0.0}, "--beta 0 must be above 0"),
        ({"label_smoothing": 0.5}, "--label_smoothing 0.5 must lie in"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "does not go with --loss_type ipo"),
        ({"sft_weight": -1.0}, "--sft_weight -1 must not be negative"),
    ],
)
def test_flags_out_of_range_are_named(flags, message):
    assert any(message in problem for problem in PreferenceArguments(**flags).problems())


def train_on_pairs(world, folder, path, tokenizer, overrides, rows_a_rank):
    flags = ["--batch_size", rows_a_rank, "--learning_rate", 0.003, "--eval_interval", 2, "--cache_dir", folder]
    model = model_of(tokenizer, 3, router_aux_loss_coef=0.1, **overrides)
    data = DPODataset(str(path), tokenizer, 128, say=None)
    run = tiny_run(folder, data, world, model, validation={"pairs": data}, flags=[*flags, "--epochs", 4])
    run.settings.stage, run.count, run.evaluate = PreferenceArguments(sft_weight=0.1), count_pairs, log_objective
    prepare_preference(run, tokenizer)
    train(run)
    return run


@pytest.fixture(scope="module")
def more_pairs(tmp_path_factory):
    """Nineteen pairs of many lengths, which do not divide evenly."""
    path = tmp_path_factory.mktemp("pairs") / "more.jsonl"
    rows = [
        {"prompt": f"Say {n}.", "chosen": f"{n} " * (1 + 5 * n % 13), "rejected": f"no {n}" * (1 + 3 * n % 11)}
        for n in range(19)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("overrides", [{}, {"use_moe": True}], ids=["dense", "moe"])
def test_two_ranks_learn_from_pairs_as_one_does(tmp_path, tokenizer, more_pairs, overrides):
    one = train_on_pairs(None, tmp_path / "one", more_pairs, tokenizer, overrides, 4)
    run_ranks(train_on_pairs, tmp_path, tmp_path / "two", more_pairs, tokenizer, overrides, 2)
    for name in ("loss", "margin", "accuracy", "validation_loss", "validation_margin", "gradient_norm"):
        alone, together = (
            {
                record["step"]: record[name]
                for record in map(json.loads, (tmp_path / ranks / "run" / "metrics.jsonl").read_text().splitlines())
                if name in record
            }
            for ranks in ("one", "two")
        )
        assert len(alone) >= 2 and close(alone, together, 1e-5 if name != "gradient_norm" else 1e-4), name
    assert one.progress.step == one.total_steps and one.progress.supervised_tokens > one.progress.step


def stage_flags(home, path, *more):
    words = "--batch_size 2 --max_seq_len 96 --max_steps 6 --eval_iters 2 --dtype float32 --device cpu --log_interval 1"
    words += f" --save_interval 3 --save_dir {home}/out --cache_dir {home}/cache --learning_rate 0.001 --sft_weight 0"
    words += f" --data_path {path}"
    return [*words.split(), *map(str, more)]


def test_the_stage_resumes_bit_for_bit_with_the_reference_that_it_started_from(
    tmp_path, tokenizer, more_pairs, capsys, monkeypatch
):
    save_model(model_of(tokenizer, 4), tokenizer, tmp_path / "out" / "full_sft_32")
    straight = run_stage(STAGE, stage_flags(tmp_path, more_pairs, "--checkpoint_dir", tmp_path / "a"))
    assert straight == tmp_path / "out" / "dpo_32" and "accuracy" in capsys.readouterr().out
    first = load_file(straight / "model.safetensors")
    metrics = json.loads((straight / "run.json").read_text())["metrics"]
    assert metrics["validation_accuracy"] > 0.5 and metrics["validation_loss"] < math.log(2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "dpo_32" / "step-00000006.pth").unlink()
    shutil.rmtree(straight)
    monkeypatch.setattr("trainer.preference.compute_reference", lambda run, data: pytest.fail("it was kept"))
    run_stage(STAGE, stage_flags(tmp_path, more_pairs, "--checkpoint_dir", tmp_path / "b", "--from_resume", 1))
    again = load_file(straight / "model.safetensors")
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    (tmp_path / "b" / "dpo_32" / "step-00000006.pth").unlink()
    with pytest.raises(ValueError, match="--beta is 0.3 and was 0.1"):
        flags = stage_flags(tmp_path, more_pairs, "--checkpoint_dir", tmp_path / "b", "--from_resume", 1)
        run_stage(STAGE, [*flags, "--beta", "0.3"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--packing", 0, "--streaming", 1], "--packing 0"),
        (["--packing", 0], "--packing 0: both sides of a pair share a row"),
        (["--beta", -1, "--label_smoothing", 0.7], "--beta -1 must be above 0"),
        (["--from_weight", "pretrained"], "pretrained"),
    ],
)
def test_mistakes_are_named(tmp_path, tokenizer, more_pairs, words, message):
    save_model(model_of(tokenizer, 4), tokenizer, tmp_path / "out" / "full_sft_32")
    with pytest.raises(ValueError, match=message):
        run_stage(STAGE, stage_flags(tmp_path, more_pairs, "--checkpoint_dir", tmp_path / "a", *words))


def test_another_start_is_another_run(tmp_path, tokenizer, more_pairs):
    start = tmp_path / "out" / "full_sft_32"
    save_model(model_of(tokenizer, 4), tokenizer, start)
    run_stage(STAGE, stage_flags(tmp_path, more_pairs, "--checkpoint_dir", tmp_path / "a"))
    (tmp_path / "a" / "dpo_32" / "step-00000006.pth").unlink()
    shutil.rmtree(start)
    save_model(model_of(tokenizer, 5), tokenizer, start)
    with pytest.raises(ValueError, match="the model that the run starts from .--from_weight., which is its reference"):
        run_stage(STAGE, stage_flags(tmp_path, more_pairs, "--checkpoint_dir", tmp_path / "a", "--from_resume", 1))


def test_models_that_only_compute_otherwise_have_other_hashes(tokenizer):
    models = [model_of(tokenizer, 1, use_moe=True, num_experts_per_tok=number) for number in (3, 2, 2)]
    first, second, third = map(model_hash, models)
    assert first != second == third
