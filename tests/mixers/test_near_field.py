"""The near field and the centres of the feature mixers, and the window alone."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from mercer import build_mixer
from mercer.mixers.linear import set_centers
from mercer.ops import softmax_attention

FEATURE_MIXERS = ("performer", "lfk", "darkformer", "particle")
SIZES = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
feature_mixer = pytest.mark.parametrize("name", FEATURE_MIXERS)


def build(name, dtype=torch.float64, **options):
    extra = {"features": "oprf"} if name == "particle" else {}
    return build_mixer(name, **(SIZES | extra | options)).to(dtype)


def draw(length=40, spread=1.0, dtype=torch.float64):
    return tuple(spread * torch.randn(2, heads, length, 8, dtype=dtype) for heads in (4, 2, 2))


def shift(mixer):
    """Give the mixer centres far from zero."""
    set_centers(mixer, 2 * torch.randn(2, 8), torch.randn(2, 8))
    return mixer


def error_to_softmax(mixer, q, k, v, scale=None):
    want = softmax_attention(q, k, v, scale=scale)
    return float(((mixer(q, k, v)[0] - want).norm() / want.norm()).detach())


@feature_mixer
@pytest.mark.parametrize("center", [False, True])
def test_a_window_over_everything_is_softmax_attention(name, center):
    q, k, v = draw()
    mixer = build(name, num_features=16, window=40, center=center)
    if center:
        shift(mixer)
    assert_close(mixer(q, k, v)[0], softmax_attention(q, k, v), rtol=1e-10, atol=1e-10)


@feature_mixer
def test_the_defaults_are_linear_attention_as_before(name):
    mixer = build(name)
    assert (mixer.window, mixer.sinks, mixer.center) == (0, 0, False)
    _, state = mixer(*draw())
    assert type(state).__name__ == "LinearState"
    assert not any(key.endswith("_center") for key in mixer.state_dict())


def test_a_near_field_brings_random_features_nearer_to_softmax_than_they_are_alone():
    q, k, v = draw(120, spread=1.5)
    q[..., 0] += 1.5
    k[:, :, 0, 0] += 8  # a first key that gathers much of the weight
    alone, window, both = (
        sum(error_to_softmax(build("performer", seed=s, num_features=64, **options), q, k, v) for s in range(4))
        for options in ({}, {"window": 16}, {"window": 16, "sinks": 1})
    )
    assert both < window < alone


@pytest.mark.parametrize("name", [*FEATURE_MIXERS, "window"])
def test_the_state_is_constant_and_decoding_is_the_whole_call(name):
    mixer, (q, k, v) = build(name, window=6, sinks=2), draw(30)
    whole, _ = mixer(q, k, v)
    state, outs, sizes = None, [], set()
    for t in range(30):
        o, state = mixer(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state=state)
        outs.append(o)
        sizes.add((state.k_window.shape, state.k_sinks.shape, None if state.far is None else state.far.sums.shape))
    assert_close(torch.cat(outs, 2), whole)
    assert len(sizes) == 1


# Centres


@feature_mixer
def test_centres_at_zero_change_nothing(name):
    inputs = draw()
    assert_close(build(name, center=True)(*inputs)[0], build(name)(*inputs)[0])


@pytest.mark.parametrize("near", [{}, {"window": 4, "sinks": 1}])
def test_centres_are_not_rounded_under_autocast(near):
    mixer, inputs = shift(build("performer", torch.float32, center=True, **near)), draw(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, _ = mixer(*inputs)
    assert_close(got, mixer(*inputs)[0])


@pytest.mark.parametrize("near", [{}, {"window": 4, "sinks": 1}])
def test_shifted_features_estimate_the_same_kernel(near):
    """The mean over many draws is within its standard error of softmax; unit vectors as values give the weights."""
    torch.manual_seed(3)
    q, k, _ = (x[:1, :1] for x in draw(6, spread=0.35))
    v = torch.eye(6, dtype=torch.float64)[None, None]
    c, b = 0.4 * torch.randn(1, 8), 0.3 * torch.randn(1, 8)
    mixer = build("performer", num_heads=1, num_kv_heads=1, num_features=20000, center=True, scale=1.0, **near)
    set_centers(mixer, c, b)
    draws = []
    for number in range(30):
        mixer.features.redraw(number)
        draws.append(mixer(q, k, v)[0][0, 0, -1])
    weights = torch.stack(draws)
    want = (q[0, 0, -1] @ k[0, 0].mT).softmax(-1)
    assert ((weights.mean(0) - want).abs() <= 3.5 * weights.std(0) / 30**0.5 + 1e-5).all()
    assert_close(weights.mean(0), want, rtol=0.03, atol=0)  # without the key's factor exp(b.k) it is 0.2 off


def test_centring_makes_features_of_keys_with_a_common_part_much_better():
    q, k, v = draw(100, spread=0.7)
    q, k = q + 1.5, k + 2.0
    plain, centred = (build("performer", num_features=256, center=c) for c in (False, True))
    set_centers(centred, k.mean((0, 2)), q.mean((0, 2)).view(2, 2, 8).mean(1))
    average = softmax_attention(q * 0, k, v)
    want = softmax_attention(q, k, v)
    uniform = float((average - want).norm() / want.norm())
    assert error_to_softmax(centred, q, k, v) < min(uniform, 0.5 * error_to_softmax(plain, q, k, v))


@feature_mixer
def test_centres_are_saved_and_have_start_values(name):
    mixer = shift(build(name, center=True, window=3))
    again = build(name, center=True, window=3)
    again.load_state_dict(mixer.state_dict())
    inputs = draw()
    assert_close(again(*inputs)[0], mixer(*inputs)[0], rtol=0, atol=0)
    assert set(mixer.initial_values()) == {"key_center", "query_center"}
    assert all(value.count_nonzero() == 0 for value in mixer.initial_values().values())


@feature_mixer
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (5, 2)])
def test_centres_obey_the_laws(name, window, sinks):
    """Padding (whose zeros the shift moves), packing and splitting."""
    mixer = shift(build(name, center=True, window=window, sinks=sinks))
    inputs = draw()
    where = torch.rand(40) > 0.3
    mask = where.expand(2, -1)
    alone = mixer(*(x[:, :, where] for x in inputs))[0]
    dirty = [x.masked_fill(~mask[:, None, :, None], float("nan")) for x in inputs]
    assert_close(mixer(*dirty, mask=mask)[0][:, :, where], alone)
    segments = (torch.arange(40) >= 13).long().expand(2, -1)
    packed = mixer(*inputs, segments=segments)[0]
    assert_close(packed[:, :, 13:], mixer(*(x[:, :, 13:] for x in inputs))[0])
    for cut in (1, 7, 13, 30):
        state, outs = None, []
        for start, stop in itertools.pairwise((0, cut, 40)):
            part = (x[:, :, start:stop] for x in inputs)
            o, state = mixer(*part, segments=segments[:, start:stop], state=state)
            outs.append(o)
        assert_close(torch.cat(outs, 2), packed)


# Errors


@feature_mixer
def test_a_bidirectional_near_field_is_refused(name):
    with pytest.raises(ValueError, match=r"window \(8\) and sinks \(2\) must be 0 with causal=False"):
        build(name, causal=False, window=8, sinks=2)
    shift(build(name, causal=False, center=True))(*draw())


@feature_mixer
@pytest.mark.parametrize("option", ["window", "sinks"])
def test_negative_sizes_are_refused(name, option):
    with pytest.raises(ValueError, match=rf"{option} \(-1\) must be at least 0"):
        build(name, **{option: -1})


@pytest.mark.parametrize("options", [{"window": 8}, {"sinks": 2}, {"center": True}])
def test_features_of_another_kernel_are_refused(options):
    with pytest.raises(ValueError, match=r"exact weights exp\(q.k\) and features Softplus are of two kernels; use"):
        build("particle", features="softplus", **options)


def test_the_window_alone_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"window \(0\) must be at least 1"):
        build("window", window=0)
    with pytest.raises(ValueError, match=r"sinks \(-3\) must be at least 0"):
        build("window", sinks=-3)
    with pytest.raises(ValueError, match="no bidirectional form: use causal=True"):
        build("window", causal=False)


def test_centres_of_a_mixer_without_any_are_refused():
    with pytest.raises(ValueError, match="Performer has no centres; build it with center=True"):
        set_centers(build("performer"), torch.zeros(2, 8), torch.zeros(2, 8))
