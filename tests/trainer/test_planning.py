"""The planner's formulas against arithmetic by hand and against what the model really keeps."""

import json
import subprocess
import sys

import pytest
import torch

from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from tests.e2e.test_readme import ROOT
from trainer.planning import Device, activation_bytes_per_token, plan_run, state_bytes_per_device

GPU = Device("GPU", 100e12, 24e9)


def kept_bytes(model, documents, tokens):
    """Bytes that a forward pass keeps for the backward pass, in bfloat16, each storage once."""
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(3, 200, (1, documents * tokens))
    document_ids = torch.arange(1, documents + 1).repeat_interleave(tokens)[None]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept), torch.autocast("cpu", torch.bfloat16):
        losses = model(input_ids=ids, labels=ids, document_ids=document_ids, return_token_losses=True).token_losses
    assert losses.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("length", [128, 384])
@pytest.mark.parametrize("preset", ["nano", "mini", "nano-moe"])
def test_activations_are_as_many_as_are_kept(preset, length):
    config = MiniMindConfig.from_preset(preset, {"num_hidden_layers": 2, "vocab_size": 512})
    model = MiniMindForCausalLM(config).train()
    # Weights are kept in half precision too: the difference between two sizes is what tokens take.
    few, many = 8, 24
    measured = (kept_bytes(model, many, length) - kept_bytes(model, few, length)) / ((many - few) * length)
    assert activation_bytes_per_token(config, length, checkpointing=False) == pytest.approx(measured, rel=0.15)


def test_state_by_hand():
    model = MiniMindForCausalLM(MiniMindConfig.from_preset("nano", {"vocab_size": 64}))
    total = sum(parameter.numel() for parameter in model.parameters())
    matrices = 4 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 832)
    assert state_bytes_per_device(model, "adamw", 1, "ddp") == total * (4 + 4 + 8 + 2)
    assert state_bytes_per_device(model, "muon", 1, "ddp") == total * (4 + 4 + 8 + 2) - 4 * matrices
    assert state_bytes_per_device(model, "adamw", 4, "fsdp") == total * (4 + 4 + 8) / 4 + total * 2


def test_hours_by_hand():
    config = MiniMindConfig.from_preset("base")
    plan = plan_run(config, GPU, 2, 1_000_000_000, 512, utilization=0.4, document_tokens=256)
    operations = 6 * (plan.parameters + 8 * 8 * 96 * 256)
    assert plan.flops == pytest.approx(1e9 * operations)
    assert plan.hours == pytest.approx(1e9 * operations / (2 * 100e12 * 0.4) / 3600)
    assert plan_run(config, GPU, 1, None, 512).tokens == 20 * plan.parameters


def test_a_plan_fits_into_its_device_or_says_that_it_cannot():
    for preset in ("nano", "base", "base-moe", "large"):
        for gigabytes in (1, 2, 4, 8, 24, 80):
            for devices in (1, 8):
                config = MiniMindConfig.from_preset(preset)
                plan = plan_run(config, Device("GPU", 100e12, gigabytes * 1e9), devices, None, 1024)
                assert plan.problems or plan.memory_bytes <= gigabytes * 1e9
                assert plan.rows * plan.accumulation * devices * 1024 >= 16_384
    tight = plan_run(MiniMindConfig.from_preset("large"), Device("GPU", 100e12, 2.2e9), 8, None, 1024)
    assert tight.parallel == "fsdp" and not tight.problems
    hopeless = plan_run(MiniMindConfig.from_preset("large"), Device("GPU", 100e12, 0.5e9), 1, None, 1024)
    assert "smaller model" in hopeless.problems[0]


def test_the_command(tmp_path):
    command = [sys.executable, str(ROOT / "scripts/plan_run.py"), "--preset", "base", "--tokens", "1.3e9", "--devices"]
    done = subprocess.run([*command, "RTX 3090:2", "cpu"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.splitlines()[-1])
    assert first["device"] == "RTX 3090" and second["device"] == "cpu" and first["hours"] < second["hours"]
    assert "torchrun --nproc_per_node 2 trainer/train_pretrain.py --preset base" in done.stdout
    wrong = subprocess.run([*command, "RTX 9999"], cwd=tmp_path, capture_output=True, text=True)
    assert wrong.returncode == 2 and "RTX 9999" in wrong.stderr and "H100" in wrong.stderr
