"""Converting: MiniMind's files both ways, Qwen3 folders, GGUF from the command line, and every mistake by name."""

import json
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import scripts.convert_model as convert_model
from model.gguf_file import read_gguf_header
from model.model_minimind import load_model
from tests.model.helpers import random_tokens, tiny_model
from trainer.config import user_errors
from trainer.results import save_model

SHAPES = {
    "dense": {},
    "untied": {"tie_word_embeddings": False},
    "moe": {"use_moe": True},
    "minimind-moe": {"use_moe": True, "num_experts_per_tok": 1, "router_frozen": True},
}


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["convert_model.py", *map(str, words)])
    with user_errors():
        convert_model.main()


@pytest.fixture(params=list(SHAPES))
def made(request, tokenizer, tmp_path):
    model = tiny_model(vocab_size=len(tokenizer), hidden_size=64, **SHAPES[request.param])
    folder = tmp_path / "out" / f"full_sft_64{'_moe' if model.config.use_moe else ''}"
    save_model(model, tokenizer, folder)
    return model, folder


@torch.no_grad()
def logits(model):
    return model(random_tokens(2, 20)).logits


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("auto", 0.03)])
def test_there_and_back_through_minimind_files(made, tmp_path, monkeypatch, dtype, tolerance):
    """Ours -> MiniMind's .pth -> Qwen3 folder: the same logits, in fp32 exactly, in MiniMind's fp16 to rounding."""
    model, folder = made
    pth, back = tmp_path / "x.pth", tmp_path / "back"
    run(monkeypatch, "--to", "minimind", "--from_weight", folder, "--output", pth, "--save_dtype", dtype)
    state = torch.load(pth, weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.float16 if dtype == "auto" else torch.float32}
    assert "lm_head.weight" in state
    chosen = ["--num_experts_per_tok", model.config.num_experts_per_tok] if model.config.use_moe else []
    run(monkeypatch, "--to", "qwen3", "--from_weight", pth, "--output", back, *chosen)
    for opened in (load_model(str(back)), AutoModelForCausalLM.from_pretrained(back)):
        scale = logits(model).abs().max()
        assert (logits(opened.eval()) - logits(model)).abs().max() <= tolerance * scale
    assert (
        AutoTokenizer.from_pretrained(back)("你好")["input_ids"]
        == AutoTokenizer.from_pretrained(folder)("你好")["input_ids"]
    )


@pytest.mark.parametrize("weights_file", ["model.safetensors", "pytorch_model.bin"])
def test_the_native_folder_opens_here_and_becomes_qwen3(made, tmp_path, monkeypatch, weights_file):
    model, folder = made
    native, back = tmp_path / "native", tmp_path / "back"
    run(monkeypatch, "--to", "minimind", "--from_weight", folder, "--output", native, "--save_dtype", "float32")
    config = json.loads((native / "config.json").read_text())
    assert config["model_type"] == "minimind" and config["rope_theta"] == 1e6 and config["dropout"] == 0.0
    if weights_file == "pytorch_model.bin":  # what MiniMind itself writes
        from safetensors.torch import load_file

        torch.save(load_file(native / "model.safetensors"), native / weights_file)
        (native / "model.safetensors").unlink()
    run(monkeypatch, "--to", "qwen3", "--from_weight", native, "--output", back)
    opened = AutoModelForCausalLM.from_pretrained(back)
    assert type(opened).__name__ == ("Qwen3MoeForCausalLM" if model.config.use_moe else "Qwen3ForCausalLM")
    assert (logits(opened.eval()) - logits(model)).abs().max() <= 1e-5


def test_gguf_goes_beside_the_weights_with_a_modelfile(made, monkeypatch, capsys):
    _, folder = made
    run(monkeypatch, "--save_dir", folder.parent, "--quantize", "f32")
    path = folder / f"{folder.name}-f32.gguf"
    assert str(path) in capsys.readouterr().out
    assert read_gguf_header(path).is_float32
    modelfile = (folder / "Modelfile").read_text()
    assert modelfile.startswith(f"FROM ./{path.name}\n") and "<|im_start|>" in modelfile
    run(monkeypatch, "--save_dir", folder.parent, "--quantize", "q8_0", "--output", folder / "y.gguf")
    assert not read_gguf_header(folder / "y.gguf").is_float32
    assert not [name for name in folder.iterdir() if name.name.startswith(".")]


def test_weights_too_large_for_half_precision_are_refused(tokenizer, tmp_path, monkeypatch, capsys):
    model = tiny_model(vocab_size=len(tokenizer))
    with torch.no_grad():
        model.model.norm.weight[3] = 1e5
    save_model(model, tokenizer, tmp_path / "big")
    with pytest.raises(SystemExit):
        run(monkeypatch, "--to", "minimind", "--from_weight", tmp_path / "big", "--output", tmp_path / "x.pth")
    assert "model.norm.weight does not fit torch.float16; use --save_dtype float32" in capsys.readouterr().err
    assert not (tmp_path / "x.pth").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--save_dir", "{tmp}"], "--from_weight full_sft: no finished model named full_sft in {tmp}"),
        (["--from_weight", "{tmp}/none.pth"], "--from_weight {tmp}/none.pth: no such file or folder"),
        (["--from_weight", "auto"], "--from_weight auto: name a stage, a model folder or a .pth file"),
        (["--from_weight", "{folder}", "--to", "qwen3", "--output", "{tmp}"], "--output {tmp}: exists already"),
        (["--from_weight", "{folder}", "--quantize", "q4"], "invalid choice: 'q4'"),
        (["--from_weight", "{folder}", "--output", "/proc/x/y.gguf"], "/proc/x/y.gguf: could not be written"),
    ],
)
def test_mistakes_get_one_line(words, message, tokenizer, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "m"
    save_model(tiny_model(vocab_size=len(tokenizer)), tokenizer, folder)
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *(word.format(tmp=tmp_path, folder=folder) for word in words))
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message.format(tmp=tmp_path) in error and len(error.splitlines()) == 1, error
