"""Kernel systems in feature space: the fast path equals the definition, whatever is masked, packed, split or huge."""

import itertools
import math

import pytest
import torch

from mercer.ops import linear_solve
from mercer.ops.factored import Factored, dense
from mercer.ops.linear import linear_attention
from mercer.ops.linear_solve import LinearSolveState, Rescaled, linear_kernel_solve, linear_kernel_solve_naive

CHUNK = 8
LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]
T = LENGTHS[-1]
MASKS = {
    "left": torch.arange(T) >= 5,
    "right": torch.arange(T) < 12,
    "all padded": torch.zeros(T, dtype=torch.bool),
    "interior": torch.tensor([0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1], dtype=torch.bool),
}
SEGMENTS = {"three": [[0] * 3 + [1] * 9 + [2] * 7, [0] * 16 + [4] * 3], "single tokens": [list(range(T)), [5] * T]}


def draw(length=T, *, batch=2, heads=4, col_heads=2, features=7, width=5, dtype=torch.float64, spread=2.0):
    """Return log_rows, log_cols, rhs and ridge that ask for gradients."""
    log_rows = spread * torch.randn(batch, heads, length, features, dtype=dtype)
    log_cols = spread * torch.randn(batch, col_heads, length, features, dtype=dtype)
    rhs = torch.randn(batch, heads, length, width, dtype=dtype)
    ridge = 0.1 + torch.rand(batch, heads, length, dtype=dtype)
    return tuple(x.requires_grad_() for x in (log_rows, log_cols, rhs, ridge))


def draw_state(batch=2, heads=4, features=7, width=5, dtype=torch.float64, segment=0):
    sums = torch.randn(batch, heads, features, width + 1, dtype=dtype)
    sums[..., -1] = sums[..., -1].abs() + 0.1
    c = torch.randn(batch, heads, features, dtype=dtype)
    return LinearSolveState(sums=sums.requires_grad_(), c=c, segment=torch.full((batch,), segment))


def value_and_gradients(function, inputs, state=None, **options):
    """Return u, the new sums and the gradients of a fixed random functional of both."""
    *tensors, ridge = inputs
    u, after = function(*tensors, ridge=ridge, state=state, **options)
    generator = torch.Generator().manual_seed(1)
    probe, probe_sums = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (u, after.sums))
    loss = (u.double() * probe).sum() + (after.sums.double() * probe_sums).sum()
    wrt = [*inputs, *([state.sums] if state is not None else [])]
    return [u, after.sums, after.c, *torch.autograd.grad(loss, wrt)]


