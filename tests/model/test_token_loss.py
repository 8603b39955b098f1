"""The chunked token loss against torch's cross-entropy: values, gradients, dtypes, empty selections."""

import pytest
import torch
import torch.nn.functional as F

from model.token_loss import CHUNK_ROWS, IGNORED_LABEL, token_losses


def random_case(rows: int, dtype: torch.dtype, ignored: float = 0.3, scale: float = 1.0):
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 24, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(53, 24, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 53, (rows,), generator=generator)
    labels[torch.rand(rows, generator=generator) < ignored] = IGNORED_LABEL
    upstream = torch.rand(rows, generator=generator, dtype=torch.float64)
    hidden, weight = (tensor.to(dtype).requires_grad_() for tensor in (hidden, weight))
    return hidden, weight, labels, upstream


def reference(hidden, weight, labels):
    return F.cross_entropy(hidden @ weight.t(), labels, ignore_index=IGNORED_LABEL, reduction="none")


@pytest.mark.parametrize("rows", [1, 37, CHUNK_ROWS, 3 * CHUNK_ROWS + 5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_equals_cross_entropy_with_any_gradient_per_token(rows, dtype, tolerance):
    hidden, weight, labels, upstream = random_case(rows, dtype)
    losses, expected = token_losses(hidden, weight, labels), reference(hidden, weight, labels)
    torch.testing.assert_close(losses, expected, rtol=tolerance * 5, atol=tolerance)
    upstream = upstream.to(dtype)
    ours = torch.autograd.grad((losses * upstream).sum(), (hidden, weight))
    theirs = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance * 10, atol=tolerance * 20)


def test_numerical_gradient():
    hidden, weight, labels, _ = random_case(6, torch.float64)
    assert torch.autograd.gradcheck(lambda h, w: token_losses(h, w, labels), (hidden, weight))


def test_extreme_logits_stay_finite():
    hidden, weight, labels, _ = random_case(20, torch.float32, scale=200.0)
    losses = token_losses(hidden, weight, labels)
    assert losses.max() > 500 and torch.isfinite(losses).all()
    torch.testing.assert_close(losses, reference(hidden, weight, labels))


def test_bfloat16_products_under_autocast_and_losses_in_fp32():
    hidden, weight, labels, upstream = random_case(300, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        losses = token_losses(hidden, weight, labels)
        logits = hidden @ weight.t()
    assert losses.dtype == torch.float32 and logits.dtype == torch.bfloat16
    torch.testing.assert_close(losses, F.cross_entropy(logits.float(), labels, reduction="none"), rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad((losses * upstream).sum(), (hidden, weight))
    theirs = torch.autograd.grad((reference(hidden, weight, labels) * upstream).sum(), (hidden, weight))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - other).norm() / other.norm() < 0.01


def test_no_supervised_token_gives_zeros_and_zero_gradients():
    hidden, weight, labels, _ = random_case(10, torch.float32, ignored=1.1)
    losses = token_losses(hidden, weight, labels)
    assert not losses.any()
    losses.sum().backward()
    assert not hidden.grad.any() and not weight.grad.any()


def test_evaluation_keeps_nothing_for_a_backward_pass():
    hidden, weight, labels, _ = random_case(40, torch.float32)
    with torch.no_grad():
        losses = token_losses(hidden, weight, labels)
    assert not losses.requires_grad
    torch.testing.assert_close(losses, reference(hidden, weight, labels))
