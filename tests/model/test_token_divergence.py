"""The divergence of every token against torch's own kl_div: both directions, temperatures, gradients, precision."""

import pytest
import torch
import torch.nn.functional as F

from model.token_divergence import Teacher, token_divergences

CASES = [(reverse, temperature) for reverse in (False, True) for temperature in (1.0, 2.5)]


def random_case(rows=3, length=70, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, theirs, their_weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((rows, length, 12), (53, 12), (rows, length, 20), (53, 20))
    )
    labels = torch.randint(0, 53, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.4] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), theirs, their_weight, labels


def expected_of(hidden, weight, theirs, their_weight, labels, reverse, temperature):
    student = (hidden @ weight.t() / temperature).log_softmax(-1)
    teacher = (theirs @ their_weight.t() / temperature).log_softmax(-1)
    first, second = (teacher, student) if reverse else (student, teacher)
    divergences = F.kl_div(first, second, log_target=True, reduction="none").sum(-1)
    shifted = F.pad(divergences[:, :-1], (1, 0))
    keep = labels != -100
    keep[:, 0] = False
    return shifted * keep


@pytest.mark.parametrize(("reverse", "temperature"), CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_values_and_gradients_are_kl_divs(reverse, temperature, dtype, tolerance):
    hidden, weight, theirs, their_weight, labels = random_case(dtype=dtype)
    found = token_divergences(hidden, weight, labels, Teacher(theirs, their_weight, temperature, reverse))
    expected = expected_of(hidden, weight, theirs, their_weight, labels, reverse, temperature)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    upstream = torch.rand(labels.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = torch.autograd.grad((found * upstream).sum(), (hidden, weight))
    theirs = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance * 10, atol=tolerance * 20)


def test_nothing_supervised_and_a_student_that_is_its_teacher():
    hidden, weight, _, _, labels = random_case()
    assert token_divergences(hidden, weight, labels, Teacher(hidden.detach(), weight.detach())).abs().max() < 1e-5
    nothing = token_divergences(
        hidden, weight, torch.full_like(labels, -100), Teacher(hidden.detach(), weight.detach())
    )
    nothing.sum().backward()
    assert nothing.abs().sum() == 0 and hidden.grad.abs().sum() == 0


def test_products_run_in_autocasts_dtype_and_divergences_in_fp32():
    hidden, weight, theirs, their_weight, labels = random_case(length=300)
    exact = expected_of(hidden, weight, theirs, their_weight, labels, False, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_divergences(hidden, weight, labels, Teacher(theirs, their_weight))
    assert found.dtype == torch.float32
    assert (found - exact).abs().mean() < 0.02 * exact.mean()
    found.sum().backward()
    assert hidden.grad.dtype == torch.float32 and torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize(("reverse", "temperature"), CASES)
def test_small_differences_survive_half_precision(reverse, temperature):
    """Teacher and student that nearly agree over a large vocabulary: probabilities differ by 1e-6."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator) for shape in ((1, 40, 16), (6400, 16)))
    weight *= 0.02
    labels = torch.zeros(1, 40, dtype=torch.long)
    teacher = hidden + 0.1 * torch.randn(1, 40, 16, generator=generator)
    gradients = []
    for dtype in (torch.float32, torch.float16):
        student = hidden.to(dtype, copy=True).requires_grad_()
        case = Teacher(teacher.to(dtype), weight.to(dtype), temperature, reverse)
        (token_divergences(student, weight.to(dtype), labels, case).sum() * 1024).backward()
        gradients.append(student.grad.float())
    exact, half = gradients
    assert (half - exact).norm() < 0.05 * exact.norm()
