"""torch.compile, layer by layer: where it pays, and what happens where it does not work."""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Literal

import torch

from model.model_minimind import MiniMindForCausalLM

UseCompile = Literal["auto", 0, 1]


def compile_layers(model: MiniMindForCausalLM, use_compile: UseCompile, device: torch.device) -> str | None:
    """Compile each layer if it pays; returns what a run should say of it.

    "auto" compiles on CUDA where Triton is installed. On a CPU the hand-written fast path is faster (EXPERIMENTS.md).
    All layers have the same shape, so they share what the compiler makes.
    """
    if use_compile == 0 or (use_compile == "auto" and device.type != "cuda"):
        return None
    if use_compile == "auto" and importlib.util.find_spec("triton") is None:
        return "compile: no, Triton is not installed"
    model.config.fast_path = False  # hand-written kernels would break the compiled graph
    for layer in model.model.layers:
        layer.compile()
    return "compile: each layer, at its first use"


@contextlib.contextmanager
def falling_back(model: MiniMindForCausalLM, use_compile: UseCompile) -> Iterator[list[str]]:
    """Around the first use of compiled layers: with "auto" a compiler's failure makes the layers plain again.

    Yields a list that then holds the reason, else stays empty. The caller uses the layers again.

    Raises:
        ValueError: the compiler failed, and `--use_compile 1` asked for it.
    """
    reasons: list[str] = []
    try:
        yield reasons
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = " ".join(str(error).split("\n")[:2])
        if use_compile == 1:
            raise ValueError(f"--use_compile 1: the compiler failed ({reason}); leave it out") from error
        for layer in model.model.layers:
            layer._compiled_call_impl = None
        model.config.fast_path = True
        reasons.append(f"compile: no, the compiler failed ({reason})")
