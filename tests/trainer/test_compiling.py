"""--use_compile: what auto picks, and that a compiler that fails costs nothing but a line."""

import pytest
import torch

from tests.trainer.helpers import tiny_model
from trainer.compiling import compile_layers, falling_back

CPU = torch.device("cpu")


def is_compiled(model):
    return [layer._compiled_call_impl is not None for layer in model.model.layers]


def test_auto_compiles_on_cuda_only(monkeypatch):
    model = tiny_model()
    assert compile_layers(model, "auto", CPU) is None and compile_layers(model, 0, torch.device("cuda")) is None
    assert not any(is_compiled(model)) and model.config.fast_path
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "Triton is not installed" in compile_layers(model, "auto", torch.device("cuda"))
    assert not any(is_compiled(model))
    assert "each layer" in compile_layers(model, 1, CPU)
    assert all(is_compiled(model)) and not model.config.fast_path


def broken(graph, inputs):
    raise RuntimeError("no compiler here")


@pytest.mark.parametrize("use_compile", ["auto", 1])
def test_a_compiler_that_fails(use_compile):
    torch._dynamo.reset()
    model, ids = tiny_model(), torch.arange(3, 20)[None]
    expected = model(ids).logits
    compile_layers(model, 1, CPU)
    for layer in model.model.layers:
        layer.compile(backend=broken)
    if use_compile == 1:
        with pytest.raises(ValueError, match="--use_compile 1.*no compiler here"), falling_back(model, 1):
            model(ids)
        return
    with falling_back(model, "auto") as failure:
        model(ids)
    assert "no compiler here" in failure[0] and not any(is_compiled(model)) and model.config.fast_path
    torch.testing.assert_close(model(ids).logits, expected)
