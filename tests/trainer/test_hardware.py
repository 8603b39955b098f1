"""What the machine can do, what a token costs and what a run needs: by arithmetic."""

import os
import random
import signal

import numpy as np
import psutil
import pytest
import torch

from tests.trainer.helpers import TINY_MOE, RandomRows, tiny_model, tiny_run, train
from trainer.checkpoint import capture_rng
from trainer.hardware import (
    flops_per_token,
    hand_back_freed_memory,
    hardware_metrics,
    has_working_amx,
    keep_freed_memory,
    matmul_peak,
    peak_memory_gib,
)
from trainer.memory import advice, describe_memory, is_out_of_memory, state_bytes

CPU = torch.device("cpu")


def test_flops_of_a_token_by_hand():
    attention, norms = 32 * 32 * 2 + 32 * 16 * 2, 2 * 8 + 2 * 32
    head, last_norm = 96 * 32, 32
    dense = 2 * (attention + norms + 3 * 32 * 64) + head + last_norm
    assert flops_per_token(tiny_model()) == 6 * dense
    two_of_four = 2 * (attention + norms + 2 * 3 * 32 * 32 + 4 * 32) + head + last_norm
    assert flops_per_token(tiny_model(**TINY_MOE)) == 6 * two_of_four
    assert flops_per_token(tiny_model(tie_word_embeddings=False)) == 6 * dense, "an embedding is looked up"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_peak_is_measured_without_touching_a_generator(dtype):
    before = capture_rng(CPU)
    assert 1e8 < matmul_peak(CPU, dtype) < 1e14
    after = capture_rng(CPU)
    assert torch.equal(before["torch"], after["torch"]) and before["python"] == after["python"]
    assert before["numpy"] == after["numpy"]
    assert random.random() != np.random.rand()


def test_what_the_machine_does_is_in_range():
    metrics = hardware_metrics(CPU)
    assert 0 <= metrics["cpu_percent"] <= 100 and 0 < metrics["ram_used_percent"] <= 100
    assert 0.05 < metrics["ram_gib"] <= peak_memory_gib(CPU) * 1.5


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_a_checkpoint_takes_is_known_before(tmp_path, optimizer):
    model = tiny_model(hidden_size=128, vocab_size=96)
    run = tiny_run(tmp_path, RandomRows(8), model=model, flags=["--optimizer", optimizer])
    expected = state_bytes(run)
    train(run)
    size = run.checkpoints.steps()[0].stat().st_size
    assert expected < size < expected * 1.15 + 60_000  # names, settings and the generators' state come on top
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert describe_memory(run).startswith(f"{(expected + 4 * weights) / 2**30:.2f} GiB")


def test_advice_is_in_numbers_that_train_the_same(tmp_path):
    run = tiny_run(tmp_path, RandomRows(8), flags=["--batch_size", "12", "--accumulation_steps", "2"])
    assert advice(run) == (
        "try --batch_size 6 --accumulation_steps 4 (the same step), or --activation_checkpointing 1 (a third slower), "
        "or --max_seq_len 8 (another run)"
    )


def test_which_errors_are_of_memory():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("shape mismatch"))


def test_freed_memory_is_kept_and_handed_back_ever_more_seldom():
    def held_after_work() -> int:
        torch.ones(2**26)  # 256 MiB, freed at once
        return psutil.Process().memory_info().rss

    assert keep_freed_memory()
    for step in range(1, 10):
        kept = held_after_work()
        hand_back_freed_memory(step)
        handed_back = kept - psutil.Process().memory_info().rss
        assert handed_back > 2**27 if step in (1, 2, 4, 8) else handed_back < 2**26


@pytest.mark.parametrize(("announced", "works"), [(True, True), (True, False), (False, False)])
def test_a_cpu_whose_amx_kills_goes_on_without(monkeypatch, capsys, announced, works):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: announced)
    product = torch.ones if works else lambda *size, dtype: os.kill(os.getpid(), signal.SIGILL)
    monkeypatch.setattr(torch, "ones", lambda *size, dtype: product(*size, dtype=torch.float32))
    assert has_working_amx.__wrapped__() == (announced and works)
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == ("AVX512_CORE_FP16" if announced and not works else None)
    assert ("cannot run it" in capsys.readouterr().err) == (announced and not works)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # somebody's choice stands
    assert not has_working_amx.__wrapped__()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "ALL")
    assert has_working_amx.__wrapped__() == announced
