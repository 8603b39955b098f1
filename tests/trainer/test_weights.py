"""Where weights come from and where they go: names, shapes, contradictions, and what is never overwritten."""

import json
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from tests.trainer.helpers import RandomRows, tiny_model, tiny_run, train
from trainer import results, weights
from trainer.config import ModelArguments

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 6400,
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(weights.DEFAULT_TOKENIZER))


def save(folder, tokenizer, metrics=None, **overrides):
    torch.manual_seed(0)
    model = MiniMindForCausalLM(MiniMindConfig(**(SHAPE | {"zero_init_output": False} | overrides)))
    with results.writing_result(folder, {"stage": "x"}, "card", metrics or folder / "none") as temporary:
        results.save_model(model, tokenizer, temporary)
    return model


def start(save_dir, candidates=(), **flags):
    arguments = ModelArguments(**flags)
    source = weights.resolve_from_weight(arguments, str(save_dir), candidates)
    return weights.init_model(arguments, source, CPU, 64)


def test_a_saved_folder_opens_here_and_in_transformers_with_equal_logits(tmp_path, tokenizer):
    model = save(tmp_path / "pretrain_32", tokenizer)
    ids = torch.randint(0, 4000, (2, 9))
    ours, _, _ = start(tmp_path, from_weight="pretrain")
    assert ours.training, "dropout and activation checkpointing act only in training mode"
    theirs = AutoModelForCausalLM.from_pretrained(str(tmp_path / "pretrain_32"))
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        assert torch.allclose(ours.eval()(input_ids=ids).logits, expected, atol=1e-6)
        assert torch.allclose(theirs.eval()(input_ids=ids).logits, expected, atol=1e-5)


def test_auto_takes_the_best_stage_there_is(tmp_path, tokenizer):
    save(tmp_path / "pretrain_32", tokenizer)
    assert "pretrain_32 (picked by auto)" in "".join(start(tmp_path, ("mid_train", "pretrain"), from_weight="auto")[2])
    time.sleep(0.01)
    save(tmp_path / "mid_train_32", tokenizer)
    assert "mid_train_32 (picked by auto)" in "".join(start(tmp_path, ("mid_train", "pretrain"), from_weight="auto")[2])


def test_without_weights_the_message_has_the_command(tmp_path):
    with pytest.raises(
        ValueError, match=r"mid_train or pretrain.*make it with: python scripts/mid_train.py or python trainer"
    ):
        start(tmp_path, ("mid_train", "pretrain"), from_weight="auto")
    with pytest.raises(ValueError, match="no such file or folder"):
        start(tmp_path, from_weight="./nowhere")


def test_flags_that_contradict_the_weights_are_named_with_both_values(tmp_path, tokenizer):
    save(tmp_path / "pretrain_32", tokenizer)
    with pytest.raises(ValueError, match=".") as caught:
        start(tmp_path, from_weight=str(tmp_path / "pretrain_32"), hidden_size=64, num_hidden_layers=3)
    assert "--hidden_size 64 contradicts" in str(caught.value) and "whose hidden_size is 32" in str(caught.value)
    assert "--num_hidden_layers 3 contradicts" in str(caught.value)
    with pytest.raises(ValueError, match="--hidden_size 256 contradicts"):
        start(tmp_path, from_weight="pretrain", preset="nano")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path, tokenizer):
    save(tmp_path / "pretrain_32", tokenizer, vocab_size=512)
    with pytest.raises(ValueError, match=r"[\d,]+ tokens, more than the 512 of the weights"):
        start(tmp_path, from_weight="pretrain", tokenizer_path=str(weights.DEFAULT_TOKENIZER))


