"""Exact near field, far field of features: the fast path equals the definition, and both ends are what they must be."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from mercer.mixers.base import map_state
from mercer.ops import (
    linear_attention,
    near_far_attention,
    near_far_attention_naive,
    softmax_attention,
)
from mercer.ops.near_far_blocks import near_attention_op
from mercer.ops.near_far_definition import check_near_far

BLOCK = 64
MASKS = {
    "left": torch.arange(150) >= 20,
    "right": torch.arange(150) < 99,
    "all padded": torch.zeros(150, dtype=torch.bool),
    "interior": torch.arange(150) % 7 % 3 == 1,
}
SEGMENTS = {
    "three": [[0] * 30 + [1] * 90 + [2] * 30, [0] * 147 + [4] * 3],
    "new at once": [[7] * 64 + [1] * 86, [3] * 1 + [9] * 149],
    "many": [[i // 5 for i in range(150)], [5] * 150],
}
SIZES = [(1, 0), (5, 2), (64, 4), (100, 3), (0, 3), (3, 40)]


def draw(length, *, batch=2, heads=4, kv_heads=2, width=5, dtype=torch.float64, spread=1.0):
    shapes = ((heads, width), (kv_heads, width), (kv_heads, 3))
    return tuple((spread * torch.randn(batch, h, length, d, dtype=dtype)).requires_grad_() for h, d in shapes)


def maps(features=6, width=5, dtype=torch.float64, spread=1.5):
    """Two different maps, so that phi and psi cannot be exchanged unnoticed."""
    return tuple(_Map(spread * torch.randn(width, features, dtype=dtype)) for _ in range(2))


class _Map:
    def __init__(self, omega):
        self.omega = omega.requires_grad_()

    def __call__(self, x):
        return x.to(torch.promote_types(x.dtype, torch.float32)) @ self.omega


def sums_of(state):
    """The sums of a state in a fixed unit, for what has any."""
    return [] if state.far is None else [state.far.sums * (state.far.c.clamp(-50, 50).exp())[..., None]]


def value_and_gradients(function, inputs, features, state=None, **options):
    o, after = function(*inputs, *(features or ()), state=state, **options)
    tokens = [after.k_window, after.v_window, after.k_sinks, after.v_sinks]
    got = [o, *tokens, *sums_of(after)]
    generator = torch.Generator().manual_seed(1)
    loss = sum((x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in got)
    wrt = [*inputs, *[f.omega for f in features or ()]]
    grads = torch.autograd.grad(loss, wrt, allow_unused=True)
    return [*got, after.seen, after.segment, *[torch.zeros(()) if g is None else g for g in grads]]


def assert_fast_is_naive(inputs, features, **options):
    slow = value_and_gradients(near_far_attention_naive, inputs, features, **options)
    fast = value_and_gradients(near_far_attention, inputs, features, chunk_size=16, **options)
    for number, (expected, got) in enumerate(zip(slow, fast, strict=True)):
        if expected.shape != got.shape:  # no gradient against one of zeros
            expected = expected.expand_as(got).to(got.dtype)
        assert_close(got, expected, rtol=1e-9, atol=1e-9, msg=lambda text, n=number: f"result {n}: {text}")


@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
@pytest.mark.parametrize(("window", "sinks"), SIZES)
@pytest.mark.parametrize("far", [True, False])
def test_fast_equals_naive_in_value_and_gradient(length, window, sinks, far):
    if window or far:
        assert_fast_is_naive(draw(length), maps() if far else None, window=window, sinks=sinks)


@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("segments", [None, *SEGMENTS])
@pytest.mark.parametrize(("window", "sinks"), [(5, 2), (64, 4), (0, 3)])
def test_masks_segments_and_states(mask, segments, window, sinks):
    real = None if mask is None else torch.stack([MASKS[mask], torch.rand(150) > 0.3])
    packed = None if segments is None else torch.tensor(SEGMENTS[segments])
    features = maps()
    options = {"window": window, "sinks": sinks}
    assert_fast_is_naive(draw(150), features, mask=real, segments=packed, **options)
    for length in (2, 90):
        with torch.no_grad():
            before = None if packed is None else torch.full((2, length), packed[0, 0].item())
            state = near_far_attention(*draw(length), *features, segments=before, **options)[1]
        assert_fast_is_naive(draw(150), features, mask=real, segments=packed, state=state, **options)


@pytest.mark.parametrize("chunk_size", [3, 64, 200])
def test_the_chunk_size_changes_nothing(chunk_size):
    inputs, features = draw(131, batch=1), maps()
    o, state = near_far_attention(*inputs, *features, window=9, sinks=2, chunk_size=chunk_size)
    want, after = near_far_attention_naive(*inputs, *features, window=9, sinks=2)
    assert_close(o, want)
    assert_close(sums_of(state), sums_of(after))


@torch.no_grad()
def test_definition_by_loops():
    (q, k, v), (phi, psi) = draw(12, batch=1, heads=1, kv_heads=1), maps()
    o, _ = near_far_attention(q, k, v, phi, psi, window=3, sinks=2, scale=0.7)
    for i in range(12):
        weights = []
        for j in range(i + 1):
            if i - j < 3 or j < 2:
                weights.append(math.exp(0.7 * float(q[0, 0, i] @ k[0, 0, j])))
            else:
                weights.append(float((phi(q)[0, 0, i] + psi(k)[0, 0, j]).exp().sum()))
        assert_close(o[0, 0, i], sum(w * v[0, 0, j] for j, w in enumerate(weights)) / sum(weights))


def test_naive_passes_gradcheck():
    inputs, features = draw(7, batch=1, heads=2, kv_heads=1), maps(features=3)
    mask = torch.tensor([[True, True, False, True, True, True, True]])
    segments = torch.tensor([[0, 0, 0, 0, 0, 0, 2]])

    def function(*inputs):
        o, state = near_far_attention_naive(*inputs, *features, window=1, sinks=1, mask=mask, segments=segments)
        return (o, *sums_of(state))

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("window", "sinks"), [(5, 2), (0, 3), (40, 1)])
def test_splitting_anywhere_changes_neither_values_nor_gradients(packed, padded, window, sinks):
    length, features = 31, maps(spread=0.3)
    inputs = draw(length)
    mask = torch.stack([torch.arange(length) >= 5, torch.rand(length) > 0.3]) if padded else None
    segments = torch.tensor([[0] * 3 + [1] * 20 + [2] * 8, [0] * 16 + [4] * 15]) if packed else None

    def run(*cuts):
        state, outs = None, []
        for start, stop in itertools.pairwise([0, *cuts, length]):
            new, seg = (None if x is None else x[:, start:stop] for x in (mask, segments))
            part = (x[:, :, start:stop] for x in inputs)
            o, state = near_far_attention(
                *part, *features, window=window, sinks=sinks, mask=new, segments=seg, state=state
            )
            outs.append(o)
        o = torch.cat(outs, 2)
        loss = (o * torch.cos(torch.arange(o.numel())).view_as(o)).sum()
        loss = loss + sum(x.sin().sum() for x in (*sums_of(state), state.k_window, state.v_sinks))
        return [o, *sums_of(state), state.k_window, state.k_sinks, state.seen, *torch.autograd.grad(loss, inputs)]

    whole = run()
    for cuts in ([1], [2, 3], [6], [17], [30], [4, 4, 20], range(1, length)):
        for got, want in zip(run(*cuts), whole, strict=True):
            assert_close(got, want, rtol=1e-9, atol=1e-9)


# One token after a past: a path of its own

STEP_MASKS = {"none": None, "real": [True, True], "one padded": [True, False], "both padded": [False, False]}
STEP_SEGMENTS = {"none": None, "same": [3, 3], "new": [3, 5]}


@pytest.mark.parametrize("mask", STEP_MASKS)
@pytest.mark.parametrize("segments", STEP_SEGMENTS)
@pytest.mark.parametrize("seen", [1, 4, 5, 6, 7, 40])  # of a window of 5 and 2 sinks
@pytest.mark.parametrize("far", [True, False])
def test_one_token_after_a_past_equals_the_definition(mask, segments, seen, far):
    before, new, features = draw(seen), draw(1), maps() if far else ()
    real = None if STEP_MASKS[mask] is None else torch.tensor(STEP_MASKS[mask])[:, None]
    document = None if STEP_SEGMENTS[segments] is None else torch.tensor(STEP_SEGMENTS[segments])[:, None]
    past = None if document is None else torch.full((2, seen), 3)
    inside = torch.ones(2, seen, dtype=torch.bool)
    inside[1, : seen // 2] = False  # so rows stand at different places
    _, state = near_far_attention_naive(*before, *features, window=5, sinks=2, mask=inside, segments=past)
    results = []
    for function in (near_far_attention_naive, near_far_attention):
        o, after = function(*new, *features, window=5, sinks=2, mask=real, segments=document, state=state)
        got = [o, after.k_window, after.v_window, after.k_sinks, after.v_sinks, *sums_of(after)]
        loss = sum((x * torch.cos(torch.arange(x.numel())).view_as(x)).sum() for x in got)
        wrt = [*before, *new, *(f.omega for f in features)]
        grads = torch.autograd.grad(loss, wrt, retain_graph=True, materialize_grads=True, allow_unused=True)
        results.append([*got, after.seen, after.segment, *grads])
    for number, (want, given) in enumerate(zip(*results, strict=True)):
        assert_close(given, want, rtol=1e-9, atol=1e-9, msg=lambda text, n=number: f"result {n}: {text}")


@torch.no_grad()
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_one_padded_token_leaves_the_state_alone_whatever_it_holds(garbage):
    features = maps()
    _, state = near_far_attention(*draw(20), *features, window=5, sinks=2)
    new = [torch.full_like(x, garbage) for x in draw(1)]
    o, after = near_far_attention(
        *new, *features, window=5, sinks=2, state=state, mask=torch.zeros(2, 1, dtype=torch.bool)
    )
    assert o.count_nonzero() == 0
    before, rest = [], []
    map_state(state, lambda t: before.append(t) or t)
    map_state(after, lambda t: rest.append(t) or t)
    for want, got in zip(before, rest, strict=True):
        assert torch.equal(got, want)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoding_far_away_keys_120_nats_above_the_rest(dtype):
    """Token by token through a spike that enters the window, leaves it and outweighs everything."""
    q, k, v = (x.detach().to(dtype) for x in draw(30, spread=0.3))
    q[..., 0] = 1
    k[:, :, 8, 0] = 120 * 5**0.5
    shift = lambda x: torch.cat([x, x[..., :1] * 0], -1).float() * 5**-0.25
    wide = lambda x: torch.cat([x, x[..., :1] * 0], -1).double() * 5**-0.25
    want, _ = near_far_attention_naive(q.double(), k.double(), v.double(), wide, wide, window=4, sinks=1)
    state, outs = None, []
    for at in range(30):
        o, state = near_far_attention(
            *(x[:, :, at : at + 1] for x in (q, k, v)), shift, shift, window=4, sinks=1, state=state
        )
        outs.append(o)
    assert_close(
        torch.cat(outs, 2).double(),
        want,
        rtol=3e-5 if dtype == torch.float32 else 2e-2,
        atol=2e-2 if dtype == torch.bfloat16 else 3e-5,
    )


@torch.no_grad()
def test_one_token_takes_few_calls(calls):
    """Decoding is bound by the number of calls; in general, and so before this path, there were about 250."""
    features = maps(dtype=torch.float32)
    _, state = near_far_attention(*draw(100, dtype=torch.float32), *features, window=64, sinks=4)
    new = draw(1, dtype=torch.float32)
    with calls:
        near_far_attention(*new, *features, window=64, sinks=4, state=state)
    assert calls.count <= 90


# What the two ends are


@pytest.mark.parametrize("far", [True, False])
@pytest.mark.parametrize("length", [1, 70, 150])
def test_a_window_over_everything_is_softmax_attention(far, length):
    inputs = draw(length)
    mask = torch.rand(2, length) > 0.2
    o, _ = near_far_attention(*inputs, *(maps() if far else ()), window=length, scale=0.6, mask=mask)
    want = softmax_attention(*inputs, scale=0.6, mask=mask) * mask[:, None, :, None]
    assert_close(o, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", [True, False])
def test_without_window_and_sinks_it_is_linear_attention(masked):
    (q, k, v), (phi, psi) = draw(150), maps()
    mask = torch.rand(2, 150) > 0.2 if masked else None
    o, state = near_far_attention(q, k, v, phi, psi, window=0, mask=mask)
    want, after = linear_attention(phi(q), psi(k), v, mask=mask)
    assert_close(o, want)
    assert_close(state.far.sums, after.sums)


def test_many_random_features_approach_softmax_and_a_window_helps():
    """Positive random features of exp(q.k) estimate what the window counts exactly, so one normaliser serves both."""
    q, k, v = (x.detach() for x in draw(100, batch=1, width=4, spread=0.4))
    want = softmax_attention(q, k, v, scale=1.0)
    errors = {}
    for features, window in itertools.product((16, 256, 16384), (0, 10)):
        omega = torch.randn(4, features, dtype=torch.float64)
        phi = lambda x, w=omega: x @ w - x.square().sum(-1, keepdim=True) / 2 - math.log(w.shape[1]) / 2
        o, _ = near_far_attention(q, k, v, phi, phi, window=window, sinks=window // 5, scale=1.0, chunk_size=64)
        errors[features, window] = float((o - want).norm() / want.norm())
    assert errors[16384, 10] < 0.01
    assert errors[16384, 10] < errors[256, 10] < errors[16, 10]
    assert all(errors[m, 10] < errors[m, 0] for m in (16, 256, 16384)), errors


def test_the_window_alone_is_softmax_of_a_band():
    q, k, v = draw(150)
    o, _ = near_far_attention(q, k, v, window=20, sinks=3, scale=0.5)
    row, col = torch.arange(150)[:, None], torch.arange(150)
    band = (col <= row) & ((row - col < 20) | (col < 3))
    logits = (0.5 * q @ k.repeat_interleave(2, 1).mT).masked_fill(~band, -math.inf)
    assert_close(o, logits.softmax(-1) @ v.repeat_interleave(2, 1))


def test_the_state_does_not_grow():
    shapes = []
    for length in (1, 40, 400):
        state = near_far_attention(*draw(length), *maps(), window=8, sinks=2)[1]
        found = []
        map_state(state, lambda t, found=found: found.append(t.shape) or t)
        shapes.append(found)
    assert shapes[0] == shapes[1] == shapes[2]


def test_no_tokens_leave_the_state_alone():
    features = maps()
    _, state = near_far_attention(*draw(20), *features, window=8, sinks=2)
    o, after = near_far_attention(*draw(0), *features, window=8, sinks=2, state=state)
    assert o.shape == (2, 4, 0, 3)
    assert after is state
    o, after = near_far_attention(*draw(0), *features, window=8, sinks=2)
    assert after.far.sums.shape == state.far.sums.shape


# Causality and extremes


def test_the_jacobian_over_the_future_is_exactly_zero():
    inputs = draw(150)
    o, _ = near_far_attention(*inputs, *maps(), window=10, sinks=2)
    for gradient in torch.autograd.grad(o[:, :, 70].sum(), inputs):
        assert gradient[:, :, 71:].count_nonzero() == 0
        assert gradient[:, :, :71].count_nonzero() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("where", [0, 1, 75, 90, 140])
def test_a_key_120_nats_above_the_rest_is_right_everywhere(dtype, where):
    """As sink, in the window, just left, long gone, in the future: past rows do not move, later ones are exact."""
    q, k, v = (x.detach() for x in draw(150, dtype=dtype, spread=0.3))
    q[..., 0] = 1
    spiked = k.clone()
    spiked[:, :, where, 0] = 120 * 5**0.5
    options = {"window": 10, "sinks": 1, "chunk_size": 32}
    shift = lambda x: torch.cat([x, x[..., :1] * 0], -1) * 5**-0.25
    inputs, want = (q, spiked, v), []
    before, _ = near_far_attention(q, k, v, shift, shift, **options)
    after, _ = near_far_attention(*inputs, shift, shift, **options)
    want, _ = near_far_attention_naive(*(x.double() for x in inputs), shift, shift, window=10, sinks=1)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    assert_close(after[:, :, :where], before[:, :, :where], rtol=tolerance, atol=tolerance)
    assert_close(after.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("garbage", [0.0, 120.0, math.nan, math.inf])
def test_what_padding_holds_and_where_it_stands_is_not_seen(garbage):
    features = maps()
    alone = draw(90, batch=1)
    where = (torch.rand(120).argsort()[:90]).sort().values
    mask = torch.zeros(2, 120, dtype=torch.bool)
    mask[0, where] = True
    padded = [torch.full((2, x.shape[1], 120, x.shape[3]), garbage, dtype=x.dtype) for x in alone]
    for x, y in zip(padded, alone, strict=True):
        x[0, :, where] = y[0].detach()
        x.requires_grad_()
    want, after = near_far_attention(*alone, *features, window=7, sinks=2)
    got, state = near_far_attention(*padded, *features, window=7, sinks=2, mask=mask)
    assert_close(got[:1, :, where], want)
    assert got[0, :, ~mask[0]].count_nonzero() == 0
    assert got[1].count_nonzero() == 0
    assert_close(state.k_window[:1], after.k_window)
    assert_close(sums_of(state)[0][:1], sums_of(after)[0])
    probe = torch.randn_like(want)
    wanted = torch.autograd.grad((want * probe).sum(), [*alone, *[f.omega for f in features]])
    given = torch.autograd.grad((got[:1, :, where] * probe).sum(), [*padded, *[f.omega for f in features]])
    for number, (g, w) in enumerate(zip(given, wanted, strict=True)):
        assert_close(g[:1, :, where] if number < 3 else g, w)
        assert g.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_error_in_low_precision_is_at_most_twice_that_of_the_definition(dtype):
    inputs, features = [x.detach().to(dtype) for x in draw(150)], maps(dtype=torch.float32)
    exact, _ = near_far_attention_naive(*(x.double() for x in inputs), *maps_of(features), window=9, sinks=2)
    slow, fast = (f(*inputs, *features, window=9, sinks=2)[0] for f in (near_far_attention_naive, near_far_attention))
    assert slow.dtype == fast.dtype == dtype
    error = [float((x.double() - exact).norm()) for x in (slow, fast)]
    assert error[1] <= 2 * error[0] + 1e-12


def maps_of(features):
    return tuple(_Map(f.omega.detach().double()) for f in features)


def test_grouped_queries_equal_repeated_keys():
    (q, k, v), features = draw(100, heads=6, kv_heads=2), maps()
    grouped, _ = near_far_attention(q, k, v, *features, window=9, sinks=2)
    repeated, _ = near_far_attention(
        q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), *features, window=9, sinks=2
    )
    assert_close(grouped, repeated)


# The operator


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_square_of_the_length():
    def kept(length):
        sizes = []
        inputs, features = draw(length, batch=1, heads=1, kv_heads=1, dtype=torch.float32), maps(dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            near_far_attention(*inputs, *features, window=32, sinks=4)
        return sum(sizes)

    assert kept(1024) <= 2.1 * kept(512)


def test_the_operator_is_registered_rightly():
    q, k, v = draw(70, dtype=torch.float32)
    known = [torch.cat([x[:, :, :5], x], 2).detach().requires_grad_() for x in (k, v)]
    sinks = [x[:, :, :4].detach().requires_grad_() for x in (k, v)]  # two blocks of two
    start = torch.tensor([[-9] * 70, [-3] * 30 + [30] * 40])
    torch.library.opcheck(near_attention_op, (q, *known, *sinks, start, 5, 2, 0.3))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, while it compiles
@pytest.mark.compile
@pytest.mark.parametrize(("length", "packed"), [(64, True), (64, False), (4096, False)])
def test_compiles_to_one_graph_whose_making_does_not_grow_with_the_length(length, packed):
    inputs, features = draw(length, batch=1, dtype=torch.float32), maps(dtype=torch.float32)
    segments = (torch.arange(length) // 40)[None] if packed else None
    mask = (torch.arange(length) > 3)[None] if packed else None
    operators = []

    def count(graph, example_inputs):
        operators.append(len(graph.graph.nodes))
        return graph

    def step(q, k, v, segments, state):
        return near_far_attention(q, k, v, *features, window=8, sinks=2, segments=segments, mask=mask, state=state)

    for state in (None, map_state(step(*inputs, segments, None)[1], torch.detach)):
        torch.compiler.reset()
        segments = None if segments is None else segments + (state is not None)  # go on with the last document
        o, after = torch.compile(step, fullgraph=True, backend=count)(*inputs, segments, state)
        want, _ = step(*inputs, segments, state)
        assert_close(o, want)
        assert operators[-1] < 250
        torch.autograd.grad(o.sum() + after.far.sums.sum(), inputs)


def refuse(text, inputs, features=(None, None), sizes=(4, 1), **change):
    """`near_far_attention` begins with this check; under the shape hook it would not get that far."""
    options = {"mask": None, "segments": None, "state": None, **change}
    with pytest.raises(ValueError, match=text):
        check_near_far(*inputs, features, sizes, **options)


def test_wrong_use_is_refused_in_words():
    q, k, v = draw(6)
    features = maps()
    refuse("must be of the same tokens", (q, k[:, :, :4], v[:, :, :4]))
    refuse(r"q_features and k_features come together", (q, k, v), (features[0], None))
    refuse(r"window \(0\) must be at least 1: without features", (q, k, v), sizes=(0, 4))
    refuse(r"window \(-1\) must be at least 0", (q, k, v), features, sizes=(-1, 0))
    refuse(r"sinks \(-2\) must be at least 0", (q, k, v), sizes=(3, -2))
    refuse(r"chunk_size \(0\) must be at least 1", (q, k, v), chunk=0)
    refuse("mask has shape", (q, k, v), mask=torch.ones(6, 6, dtype=torch.bool))
    refuse("segments has shape", (q, k, v), segments=torch.ones(2, 6))
    state = near_far_attention(q, k, v, *features, window=3, sinks=1)[1]
    refuse("these inputs need .*with one", (q, k, v), features, (4, 1), state=state)
    refuse("with a far field; these inputs need .*without one", (q, k, v), sizes=(3, 1), state=state)


def test_a_document_that_comes_back_is_refused():
    segments = torch.tensor([[0] * 9 + [1] * 2 + [0] * 9] * 2)
    with pytest.raises(ValueError, match="document 0 of batch row 0 comes back after another one"):
        near_far_attention(*draw(20), window=4, segments=segments)


def test_the_log_weight_of_linear_attention_has_a_gradient():
    from mercer.ops.linear_passes import linear_attention_op

    for causal in (True, False):
        log_q, log_k = (torch.randn(2, 2, 20, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
        v, sums = torch.randn(2, 2, 20, 3).double(), torch.zeros(2, 2, 6, 4).double()
        nothing = torch.full((2, 2, 6), -1e30).double()
        last = torch.zeros(2, dtype=torch.long)
        got = linear_attention_op(
            log_q, None, log_k, None, None, v, sums, nothing, None, None, last, 0.0, 0.0, causal, 8, 1, True
        )[4]
        pairs = torch.logsumexp(log_q[..., :, None, :] + log_k[..., None, :, :], -1)
        hidden = torch.ones(20, 20, dtype=torch.bool).triu(1) & causal
        want = pairs.masked_fill(hidden, -math.inf).logsumexp(-1, keepdim=True)
        assert_close(got, want)
        probe = torch.randn_like(want)
        grads = [torch.autograd.grad((x * probe).sum(), [log_q, log_k]) for x in (got, want)]
        assert_close(grads[0], grads[1])
