"""Which parameter goes where, and that nothing is forgotten or counted twice."""

import pytest
import torch

from model.config import MiniMindConfig
from model.model_minimind import MiniMindForCausalLM
from trainer.muon import QUINTICS, Muon, orthogonalize
from trainer.optim import build_optimizers, is_hidden_matrix


def tiny(**overrides):
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return MiniMindForCausalLM(MiniMindConfig(**(fields | overrides)))


def names_in(model, optimizer):
    by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_identity[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def test_muon_has_the_matrices_and_adamw_the_rest_each_once():
    model = tiny(use_moe=True, num_experts=4, num_experts_per_tok=2)
    (muon, adamw), table = build_optimizers(model, "muon", 5e-3, 0.1, 1e-3)
    matrices, rest = names_in(model, muon), names_in(model, adamw)
    assert sorted(matrices + rest) == sorted(name for name, _ in model.named_parameters())
    assert all(name.endswith("_proj.weight") for name in matrices)
    assert len(matrices) == 2 * (4 + 4 * 3)  # q, k, v, o and three matrices of each expert, each on its own
    assert {name for name in rest if "mlp.gate" in name} == {
        "model.layers.0.mlp.gate.weight",
        "model.layers.1.mlp.gate.weight",
    }
    assert sum(group.parameters for group in table) == sum(parameter.numel() for parameter in model.parameters())
    assert [group["peak_lr"] for group in muon.param_groups] == [5e-3, 5e-3 / 2]
    assert [group["peak_lr"] for group in adamw.param_groups] == [1e-3, 1e-3 / 10]
    slower = matrices[-len(muon.param_groups[1]["params"]) :]
    assert len(slower) == 2 * 4 * 2, "gate and up of each expert"
    assert all(".experts." in name and "down_proj" not in name for name in slower)
    dense, _ = build_optimizers(tiny(), "muon", 5e-3, 0.1, 1e-3)
    rates = [[group["peak_lr"] for group in optimizer.param_groups] for optimizer in dense]
    assert rates == [[5e-3], [1e-3]], "a dense model has neither experts nor routers"


def test_only_matrices_decay():
    model = tiny()
    (adamw,), _ = build_optimizers(model, "adamw", 1e-3, 0.1)
    for group in adamw.param_groups:
        for parameter in group["params"]:
            name = next(name for name, other in model.named_parameters() if other is parameter)
            assert group["weight_decay"] == (0.1 if is_hidden_matrix(name, parameter) else 0.0), name


def test_adamw_alone_has_one_learning_rate():
    (adamw,), _ = build_optimizers(tiny(use_moe=True, num_experts=4, num_experts_per_tok=2), "adamw", 1e-3, 0.1)
    assert {group["peak_lr"] for group in adamw.param_groups} == {1e-3}


def test_a_frozen_parameter_is_left_out():
    model = tiny()
    model.model.embed_tokens.weight.requires_grad_(False)
    optimizers, _ = build_optimizers(model, "muon", 5e-3, 0.1)
    assert all("embed_tokens" not in name for optimizer in optimizers for name in names_in(model, optimizer))


@pytest.fixture(params=[True, False], ids=["native bfloat16", "emulated bfloat16"])
def native(request, monkeypatch):
    """A device that multiplies bfloat16 in hardware, and one that would emulate it."""
    monkeypatch.setattr("trainer.muon.has_native_bfloat16", lambda device: request.param)
    return request.param


def test_muon_step_equals_newton_schulz_by_hand(native):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(8, 16))
    holder = torch.nn.Module()
    holder.q_proj = torch.nn.Linear(1, 1, bias=False)
    holder.q_proj.weight = weight
    holder.norm = torch.nn.Parameter(torch.ones(4))
    (muon, _), _ = build_optimizers(holder, "muon", 0.02, 0.1)
    gradient = torch.randn(8, 16)
    weight.grad, before = gradient.clone(), weight.detach().clone()
    muon.step()
    # First step: momentum is (1 - 0.95) g, and Nesterov's look-ahead a multiple of g; the direction is g's.
    x = gradient.double() / gradient.double().norm()
    for a, b, c in QUINTICS:
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    scale = 0.02 * 0.2 * 16**0.5
    error = (weight - (before * (1 - 0.02 * 0.1) - scale * x)).abs().max()
    assert 2**-12 * scale < error < 2**-4 * scale if native else error < 1e-5 * scale


def test_muon_steps_equal_torchs(monkeypatch):
    monkeypatch.setattr("trainer.muon.has_native_bfloat16", lambda device: True)  # torch's is in bfloat16 anywhere
    torch.manual_seed(0)
    shapes = [(32, 32), (16, 32), (64, 32), (32, 64), (64, 32), (32, 32)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
    jordan = [(3.4445, -4.7750, 2.0315)] * 5
    optimizers = (
        Muon(ours, quintics=jordan, **options),
        torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options),
    )
    for number in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape)
            other.grad = mine.grad.clone()
        ours[1].grad = theirs[1].grad = None if number == 2 else theirs[1].grad  # no gradient: no step, no decay
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        # Rounding to bfloat16 apart: an update's elements are about 0.02 * 0.2 in size.
        assert (mine - other).abs().max() < 5 * 0.02 * 0.2 * 2**-6
        torch.testing.assert_close(
            optimizers[0].state[mine]["momentum_buffer"], optimizers[1].state[other]["momentum_buffer"]
        )


@pytest.mark.parametrize("decay", [0.0, 1.0, 2.0], ids=["flat spectrum", "falls", "falls fast"])
def test_muon_brings_all_but_tiny_singular_values_near_one(decay):
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, 48))[0] for size in (48, 160))
    values = torch.arange(1, 49.0) ** -decay
    update = orthogonalize(((left * values) @ right.T)[None].bfloat16())[0].float()
    found = (left.T @ update @ right).diagonal()
    relative = values / values.norm()
    assert found[relative > 0.003].min() > 0.7 and found.max() < 1.3
    assert torch.linalg.svdvals(update).max() < 1.3, "nothing grows"


def test_muon_survives_a_gradient_of_rank_one():
    update = orthogonalize((torch.randn(48, 1) @ torch.randn(1, 160))[None].bfloat16())[0].float()
    assert torch.linalg.svdvals(update).max() < 1.3


def test_muon_refuses_what_is_no_matrix():
    with pytest.raises(ValueError, match="two dimensions"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
