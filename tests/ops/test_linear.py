"""Linear attention: the fast path equals the definition, whatever is masked, packed, split, huge or small."""

import itertools
import math

import pytest
import torch

from mercer.mixers.base import map_state
from mercer.ops import linear, linear_carry
from mercer.ops.linear import LinearState, check_linear, linear_attention, linear_attention_naive

CHUNK = 8
LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3]
T = LENGTHS[-1]
MASKS = {
    "left": torch.arange(T) >= 5,
    "right": torch.arange(T) < 12,
    "all padded": torch.zeros(T, dtype=torch.bool),
    "interior": torch.tensor([0, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1], dtype=torch.bool),
}
SEGMENTS = {
    "three": [[0] * 3 + [1] * 9 + [2] * 7, [0] * 16 + [4] * 3],
    "new at once": [[7] * 8 + [1] * 11, [3] * 1 + [9] * 18],
    "single tokens": [list(range(T)), [5] * T],
}


def draw(length=T, *, batch=2, heads=4, kv_heads=2, features=7, width=5, dtype=torch.float64, spread=3.0):
    """Return log_q, log_k and v that ask for gradients."""
    log_q = spread * torch.randn(batch, heads, length, features, dtype=dtype)
    log_k = spread * torch.randn(batch, kv_heads, length, features, dtype=dtype)
    v = torch.randn(batch, kv_heads, length, width, dtype=dtype)
    return tuple(x.requires_grad_() for x in (log_q, log_k, v))


def draw_state(batch=2, kv_heads=2, features=7, width=5, dtype=torch.float64, segment=0):
    sums = torch.randn(batch, kv_heads, features, width + 1, dtype=dtype)
    sums[..., -1] = sums[..., -1].abs() + 0.1
    c = torch.randn(batch, kv_heads, features, dtype=dtype)
    return LinearState(sums=sums.requires_grad_(), c=c, segment=torch.full((batch,), segment))


def value_and_gradients(function, inputs, state=None, **options):
    """Return o, the new sums and the gradients of a fixed random functional of both."""
    o, after = function(*inputs, state=state, **options)
    generator = torch.Generator().manual_seed(1)
    probe, probe_sums = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, after.sums))
    loss = (o.double() * probe).sum() + (after.sums.double() * probe_sums).sum()
    wrt = [*inputs, *([state.sums] if state is not None else [])]
    return [o, after.sums, after.c, *torch.autograd.grad(loss, wrt)]


def assert_fast_is_naive(inputs, chunk_size=CHUNK, tolerance=1e-11, **options):
    slow = value_and_gradients(linear_attention_naive, inputs, **options)
    fast = value_and_gradients(linear_attention, inputs, chunk_size=chunk_size, **options)
    for expected, got in zip(slow, fast, strict=True):
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
def test_fast_equals_naive_in_value_and_gradient(length, causal, with_state):
    assert_fast_is_naive(draw(length), causal=causal, state=draw_state() if with_state else None)


@pytest.mark.parametrize("chunk_size", [1, 3, 64, 200])
def test_the_chunk_size_changes_nothing(chunk_size):
    assert_fast_is_naive(draw(131, batch=1, heads=2, kv_heads=1), chunk_size=chunk_size)


def test_chunks_of_several_blocks(marks_over_blocks, whole_block):
    length, marks = marks_over_blocks
    inputs, state = draw(length, batch=1, heads=2, kv_heads=1), draw_state(batch=1, kv_heads=1)
    assert_fast_is_naive(inputs, chunk_size=2 * whole_block, state=state, **marks)


@pytest.mark.parametrize("causal", [True, False])
def test_a_loss_may_see_the_state_alone(causal):
    inputs, state, results = draw(), draw_state(), []
    for function, options in ((linear_attention_naive, {}), (linear_attention, {"chunk_size": CHUNK})):
        _, after = function(*inputs, state=state, causal=causal, **options)
        found = torch.autograd.grad(after.sums.sin().sum(), (*inputs, state.sums), allow_unused=True)
        results.append([torch.zeros(()).double() if grad is None else grad for grad in found])
    assert not results[1][0].any()  # of the queries
    for expected, got in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


