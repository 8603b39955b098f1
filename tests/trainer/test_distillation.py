"""Distillation: the loss by hand, any cut of a step, ranks, resume, and teachers that do not fit."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from dataset.lm_dataset import collate_rows
from tests.model.helpers import tiny_model as model_of
from tests.trainer.helpers import TINY_MOE, RandomRows, close, logged, run_ranks, tiny_model, tiny_run, train
from trainer.distillation import DistillationArguments, DistillationLoss
from trainer.losses import StepContext, count_tokens
from trainer.results import save_model
from trainer.stage import run_stage
from trainer.train_distillation import STAGE


def teacher_model():
    return tiny_model(9, hidden_size=48).eval().requires_grad_(False)


def context_of(batches, loads=None):
    counts = sum(count_tokens(batch) for batch in batches)
    return StepContext(counts[0], counts[2], loads)


def log_probs_of(model, batch, temperature):
    logits = model(input_ids=batch["input_ids"], document_ids=batch["document_ids"]).logits
    return (logits[:, :-1] / temperature).log_softmax(-1)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_loss_and_gradient_by_hand(direction):
    student, teacher, rows = tiny_model(), teacher_model(), RandomRows(4)
    batch = collate_rows([rows[index] for index in range(4)])
    arguments = DistillationArguments(direction=direction, temperature=2.0, distillation_weight=0.3)
    loss, count, _ = DistillationLoss(arguments, teacher)(student, batch, context_of([batch]))
    mine = torch.autograd.grad(loss, list(student.parameters()))
    labels = batch["labels"][:, 1:]
    first, second = (log_probs_of(model, batch, 2.0) for model in (student, teacher))
    if direction == "reverse":
        first, second = second, first
    divergence = F.kl_div(first, second, log_target=True, reduction="none").sum(-1)[labels != -100].sum()
    plain = F.nll_loss(log_probs_of(student, batch, 1.0).flatten(0, 1), labels.flatten(), reduction="sum")
    expected = 0.3 * 2.0**2 * divergence + 0.7 * plain
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5) and count == (labels != -100).sum()
    for ours, theirs in zip(mine, torch.autograd.grad(expected, list(student.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_any_cut_of_a_step_gives_the_same_gradient():
    rows, teacher = RandomRows(8), teacher_model()
    student = tiny_model(**TINY_MOE)
    loads = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.4, 0.1]], dtype=torch.float64)
    results = []
    for cut in ([list(range(8))], [[0, 1, 2], [3, 4, 5, 6], [7, -1]]):
        batches = [collate_rows([rows[index] for index in part]) for part in cut]
        context = context_of(batches, loads)
        student.zero_grad()
        for batch in batches:
            (DistillationLoss(DistillationArguments(), teacher)(student, batch, context)[0] / context.terms).backward()
        results.append([parameter.grad.clone() for parameter in student.parameters()])
    for first, second in zip(*results, strict=True):
        assert torch.allclose(first, second, atol=2e-6)


def learn(world, folder, overrides, rows_a_rank):
    flags = ["--batch_size", rows_a_rank, "--learning_rate", 0.003]
    run = tiny_run(folder, RandomRows(41), world, tiny_model(**overrides), flags=flags)
    run.loss = DistillationLoss(DistillationArguments(), teacher_model())
    train(run)


@pytest.mark.parametrize("overrides", [{}, TINY_MOE], ids=["dense", "moe"])
def test_two_ranks_learn_as_one_does(tmp_path, overrides):
    learn(None, tmp_path / "one", overrides, 8)
    run_ranks(learn, tmp_path, tmp_path / "two", overrides, 4)
    for name, tolerance in {"loss": 1e-5, "divergence": 1e-5, "gradient_norm": 1e-4}.items():
        one, two = (logged(tiny_run(tmp_path / ranks, RandomRows(41), None), name) for ranks in ("one", "two"))
        assert len(one) == 6 and close(one, two, tolerance), name


def flags(folder, *more):
    words = "--batch_size 2 --max_seq_len 64 --max_steps 6 --eval_iters 1 --dtype float32 --device cpu --log_interval 3"
    words += f" --save_interval 3 --save_dir {folder}/out --cache_dir {folder}/cache --data_path {folder}/chats.jsonl"
    return [*words.split(), *map(str, more)]


@pytest.fixture
def home(tokenizer, tmp_path):
    chats = [
        {"conversations": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    for name, seed, overrides in (("mid_train_32", 1, {}), ("full_sft_48", 2, {"hidden_size": 48})):
        save_model(model_of(seed, vocab_size=len(tokenizer), **overrides), tokenizer, tmp_path / "out" / name)
    return tmp_path


def test_the_stage_leaves_a_model_and_resumes_bit_for_bit(home, tokenizer, capsys):
    straight = run_stage(STAGE, flags(home, "--checkpoint_dir", home / "a"))
    assert straight == home / "out" / "distillation_32"
    printed = capsys.readouterr().out
    assert f"teacher: {home / 'out' / 'full_sft_48'}" in printed and "divergence" in printed
    first = load_file(straight / "model.safetensors")
    shutil.copytree(home / "a", home / "b")
    (home / "b" / "distillation_32" / "step-00000006.pth").unlink()
    shutil.rmtree(straight)
    run_stage(STAGE, flags(home, "--checkpoint_dir", home / "b", "--from_resume", 1))
    again = load_file(straight / "model.safetensors")
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    (home / "b" / "distillation_32" / "step-00000006.pth").unlink()
    shutil.rmtree(home / "out" / "full_sft_48")
    save_model(model_of(3, vocab_size=len(tokenizer), hidden_size=48), tokenizer, home / "out" / "full_sft_48")
    with pytest.raises(ValueError, match="cannot resume: the teacher .--teacher. changed"):
        run_stage(STAGE, flags(home, "--checkpoint_dir", home / "b", "--from_resume", 1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", 0, "--distillation_weight", 2], "--temperature 0 must be above 0"),
        (["--teacher", "nothing"], "--teacher nothing: .*no such finished model"),
        (["--teacher", "./nowhere"], "--teacher ./nowhere: .*no model there"),
        (["--teacher", "full_sft_other"], "--teacher full_sft_other: its vocabulary"),
        (["--max_seq_len", 600, "--teacher", "full_sft"], "--teacher full_sft: it reads 512 tokens"),
    ],
)
def test_teachers_that_do_not_fit_are_named(home, tokenizer, words, message):
    folder = home / "out" / "full_sft_other_32"
    save_model(model_of(1, vocab_size=len(tokenizer) + 64), tokenizer, folder)
    with pytest.raises(ValueError, match=message):
        run_stage(STAGE, flags(home, "--checkpoint_dir", home / "a", *words))