def assert_fast_is_naive(inputs, chunk_size=CHUNK, tolerance=1e-10, **options):
    slow = value_and_gradients(linear_kernel_solve_naive, inputs, **options)
    fast = value_and_gradients(linear_kernel_solve, inputs, chunk_size=chunk_size, **options)
    for expected, got in zip(slow, fast, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("with_state", [True, False])
def test_fast_equals_naive_in_value_and_gradient(length, with_state):
    assert_fast_is_naive(draw(length), state=draw_state() if with_state else None)


@pytest.mark.parametrize("chunk_size", [1, 3, 64, 200])
def test_the_chunk_size_changes_nothing(chunk_size):
    assert_fast_is_naive(draw(131, batch=1, heads=2, col_heads=1), chunk_size=chunk_size)


def test_chunks_of_several_blocks(marks_over_blocks, whole_block):
    length, marks = marks_over_blocks
    inputs, state = draw(length, batch=1, heads=2, col_heads=1), draw_state(batch=1, heads=2)
    assert_fast_is_naive(inputs, chunk_size=2 * whole_block, tolerance=1e-8, state=state, **marks)


def test_a_loss_may_see_the_state_alone():
    (log_rows, log_cols, rhs, ridge), state, results = draw(), draw_state(), []
    for function, options in ((linear_kernel_solve_naive, {}), (linear_kernel_solve, {"chunk_size": CHUNK})):
        _, after = function(log_rows, log_cols, rhs, ridge=ridge, state=state, **options)
        results.append(torch.autograd.grad(after.sums.sin().sum(), (log_rows, log_cols, rhs, ridge, state.sums)))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tied", [True, False])
def test_layouts_of_memory_do_not_matter_across_blocks(tied):
    results = []
    for layout in (torch.clone, lambda x: x.mT.contiguous().mT):
        torch.manual_seed(3)
        log_rows, log_cols, rhs, ridge = draw(col_heads=4)
        rows, cols, right = (layout(x.detach()).requires_grad_() for x in (log_rows, log_cols, rhs))
        u, _ = linear_kernel_solve(rows, rows if tied else cols, right, ridge=ridge, chunk_size=CHUNK)
        results.append([u, *torch.autograd.grad(u.sin().sum(), (rows, right) if tied else (rows, cols, right))])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_gradients_are_the_same_if_nothing_was_kept_for_them(monkeypatch):
    inputs, options = draw(), {"state": draw_state(), "mask": torch.stack([MASKS["left"]] * 2)}
    options["segments"] = torch.tensor(SEGMENTS["three"])
    with torch.no_grad():
        inputs[1][0, 1, 6] += 900  # its chunk is halved
    kept = value_and_gradients(linear_kernel_solve, inputs, chunk_size=CHUNK, **options)
    monkeypatch.setattr("mercer.ops.linear_solve.any_grad", lambda *tensors: False)
    again = value_and_gradients(linear_kernel_solve, inputs, chunk_size=CHUNK, **options)
    for expected, got in zip(kept, again, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("segments", [None, *SEGMENTS])
def test_masks_and_segments(mask, segments):
    torch.manual_seed(2)
    real = torch.stack([MASKS[mask], torch.rand(T) > 0.3])
    packed = None if segments is None else torch.tensor(SEGMENTS[segments])
    for state in (None, draw_state(), draw_state(segment=50)):
        assert_fast_is_naive(draw(), mask=real, segments=packed, state=state)


@pytest.fixture(params=[False, True], ids=["in factors", "multiplied out"])
def multiplied_out(request, monkeypatch):
    """Let the operator make the product of factors, or be given it, as on an accelerator."""
    if request.param:
        given = lambda x, heads, dtype, mask: (dense(Factored(x.x, x.weight), mask), None)
        monkeypatch.setattr(linear_solve, "arguments_of", given)


@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("weights", [1, 4])
@pytest.mark.parametrize("factors", [2, 4])
@pytest.mark.usefixtures("multiplied_out")
def test_columns_that_are_rescaled_rows(mask, weights, factors):
    _, _, rhs, ridge = draw()
    x, weight = (torch.randn(*size, dtype=torch.float64).requires_grad_() for size in ((2, 4, T, 3), (weights, 7, 3)))
    factor = torch.randn(2, factors, T, dtype=torch.float64).requires_grad_()
    real = None if mask is None else torch.stack([MASKS[mask], torch.rand(T) > 0.3])
    results, state = [], draw_state()

    def at_another_length(x, weight, factor):
        scaled = factor.repeat_interleave(4 // factors, 1)[..., None] * x
        return (scaled @ weight.mT) - 0.4 * scaled.square().sum(-1, keepdim=True) + 0.7

    for function, options in ((linear_kernel_solve_naive, {}), (linear_kernel_solve, {"chunk_size": CHUNK})):

        def solve(x, weight, factor, rhs, function=function, options=options, **others):
            rows = Factored(x, weight, -0.4, 0.7, x[..., :1])
            return function(rows, Rescaled(factor), rhs, **others, **options)

        results.append(value_and_gradients(solve, (x, weight, factor, rhs, ridge), state=state, mask=real))
    rows = (x @ weight.mT).detach()
    u, _ = linear_kernel_solve_naive(
        rows, at_another_length(x, weight, factor).detach(), rhs, ridge=ridge, state=state, mask=real
    )
    torch.testing.assert_close(results[0][0], u, rtol=1e-10, atol=1e-10)
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("multiplied_out")
def test_the_backward_pass_of_rescaled_rows_repeats():
    x, weight = (torch.randn(*size, dtype=torch.float64).requires_grad_() for size in ((2, 4, T, 3), (4, 7, 3)))
    factor = torch.randn(2, 4, T, dtype=torch.float64).requires_grad_()
    _, _, rhs, ridge = draw()
    u, _ = linear_kernel_solve(Factored(x, weight), Rescaled(factor), rhs, ridge=ridge, chunk_size=CHUNK)
    first, second = (torch.autograd.grad(u.sin().sum(), (x, weight, factor), retain_graph=True) for _ in range(2))
    for got, again in zip(first, second, strict=True):
        torch.testing.assert_close(again, got, rtol=0, atol=0)


def test_the_backward_pass_reads_the_weights_that_were_kept(monkeypatch):
    log_rows, log_cols, rhs, ridge = draw()
    kept, op = [], linear_solve.linear_kernel_solve_op
    monkeypatch.setattr(linear_solve, "linear_kernel_solve_op", lambda *given: kept.append(op(*given)) or kept[0])
    u, _ = linear_kernel_solve(log_rows, log_cols, rhs, ridge=ridge, chunk_size=CHUNK)
    right = torch.autograd.grad(u.sum(), rhs, retain_graph=True)[0]
    kept[0][-1].data.mul_(2)
    assert (torch.autograd.grad(u.sum(), rhs)[0] - right).abs().amax() > 0.1


def test_forward_substitution_by_loops():
    """Transcribe u[t] = (rhs[t] - phi(r_t)' S_{t-1} / n_t) / (P[t,t] + ridge), S_t = S_{t-1} + phi(c_t) u[t]'."""
    log_rows, log_cols, rhs, ridge = (x.detach() for x in draw(10, batch=1, heads=1, col_heads=1))
    u, state = linear_kernel_solve(log_rows, log_cols, rhs, ridge=ridge, chunk_size=4)
    rows, cols = log_rows[0, 0].exp(), log_cols[0, 0].exp()
    S, z = torch.zeros(7, 5, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    for t in range(10):
        z += cols[t]
        n = rows[t] @ z
        expected = (rhs[0, 0, t] - rows[t] @ S / n) / (rows[t] @ cols[t] / n + ridge[0, 0, t])
        torch.testing.assert_close(u[0, 0, t], expected)
        S += torch.outer(cols[t], expected)
    torch.testing.assert_close(state.S[0, 0] * state.c[0, 0].exp()[:, None], S)
    torch.testing.assert_close(state.z[0, 0] * state.c[0, 0].exp(), z)


def test_smoothing_the_solution_gives_the_right_hand_side_back():
    log_rows, log_cols, rhs, ridge = draw(50, heads=2)
    u, _ = linear_kernel_solve(log_rows, log_cols, rhs, ridge=0.1)
    torch.testing.assert_close(linear_attention(log_rows, log_cols, u)[0] + 0.1 * u, rhs)
    u, _ = linear_kernel_solve(log_rows, log_cols, rhs, ridge=ridge)
    torch.testing.assert_close(linear_attention(log_rows, log_cols, u)[0] + ridge[..., None] * u, rhs)


def test_naive_passes_gradcheck():
    inputs = draw(5, batch=1, heads=2, col_heads=1, features=3, width=2, spread=1.0)
    state = draw_state(batch=1, heads=2, features=3, width=2)
    mask, segments = torch.tensor([[True, True, False, True, True]]), torch.tensor([[0, 0, 0, 0, 2]])

    def function(log_rows, log_cols, rhs, ridge, sums):
        past = LinearSolveState(sums=sums, c=state.c, segment=state.segment)
        u, after = linear_kernel_solve_naive(
            log_rows, log_cols, rhs, ridge=ridge, mask=mask, segments=segments, state=past
        )
        return u, after.c.exp()[..., None] * after.sums  # counted in a fixed unit: c is not differentiated

    assert torch.autograd.gradcheck(function, (*inputs, state.sums))


@pytest.mark.parametrize("heads", [(4, 2, 1), (1, 2, 4), (2, 4, 2)])
def test_fewer_heads_equal_repeated_ones(heads):
    many = max(heads)
    log_rows, log_cols, rhs, _ = draw()
    inputs = [
        x[:, :1].expand(-1, n, -1, -1).contiguous() for x, n in zip((log_rows, log_cols, rhs), heads, strict=True)
    ]
    inputs = [x + torch.arange(x.shape[1])[:, None, None] * 0.1 for x in inputs]
    few, _ = linear_kernel_solve(*inputs, ridge=0.3, chunk_size=CHUNK)
    repeated = [x.repeat_interleave(many // x.shape[1], 1) for x in inputs]
    torch.testing.assert_close(few, linear_kernel_solve(*repeated, ridge=0.3, chunk_size=CHUNK)[0])


@pytest.mark.parametrize("rhs_heads", [2, 4])
def test_rows_and_columns_may_be_one_tensor(rhs_heads):
    _, shared, _, _ = draw()
    _, _, rhs, _ = draw(heads=rhs_heads)
    results = []
    for rows, cols in ((shared, shared), (shared, shared.clone())):
        u, state = linear_kernel_solve(rows, cols, rhs, ridge=0.3, mask=torch.stack([MASKS["left"]] * 2), chunk_size=4)
        loss = u.square().sum() + state.sums.sum()
        results.append([u, state.sums, *torch.autograd.grad(loss, (shared, rhs))])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("shape", ["number", "heads", "tokens", "all"])
def test_the_ridge_broadcasts(shape):
    log_rows, log_cols, rhs, full = draw()
    ridge = {"number": torch.tensor(0.3), "heads": full[0, :, 0], "tokens": full[:1, :1], "all": full}[shape]
    ridge = ridge.detach().double().requires_grad_()
    assert_fast_is_naive((log_rows, log_cols, rhs, ridge))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_splitting_anywhere_changes_neither_values_nor_gradients(packed, padded):
    inputs = draw()
    mask = torch.stack([MASKS["left"], MASKS["interior"]]) if padded else None
    segments = torch.tensor(SEGMENTS["three"]) if packed else None

    def run(*cuts):
        state, outs = None, []
        for start, stop in itertools.pairwise([0, *cuts, T]):
            options = {"mask": mask, "segments": segments}
            options = {name: x if x is None else x[:, start:stop] for name, x in options.items()}
            *tensors, ridge = (x[:, :, start:stop] for x in inputs)
            u, state = linear_kernel_solve(*tensors, ridge=ridge, state=state, chunk_size=CHUNK, **options)
            outs.append(u)
        u = torch.cat(outs, 2)
        loss = (u * torch.cos(torch.arange(u.numel())).view_as(u)).sum() + (state.S.sin() * state.z[..., None]).sum()
        return [u, state.sums, state.c, state.segment, *torch.autograd.grad(loss, inputs)]

    whole = run()
    for cuts in [*((i,) for i in range(1, T)), (3, 7, 8, 15), tuple(range(1, T))]:
        for expected, got in zip(whole, run(*cuts), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_the_past_does_not_depend_on_a_future_120_nats_above():
    log_rows, log_cols, rhs, ridge = draw(T, dtype=torch.float32, spread=1.0)
    for place in range(1, T):
        high = log_cols.detach().clone()
        high[:, :, place] += 120
        before, _ = linear_kernel_solve(log_rows, log_cols, rhs, ridge=ridge, chunk_size=CHUNK)
        after, state = linear_kernel_solve(log_rows, high.requires_grad_(), rhs, ridge=ridge, chunk_size=CHUNK)
        torch.testing.assert_close(after[:, :, :place], before[:, :, :place], rtol=1e-4, atol=1e-4)
        assert state.sums.isfinite().all()
        assert after.isfinite().all()
        grads = torch.autograd.grad(after[:, :, :place].square().sum(), (log_rows, high, rhs, ridge))
        reference = torch.autograd.grad(before[:, :, :place].square().sum(), (log_rows, log_cols, rhs, ridge))
        for got, expected in zip(grads, reference, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * max(1, expected.abs().max().item()))
            assert not got[:, :, place:].any(), "the Jacobian with respect to the future is exactly zero"


@pytest.mark.parametrize("chunk_size", [3, CHUNK, 64])
def test_a_packed_document_equals_itself_alone_beside_keys_120_nats_above(chunk_size):
    log_rows, log_cols, rhs, ridge = draw(T, batch=1, dtype=torch.float32, spread=1.0)
    lengths = [4, 9, 6]
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    high = log_cols + torch.where(segments[:, None, :, None] == 1, 120.0, 0.0)
    packed, _ = linear_kernel_solve(log_rows, high, rhs, ridge=ridge, segments=segments, chunk_size=chunk_size)
    for number, stop in enumerate(itertools.accumulate(lengths)):
        at = slice(stop - lengths[number], stop)
        *tensors, ridges = (x[:, :, at] for x in (log_rows, high, rhs, ridge))
        alone, _ = linear_kernel_solve(*tensors, ridge=ridges, chunk_size=chunk_size)
        torch.testing.assert_close(packed[:, :, at], alone, rtol=1e-4, atol=1e-4)
        for grad in torch.autograd.grad(packed[:, :, at].sum(), (log_rows, log_cols, rhs, ridge), retain_graph=True):
            assert not torch.cat([grad[:, :, : at.start], grad[:, :, at.stop :]], 2).any(), "exactly zero"


@pytest.mark.parametrize("garbage", [0.0, 120.0, math.nan, math.inf, -math.inf])
def test_what_padding_holds_and_where_it_stands_is_not_seen(garbage):
    inputs = draw(11, batch=1, dtype=torch.float32, spread=1.0)

    def run(left, right):
        padded = [torch.nn.functional.pad(x, (0, 0, left, right), value=garbage) for x in inputs[:3]]
        ridge = torch.nn.functional.pad(inputs[3], (left, right), value=garbage)
        mask = torch.nn.functional.pad(torch.ones(1, 11, dtype=torch.bool), (left, right))
        u, _ = linear_kernel_solve(*padded, ridge=ridge, mask=mask, chunk_size=CHUNK)
        assert not u.masked_select(~mask[:, None, :, None]).any(), "padded tokens have u = 0"
        u = u[:, :, left : left + 11]
        return [u, *torch.autograd.grad(u.square().sum(), inputs)]

    bare = run(0, 0)
    for left, right in [(3, 0), (0, 5), (9, 9)]:
        for got, expected in zip(run(left, right), bare, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize(
    ("hostile", "ridge"),
    [
        *((name, 0.1) for name in ("huge", "duplicate", "zero", "steps", "minus infinity")),
        *((name, 1e-10) for name in ("duplicate", "zero", "steps")),  # where a diagonal vanishes only the ridge is left
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hostile_input_stays_finite_with_a_bounded_residual(hostile, dtype, ridge):
    log_rows, log_cols, rhs, _ = (x.detach() for x in draw(150, batch=1, heads=2, dtype=torch.float32))
    if hostile == "huge":
        log_rows, log_cols = 300 * log_rows, 300 * log_cols - 1e5
    elif hostile == "duplicate":
        log_cols = log_cols[:, :, :1].expand(-1, -1, 150, -1)
    elif hostile == "zero":
        log_rows, log_cols = 0 * log_rows, 0 * log_cols
    elif hostile == "steps":
        log_cols = log_cols + 40 * torch.arange(150)[:, None] * torch.tensor([1, -1, 0, 1, 0, 0, 0])
    elif hostile == "minus infinity":
        log_cols[..., 1], log_cols[:, :, 10, :], log_rows[:, :, 20] = -math.inf, -math.inf, -math.inf
    inputs = [x.to(dtype).requires_grad_() for x in (log_rows, log_cols, rhs)]
    u, state = linear_kernel_solve(inputs[0], inputs[1], inputs[2].float(), ridge=ridge)
    assert u.isfinite().all()
    assert state.sums.isfinite().all()
    with torch.no_grad():
        smooth, _ = linear_attention(*(x.double() for x in inputs[:2]), u.double())
    residual = smooth + ridge * u - inputs[2]
    assert residual.norm() <= 1e-5 * (smooth.norm() + u.norm() + rhs.norm())
    for grad in torch.autograd.grad(u.sum(), inputs):
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_error_in_low_precision_is_at_most_twice_that_of_the_definition(dtype):
    inputs = [x.detach().to(dtype).requires_grad_() for x in draw(150, dtype=torch.float32, spread=1.0, features=32)]
    exact = value_and_gradients(linear_kernel_solve_naive, [x.detach().double().requires_grad_() for x in inputs])
    slow = value_and_gradients(linear_kernel_solve_naive, inputs)
    fast = value_and_gradients(linear_kernel_solve, inputs)
    assert fast[0].dtype == dtype
    assert fast[1].dtype == torch.float32
    for expected, naive, got in zip(exact, slow, fast, strict=True):
        error, allowed = ((x.double() - expected).norm() for x in (got, naive))
        assert error <= 2 * allowed + 1e-6 * expected.norm()  # the rounding of float32 itself


def test_autocast_does_not_reach_the_arithmetic():
    *tensors, ridge = draw(40, dtype=torch.float32)
    expected, _ = linear_kernel_solve(*tensors, ridge=ridge)
    grads = torch.autograd.grad(expected.square().sum(), tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        u, _ = linear_kernel_solve(*tensors, ridge=ridge)
        again = torch.autograd.grad(u.square().sum(), tensors)
    assert torch.equal(u, expected)
    assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))


def test_no_tokens_leave_the_state_alone():
    state = draw_state()
    *tensors, ridge = draw(0)
    u, after = linear_kernel_solve(*tensors, ridge=ridge, state=state)
    assert u.shape == (2, 4, 0, 5)
    torch.testing.assert_close(after.sums, state.sums)


def test_the_operator_is_registered_rightly():
    from mercer.ops.linear_solve_passes import linear_kernel_solve_op

    inputs, state = draw(9, heads=2, dtype=torch.float32), draw_state(heads=2, dtype=torch.float32)
    mask = MASKS["left"][:9].expand(2, -1).clone()
    for masks in ((None, None), (mask, torch.zeros(2, 9, dtype=torch.long))):
        log_rows, log_cols, *rest = inputs
        scales = [torch.randn(2, 2, 9).requires_grad_() for _ in range(2)]
        x, weight = torch.randn(2, 2, 9, 3).requires_grad_(), torch.randn(2, 7, 3).requires_grad_()
        dense = [(log_rows, None, *columns) for columns in ((log_cols, None), (None, None))]
        logs = [(*dense[0], None, None), (*dense[1], None, None), (*dense[1], *scales)]
        logs += [(x, weight, x, weight, None, scales[0]), (x, weight, None, None, *scales)]
        for given in logs:
            for keep in (False, True):
                added = (0.0, 0.0) if given[1] is None else (-0.4, 0.7)
                arguments = (*given, *rest, state.sums, state.c, *masks, state.segment, *added, 4, 1, keep)
                torch.library.opcheck(linear_kernel_solve_op, arguments)


def test_wrong_use_is_refused_in_words():
    log_rows, log_cols, rhs, ridge = draw()
    rows = Factored(torch.zeros(2, 4, T, 3), torch.zeros(4, 7, 3))
    with pytest.raises(ValueError, match=r"factor \(2, 4, 3\) must be one number a token of log_rows \(2, 4, 19, 7\)"):
        linear_kernel_solve(rows, Rescaled(torch.ones(2, 4, 3)), rhs, ridge=0.1)
    with pytest.raises(ValueError, match="Rescaled columns need rows that are Factored, not Tensor"):
        linear_kernel_solve(log_rows, Rescaled(torch.ones(2, 4, T)), rhs, ridge=0.1)
    with pytest.raises(ValueError, match=r"chunk_size \(0\) must be at least 1"):
        linear_kernel_solve(log_rows, log_cols, rhs, ridge=ridge, chunk_size=0)
    with pytest.raises(ValueError, match=r"log_cols has 2 heads; the query heads \(3\) must be a multiple"):
        linear_kernel_solve(log_rows[:, :3], log_cols, rhs[:, :3], ridge=0.1)
    with pytest.raises(ValueError, match=r"ridge has shape \(3, 1\); it must be a number, \[heads\] or broadcast"):
        linear_kernel_solve(log_rows, log_cols, rhs, ridge=torch.ones(3))
    with pytest.raises(ValueError, match=r"state holds sums S \(2, 4, 7, 3\); these inputs need \(2, 4, 7, 5\)"):
        linear_kernel_solve(log_rows, log_cols, rhs, ridge=0.1, state=draw_state(width=3))
    segments = torch.tensor([[0] * 5 + [1] * 5 + [0] * 9] * 2)
    with pytest.raises(ValueError, match="document 0 of batch row 0 comes back"):
        linear_kernel_solve(log_rows, log_cols, rhs, ridge=0.1, segments=segments)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, while it compiles
@pytest.mark.compile
@pytest.mark.parametrize("length", [64, 4096])
def test_compiles_to_one_graph_whose_making_does_not_grow_with_the_length(length):
    graphs = []

    def step(log_rows, log_cols, rhs, ridge):
        u, state = linear_kernel_solve(log_rows, log_cols, rhs, ridge=ridge)
        return u + linear_kernel_solve(log_rows, log_rows, rhs, ridge=ridge, state=state)[0]

    def count(graph, example):
        graphs.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    torch.compiler.reset()
    inputs = draw(length, batch=1, heads=2, dtype=torch.float32, spread=1.0)
    u = torch.compile(step, fullgraph=True, backend=count)(*inputs)
    grads = torch.autograd.grad(u.square().sum(), inputs)
    assert len(graphs) == 1
    assert graphs[0] < 60, "nodes, whatever the length"
    expected = step(*inputs)
    for got, right in zip(grads, torch.autograd.grad(expected.square().sum(), inputs), strict=True):
        torch.testing.assert_close(got, right)
    torch.testing.assert_close(u, expected)
