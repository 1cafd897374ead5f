"""MixerAttention: projections, rotary positions that count real tokens, and the mixer's laws passed on."""

import math

import pytest
import torch
from torch.testing import assert_close

from mercer import MIXERS, MixerAttention
from mercer.attention import rotate_half

every_mixer = pytest.mark.parametrize("mixer", sorted(MIXERS))


def build(mixer, **options):
    return MixerAttention(32, 4, mixer=mixer, num_kv_heads=2, **options).double()


@every_mixer
def test_splitting(mixer):
    attention, x = build(mixer), torch.randn(2, 30, 32, dtype=torch.float64)
    whole, _ = attention(x)
    state, parts = None, []
    for part in x.split([1, 7, 1, 21], 1):
        y, state = attention(part, state)
        parts.append(y)
    assert_close(torch.cat(parts, 1), whole, rtol=1e-8, atol=1e-9)


@every_mixer
@pytest.mark.parametrize("left", [0, 5])
def test_padding_does_not_shift_positions(mixer, left):
    attention, x = build(mixer), torch.randn(1, 12, 32, dtype=torch.float64)
    padded = torch.randn(1, 20, 32, dtype=torch.float64)
    padded[:, left : left + 12] = x
    mask = (torch.arange(20) >= left) & (torch.arange(20) < left + 12)
    y, _ = attention(padded, mask=mask[None])
    assert_close(y[:, left : left + 12], attention(x)[0], rtol=1e-8, atol=1e-9)


@every_mixer
def test_decoding_after_left_padding(mixer):
    attention, x = build(mixer), torch.randn(1, 12, 32, dtype=torch.float64)
    padded = torch.cat([torch.randn(1, 4, 32, dtype=torch.float64), x], 1)
    mask = (torch.arange(16) >= 4)[None]
    _, state = attention(padded[:, :10], mask=mask[:, :10])
    y, _ = attention(padded[:, 10:], state, mask=mask[:, 10:])
    assert_close(y, attention(x)[0][:, 6:], rtol=1e-8, atol=1e-9)


@every_mixer
def test_packed_documents_start_their_positions_again(mixer):
    attention, x = build(mixer), torch.randn(2, 20, 32, dtype=torch.float64)
    segments = (torch.arange(20) >= 8).long().expand(2, -1)
    y, _ = attention(x, segments=segments)
    alone = torch.cat([attention(x[:, :8])[0], attention(x[:, 8:])[0]], 1)
    assert_close(y, alone, rtol=1e-8, atol=1e-9)


@every_mixer
@pytest.mark.parametrize("left", [0, 3])
def test_a_packed_stream_can_be_split(mixer, left):
    attention, x = build(mixer), torch.randn(1, 20, 32, dtype=torch.float64)
    segments = torch.tensor([[4] * 8 + [1] * 7 + [6] * 5])
    mask = (torch.arange(20) >= left)[None]
    whole, _ = attention(x, segments=segments, mask=mask)
    for cuts in ((5, 15), (8, 12), (2, 18), (1, 19)):
        state, parts = None, []
        for start, stop in zip((0, *cuts), (*cuts, 20), strict=True):
            at = slice(start, stop)
            y, state = attention(x[:, at], state, mask=mask[:, at], segments=segments[:, at])
            parts.append(y)
        assert_close(torch.cat(parts, 1)[:, left:], whole[:, left:], rtol=1e-8, atol=1e-9)


@every_mixer
@pytest.mark.filterwarnings("ignore:a bidirectional Cubit system")
def test_bidirectional_outputs_see_the_future_or_are_refused(mixer, without_shape_checks):
    if mixer in (
        "deltaformer",
        "linear_cubit",
        "window",
    ):  # all look back alone: without a future there is nothing to see
        with pytest.raises(ValueError, match="has no bidirectional form: use causal=True"):
            build(mixer, causal=False)
        return
    attention, x = build(mixer, causal=False), torch.randn(1, 9, 32, dtype=torch.float64, requires_grad=True)
    y, state = attention(x)
    assert state is None
    assert torch.autograd.grad(y[:, 0].sum(), x)[0][:, 5:].abs().max() > 0
    mask = (torch.arange(9) < 7)[None]
    assert_close(attention(x, mask=mask)[0][:, :7], attention(x[:, :7])[0], rtol=1e-8, atol=1e-9)
    with pytest.raises(ValueError, match=r"is bidirectional \(causal=False\) and has no state"):
        attention.mixer(*torch.randn(3, 1, 4, 2, 8).double(), x=x[:, :2], state=object())


def test_rotary_positions_leave_products_a_function_of_the_distance():
    x, y = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    at = lambda z, t: rotate_half(z, torch.tensor([[t]]))
    near, far = (at(x, t + 3) * at(y, t) for t in (0, 1000))
    assert_close(near.sum(), far.sum())
    assert (at(x, 3) * at(y, 0)).sum() != (x * y).sum()


@pytest.mark.parametrize("mixer", ["softmax", "deltaformer", "cubit"])
def test_300_steps_with_sixteen_bit_weights_stay_finite_and_learn(mixer):
    """Autocast is the training loop's; here the weights themselves are bfloat16, the ridge at its paper value."""
    attention = MixerAttention(32, 4, mixer=mixer).bfloat16()
    x = torch.randn(4, 24, 32, dtype=torch.bfloat16)
    target = x.roll(1, 1)  # every token recalls the one before it
    optimiser = torch.optim.AdamW(attention.parameters(), lr=3e-3)
    losses = []
    for _ in range(300):
        loss = (attention(x)[0] - target)[:, 1:].float().square().mean()
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in attention.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.7 * losses[0]


def test_sizes_that_do_not_divide():
    with pytest.raises(ValueError, match=r"hidden_size \(30\) must be a multiple of num_heads \(4\)"):
        MixerAttention(30, 4)
    with pytest.raises(ValueError, match=r"head_dim \(3\) must be even"):
        MixerAttention(12, 4)


@pytest.mark.compile
@every_mixer
def test_compiles_whole(mixer):
    attention = MixerAttention(32, 4, mixer=mixer, num_kv_heads=2)
    x = torch.randn(2, 100, 32)
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x)[0], attention(x)[0])
    wanted = list(attention.parameters())
    losses = [f(x)[0].square().sum() for f in (compiled, attention)]
    grads = [torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True) for loss in losses]
    for a, b in zip(*grads, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.compile
@every_mixer
def test_compiles_once_for_all_lengths(mixer):
    attention = MixerAttention(32, 4, mixer=mixer, num_kv_heads=2)
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend=count, dynamic=True)
    with torch.no_grad():
        for batch, length in ((2, 20), (3, 33), (2, 50)):
            x = torch.randn(batch, length, 32)
            assert_close(compiled(x)[0], attention(x)[0])
    assert len(graphs) == 1