def test_a_missing_or_broken_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer.json there; make one with: python scripts/train_tokenizer.py"):
        start(tmp_path, tokenizer_path=str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(ValueError, match="the tokenizer cannot be read"):
        start(tmp_path, tokenizer_path=str(tmp_path))


def test_a_folder_of_another_shape_is_never_overwritten(tmp_path, tokenizer):
    folder = tmp_path / "pretrain_32"
    save(folder, tokenizer)
    results.check_result_folder(folder, MiniMindConfig(**SHAPE))
    with pytest.raises(ValueError, match="holds a model whose num_hidden_layers is 2, this run's is 3"):
        results.check_result_folder(folder, MiniMindConfig(**(SHAPE | {"num_hidden_layers": 3})))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no config.json"):
        results.check_result_folder(tmp_path / "notes", MiniMindConfig(**SHAPE))


def test_a_save_that_fails_leaves_the_old_folder(tmp_path, tokenizer, monkeypatch):
    folder = tmp_path / "pretrain_32"
    save(folder, tokenizer)
    before = (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr(results.shutil, "copyfile", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}))
    with pytest.raises(ValueError, match="could not be written.*disk full"):
        save(folder, tokenizer, tmp_path / "metrics.jsonl", initializer_range=0.5)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_a_minimind_state_dict_in_half_precision_opens(tmp_path, tokenizer, moe):
    overrides = {"use_moe": True, "num_experts": 4, "num_experts_per_tok": 1, "router_frozen": True} if moe else {}
    model = save(tmp_path / "x_32", tokenizer, **overrides)
    state = {name: tensor.half() for name, tensor in model.state_dict().items()}
    torch.save(state | {"model.freqs_cos": torch.zeros(4, 4)}, tmp_path / "pretrain_32.pth")
    opened, _, notes = start(tmp_path, from_weight=str(tmp_path / "pretrain_32.pth"))
    for name, tensor in opened.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, state[name].float()), name
    assert any("router: frozen" in note for note in notes) == moe
    if moe:
        assert not opened.model.layers[0].mlp.gate.weight.requires_grad


def test_a_wrong_state_dict_is_refused_by_tensor(tmp_path, tokenizer):
    state = save(tmp_path / "x_32", tokenizer).state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    torch.save(state | {"model.extra": torch.zeros(1)}, tmp_path / "broken.pth")
    with pytest.raises(
        ValueError, match=r"model.layers.1.mlp.up_proj.weight is missing; model.extra is not a parameter"
    ):
        start(tmp_path, from_weight=str(tmp_path / "broken.pth"))
    torch.save({"a": torch.zeros(1)}, tmp_path / "foreign.pth")
    with pytest.raises(ValueError, match="Not a MiniMind state dict"):
        start(tmp_path, from_weight=str(tmp_path / "foreign.pth"))


def test_a_checkpoint_of_ours_is_a_start_too(tmp_path, tokenizer):
    run = tiny_run(tmp_path, RandomRows(8), model=tiny_model(vocab_size=6400))
    train(run)
    opened, _, _ = start(tmp_path, from_weight=str(run.checkpoints.steps()[0]))
    for name, tensor in run.bare_model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor)


def test_top_1_with_normalised_weights_is_refused_from_scratch(tmp_path):
    with pytest.raises(ValueError, match="router gets no gradient"):
        start(tmp_path, preset="nano-moe", num_experts_per_tok=1)


def test_new_weights_start_as_asked_and_say_so(tmp_path, tokenizer):
    shape = {"preset": "nano", "hidden_size": 256, "num_hidden_layers": 2}
    models, notes = {}, {}
    for init in ("induction", "normal"):
        torch.manual_seed(0)
        models[init], _, notes[init] = start(tmp_path, init=init, **shape)
    assert any("copies from the context" in note for note in notes["induction"])
    assert not any("start:" in note for note in notes["normal"])
    torch.manual_seed(0)
    plain = MiniMindForCausalLM(models["normal"].config)
    assert torch.equal(models["normal"].model.embed_tokens.weight, plain.model.embed_tokens.weight)
    assert not models["normal"].model.layers[0].self_attn.o_proj.weight.any()
    assert models["induction"].model.layers[0].self_attn.o_proj.weight.any()
    small = start(tmp_path, preset="nano", hidden_size=32, num_hidden_layers=1)[2]
    assert any("random; --init induction needs 2 layers" in note for note in small)


def test_a_damaged_weights_file_is_named(tmp_path, tokenizer):
    (tmp_path / "m").mkdir()
    results.save_model(tiny_model(vocab_size=len(tokenizer)), tokenizer, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match="m: the weights cannot be read, the file is damaged"):
        weights.open_model(tmp_path / "m")
