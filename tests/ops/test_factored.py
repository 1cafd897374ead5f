"""Log features in two factors: the operators give what they give for the same features multiplied out."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from mercer.features import build_features
from mercer.ops import (
    Factored,
    Rescaled,
    linear_attention,
    linear_attention_naive,
    linear_kernel_solve,
    linear_kernel_solve_naive,
    near_far_attention,
)
from mercer.ops.linear_logs import LogGradients

T, CHUNK = 19, 8
MASK = torch.stack([torch.arange(T) >= 5, torch.arange(T) % 4 != 1])
SEGMENTS = torch.tensor([[0] * 3 + [1] * 9 + [2] * 7, [0] * 16 + [4] * 3])
MARKS = [{}, {"mask": MASK}, {"segments": SEGMENTS}, {"mask": MASK, "segments": SEGMENTS}]


def draw(*size, factor=1.0):
    return (factor * torch.randn(*size, dtype=torch.float64)).requires_grad_()


def factors(heads, weights=2, *, factor=1.0, offset=True):
    """Return the leaves of log features, and what makes them."""
    leaves = [draw(2, heads, T, 3, factor=factor), draw(weights, 7, 3), draw(2, heads, T, 1)]

    def make(x, weight, constant):
        return Factored(x, weight, -0.4, 0.7, constant if offset else None)

    return leaves, make


def value_and_gradients(function, leaves):
    o, state = function(*leaves)
    loss = (o * torch.cos(torch.arange(o.numel())).view_as(o)).sum() + (state.S.sin() * state.z[..., None]).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [
        o,
        state.sums,
        state.c,
        *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)),
    ]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("factor", [1.0, 40.0])  # keys hundreds of nats apart: chunks are halved
def test_linear_attention_in_factors(marks, causal, factor):
    (q, make_q), (k, make_k), v = factors(4), factors(2, factor=factor), draw(2, 2, T, 5)

    def run(attend, *leaves, **options):
        return attend(make_q(*leaves[:3]), make_k(*leaves[3:6]), leaves[6], causal=causal, **marks, **options)

    leaves = [*q, *k, v]
    fast = value_and_gradients(lambda *x: run(linear_attention, *x, chunk_size=CHUNK), leaves)
    assert_same(fast, value_and_gradients(lambda *x: run(linear_attention_naive, *x), leaves))


def test_one_weight_for_all_heads_is_multiplied_out():
    (q, make), v = factors(2, weights=1), draw(2, 2, T, 5)
    run = lambda attend: value_and_gradients(lambda *x: attend(make(*x[:3]), make(*x[:3]), x[3]), [*q, v])
    assert_same(run(linear_attention), run(linear_attention_naive))


def test_splitting_changes_nothing():
    (q, make_q), (k, make_k), v = factors(4), factors(2), draw(2, 2, T, 5)

    def run(cuts):
        state, outs = None, []
        for start, stop in itertools.pairwise([0, *cuts, T]):
            at = slice(start, stop)
            logs = (make(x[:, :, at], w, c[:, :, at]) for (x, w, c), make in ((q, make_q), (k, make_k)))
            o, state = linear_attention(*logs, v[:, :, at], state=state, chunk_size=CHUNK)
            outs.append(o)
        return torch.cat(outs, 2), state

    whole = value_and_gradients(lambda *_: run([]), [*q, *k, v])
    assert_same(value_and_gradients(lambda *_: run([1, 9, 10]), [*q, *k, v]), whole)


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("columns", ["own", "same", "rescaled"])
@pytest.mark.parametrize("heads", [2, 4])
def test_systems_in_factors(marks, columns, heads):
    (rows, make_rows), (cols, make_cols) = factors(heads), factors(2)
    rhs, ridge, factor = draw(2, 2, T, 5), 0.3, draw(2, heads, T)

    def run(solve, *leaves, **options):
        of_rows, of_cols = make_rows(*leaves[:3]), make_cols(*leaves[3:6])
        given = {"own": of_cols, "same": of_rows, "rescaled": Rescaled(leaves[6])}[columns]
        return solve(of_rows, given, leaves[7], ridge=ridge, **marks, **options)

    leaves = [*rows, *cols, factor, rhs]
    fast = value_and_gradients(lambda *x: run(linear_kernel_solve, *x, chunk_size=CHUNK), leaves)
    slow = value_and_gradients(lambda *x: run(linear_kernel_solve_naive, *x), leaves)
    assert_same(fast, slow)


@pytest.mark.parametrize("marks", MARKS)
def test_the_near_field_in_factors(marks):
    maps = [build_features("hyperbolic", 2, 4, 16, seed=seed).double() for seed in (0, 1)]
    leaves = [draw(2, 4, T, 4), draw(2, 2, T, 4), draw(2, 2, T, 5)]

    def run(how):
        def attend(q, k, v):
            o, state = near_far_attention(q, k, v, *map(how, maps), window=3, sinks=1, chunk_size=CHUNK, **marks)
            return o, state.far

        return value_and_gradients(attend, leaves)

    assert_same(run(lambda f: f.factored), run(lambda f: f))


@pytest.mark.parametrize("solved", [False, True])
def test_a_gradient_that_is_not_wanted_is_not_worked_out(monkeypatch, solved):
    rooms, like = [], LogGradients.like.__func__
    (q, make_q), (k, make_k), v = factors(2), factors(2), draw(2, 2, T, 5)

    def grads(*wanted):
        rooms.clear()
        logs = make_q(*q), make_k(*k)
        o = (linear_kernel_solve(*logs, v, ridge=0.1) if solved else linear_attention(*logs, v))[0]
        return torch.autograd.grad(o.sin().sum(), wanted)

    def watched(cls, *given, **options):
        rooms.append(like(cls, *given, **options))
        return rooms[-1]

    monkeypatch.setattr(LogGradients, "like", classmethod(watched))
    every = grads(q[0], k[0], k[2], v, q[1], k[1])
    assert [room.weight is None for room in rooms] == [False, False]
    for leaf in (q[1], k[1]):
        leaf.requires_grad_(False)
    assert_same(grads(q[0], k[0], k[2], v), every[:4])
    assert [room.weight is None for room in rooms] == [True, True]


@pytest.mark.parametrize("tokens", [T, 1])
@pytest.mark.parametrize("weights", [1, 2])  # one for two key heads is multiplied out
def test_nan_in_padding_reaches_no_gradient(tokens, weights):
    (q, make_q), (k, make_k), v = factors(2, weights), factors(2, weights), draw(2, 2, T, 5)
    mask = MASK[:, :tokens]
    hide = lambda x: x.detach()[:, :, :tokens].masked_fill(~mask[:, None, :, None], float("nan")).requires_grad_()
    q, k, v = [hide(q[0]), q[1], hide(q[2])], [hide(k[0]), k[1], hide(k[2])], hide(v)
    factor = hide(draw(2, 2, T, 1))
    for columns in (None, make_k(*k), Rescaled(factor[..., 0])):
        if columns is None:
            o, _ = linear_attention(make_q(*q), make_k(*k), v, mask=mask, chunk_size=CHUNK)
        else:
            o, _ = linear_kernel_solve(make_q(*q), columns, v, ridge=0.1, mask=mask, chunk_size=CHUNK)
        assert o.isfinite().all()
        grads = torch.autograd.grad(o.sum(), [*q[:2], *k, v, factor], allow_unused=True)
        assert all(g.isfinite().all() for g in grads if g is not None)


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"weight \(4, 5, 3\) must have the width of x \(1, 2, 6, 3\), and a number"):
        Factored(torch.zeros(1, 2, 6, 3), torch.zeros(4, 5, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights", [1, 2])
def test_factors_of_few_digits_are_multiplied_in_float32(dtype, weights):
    x, weight, v = (4 * torch.randn(2, 2, T, 8)).to(dtype), torch.randn(weights, 7, 8).to(dtype), draw(2, 2, T, 5)
    given, wide = Factored(x, weight), Factored(x.double(), weight.double())
    got, _ = linear_attention(given, given, v.float(), mask=MASK)
    assert_close(got, linear_attention(wide, wide, v, mask=MASK)[0].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("marks", MARKS)
def test_log_features_in_float16(marks):
    q, k, v = (torch.randn(2, 2, T, 7).half() for _ in range(3))
    got, _ = linear_attention(q, k, v.float(), chunk_size=CHUNK, **marks)
    assert_close(got, linear_attention(q.float(), k.float(), v.float(), chunk_size=CHUNK, **marks)[0])


def test_a_state_is_differentiated_through_no_tokens():
    k, v = draw(1, 2, 3, 7), draw(1, 2, 3, 5)
    _, past = linear_attention(k, k, v, causal=False)
    none, segments = torch.zeros(1, 2, 0, 7, dtype=v.dtype), torch.zeros(1, 0, dtype=torch.long)
    _, after = linear_attention(none, none, v[:, :, :0], causal=False, segments=segments, state=past)
    assert_close(*(torch.autograd.grad(x.S.sum(), v, retain_graph=True)[0] for x in (after, past)))