LAYOUTS = {
    "heads last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "features first": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 2])
def test_layouts_of_memory_do_not_matter_across_blocks(layout, batch):
    inputs = draw(batch=batch)
    laid_out = [LAYOUTS[layout](x.detach()).requires_grad_() for x in inputs]
    assert not laid_out[0].is_contiguous()
    plain, same = (value_and_gradients(linear_attention, x, chunk_size=CHUNK) for x in (inputs, laid_out))
    for expected, got in zip(plain, same, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("features", [1, 7])
def test_a_backward_pass_leaves_its_inputs_alone_and_can_be_repeated(causal, kept, features, monkeypatch):
    if not kept:
        monkeypatch.setattr("mercer.ops.linear.any_grad", lambda *tensors: False)
    state = draw_state(features=features)
    transposed = state.sums.detach().mT.contiguous().mT.requires_grad_()  # the way round they are worked with
    state = LinearState(sums=transposed, c=state.c, segment=state.segment)
    inputs, before = draw(features=features), transposed.detach().clone()
    o, _ = linear_attention(*inputs, state=state, causal=causal, chunk_size=CHUNK)
    first, second = (torch.autograd.grad(o.sin().sum(), (*inputs, transposed), retain_graph=True) for _ in range(2))
    assert torch.equal(transposed, before)
    for expected, got in zip(first, second, strict=True):
        assert torch.equal(got, expected)


def test_threads_may_change_between_the_passes():
    """Heads worked together share the places where chunks are cut; with one head 600 nats out the cuts matter."""
    inputs = draw(128, batch=1, heads=8, kv_heads=8, features=256)
    with torch.no_grad():
        inputs[1][0, 3, 64] += 600
    results = []
    for threads in (1, 2):
        o, _ = linear_attention(*inputs)  # one thread works four heads at a time here, two work eight
        torch.set_num_threads(threads)
        results.append(torch.autograd.grad(o.sin().sum(), inputs))
        torch.set_num_threads(1)
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.fixture
def rooms(monkeypatch):
    """Collect what linear attention keeps for its backward pass: sums that entered chunks, weights inside blocks."""
    found, op = [], linear.linear_attention_op

    def watched(*arguments):
        results = op(*arguments)
        found.append(results[5:])
        return results

    monkeypatch.setattr(linear, "linear_attention_op", watched)
    return found


def test_sums_are_kept_for_gradients_alone_and_not_of_short_chunks(rooms, monkeypatch):
    monkeypatch.setattr(linear_carry, "SHORT", 4)
    inputs = draw()
    linear_attention(*inputs, chunk_size=8)
    linear_attention(*inputs, chunk_size=6)  # which is no number of blocks
    linear_attention(*inputs, chunk_size=3)
    linear_attention(*inputs, causal=False)
    with torch.no_grad():
        linear_attention(*inputs, chunk_size=8)
    assert [tuple(room.shape[2] for room in kept) for kept in rooms] == [(3, T), (4, 0), (0, 0), (0, 0), (0, 0)]


def test_the_backward_pass_reads_the_weights_that_were_kept(rooms):
    inputs = draw()
    o, _ = linear_attention(*inputs, chunk_size=8)
    right = torch.autograd.grad(o.sum(), inputs[2], retain_graph=True)[0]
    rooms[0][1].data.mul_(2)
    assert (torch.autograd.grad(o.sum(), inputs[2])[0] - right).abs().amax() > 0.1


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_the_same_if_nothing_was_kept_for_them(causal, monkeypatch):
    inputs, options = draw(), {"state": draw_state(), "causal": causal, "mask": torch.stack([MASKS["left"]] * 2)}
    options["segments"] = torch.tensor(SEGMENTS["three"])
    with torch.no_grad():
        inputs[1][0, 1, 6] += 900  # its chunk is halved
    kept = value_and_gradients(linear_attention, inputs, chunk_size=CHUNK, **options)
    monkeypatch.setattr("mercer.ops.linear.any_grad", lambda *tensors: False)
    again = value_and_gradients(linear_attention, inputs, chunk_size=CHUNK, **options)
    for expected, got in zip(kept, again, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("segments", [None, *SEGMENTS])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_and_segments(mask, segments, causal):
    torch.manual_seed(2)
    real = torch.stack([MASKS[mask], torch.rand(T) > 0.3])
    packed = None if segments is None else torch.tensor(SEGMENTS[segments])
    for state in (None, draw_state(), draw_state(segment=50)):
        assert_fast_is_naive(draw(), causal=causal, mask=real, segments=packed, state=state)


def test_cross_attention_over_keys_of_another_length():
    log_q, _, _ = draw(5)
    _, log_k, v = draw(T)
    mask = torch.stack([MASKS["right"], MASKS["interior"]])
    assert_fast_is_naive((log_q, log_k, v), causal=False, mask=mask)


def test_grouped_queries_equal_repeated_keys():
    log_q, log_k, v = draw(heads=6, kv_heads=2)
    grouped, _ = linear_attention(log_q, log_k, v, chunk_size=CHUNK)
    repeated, _ = linear_attention(log_q, log_k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), chunk_size=CHUNK)
    torch.testing.assert_close(grouped, repeated)


def test_naive_passes_gradcheck():
    inputs = draw(5, batch=1, heads=2, kv_heads=1, features=3, width=2, spread=1.0)
    state = draw_state(batch=1, kv_heads=1, features=3, width=2)
    mask = torch.tensor([[True, True, False, True, True]])
    segments = torch.tensor([[0, 0, 0, 0, 2]])

    def function(log_q, log_k, v, sums):
        past = LinearState(sums=sums, c=state.c, segment=state.segment)
        o, after = linear_attention_naive(log_q, log_k, v, mask=mask, segments=segments, state=past)
        return o, after.c.exp()[..., None] * after.sums  # counted in a fixed unit: c is not differentiated

    assert torch.autograd.gradcheck(function, (*inputs, state.sums))


def test_definition_by_loops():
    log_q, log_k, v = draw(6, batch=1, heads=1, kv_heads=1, features=3, width=2)
    o, _ = linear_attention(log_q, log_k, v, chunk_size=4)
    q, k = log_q[0, 0].tolist(), log_k[0, 0].tolist()
    for i in range(6):
        weights = [sum(math.exp(q[i][f] + k[j][f]) for f in range(3)) for j in range(i + 1)]
        mean = sum(w * v[0, 0, j] for j, w in enumerate(weights)) / sum(weights)
        torch.testing.assert_close(o[0, 0, i], mean)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_splitting_anywhere_changes_neither_values_nor_gradients(packed, padded):
    inputs = draw()
    mask = torch.stack([MASKS["left"], MASKS["interior"]]) if padded else None
    segments = torch.tensor(SEGMENTS["three"]) if packed else None

    def cut(start, stop, state):
        options = {"mask": mask, "segments": segments}
        options = {name: x if x is None else x[:, start:stop] for name, x in options.items()}
        return linear_attention(*(x[:, :, start:stop] for x in inputs), state=state, chunk_size=CHUNK, **options)

    def run(*cuts):
        state, outs = None, []
        for start, stop in itertools.pairwise([0, *cuts, T]):
            o, state = cut(start, stop, state)
            outs.append(o)
        o = torch.cat(outs, 2)
        loss = (o * torch.cos(torch.arange(o.numel())).view_as(o)).sum() + (state.S.sin() * state.z[..., None]).sum()
        return [o, state.sums, state.c, state.segment, *torch.autograd.grad(loss, inputs)]

    whole = run()
    for cuts in [*((i,) for i in range(1, T)), (3, 7, 8, 15), tuple(range(1, T))]:
        for expected, got in zip(whole, run(*cuts), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


def test_the_past_does_not_depend_on_a_future_120_nats_above():
    log_q, log_k, v = draw(T, dtype=torch.float32, spread=1.0)
    for place in range(1, T):
        high = log_k.detach().clone()
        high[:, :, place] += 120
        before, _ = linear_attention(log_q, log_k, v, chunk_size=CHUNK)
        after, state = linear_attention(log_q, high.requires_grad_(), v, chunk_size=CHUNK)
        torch.testing.assert_close(after[:, :, :place], before[:, :, :place])
        torch.testing.assert_close(
            after[:, :, place:], v.repeat_interleave(2, 1)[:, :, place : place + 1].expand_as(after[:, :, place:])
        )
        assert state.sums.isfinite().all()
        grads = torch.autograd.grad(after[:, :, :place].square().sum(), (log_q, high, v))
        reference = torch.autograd.grad(before[:, :, :place].square().sum(), (log_q, log_k, v))
        for got, expected in zip(grads, reference, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        for grad in grads[1:]:
            assert not grad[:, :, place:].any(), "the Jacobian with respect to the future is exactly zero"


@pytest.mark.parametrize("chunk_size", [3, CHUNK, 64])
def test_a_packed_document_equals_itself_alone_beside_keys_120_nats_above(chunk_size):
    log_q, log_k, v = draw(T, batch=1, dtype=torch.float32, spread=1.0)
    lengths = [4, 9, 6]
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    high = torch.where(segments[:, None, :, None] == 1, 120.0, 0.0)
    start = 0
    for number, length in enumerate(lengths):
        at = slice(start, start + length)
        start += length
        inside = high if number == 1 else 0 * high
        alone, _ = linear_attention(*(x[:, :, at] for x in (log_q, log_k + inside, v)), chunk_size=chunk_size)
        for causal in (True, False):
            packed, _ = linear_attention(
                log_q, log_k + high, v, segments=segments, causal=causal, chunk_size=chunk_size
            )
            if causal:
                torch.testing.assert_close(packed[:, :, at], alone)
            grads = torch.autograd.grad(packed[:, :, at].sum(), (log_q, log_k, v))
            for grad in grads:
                outside = torch.cat([grad[:, :, : at.start], grad[:, :, at.stop :]], 2)
                assert not outside.any(), "exactly zero"


@pytest.mark.parametrize("garbage", [0.0, 120.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("causal", [True, False])
def test_what_padding_holds_and_where_it_stands_is_not_seen(garbage, causal):
    inputs = draw(11, batch=1, dtype=torch.float32, spread=1.0)

    def run(left, right):
        padded = [torch.nn.functional.pad(x, (0, 0, left, right), value=garbage) for x in inputs]
        mask = torch.nn.functional.pad(torch.ones(1, 11, dtype=torch.bool), (left, right))
        o, _ = linear_attention(*padded, mask=mask, causal=causal, chunk_size=CHUNK)
        o = o[:, :, left : left + 11]
        return [o, *torch.autograd.grad(o.square().sum(), inputs)]

    bare = run(0, 0)
    for left, right in [(3, 0), (0, 5), (9, 9)]:
        for got, expected in zip(run(left, right), bare, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_rows_that_see_nothing_give_zero_and_take_no_gradient():
    inputs = draw(dtype=torch.float32)
    mask = torch.stack([MASKS["all padded"], MASKS["left"]])
    o, state = linear_attention(*inputs, mask=mask, chunk_size=CHUNK)
    assert not o[0].any()
    assert not o[1, :, :5].any()
    assert not state.sums[0].any()
    for grad in torch.autograd.grad(o.sum(), inputs):
        assert grad.isfinite().all()
        assert not grad[0].any()


@pytest.mark.parametrize("hostile", ["huge", "duplicate", "zero", "one feature", "steps", "minus infinity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hostile_input_stays_finite_and_right(hostile, dtype):
    log_q, log_k, v = (x.detach() for x in draw(150, batch=1, dtype=torch.float32))
    if hostile == "huge":
        log_q, log_k = 300 * log_q, 300 * log_k - 1e5
    elif hostile == "duplicate":
        log_k = log_k[:, :, :1].expand(-1, -1, 150, -1)
    elif hostile == "zero":
        log_q, log_k = 0 * log_q, 0 * log_k
    elif hostile == "one feature":
        log_k[..., 0] += 500
        log_q[..., 0] -= 500
    elif hostile == "steps":
        log_k = log_k + 40 * torch.arange(150)[:, None] * torch.tensor([1, -1, 0, 1, 0, 0, 0])
    elif hostile == "minus infinity":
        log_k[..., 1], log_k[:, :, 10, :], log_q[:, :, 20] = -math.inf, -math.inf, -math.inf
    inputs = [x.to(dtype).requires_grad_() for x in (log_q, log_k, v)]
    got = value_and_gradients(linear_attention, inputs)
    expected = value_and_gradients(linear_attention_naive, [x.detach().double().requires_grad_() for x in inputs])
    naive = value_and_gradients(linear_attention_naive, inputs)
    for fast, slow, exact in zip(got, naive, expected, strict=True):
        assert fast.isfinite().all()
        error, allowed = ((x.double() - exact).norm() for x in (fast, slow))
        assert error <= 2 * allowed + 1e-5 * exact.norm().clamp_min(1)


def test_a_long_sequence_of_huge_norms_is_finite():
    x = 1e3 * torch.randn(1, 1, 4096, 4)
    omega = torch.randn(4, 16)
    log_k = (x @ omega - x.square().sum(-1, keepdim=True) / 2).requires_grad_()
    v = torch.randn(1, 1, 4096, 4, requires_grad=True)
    o, _ = linear_attention(log_k, log_k, v)
    assert o.isfinite().all()
    for grad in torch.autograd.grad(o.square().sum(), (log_k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_error_in_low_precision_is_at_most_twice_that_of_the_definition(dtype):
    inputs = [x.detach().to(dtype).requires_grad_() for x in draw(200, dtype=torch.float32, spread=1.5, features=32)]
    exact = value_and_gradients(linear_attention_naive, [x.detach().double().requires_grad_() for x in inputs])
    slow = value_and_gradients(linear_attention_naive, inputs)
    fast = value_and_gradients(linear_attention, inputs)
    assert fast[0].dtype == dtype
    assert fast[1].dtype == torch.float32
    for expected, naive, got in zip(exact, slow, fast, strict=True):
        error, allowed = ((x.double() - expected).norm() for x in (got, naive))
        assert error <= 2 * allowed + 5e-7 * expected.norm()  # the rounding of float32 itself


def test_dtypes_may_differ_and_autocast_does_not_reach_the_arithmetic():
    log_q, log_k, v = draw(40, dtype=torch.float32)
    low = v.detach().bfloat16().requires_grad_()
    expected, _ = linear_attention(log_q, log_k, low.float())
    grads = torch.autograd.grad(expected.square().sum(), (log_q, log_k))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, state = linear_attention(log_q, log_k, low)
        same, _ = linear_attention(log_q, log_k, low.float())
        again = torch.autograd.grad(same.square().sum(), (log_q, log_k))
    assert o.dtype == torch.bfloat16
    assert state.sums.dtype == torch.float32
    assert torch.equal(same, expected)
    assert torch.equal(o, expected.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))
    assert linear_attention(log_q.double(), log_k, v)[1].sums.dtype == torch.float64


def test_strides_do_not_matter():
    inputs = draw()
    o, _ = linear_attention(*inputs, chunk_size=CHUNK)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    torch.testing.assert_close(linear_attention(*turned, chunk_size=CHUNK)[0], o)


def test_a_row_alone_equals_the_row_in_a_batch():
    inputs = draw(dtype=torch.float32)
    o, state = linear_attention(*inputs, chunk_size=CHUNK)
    alone, state_alone = linear_attention(*(x[1:] for x in inputs), chunk_size=CHUNK)
    torch.testing.assert_close(alone, o[1:])
    torch.testing.assert_close(state_alone.sums, map_state(state, lambda x: x[1:]).sums)


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_square_of_the_length():
    def kept(length):
        sizes = []
        inputs = draw(length, batch=1, heads=1, kv_heads=1, dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            linear_attention(*inputs)
        return sum(sizes)

    assert kept(1024) <= 2 * kept(512)


def test_the_state_does_not_grow():
    sizes = {length: linear_attention(*draw(length))[1].sums.shape for length in (1, 50)}
    assert sizes[1] == sizes[50]


def test_no_tokens_leave_the_state_alone():
    state = draw_state()
    o, after = linear_attention(*draw(0), state=state)
    assert o.shape == (2, 4, 0, 5)
    torch.testing.assert_close(after.sums, state.sums)


def test_the_operator_is_registered_rightly():
    from mercer.ops.linear_passes import linear_attention_op

    inputs = draw(9, dtype=torch.float32)
    state = draw_state(dtype=torch.float32)
    mask = MASKS["left"][:9].expand(2, -1).clone()
    x_q, x_k, offset = (torch.randn(2, *size).requires_grad_() for size in ((4, 9, 3), (2, 9, 3), (2, 9)))
    weights = [torch.randn(2, 7, 3).requires_grad_() for _ in range(2)]
    for masks in ((None, None), (mask, torch.zeros(2, 9, dtype=torch.long))):
        dense, factors = (inputs[0], None, inputs[1], None, None), (x_q, weights[0], x_k, weights[1], offset)
        for logs, floats in ((dense, (0.0, 0.0)), (factors, (-0.5, 0.3))):
            arguments = (*logs, inputs[2], state.sums, state.c, *masks, state.segment, *floats, True, 4, 1)
            for keep in (False, True):
                torch.library.opcheck(linear_attention_op, (*arguments, keep))


def refuse(text, log_q, log_k, v, **change):
    """`linear_attention` begins with this check; under the shape hook it would not get that far."""
    options = {"causal": True, "mask": None, "segments": None, "state": None, **change}
    with pytest.raises(ValueError, match=text):
        check_linear(log_q, log_k, v, **options)


def test_wrong_use_is_refused_in_words():
    log_q, log_k, v = draw()
    refuse(r"mask has shape \(19, 19\); it must be a padding mask", *draw(), mask=torch.ones(T, T, dtype=torch.bool))
    refuse(r"segments has shape \(2, 3\)", *draw(), segments=torch.zeros(2, 3, dtype=torch.long))
    refuse(r"chunk_size \(0\) must be at least 1", *draw(), chunk_size=0)
    refuse(r"state holds sums S \(2, 2, 7, 3\); these inputs need \(2, 2, 7, 5\)", *draw(), state=draw_state(width=3))
    refuse(r"log_k has 2 heads; the query heads \(3\) must be a multiple", log_q[:, :3], log_k, v)
    refuse("must have the batch and features of log_q", log_q[..., :3], log_k, v)
    refuse("must have the batch, heads and tokens of log_k", log_q, log_k, v[:, :, :3])
    refuse("log_q has 5 tokens and log_k 19; with causal=True", log_q[:, :, :5], log_k, v)
    segments = torch.tensor([[0] * 5 + [1] * 5 + [0] * 9] * 2)
    with pytest.raises(ValueError, match="document 0 of batch row 0 comes back"):
        linear_attention(log_q, log_k, v, segments=segments)
    segments = torch.tensor([[50] * T, [49] * 2 + [50] * 17])
    with pytest.raises(ValueError, match="document 50 of batch row 1 comes back"):
        linear_attention(log_q, log_k, v, segments=segments, state=draw_state(segment=50))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, while it compiles
@pytest.mark.compile
@pytest.mark.parametrize(("backend", "length"), [("inductor", 64), ("aot_eager", 64), ("aot_eager", 4096)])
def test_compiles_to_one_graph_whose_making_does_not_grow_with_the_length(backend, length):
    graphs = []

    def step(log_q, log_k, v, mask):
        o, state = linear_attention(log_q, log_k, v, mask=mask)
        return o + linear_attention(log_q, log_k, v, state=state)[0], state

    def count(graph, example):
        graphs.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend(backend)(graph, example)

    torch.compiler.reset()
    inputs = draw(length, batch=1, dtype=torch.float32)
    mask = torch.ones(1, length, dtype=torch.bool)
    o, state = torch.compile(step, fullgraph=True, backend=count)(*inputs, mask)
    grads = torch.autograd.grad(o.square().sum() + state.S.sum(), inputs)
    assert len(graphs) == 1
    assert graphs[0] < 60, "nodes, whatever the length"
    expected, state = step(*inputs, mask)
    reference = torch.autograd.grad(expected.square().sum() + state.S.sum(), inputs)
    for got, right in zip((o, *grads), (expected, *reference), strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 9 + [3] * 14])])
def test_chunks_are_cut_alike_in_turn_and_at_once(documents):
    """A CPU cuts as it goes, an accelerator all at once; only one of the two runs on the machine of a test."""
    from mercer.ops import linear_chunks
    from mercer.ops.linear_logs import Logs

    log_k = torch.randn(2, 23, 5)
    log_k[0, 11] += 90.0  # a chunk that must be halved
    log_k[1, 21] += 70.0
    last, occupied = torch.zeros(1, dtype=torch.long), torch.zeros(1, dtype=torch.bool)
    tokens = linear_chunks.tokens_of(None, documents, last, occupied, heads=2)
    scale = torch.full((2, 5), linear_chunks.FLOOR)
    arguments = (Logs(log_k[:, None]), scale, tokens, 8, 52.0)
    in_turn, at_once = (list(cut(*arguments)) for cut in (linear_chunks._cut_in_turn, linear_chunks._cut_at_once))
    assert [len(chunk) for chunk in at_once] == [len(chunk) for chunk in in_turn]
    assert max(len(chunk) for chunk in in_turn) > 1
    for a, b in zip(itertools.chain(*in_turn), itertools.chain(*at_once), strict=True):
        assert (a.start, a.stop, a.parts is None) == (b.start, b.stop, b.parts is None)
        for name in ("carry", "shift", "scale"):
            assert torch.equal(getattr(a, name), getattr(b, name))


def test_one_token_takes_few_calls(calls):
    """Decoding is bound by the number of calls; cut into pieces and planned, one token takes more than 100."""
    _, state = linear_attention(*draw(30, dtype=torch.float32))
    with calls, torch.no_grad():
        linear_attention(*draw(1, dtype=torch.float32), state=state)
    assert calls.count <= 45
