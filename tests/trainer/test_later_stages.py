"""Preference, reinforcement and distillation: in half precision, and with an adapter in place of the weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.eval.helpers import write_rows
from tests.trainer.rollouts import ending_model, stage_words, write_home
from trainer import train_distillation, train_dpo, train_grpo, train_ppo
from trainer.results import save_model
from trainer.stage import run_stage
from trainer.weights import load_tokenizer, open_model

ADAPTER = ("--lora_rank", 4, "--learning_rate", 0.02, "--checkpoint_dir")


@pytest.fixture
def home(tokenizer, tmp_path):
    pairs = [{"prompt": f"Say {index}.", "chosen": f"{index}!", "rejected": "No."} for index in range(24)]
    write_rows(tmp_path / "pairs.jsonl", pairs)
    save_model(ending_model(tokenizer), tokenizer, tmp_path / "out" / "full_sft_32")
    return write_home(tmp_path)


def words_of(home, stage):
    if stage.name in ("grpo", "ppo"):
        return stage_words(home, "--from_weight", "full_sft")
    words = (
        "--batch_size 2 --max_seq_len 64 --max_steps 8 --eval_iters 1 --dtype float32 --device cpu --log_interval 1 "
    )
    words += f"--save_interval 3 --save_dir {home}/out --cache_dir {home}/cache --from_weight full_sft --data_path "
    data = "pairs.jsonl" if stage.name == "dpo" else "prompts.jsonl"
    teacher = ["--teacher", f"{home}/out/full_sft_32"] if stage.name == "distillation" else []
    return [*words.split(), f"{home}/{data}", *teacher]


@pytest.mark.parametrize(
    ("stage", "dtype", "overrides"),
    [
        (train_dpo, "float16", {}),
        (train_dpo, "bfloat16", {"use_moe": True}),
        (train_distillation, "float16", {"use_moe": True}),
        (train_distillation, "bfloat16", {}),
        (train_ppo, "float16", {}),
        (train_ppo, "bfloat16", {"use_moe": True}),
    ],
    ids=lambda value: value.STAGE.name if hasattr(value, "STAGE") else None,
)
def test_half_precision_trains_and_resumes_bit_for_bit(home, tokenizer, capsys, stage, dtype, overrides):
    start = home / "out" / "full_sft_32"
    shutil.rmtree(start)
    save_model(ending_model(tokenizer, **overrides), tokenizer, start)
    words = [*words_of(home, stage.STAGE), "--dtype", dtype, "--checkpoint_dir"]
    folder = run_stage(stage.STAGE, [*words, str(home / "a")])
    assert ("loss scaling" in capsys.readouterr().out) == (dtype == "float16")
    before, after = load_file(start / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.isfinite(after[name]).all() for name in after)
    assert any(not torch.equal(before[name], after[name]) for name in after)
    shutil.copytree(home / "a", home / "b")
    (home / "b" / folder.name / "step-00000008.pth").unlink()
    shutil.rmtree(folder)
    run_stage(stage.STAGE, [*words, str(home / "b"), "--from_resume", "1"])
    again = load_file(folder / "model.safetensors")
    assert after.keys() == again.keys() and all(torch.equal(after[name], again[name]) for name in after)


@pytest.mark.parametrize(
    "stage", [train_dpo, train_distillation, train_grpo, train_ppo], ids=lambda one: one.STAGE.name
)
def test_an_adapter_is_trained_saved_and_resumed_bit_for_bit(home, capsys, stage):
    stage = stage.STAGE
    words = words_of(home, stage)
    base = load_file(home / "out" / "full_sft_32" / "model.safetensors")
    folder = run_stage(stage, [*words, *map(str, (*ADAPTER, home / "a"))])
    assert "adapter: rank 4" in capsys.readouterr().out
    assert (folder / "adapter_config.json").is_file() and not (folder / "model.safetensors").exists()
    first = load_file(folder / "adapter_model.safetensors")
    assert not any("critic" in name for name in first) and any(tensor.any() for tensor in first.values())
    unchanged = load_file(home / "out" / "full_sft_32" / "model.safetensors")
    assert all(torch.equal(base[name], unchanged[name]) for name in base)
    whole = open_model(folder)
    assert not torch.equal(
        whole.model.layers[0].self_attn.q_proj.weight, base["model.layers.0.self_attn.q_proj.weight"]
    )
    assert load_tokenizer(folder).chat_template
    shutil.copytree(home / "a", home / "b")
    (home / "b" / folder.name / "step-00000008.pth").unlink()
    shutil.rmtree(folder)
    run_stage(stage, [*words, *map(str, (*ADAPTER, home / "b")), "--from_resume", "1"])
    again = load_file(folder / "adapter_model.safetensors")
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)


def test_the_first_step_of_an_adapter_has_ratio_one_and_no_divergence(home):
    words = [*words_of(home, train_grpo.STAGE), *map(str, (*ADAPTER, home / "a"))]
    folder = run_stage(train_grpo.STAGE, words)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    first = next(record for record in records if "ratio" in record)
    assert first["step"] == 1 and abs(first["ratio"] - 1) < 1e-5 and abs(first["divergence"]) < 1e-5


def test_wrong_adapters_are_named_with_the_stages_own_mistakes(home):
    words = words_of(home, train_grpo.STAGE)
    with pytest.raises(ValueError, match=r"(?s)--clip_low 2 must lie.*--lora_alpha -1 must be above 0"):
        run_stage(train_grpo.STAGE, [*words, "--lora_rank", "4", "--lora_alpha", "-1", "--clip_low", "2"])
    with pytest.raises(ValueError, match=r"(?s)--lora_alpha 32.0 is of an adapter: give --lora_rank.*--merge 1 is"):
        run_stage(train_grpo.STAGE, [*words, "--lora_alpha", "32", "--merge", "1"])
    with pytest.raises(ValueError, match="--lora_rank -1 must not be negative"):
        run_stage(train_grpo.STAGE, [*words, "--lora_rank", "-1"])
