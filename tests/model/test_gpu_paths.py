"""What CUDA runs instead of a CPU's kernels: its shapes and its mathematics, here with stand-ins; on a GPU for real."""

import pytest
import torch
import torch.nn.functional as F

from model import model_minimind, moe, packed_rows
from tests.model.helpers import packed_rows as make_packed_rows
from tests.model.helpers import tiny_model
from tests.model.test_moe import ROUTINGS, random_layer, run

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def by_definition(query, key, value, starts, key_starts, longest, longest_key, *, window_size, enable_gqa):
    """varlen_attn's contract: (tokens, heads, size), bounds of documents, window (-1, 0) for causal."""
    assert query.shape[0] == key.shape[0] == value.shape[0] == starts[-1] and starts.dtype == torch.int32
    assert torch.equal(starts, key_starts) and window_size == (-1, 0) and enable_gqa
    parts = []
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert 0 < last - first <= longest == longest_key
        states = [part[first:last].transpose(0, 1)[None] for part in (query, key, value)]
        parts.append(F.scaled_dot_product_attention(*states, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


def losses_and_gradients(model, batch):
    losses = model(**batch, return_token_losses=True).token_losses
    gradients = torch.autograd.grad(losses.sum(), list(model.parameters()), materialize_grads=True)
    return losses, gradients


def test_bounded_attention_equals_the_mask(monkeypatch):
    model, batch = tiny_model(), make_packed_rows([[7, 20, 3], [1, 28]], 32)
    expected = losses_and_gradients(model, batch)
    monkeypatch.setattr(packed_rows, "varlen_attn", by_definition)
    monkeypatch.setattr(model_minimind, "has_bounded_attention", lambda device, dtype: True)
    losses, gradients = losses_and_gradients(model, batch)
    torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=1e-5)
    for mine, other in zip(gradients, expected[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_grouped_products_equal_the_reference(routing, monkeypatch):
    monkeypatch.setattr(moe, "prefers_grouped_products", lambda rows, experts: True)
    layer, hidden = random_layer(**routing), torch.randn(1, 41, 32)
    together = run(layer, hidden)
    layer.implementation = "reference"
    for mine, other in zip(together, run(layer, hidden), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_an_expert_without_tokens_in_grouped_products(monkeypatch):
    monkeypatch.setattr(moe, "prefers_grouped_products", lambda rows, experts: True)
    layer = random_layer()
    with torch.no_grad():
        layer.gate.weight[3] = -100 * layer.gate.weight[:3].sum(0)
    hidden = layer.gate.weight[:3].sum(0).detach().expand(1, 7, -1)
    output, (_, counts) = layer(hidden, None)
    (output * torch.randn_like(output)).sum().backward()
    assert counts[3] == 0 and not any(parameter.grad.any() for parameter in layer.experts[3].parameters())


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_layer_compiles_without_a_graph_break_and_trains_the_same(experts, backend):
    torch._dynamo.reset()
    shape = {"use_moe": True, "num_experts": 4, "moe_intermediate_size": 32} if experts else {}
    model = tiny_model(num_hidden_layers=1, fast_path=False, **shape)
    batch = make_packed_rows([[7, 20, 3], [1, 28]], 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = losses_and_gradients(model, batch)
        model.model.layers[0].compile(fullgraph=True, backend=backend)
        losses, gradients = losses_and_gradients(model, batch)
    torch.testing.assert_close(losses, expected[0], rtol=0.02, atol=0.02)
    for mine, other in zip(gradients, expected[1], strict=True):
        assert (mine - other).norm() <= 0.03 * other.norm() + 1e-6


@NEEDS_CUDA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_gpu_gives_what_a_cpu_gives(experts, dtype):
    shape = {"use_moe": True, "num_experts": 4, "moe_intermediate_size": 32} if experts else {}
    model = tiny_model(head_dim=16, **shape)
    batch = make_packed_rows([[7, 20, 3], [1, 28]], 32)
    expected, _ = losses_and_gradients(model, batch)
    batch["input_ids"] = batch["input_ids"].cuda()  # labels and documents stay on the CPU
    with torch.autocast("cuda", dtype):
        losses, gradients = losses_and_gradients(model.cuda(), batch)
    torch.testing.assert_close(losses.cpu(), expected, rtol=0.05, atol=0.05)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
