"""softmax_attention equals its definition, through every mask."""

import pytest
import torch
from torch.testing import assert_close

from mercer.bench import peak_bytes
from mercer.ops import softmax_attention, softmax_attention_naive


def heads(rows, cols=None, dtype=torch.float64):
    cols = rows if cols is None else cols
    q = torch.randn(2, 4, rows, 6, dtype=dtype)
    k, v = torch.randn(2, 2, cols, 6, dtype=dtype), torch.randn(2, 2, cols, 5, dtype=dtype)
    return [t.requires_grad_() for t in (q, k, v)]


def marks(kind, length):
    if kind == "mask":
        mask = torch.rand(2, length) > 0.4
        mask[1] = False
        return {"mask": mask}
    if kind == "segments":
        return {"segments": torch.randint(0, 3, (2, length)).sort(1).values}
    return {}


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (2, 2), (33, 33), (1, 20), (5, 20)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["plain", "mask", "segments"])
def test_fused_equals_the_definition_in_value_and_gradient(rows, cols, causal, kind):
    tensors, options = heads(rows, cols), {"causal": causal, "scale": 0.3} | marks(kind, cols)
    weight = torch.randn(2, 4, rows, 5, dtype=torch.float64)
    results = []
    for f in (softmax_attention, softmax_attention_naive):
        o = f(*tensors, **options)
        results.append([o, *torch.autograd.grad((o * weight).sum(), tensors)])
    for a, b in zip(*results, strict=True):
        assert_close(a, b, rtol=1e-9, atol=1e-10)


def test_the_definition_by_hand():
    q, k, v = (t[:, :1] for t in heads(3))
    rows = []
    for i in range(3):
        w = torch.stack([q[0, 0, i] @ k[0, 0, j] / 6**0.5 for j in range(i + 1)]).exp()
        rows.append(sum(w[j] * v[0, 0, j] for j in range(i + 1)) / w.sum())
    assert_close(softmax_attention(q, k, v)[0, 0], torch.stack(rows))


def test_gradcheck_of_the_definition():
    options = marks("mask", 4)
    assert torch.autograd.gradcheck(lambda *t: softmax_attention_naive(*t, **options), heads(4))


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    tensors = heads(6)
    mask = torch.arange(6).expand(2, 6) >= 3
    o = softmax_attention(*tensors, mask=mask)
    assert o[:, :, :3].count_nonzero() == 0
    for gradient in torch.autograd.grad(o.sum(), tensors):
        assert gradient.isfinite().all()
        assert gradient[:, :, :3].count_nonzero() == 0


@pytest.mark.parametrize(("width", "value_width"), [(8, 8), (8, 16), (16, 8)])
def test_no_pass_holds_a_matrix_of_all_pairs(width, value_width):
    q, k = torch.randn(2, 1, 1, 1024, width, requires_grad=True)
    v = torch.randn(1, 1, 1024, value_width, requires_grad=True)
    forward = lambda: softmax_attention(q, k, v)
    matrix_bytes = 4 * 1024 * 1024
    assert peak_bytes(forward) < matrix_bytes
    assert peak_bytes(lambda: torch.autograd.grad(forward().sum(), (q, k, v))) < matrix_bytes


@pytest.mark.parametrize("masked", [False, True])
def test_decoding_with_grouped_queries_repeats_no_key(masked):
    q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 4096, 64), torch.randn(1, 2, 4096, 64)
    segments = torch.zeros(1, 4096, dtype=torch.long) if masked else None
    assert peak_bytes(lambda: softmax_attention(q, k, v, segments=segments)) < k.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_error_is_at_most_twice_the_definitions(dtype):
    low = [t.detach().to(dtype) for t in heads(100)]
    reference = softmax_attention_naive(*(t.double() for t in low))
    error = lambda o: (o.double() - reference).abs().max()
    fast = softmax_attention(*low)
    assert fast.dtype == dtype
    assert error(fast) <= 2 * error(softmax_attention_naive(*low))


def test_errors_give_the_value_and_the_need(without_shape_checks):
    q, k, v = heads(6)
    with pytest.raises(ValueError, match=r"k has 3 heads; the query heads \(4\) must be a multiple"):
        softmax_attention(q, torch.randn(2, 3, 6, 6), v)
    with pytest.raises(ValueError, match="q, k, v have 6, 5, 6 positions; k and v must have as many as each other"):
        softmax_attention(q, k[:, :, :5], v)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1, 6, 6\)"):
        softmax_attention(q, k, v, mask=torch.ones(2, 1, 6, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"segments has shape \(2, 5\)"):
        softmax_attention(q, k, v, segments=torch.zeros(2, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"the batches differ \(q 1, k 2, v 2 rows\); expand\(\) what all rows share"):
        softmax_attention(q[:1], k, v)
    with pytest.raises(ValueError, match=r"q has shape \(2, 6, 6\); it must be \[batch, heads, time, width\]"):
        softmax_attention(q[:, 0], k, v)
