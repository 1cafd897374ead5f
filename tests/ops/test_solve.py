"""kernel_solve equals its definition, forward and backward, and holds no T x T matrix."""

import math
import warnings

import pytest
import torch
from torch.testing import assert_close

from mercer import NumericalWarning
from mercer.ops import kernel_solve, kernel_solve_naive

B, H, G, D, DV, BLOCK = 2, 4, 2, 6, 5, 8


def problem(length, past=0, dtype=torch.float64, heads=H):
    """rows, cols, rhs, ridge, gate, past, each requiring a gradient."""
    shapes = [(B, heads, length, D), (B, G, past + length, D), (B, G, length, DV)]
    tensors = [torch.randn(s, dtype=dtype) for s in shapes]
    tensors += [0.1 + torch.rand(B, heads, length, dtype=dtype), torch.randn(heads, dtype=dtype)]
    tensors += [torch.randn(B, heads, past, DV, dtype=dtype)]
    return [t.requires_grad_() for t in tensors]


def run(solve, tensors, *, gated=True, **options):
    rows, cols, rhs, ridge, gate, past = tensors
    past = past if past.shape[2] else None
    return solve(rows, cols, rhs, ridge=ridge, gate=gate if gated else None, past=past, **options)


def values_and_gradients(solve, tensors, **options):
    u = run(solve, tensors, **options)
    weight = torch.randn(u.shape, dtype=u.dtype, generator=torch.Generator().manual_seed(1))
    wanted = [t for t in tensors if t.numel()]
    grads = torch.autograd.grad((u * weight).sum(), wanted, allow_unused=True)
    return [u, *(torch.zeros_like(t) if g is None else g for t, g in zip(wanted, grads, strict=True))]


def blocked(*args, **options):
    return kernel_solve(*args, block_size=BLOCK, **options)


