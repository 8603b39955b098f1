"""Adapters: PEFT's files that PEFT itself opens with our logits, merging, resuming, and what is refused."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from model.model_minimind import load_model
from tests.model.helpers import packed_rows, random_tokens, tiny_model
from tests.trainer import helpers
from tests.trainer.helpers import TINY_MOE, RandomRows, close, logged, run_ranks, tiny_run, train
from trainer import lora, weights
from trainer.config import FolderChoice
from trainer.lora import add_adapter, merged, open_merged, save_adapter
from trainer.lora_flags import LoraArguments
from trainer.results import save_model
from trainer.stage import run_stage
from trainer.train_lora import STAGE

SHAPES = {"dense": {}, "moe": {"use_moe": True}, "untied": {"tie_word_embeddings": False}}


def adapted(shape, tokenizer, folder, **flags):
    """A saved base and the same model with an adapter whose matrices are all random."""
    model = tiny_model(vocab_size=len(tokenizer), **SHAPES[shape])
    save_model(model, tokenizer, folder)
    arguments = LoraArguments(**({"lora_rank": 3, "lora_alpha": 12.0} | flags))
    add_adapter(model, arguments)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval(), arguments


@torch.no_grad()
def logits(model):
    return model(input_ids=random_tokens(2, 20)).logits


@pytest.mark.parametrize("targets", [["attention", "mlp", "experts"], ["attention"], ["mlp", "experts"]])
@pytest.mark.parametrize("shape", list(SHAPES))
def test_peft_opens_our_adapter_with_our_logits_and_merging_keeps_them(shape, targets, tokenizer, tmp_path):
    base, folder = tmp_path / "base_32", tmp_path / "lora_32"
    model, arguments = adapted(shape, tokenizer, base, lora_targets=targets)
    save_adapter(model, tokenizer, folder, base, arguments)
    expected, plain = logits(model), logits(load_model(str(base)))
    assert (expected - plain).abs().max() > 0.01, "the adapter does something"
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(theirs, folder).eval()
    torch.testing.assert_close(logits(theirs), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(merged(model).eval()), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(open_merged(folder).eval()), expected, rtol=0, atol=1e-5)
    assert torch.equal(logits(model), expected), "merging leaves the model as it was"


def test_merging_is_base_plus_scaled_product_to_the_bit(tokenizer, tmp_path):
    model, arguments = adapted("dense", tokenizer, tmp_path / "base_32")
    layer = model.model.layers[1].self_attn.q_proj
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * (arguments.lora_alpha / 3)
    weight = merged(model).state_dict()["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(weight, layer.base_layer.weight + product)


@pytest.mark.parametrize("use_moe", [False, True])
def test_only_the_adapter_is_trained_also_in_packed_rows(use_moe):
    model = tiny_model(use_moe=use_moe)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = packed_rows([[30, 70], [100], [60, 40], [100]], 100)
    plain = model(**batch, return_token_losses=True).token_losses
    add_adapter(model, LoraArguments(lora_rank=2))
    model.train()
    losses = model(**batch, return_token_losses=True).token_losses
    torch.testing.assert_close(losses, plain, rtol=0, atol=1e-5)  # it starts as no change
    losses.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert (parameter.grad is not None) == ("lora_" in name), name
    assert any(parameter.grad.abs().sum() > 0 for name, parameter in model.named_parameters() if "lora_B" in name)
    for name, tensor in model.state_dict().items():
        if "lora_" not in name:
            assert torch.equal(tensor, before[name.replace(".base_layer", "")])


def train_an_adapter(world, folder, overrides, rows_a_rank):
    torch.manual_seed(0)
    model = helpers.tiny_model(**overrides)
    add_adapter(model, LoraArguments(lora_rank=2))
    flags = ["--batch_size", rows_a_rank, "--learning_rate", 0.003, "--parallel", "ddp"]
    train(tiny_run(folder, RandomRows(75), world, model, flags=flags))


@pytest.mark.parametrize("overrides", [{}, TINY_MOE], ids=["dense", "moe"])
def test_two_ranks_train_an_adapter_as_one_does(tmp_path, overrides):
    train_an_adapter(None, tmp_path / "one", overrides, 8)
    run_ranks(train_an_adapter, tmp_path, tmp_path / "two", overrides, 4)
    for name, tolerance in {"loss": 1e-6, "gradient_norm": 1e-4}.items():
        one, two = (logged(tiny_run(tmp_path / ranks, RandomRows(75), None), name) for ranks in ("one", "two"))
        assert len(one) == 10 and close(one, two, tolerance), name


def flags(folder, *more):
    words = "--batch_size 2 --max_seq_len 64 --max_steps 6 --eval_iters 1 --dtype float32 --device cpu --log_interval 3"
    words += f" --save_interval 3 --lora_rank 2 --lora_dropout 0.1 --save_dir {folder}/out --cache_dir {folder}/cache"
    rows = folder / "chats.jsonl"
    if not rows.exists():
        chats = [
            {"conversations": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}!"}]}
            for n in range(40)
        ]
        rows.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return [*words.split(), "--data_path", str(rows), *map(str, more)]


@pytest.fixture
def based(tokenizer, tmp_path):
    model = tiny_model(vocab_size=len(tokenizer))
    save_model(model, tokenizer, tmp_path / "out" / "full_sft_32")
    return tmp_path


def test_a_stage_leaves_an_adapter_and_a_merged_model_and_resumes_bit_for_bit(based):
    straight = run_stage(STAGE, flags(based, "--merge", 1, "--checkpoint_dir", based / "a"))
    assert straight == based / "out" / "lora_32"
    assert weights.find_folder(FolderChoice(weight="lora", save_dir=str(based / "out"))) == straight
    first = load_file(straight / "adapter_model.safetensors")
    whole = weights.open_model(based / "out" / "lora_merged_32")
    torch.testing.assert_close(logits(weights.open_model(straight)), logits(whole), rtol=0, atol=1e-5)
    assert "PeftModel.from_pretrained" in (straight / "README.md").read_text()
    shutil.copytree(based / "a", based / "b")
    (based / "b" / "lora_32" / "step-00000006.pth").unlink()
    shutil.rmtree(straight)
    run_stage(STAGE, flags(based, "--checkpoint_dir", based / "b", "--from_resume", 1))
    again = load_file(straight / "adapter_model.safetensors")
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    (based / "b" / "lora_32" / "step-00000006.pth").unlink()
    with pytest.raises(ValueError, match="--lora_alpha is 3.0 and was 16.0"):
        run_stage(STAGE, flags(based, "--checkpoint_dir", based / "b", "--from_resume", 1, "--lora_alpha", 3))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lora_rank", 0, "--lora_alpha", -1, "--lora_dropout", 2], "--lora_rank 0 must be at least 1"),
        (["--lora_targets", "attention", "heads"], "--lora_targets attention heads: take some of attention, mlp, exp"),
        (["--lora_targets", "experts"], "--lora_targets experts: the model has attention, mlp"),
        (["--from_weight", "none"], "--from_weight none: an adapter needs a trained model"),
        (["--from_weight", "{tmp}/x.pth"], "x.pth: an adapter belongs to a model folder; make one with: python"),
        (["--parallel", "fsdp"], "--parallel fsdp: an adapter is small"),
        (["--save_weight", "full_sft"], "exists and holds no adapter_config.json"),
    ],
)
def test_mistakes_are_named_before_any_work(based, words, message):
    torch.save(tiny_model(vocab_size=4657).state_dict(), based / "x.pth")
    words = [str(word).format(tmp=based) for word in words]
    with pytest.raises(ValueError, match=message):
        run_stage(STAGE, flags(based, "--checkpoint_dir", based / "a", *words))


def test_a_lost_base_is_named_and_one_beside_the_adapter_is_found(tokenizer, tmp_path):
    base, folder = tmp_path / "base_32", tmp_path / "lora_32"
    model, arguments = adapted("dense", tokenizer, base)
    save_adapter(model, tokenizer, folder, base, arguments)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.move(folder, moved / "lora_32")
    base.rename(tmp_path / "renamed")
    with pytest.raises(ValueError, match="its base model .*base_32 is neither there nor beside it"):
        open_merged(moved / "lora_32")
    shutil.move(tmp_path / "renamed", moved / "base_32")
    assert lora.base_of_adapter(moved / "lora_32") == moved / "base_32"
