"""Experts: both implementations agree, the router learns, statistics leave padding out."""

import pytest
import torch

import model.moe
from model.model_minimind import count_parameters
from model.moe import MixtureOfExperts
from tests.model.helpers import packed_rows, tiny_config, tiny_model

ROUTINGS = [
    {"num_experts": 4, "num_experts_per_tok": 2},
    {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False},
    {"num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": False},
    {"num_experts": 3, "num_experts_per_tok": 3},
]


def random_layer(**fields) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(tiny_config(use_moe=True, **fields))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.2)
    return layer


def run(layer: MixtureOfExperts, hidden: torch.Tensor) -> list[torch.Tensor]:
    hidden = hidden.clone().requires_grad_()
    output, (sums, _) = layer(hidden, None)
    weights = torch.linspace(0.5, 1.5, output.numel()).view_as(output)
    inputs = [hidden, *layer.parameters()]
    return [output.detach(), *torch.autograd.grad((output * weights).sum() + (sums**2).sum(), inputs)]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("tokens", "part"), [(5, 1024), (600, 1024), (600, 64)])  # 600: the experts' fast path as well
def test_grouped_equals_reference_in_output_and_gradients(routing, tokens, part, monkeypatch):
    monkeypatch.setattr(model.moe, "PART_ROWS", part)
    layer, hidden = random_layer(**routing), torch.randn(1, tokens, 32)
    grouped = run(layer, hidden)
    layer.implementation = "reference"
    for fast, readable in zip(grouped, run(layer, hidden), strict=True):
        torch.testing.assert_close(fast, readable, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [7, 300])
def test_an_expert_without_tokens_gets_a_zero_gradient(tokens):
    layer = random_layer()
    with torch.no_grad():
        layer.gate.weight[3] = -100 * layer.gate.weight[:3].sum(0)
    hidden = layer.gate.weight[:3].sum(0).detach().expand(1, tokens, -1)
    output, (_, counts) = layer(hidden, None)
    assert counts[3] == 0
    output.sum().backward()
    for parameter in layer.experts[3].parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def router_gradient(**routing) -> float:
    model = tiny_model(use_moe=True, **routing).train()
    batch = packed_rows([[20, 12]], 32)
    model(**batch, return_token_losses=True).token_losses.sum().backward()
    return min(layer.mlp.gate.weight.grad.abs().max().item() for layer in model.model.layers)


def test_the_router_learns_from_the_language_model_loss():
    assert router_gradient(num_experts_per_tok=2, norm_topk_prob=True) > 1e-3
    assert router_gradient(num_experts_per_tok=1, norm_topk_prob=False) > 1e-3


def test_one_normalised_expert_gives_the_router_nothing_so_it_is_frozen():
    model = tiny_model(use_moe=True, num_experts_per_tok=1, router_frozen=True).train()
    assert not any(layer.mlp.gate.weight.requires_grad for layer in model.model.layers)
    for layer in model.model.layers:
        layer.mlp.gate.weight.requires_grad_(True)
    batch = packed_rows([[20, 12]], 32)
    model(**batch, return_token_losses=True).token_losses.sum().backward()
    assert max(layer.mlp.gate.weight.grad.abs().max().item() for layer in model.model.layers) < 1e-6


def test_statistics_count_real_tokens_only():
    model = tiny_model(use_moe=True).train()
    batch = packed_rows([[20, 12], [9]], 32)
    output = model(**batch, return_token_losses=True)
    real = int((batch["document_ids"] != 0).sum())
    assert output.expert_counts.shape == output.router_probability_sums.shape == (2, 4)
    assert output.expert_counts.sum(1).tolist() == [2 * real] * 2
    torch.testing.assert_close(output.router_probability_sums.sum(1), torch.full((2,), float(real)))
    assert output.router_probability_sums.requires_grad and not output.expert_counts.requires_grad
    alone = model(**packed_rows([[20, 12]], 32), return_token_losses=True)
    other = {name: tensor[1:, :9] for name, tensor in batch.items()}
    rest = model(**other, return_token_losses=True)
    torch.testing.assert_close(output.expert_counts, alone.expert_counts + rest.expert_counts)
    left_padded = model(batch["input_ids"], attention_mask=(batch["document_ids"] != 0).long())
    assert left_padded.expert_counts.sum(1).tolist() == [2 * real] * 2


def test_dense_models_have_no_statistics():
    output = tiny_model()(**packed_rows([[20]], 32), return_token_losses=True)
    assert output.expert_counts is None and output.router_probability_sums is None


def test_the_router_runs_in_fp32_under_autocast():
    layer = random_layer()
    with torch.autocast("cpu", torch.bfloat16):
        probabilities, weights, _ = layer.gate(torch.randn(9, 32))
    assert probabilities.dtype == weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(9))


def test_active_parameters_leave_out_the_experts_that_a_token_does_not_visit():
    total, active = count_parameters(tiny_model(use_moe=True))
    assert total - active == 2 * 2 * 3 * 32 * 24  # layers x idle experts x matrices x sizes
    assert len(set(count_parameters(tiny_model()))) == 1