def marks(kind, length):
    if kind == "mask":
        mask = torch.rand(B, length) > 0.3
        mask[1] = False
        return {"mask": mask}
    if kind == "left padding":
        return {"mask": torch.arange(length) >= torch.tensor([[length // 2], [0]])}
    if kind == "segments":
        return {"segments": torch.randint(0, 3, (B, length)).sort(1).values}
    return {}


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["plain", "mask", "left padding", "segments"])
def test_blocks_equal_the_definition_in_value_and_gradient(length, past, strict, gated, kind):
    options = {"strict": strict, "gated": gated, "scale": 0.7} | marks(kind, past + length)
    tensors = problem(length, past)
    fast, naive = (values_and_gradients(f, tensors, **options) for f in (blocked, kernel_solve_naive))
    for a, b in zip(fast, naive, strict=True):
        assert_close(a, b, rtol=1e-8, atol=1e-9)


def test_default_block_and_many_heads_a_group():
    tensors = problem(300)
    for a, b in zip(*(values_and_gradients(f, tensors) for f in (kernel_solve, kernel_solve_naive)), strict=True):
        assert_close(a, b, rtol=1e-7, atol=1e-8)


def test_heads_are_worked_on_in_groups_when_the_cache_is_small(monkeypatch):
    monkeypatch.setattr("mercer.ops.solve_blocks._CACHE_ELEMENTS", 3 * BLOCK * 20)
    tensors = problem(19)
    for a, b in zip(*(values_and_gradients(f, tensors) for f in (blocked, kernel_solve_naive)), strict=True):
        assert_close(a, b, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("strict", [False, True])
def test_gradcheck_of_the_definition(strict):
    rows, cols, rhs, ridge, gate, past = problem(4, 2)
    f = lambda *t: kernel_solve_naive(*t[:3], ridge=t[3], gate=t[4], past=t[5], strict=strict)
    assert torch.autograd.gradcheck(f, (rows, cols, rhs, ridge, gate, past))


def test_the_definition_by_hand():
    """Three rows worked out with loops."""
    rows, cols, rhs = torch.randn(3, 1, 1, 3, 2, dtype=torch.float64)
    u = []
    for i in range(3):
        scores = torch.stack([0.5 * rows[0, 0, i] @ cols[0, 0, j] for j in range(i + 1)])
        p = scores.exp() / scores.exp().sum()
        rest = sum((2.0 * p[j] * u[j] for j in range(i)), torch.zeros(2, dtype=torch.float64))
        u.append((rhs[0, 0, i] - rest) / (2.0 * p[i] + 0.3))
    assert_close(kernel_solve(rows, cols, rhs, ridge=0.3, gate=2.0, scale=0.5)[0, 0], torch.stack(u))


@pytest.mark.parametrize("gamma", [1.0, -1.0, 0.0])
def test_right_at_negative_gamma_where_the_diagonal_is_the_row_minimum(gamma):
    r = torch.randn(1, 2, 40, 8, dtype=torch.float64)
    unit = gamma * r / r.norm(dim=-1, keepdim=True)
    rhs = torch.randn(1, 2, 40, 5, dtype=torch.float64)
    fast, naive = (f(r, unit, rhs, ridge=1.0) for f in (blocked, kernel_solve_naive))
    assert_close(fast, naive, rtol=1e-9, atol=1e-9)


def test_bidirectional_raises_the_ridge_and_says_so():
    rows, cols, rhs, *_ = problem(7, heads=G)
    with pytest.warns(NumericalWarning, match=r"ridge 1e-10 raised to 0.001; pass ridge >= 0.001"):
        u = kernel_solve(rows, cols, rhs, ridge=1e-10, causal=False)
    p = (rows @ cols.mT).softmax(-1)
    assert_close(p @ u + 1e-3 * u, rhs, rtol=1e-6, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel_solve(rows, cols, rhs, ridge=1e-3, causal=False)


def test_bidirectional_padding_is_invisible():
    rows, cols, rhs, *_ = problem(9, heads=G)
    mask = torch.ones(B, 9, dtype=torch.bool)
    mask[:, [2, 7, 8]] = False
    keep = [0, 1, 3, 4, 5, 6]
    want = kernel_solve(rows[:, :, keep], cols[:, :, keep], rhs[:, :, keep], ridge=0.5, causal=False)
    assert_close(kernel_solve(rows, cols, rhs, ridge=0.5, causal=False, mask=mask)[:, :, keep], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["random", "duplicate", "zero", "large", "spike"])
@pytest.mark.parametrize("length", [1, 300])
def test_hostile_cubit_systems_stay_finite_with_a_bounded_residual(dtype, case, length):
    r = torch.randn(1, 2, length, 16)
    if case == "duplicate":
        r[:] = r[:, :, :1]
    if case == "zero":
        r.zero_()
    if case == "large":
        r *= 1e3
    if case == "spike":
        r[:, :, length // 2] *= 1e4
    r = r.to(dtype).requires_grad_()
    unit = (r / torch.linalg.vector_norm(r, dim=-1, keepdim=True).clamp(min=1e-6)).float()
    rhs = torch.randn(1, 2, length, 5).requires_grad_()
    u = kernel_solve(r, unit, rhs, ridge=1e-10)
    p = kernel_weights(r.detach(), unit.detach())
    residual = p @ u.double() + 1e-10 * u.double() - rhs
    # the scores themselves carry a rounding error of eps |score|, which P inherits
    error = 1e-5 * (1 + (r.float() @ unit.mT).abs().max()) * u.abs().max() * (1 if dtype == torch.float32 else 10)
    assert residual.abs().max() <= error
    for gradient in torch.autograd.grad(u.sum(), [r, rhs]):
        assert gradient.isfinite().all()


def kernel_weights(rows, cols):
    scores = rows.double() @ cols.double().mT
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_error_is_at_most_twice_the_definitions(dtype):
    tensors = [t.detach() for t in problem(100, heads=G)]
    exact = kernel_solve_naive(*tensors[:3], ridge=0.1)
    low = [t.to(dtype) for t in tensors[:3]]
    naive, fast = (f(*low, ridge=0.1) for f in (kernel_solve_naive, kernel_solve))
    assert fast.dtype == dtype
    reference = kernel_solve_naive(*(t.double() for t in low), ridge=0.1)
    error = lambda u: (u.double() - reference).abs().max()
    assert error(fast) <= 2 * error(naive)
    assert (fast.double() - exact).abs().max() <= 2 * (naive.double() - exact).abs().max()


@pytest.mark.parametrize("solve", [kernel_solve, kernel_solve_naive])
def test_a_scale_does_not_round_sixteen_bit_rows(solve):
    rows, cols, rhs = (3 * torch.randn(3, 1, 2, 100, 32)).bfloat16()
    u = solve(rows, cols, rhs.float(), ridge=1.0, strict=True, scale=0.3)
    assert_close(u, solve(rows.float(), cols.float(), rhs.float(), ridge=1.0, strict=True, scale=0.3))


def test_no_pass_holds_a_matrix_of_all_pairs():
    """Every tensor either pass makes at T = 1024 is smaller than the T x T matrix of one head."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple) else (out,):
                if isinstance(t, torch.Tensor):
                    Largest.numel = max(Largest.numel, t.untyped_storage().nbytes() // t.element_size())
            return out

    from mercer.ops.solve_blocks import solve_blocks, solve_blocks_backward

    rows, cols, rhs = torch.randn(3, 1, 1, 1024, 8)
    ridge, past = torch.ones(1, 1, 1024), rhs[:, :, :0]
    raw = [f._init_fn for f in (solve_blocks, solve_blocks_backward)]  # the operators' bodies, not opaque calls
    with Largest():
        u = raw[0](rows, cols, rhs, ridge, None, past, None, None, False, 128)
        raw[1](rhs, u, rows, cols, ridge, None, past, None, None, False, 128)
    assert 128 * 1024 <= Largest.numel < 1024 * 1024 / 4


def test_errors_give_the_value_and_the_need(without_shape_checks):
    rows, cols, rhs, *_ = problem(6)
    with pytest.raises(ValueError, match=r"cols has 3 heads; the query heads \(4\) must be a multiple"):
        kernel_solve(rows, torch.randn(B, 3, 6, D), rhs, ridge=1.0)
    with pytest.raises(ValueError, match="have 6, 5, 6 and 0 positions; rhs must have as many as rows"):
        kernel_solve(rows, cols[:, :, :5], rhs, ridge=1.0)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 6, 6\); it must be a padding mask"):
        kernel_solve(rows, cols, rhs, ridge=1.0, mask=torch.ones(2, 6, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask has dtype torch.int64; it must be bool"):
        kernel_solve(rows, cols, rhs, ridge=1.0, mask=torch.ones(2, 6, dtype=torch.long))
    with pytest.raises(ValueError, match=r"ridge has shape \(1, 5\)|ridge has shape \(5, 1\)"):
        kernel_solve(rows, cols, rhs, ridge=torch.ones(5))
    with pytest.raises(ValueError, match=r"block_size \(0\) must be at least 1"):
        kernel_solve(rows, cols, rhs, ridge=1.0, block_size=0)
    with pytest.raises(ValueError, match=r"a bidirectional system \(causal=False\) has no past"):
        kernel_solve(rows[:, :, :4], cols, rhs[:, :, :4], ridge=1.0, causal=False, past=rhs[:, :, :2])
    with pytest.raises(ValueError, match=r"the batches differ \(rows 2, cols 2, rhs 2, past 1 rows\)"):
        kernel_solve(rows[:, :, :4], cols, rhs[:, :, :4], ridge=1.0, past=rhs[:1, :, :2])
    with pytest.raises(ValueError, match="strict"):
        kernel_solve(rows, cols, rhs, ridge=1.0, causal=False, strict=True)


@pytest.mark.compile
def test_compiles_whole_and_no_slower_with_length():
    import time

    def f(rows, unit, rhs, ridge):
        return kernel_solve(rows, unit, rhs, ridge=ridge).square().sum()

    seconds = []
    for length in (64, 1024):
        torch._dynamo.reset()
        rows, unit, rhs = (t.requires_grad_() for t in torch.randn(3, 1, 2, length, 8))
        ridge = torch.ones(2)
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=False)
        start = time.perf_counter()
        got = torch.autograd.grad(compiled(rows, unit, rhs, ridge), [rows, unit, rhs])
        seconds.append(time.perf_counter() - start)
        for a, b in zip(got, torch.autograd.grad(f(rows, unit, rhs, ridge), [rows, unit, rhs]), strict=True):
            assert_close(a, b)
    assert max(seconds) < 20
    assert seconds[1] < 3 * seconds[0] + 2
