"""local_linear_attention equals the normal equations of the paper."""

import pytest
import torch
from torch.testing import assert_close

from mercer.ops import local_linear_attention, local_linear_attention_naive, softmax_attention

ROWS = 64  # queries worked on at a time


def heads(rows, cols=None, dtype=torch.float64):
    cols = rows if cols is None else cols
    q = torch.randn(2, 4, rows, 6, dtype=dtype)
    k, v = torch.randn(2, 2, cols, 6, dtype=dtype), torch.randn(2, 2, cols, 5, dtype=dtype)
    ridge = torch.tensor(0.7, dtype=dtype)
    return [t.requires_grad_() for t in (q, k, v, ridge)]


@pytest.mark.parametrize(("rows", "past"), [(1, 0), (2, 0), (ROWS, 0), (ROWS + 1, 3), (2 * ROWS + 3, 0)])
@pytest.mark.parametrize("kind", ["causal", "mask", "segments", "bidirectional"])
def test_fast_equals_the_definition_in_value_and_gradient(rows, past, kind):
    *tensors, ridge = heads(rows, rows + past)
    options = {"causal": kind != "bidirectional"}
    if kind == "mask":
        options["mask"] = torch.rand(2, rows + past) > 0.4
        options["mask"][1] = False
    if kind == "segments":
        options["segments"] = torch.randint(0, 3, (2, rows + past)).sort(1).values
    weight = torch.randn(2, 4, rows, 5, dtype=torch.float64)
    results = []
    for f in (local_linear_attention, local_linear_attention_naive):
        o = f(*tensors, ridge=ridge, **options)
        results.append([o, *torch.autograd.grad((o * weight).sum(), [*tensors, ridge])])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_gradcheck_of_the_definition():
    f = lambda q, k, v, ridge: local_linear_attention_naive(q, k, v, ridge=ridge)
    assert torch.autograd.gradcheck(f, heads(3))


def test_a_large_ridge_gives_softmax_attention():
    q, k, v, _ = heads(20)
    assert_close(local_linear_attention(q, k, v, ridge=1e12), softmax_attention(q, k, v), rtol=1e-6, atol=1e-6)


def test_values_on_a_plane_are_continued_exactly():
    q, k, _, _ = heads(20)
    plane = torch.randn(6, 5, dtype=torch.float64)
    o = local_linear_attention(q, k, k @ plane + 3, ridge=1e-12)
    assert_close(o[:, :, 8:], (q @ plane + 3)[:, :, 8:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_error_is_at_most_twice_the_definitions(dtype):
    low = [t.detach().to(dtype) for t in heads(50)[:3]]
    reference = local_linear_attention_naive(*(t.double() for t in low))
    error = lambda o: (o.double() - reference).abs().max()
    assert error(local_linear_attention(*low)) <= 2 * error(local_linear_attention_naive(*low))


def test_keys_that_are_large_and_alike_do_not_cancel():
    k = (1e3 + 1e-3 * torch.randn(1, 1, 30, 8)).requires_grad_()
    q, v = k.detach() + 1, torch.randn(1, 1, 30, 4)
    o = local_linear_attention(q, k, v)
    exact = local_linear_attention(q.double(), k.detach().double(), v.double())
    assert_close(o, exact.float(), rtol=1e-3, atol=1e-3)
    assert torch.autograd.grad(o.sum(), k)[0].isfinite().all()


@pytest.mark.parametrize("ridge", [0.0, -1.0])
def test_the_slopes_need_a_penalty(ridge):
    with pytest.raises(ValueError, match=rf"ridge \({ridge}\) must be positive"):
        local_linear_attention(*heads(4)[:3], ridge=ridge)
