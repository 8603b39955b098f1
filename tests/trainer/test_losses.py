"""Losses are sums: any cut of a batch adds up to the same, and the values equal those worked out by hand."""

import torch
import torch.nn.functional as F

from dataset.lm_dataset import collate_rows
from tests.trainer.helpers import TINY_MOE, RandomRows, tiny_model
from trainer.losses import StepContext, balance_loss_sum, count_tokens, language_model_loss


def context_of(batches, loads=None):
    counts = sum(count_tokens(batch) for batch in batches)
    return StepContext(counts[0], counts[2], loads)


def gradients(model, batches, context):
    model.zero_grad()
    for batch in batches:
        loss, _, _ = language_model_loss(model, batch, context)
        (loss / context.terms).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_the_loss_is_the_sum_of_cross_entropies_over_supervised_tokens():
    model, rows = tiny_model(), RandomRows(4)
    batch = collate_rows([rows[index] for index in range(4)])
    loss, count, logs = language_model_loss(model, batch, context_of([batch]))
    logits = model(input_ids=batch["input_ids"], document_ids=batch["document_ids"]).logits
    expected = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    assert torch.allclose(loss.float(), expected, atol=1e-4)
    assert count == (batch["labels"] != -100).sum() == count_tokens(batch)[0]
    assert logs["loss_sum"] == loss.detach()


def test_any_cut_of_a_step_gives_the_same_gradient_dense_and_moe():
    rows = RandomRows(8)
    cuts = [
        [list(range(8))],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0], [1, 2, 3, 4, 5, 6], [7, -1]],
    ]
    for overrides in ({}, TINY_MOE):
        model = tiny_model(**overrides)
        loads = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.4, 0.1]], dtype=torch.float64) if overrides else None
        results = []
        for cut in cuts:
            batches = [collate_rows([rows[index] for index in part]) for part in cut]
            results.append(gradients(model, batches, context_of(batches, loads)))
        for other in results[1:]:
            for name, gradient in results[0].items():
                assert torch.allclose(other[name], gradient, atol=2e-6), name


def test_balance_loss_equals_the_switch_transformers_by_hand():
    probabilities = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.3, 0.7]])  # three tokens, two experts
    loads = torch.tensor([[2 / 3, 1 / 3]], dtype=torch.float64)
    by_hand = 2 * (2 / 3 * (0.5 + 0.9 + 0.3) + 1 / 3 * (0.5 + 0.1 + 0.7))
    assert torch.isclose(balance_loss_sum(probabilities.sum(0, keepdim=True), loads), torch.tensor(by_hand).double())
    even = torch.full((1, 2), 0.5, dtype=torch.float64)
    assert torch.isclose(balance_loss_sum(probabilities.sum(0, keepdim=True), even), torch.tensor(3.0).double())


def test_a_row_without_labels_changes_nothing():
    model, rows = tiny_model(), RandomRows(3)
    batch = collate_rows([rows[index] for index in range(3)])
    wider = collate_rows([rows[index] for index in (0, 1, 2, -1)])
    first, second = gradients(model, [batch], context_of([batch])), gradients(model, [wider], context_of([wider]))
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
