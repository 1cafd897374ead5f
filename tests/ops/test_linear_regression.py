"""Kernel regression in feature space: one product for rows, columns and keys, or three, gives the same."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from mercer.ops import (
    Factored,
    LinearRegressionState,
    LinearSolveState,
    LinearState,
    Rescaled,
    linear_kernel_regression,
    linear_kernel_regression_naive,
    linear_regression_passes,
)
from mercer.ops import linear_regression as module
from mercer.ops.linear_logs import SharedGradients

T, CHUNK, HEADS, FEATURES, WIDTH = 19, 8, 2, 7, 5
MASK = torch.stack([torch.arange(T) >= 5, torch.arange(T) % 4 != 1])
SEGMENTS = torch.tensor([[0] * 3 + [1] * 9 + [2] * 7, [0] * 16 + [4] * 3])
MARKS = {"plain": {}, "padded": {"mask": MASK}, "packed": {"segments": SEGMENTS}}
MARKS["both"] = MARKS["padded"] | MARKS["packed"]


def draw(*size, dtype=torch.float64, factor=1.0):
    return (factor * torch.randn(*size, dtype=dtype)).requires_grad_()


def draw_inputs(length=T, *, batch=2, groups=1, factor=1.0, dtype=torch.float64):
    """Return x and weight of queries and of keys, factor, right-hand sides and ridge."""
    of_q = [draw(batch, groups * HEADS, length, 3, factor=factor, dtype=dtype), draw(HEADS, FEATURES, 3, dtype=dtype)]
    of_k = [draw(batch, HEADS, length, 3, factor=factor, dtype=dtype), draw(HEADS, FEATURES, 3, dtype=dtype)]
    scale = draw(batch, HEADS, length, dtype=dtype)
    ridge = (0.1 + torch.rand(batch, HEADS, length, dtype=dtype)).requires_grad_()
    return [*of_q, *of_k, scale, draw(batch, HEADS, length, WIDTH, dtype=dtype), ridge]


def draw_state(batch=2, segment=0):
    """Return sums that ask for gradients."""
    parts = []
    for kind in (LinearSolveState, LinearState):
        sums = torch.randn(batch, HEADS, FEATURES, WIDTH + 1, dtype=torch.float64)
        sums[..., -1] = sums[..., -1].abs() + 0.1
        c = torch.randn(batch, HEADS, FEATURES, dtype=torch.float64)
        parts.append(kind(sums=sums.requires_grad_(), c=c, segment=torch.full((batch,), segment)))
    return LinearRegressionState(*parts)


def call(function, inputs, **options):
    """Call with one product for rows, columns and keys."""
    q, q_weight, k, k_weight, factor, rhs, ridge = inputs
    log_k = Factored(k, k_weight, -0.4, 0.7)
    columns = Rescaled(factor)
    log_q = Factored(q, q_weight, -0.4, 0.7)
    return function(log_q, log_k, rhs, log_rows=log_k, log_cols=columns, ridge=ridge, **options)


def value_and_gradients(function, inputs, state=None, **options):
    o, after = call(function, inputs, state=state, **options)
    sums = (after.system.sums, after.smoother.sums)
    generator = torch.Generator().manual_seed(1)
    probes = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, *sums)]
    loss = sum((x.double() * probe).sum() for x, probe in zip((o, *sums), probes, strict=True))
    wanted = [*inputs, *([state.system.sums, state.smoother.sums] if state is not None else [])]
    return [o, *sums, after.system.c, after.smoother.c, *torch.autograd.grad(loss, wanted)]


def assert_fast_is_naive(inputs, tolerance=1e-9, chunk_size=CHUNK, **options):
    fast = value_and_gradients(linear_kernel_regression, inputs, chunk_size=chunk_size, **options)
    slow = value_and_gradients(linear_kernel_regression_naive, inputs, **options)
    for got, expected in zip(fast, slow, strict=True):
        assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def together(monkeypatch):
    """Record the calls that are done at once."""
    calls, original = [], module._together
    monkeypatch.setattr(module, "_together", lambda *x, **options: calls.append(1) or original(*x, **options))
    return calls


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_at_once_equals_the_definition(marks, with_state, groups, together):
    state = draw_state() if with_state else None
    assert_fast_is_naive(draw_inputs(groups=groups), state=state, **MARKS[marks])
    assert together


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_any_length(length):
    assert_fast_is_naive(draw_inputs(length), state=draw_state())


@pytest.mark.parametrize("chunk_size", [1, 3, 64, 200])
def test_the_chunk_size_changes_nothing(chunk_size):
    assert_fast_is_naive(draw_inputs(131, batch=1), chunk_size=chunk_size, tolerance=1e-8)


@pytest.mark.parametrize("marks", MARKS)
@pytest.mark.parametrize("which", ["keys", "columns", "both"])
def test_chunks_that_the_two_halve_in_different_places(marks, which, together, monkeypatch):
    """Keys, or columns, hundreds of nats apart: one is cut into pieces where the other is not."""
    pieces, put = [], SharedGradients.put
    monkeypatch.setattr(
        SharedGradients,
        "put",
        lambda self, logs, span, *rest, **options: (
            pieces.append((logs.tied, span.stop - span.start)) or put(self, logs, span, *rest, **options)
        ),
    )
    inputs = draw_inputs()
    with torch.no_grad():
        if which == "columns":
            inputs[4][:, :, ::3] *= 60  # the square of a column makes it very small
        else:
            inputs[2][:, :, ::3] *= 60
            if which == "keys":
                inputs[4][:, :, ::3] /= 60
    assert_fast_is_naive(inputs, tolerance=1e-7, **MARKS[marks])
    of_system, of_smoother = (any(size < 3 for whose, size in pieces if whose is tied) for tied in (True, False))
    if marks in ("plain", "padded"):
        assert (of_system, of_smoother) == (which != "keys", which != "columns")


@pytest.mark.parametrize("blocks", [2, 4])  # of attention; 4 are a chunk unless asked otherwise
def test_chunks_of_several_blocks(blocks, marks_over_blocks, whole_block, together):
    length, marks = marks_over_blocks
    inputs, state = draw_inputs(length, batch=1, groups=2), draw_state(batch=1)
    assert_fast_is_naive(inputs, chunk_size=blocks * whole_block, tolerance=1e-8, state=state, **marks)
    assert together


def test_heads_worked_in_turn(monkeypatch):
    monkeypatch.setattr("mercer.ops.linear_pieces.heads_at_once", lambda *_: 1)
    assert_fast_is_naive(draw_inputs(groups=2), state=draw_state(), **MARKS["both"])


@pytest.mark.parametrize("short", [1, 1000])
def test_the_backward_pass_repeats_and_needs_nothing_kept(short, monkeypatch):
    monkeypatch.setattr("mercer.ops.linear_carry.SHORT", short)
    inputs = draw_inputs()
    o, _ = call(linear_kernel_regression, inputs, chunk_size=CHUNK)
    first = torch.autograd.grad(o.sin().sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(o.sin().sum(), inputs)
    expected = torch.autograd.grad(call(linear_kernel_regression_naive, inputs)[0].sin().sum(), inputs)
    for got, again, want in zip(first, second, expected, strict=True):
        assert_close(got, again, rtol=0, atol=0)
        assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("room", [-1, -3], ids=["smoother", "system"])
def test_the_backward_pass_reads_the_weights_that_were_kept(room, monkeypatch):
    inputs, kept, op = draw_inputs(), [], module.linear_kernel_regression_op
    watched = lambda *given: kept.append(op(*given)) or kept[0]
    monkeypatch.setattr(module, "linear_kernel_regression_op", watched)
    o, _ = call(linear_kernel_regression, inputs, chunk_size=CHUNK)
    right = torch.autograd.grad(o.sum(), inputs[5], retain_graph=True)[0]
    kept[0][room].data.mul_(2)
    assert (torch.autograd.grad(o.sum(), inputs[5])[0] - right).abs().amax() > 0.01


@pytest.mark.parametrize("part", ["system", "smoother"])
def test_a_loss_may_see_one_state_alone(part):
    inputs, state, results = draw_inputs(), draw_state(), []
    for function, options in ((linear_kernel_regression, {"chunk_size": CHUNK}), (linear_kernel_regression_naive, {})):
        _, after = call(function, inputs, state=state, **options)
        wanted = [*inputs, getattr(state, part).sums]
        grads = torch.autograd.grad(getattr(after, part).sums.sin().sum(), wanted, allow_unused=True)
        results.append([torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted, strict=True)])
    for got, expected in zip(*results, strict=True):
        assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_two_calls_equal_one():
    inputs = draw_inputs()
    whole, end = call(linear_kernel_regression, inputs, chunk_size=CHUNK)
    outs, state = [], None
    for start, stop in itertools.pairwise([0, 1, 9, 10, T]):
        cut = [x if x.dim() == 3 and x.shape[1] == FEATURES else x[:, :, start:stop] for x in inputs]
        out, state = call(linear_kernel_regression, cut, state=state, chunk_size=CHUNK)
        outs.append(out)
    assert_close(torch.cat(outs, 2), whole, rtol=1e-9, atol=1e-9)
    assert_close(state.system.sums, end.system.sums, rtol=1e-9, atol=1e-9)
    assert_close(state.smoother.sums, end.smoother.sums, rtol=1e-9, atol=1e-9)


def test_nan_in_padding_reaches_nothing():
    inputs = draw_inputs()
    hide = lambda x: x.detach().masked_fill(~MASK[:, None, :, None] if x.dim() == 4 else ~MASK[:, None], math.nan)
    padded = [x if x.shape[0] == HEADS and x.shape[1] == FEATURES else hide(x).requires_grad_() for x in inputs[:-1]]
    o, _ = call(linear_kernel_regression, [*padded, inputs[-1]], mask=MASK, chunk_size=CHUNK)
    assert_close(o, call(linear_kernel_regression, inputs, mask=MASK, chunk_size=CHUNK)[0])
    for gradient in torch.autograd.grad(o.square().sum(), padded):
        assert gradient.isfinite().all()


def test_a_gradient_that_is_not_wanted_is_not_worked_out():
    inputs = draw_inputs()
    expected = torch.autograd.grad(call(linear_kernel_regression, inputs)[0].sin().sum(), inputs)
    for weight in (inputs[1], inputs[3]):
        weight.requires_grad_(False)
    wanted = [x for x in inputs if x.requires_grad]
    got = torch.autograd.grad(call(linear_kernel_regression, inputs)[0].sin().sum(), wanted)
    kept = [x for x, leaf in zip(expected, inputs, strict=True) if leaf.requires_grad]
    for a, b in zip(got, kept, strict=True):
        assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("why", ["an offset", "one weight for two heads"])
def test_keys_that_the_operator_cannot_make_are_regressed_in_turn(why, together):
    q, q_weight, k, k_weight, factor, rhs, ridge = draw_inputs()
    weight, offset = (k_weight, draw(2, HEADS, T, 1)) if why == "an offset" else (draw(1, FEATURES, 3), None)
    log_q, log_k = Factored(q, q_weight), Factored(k, weight, -0.4, 0.7, offset)
    results = []
    for function in (linear_kernel_regression, linear_kernel_regression_naive):
        o, _ = function(log_q, log_k, rhs, log_rows=log_k, log_cols=Rescaled(factor), ridge=ridge, mask=MASK)
        leaves = [q, k, weight, factor, rhs, *([] if offset is None else [offset])]
        results.append([o, *torch.autograd.grad(o.sin().sum(), leaves)])
    for got, expected in zip(*results, strict=True):
        assert_close(got, expected, rtol=1e-9, atol=1e-9)
    assert not together


def test_features_that_are_given_are_regressed_in_turn(together):
    log_q, log_k, log_rows, log_cols = (draw(2, HEADS, T, FEATURES) for _ in range(4))
    rhs = draw(2, HEADS, T, WIDTH)
    options = {"log_rows": log_rows, "log_cols": log_cols, "ridge": 0.3, "mask": MASK, "segments": SEGMENTS}
    fast, _ = linear_kernel_regression(log_q, log_k, rhs, chunk_size=CHUNK, **options)
    slow, _ = linear_kernel_regression_naive(log_q, log_k, rhs, **options)
    assert_close(fast, slow, rtol=1e-9, atol=1e-9)
    assert not together


def test_low_precision_is_computed_in_float32():
    inputs = draw_inputs(40, batch=1)
    rounded = [x.detach().to(torch.bfloat16) for x in inputs]
    o, state = call(linear_kernel_regression, rounded)
    exact, _ = call(linear_kernel_regression_naive, [x.double() for x in rounded])
    assert o.dtype == torch.bfloat16
    assert state.system.sums.dtype == state.smoother.sums.dtype == torch.float32
    assert_close(o.double(), exact, rtol=2e-2, atol=2e-2)


def test_shapes_that_do_not_fit_are_refused():
    inputs = draw_inputs()
    with pytest.raises(ValueError, match=r"factor \(2, 2, 3\) must be one number a token of log_rows \(2, 2, 19, 7\)"):
        call(linear_kernel_regression, [*inputs[:4], torch.ones(2, 2, 3), *inputs[5:]])
    with pytest.raises(ValueError, match=r"log_q has 7 tokens and log_k 19"):
        call(linear_kernel_regression, [inputs[0][:, :, :7], *inputs[1:]])
    with pytest.raises(ValueError, match=r"chunk_size \(0\) must be at least 1"):
        call(linear_kernel_regression, inputs, chunk_size=0)
    with pytest.raises(ValueError, match=r"state holds sums S \(1, 2, 7, 5\)"):
        call(linear_kernel_regression, inputs, state=draw_state(batch=1))


def test_the_operator_is_registered_rightly():
    q, q_weight, k, k_weight, factor, rhs, ridge = draw_inputs(9, batch=1)
    state = draw_state(batch=1)
    tensors = (q, q_weight, k, k_weight, factor, rhs, ridge, state.system.sums, state.smoother.sums)
    others = (state.system.c, state.smoother.c, None, None, state.system.segment, -0.4, 0.7, 4, 1, True)
    torch.library.opcheck(linear_regression_passes.linear_kernel_regression_op, (*tensors, *others))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, while it compiles
@pytest.mark.compile
@pytest.mark.parametrize("length", [T, 4096])
def test_compiles_to_one_graph_whose_making_does_not_grow_with_the_length(length):
    graphs = []

    def step(*inputs):
        o, after = call(linear_kernel_regression, inputs)
        return o + call(linear_kernel_regression, inputs, state=after)[0]

    def count(graph, example):
        graphs.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    torch.compiler.reset()
    inputs = draw_inputs(length, batch=1, dtype=torch.float32)
    o = torch.compile(step, fullgraph=True, backend=count)(*inputs)
    grads = torch.autograd.grad(o.square().sum(), inputs)
    assert len(graphs) == 1
    assert graphs[0] < 160, "nodes, whatever the length"
    expected = step(*inputs)
    reference = torch.autograd.grad(expected.square().sum(), inputs)
    for got, right in zip((o, *grads), (expected, *reference), strict=True):
        assert_close(got, right)


def test_the_definition_is_a_system_and_a_smoothing():
    """By dense matrices: o = A (P + ridge I)^-1 v."""
    q, q_weight, k, k_weight, factor, rhs, ridge = (x.detach() for x in draw_inputs(6, batch=1))
    o, _ = call(linear_kernel_regression_naive, (q, q_weight, k, k_weight, factor, rhs, ridge))
    for head in range(HEADS):
        t, t_q = k[0, head] @ k_weight[head].T, q[0, head] @ q_weight[head].T
        square = k[0, head].square().sum(-1, keepdim=True)
        columns = factor[0, head][:, None] * t - 0.4 * factor[0, head][:, None] ** 2 * square
        keys = t - 0.4 * square
        p, a = ((x.exp() @ y.exp().T).tril() for x, y in ((t, columns), (t_q, keys)))
        p, a = (w / w.sum(-1, keepdim=True) for w in (p, a))
        u = torch.linalg.solve(p + torch.diag(ridge[0, head]), rhs[0, head])
        assert_close(o[0, head], a @ u)
