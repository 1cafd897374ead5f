"""Laws that every mixer of the table obeys. A new MIXERS line is tested with no new test code."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from mercer import MIXERS, build_mixer
from mercer.mixers import map_state, mixer_options

VARIANTS = {
    "darkformer near": ("darkformer", {"window": 5, "sinks": 2, "center": True}),
    "lfk separate": ("lfk", {"separate": True, "window": 3}),
    "linear_cubit share": ("linear_cubit", {"share": True}),
}  # options that change the path
every_mixer = pytest.mark.parametrize("name", sorted(MIXERS) + sorted(VARIANTS))
SIZES = {"num_heads": 4, "head_dim": 8, "num_kv_heads": 2, "hidden_size": 32}
close = partial(assert_close, rtol=1e-8, atol=1e-9)


def build(name, dtype=torch.float64, **sizes):
    torch.manual_seed(0)
    name, options = VARIANTS.get(name, (name, {}))
    return build_mixer(name, **(SIZES | options | sizes)).to(dtype)


def tokens(length, batch=2, dtype=torch.float64, scale=1.0, heads=4, kv_heads=2):
    """Inputs of a mixer, each requiring a gradient."""
    shapes = {"q": (heads, 8), "k": (kv_heads, 8), "v": (kv_heads, 5)}
    made = {n: scale * torch.randn(batch, h, length, d, dtype=dtype) for n, (h, d) in shapes.items()}
    made["x"] = torch.randn(batch, length, 32, dtype=dtype)
    return {n: t.requires_grad_() for n, t in made.items()}


def at(inputs, where, time=slice(None)):
    """Cut rows and times out of the inputs; x has no head axis."""
    return {n: t[where, time] if n == "x" else t[where, :, time] for n, t in inputs.items()}


def gradients(mixer, inputs, o, weight):
    """Gradients of <o, weight> with respect to inputs and parameters, by name; unused ones are zero."""
    parameters = dict(mixer.named_parameters())
    named = inputs | parameters
    grads = torch.autograd.grad((o * weight).sum(), list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(named.items(), grads, strict=True)}


def assert_same(mixer, got, want):
    for name in want:
        close(got[name], want[name], msg=lambda text, n=name: f"gradient of {n}: {text}")


# 1. Splitting


@every_mixer
@settings(max_examples=10, deadline=None)
@given(length=st.integers(2, 150), data=st.data())
def test_splitting_the_sequence_changes_nothing(name, length, data):
    cut, masked = data.draw(st.integers(1, length - 1)), data.draw(st.booleans())
    mixer, inputs, weight = build(name), tokens(length), torch.randn(2, 4, length, 5, dtype=torch.float64)
    mask = torch.rand(2, length) > 0.3 if masked else None
    part = lambda s: at(inputs, slice(None), s) | {"mask": None if mask is None else mask[:, s]}
    whole, _ = mixer(**inputs, mask=mask)
    first, state = mixer(**part(slice(0, cut)))
    second, _ = mixer(**part(slice(cut, None)), state=state)
    real = 1.0 if mask is None else mask[:, None, :, None].double()
    split = torch.cat([first, second], 2)
    close(split * real, whole * real)
    assert_same(mixer, gradients(mixer, inputs, split, weight * real), gradients(mixer, inputs, whole, weight * real))


@every_mixer
def test_token_by_token_decoding_is_the_whole_call(name):
    mixer, inputs = build(name), tokens(20)
    state, steps = None, []
    for t in range(20):
        o, state = mixer(**at(inputs, slice(None), slice(t, t + 1)), state=state)
        steps.append(o)
    close(torch.cat(steps, 2), mixer(**inputs)[0])


@every_mixer
def test_a_mask_over_past_and_new_tokens_is_a_mask_over_the_new_ones(name):
    mixer, inputs = build(name), tokens(12)
    mask = torch.rand(2, 12) > 0.3
    _, state = mixer(**at(inputs, slice(None), slice(0, 7)), mask=mask[:, :7])
    new = at(inputs, slice(None), slice(7, None))
    close(mixer(**new, mask=mask, state=state)[0], mixer(**new, mask=mask[:, 7:], state=state)[0])


@every_mixer
def test_state_rows_can_be_chosen_and_repeated(name):
    mixer, inputs = build(name), tokens(9, batch=3)
    whole, _ = mixer(**inputs)
    _, state = mixer(**at(inputs, slice(None), slice(0, 6)))
    order = torch.tensor([2, 0, 0])
    state = map_state(state, lambda t: t[order])
    close(mixer(**at(inputs, order, slice(6, None)), state=state)[0], whole[order, :, 6:])


# 2. Causality


@every_mixer
def test_the_jacobian_over_the_future_is_exactly_zero(name):
    mixer, inputs = build(name), tokens(140)
    o, _ = mixer(**inputs)
    for gradient in torch.autograd.grad(o[:, :, 70].sum(), list(inputs.values()), allow_unused=True):
        if gradient is not None:
            future = gradient[:, 71:] if gradient.dim() == 3 else gradient[:, :, 71:]
            assert future.count_nonzero() == 0


@every_mixer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nats", [-120.0, 3.0, 120.0, 1e4])
def test_values_do_not_depend_on_what_the_future_holds(name, nats, dtype):
    mixer, inputs = build(name, dtype), {n: t.detach() for n, t in tokens(40, dtype=dtype).items()}
    before, _ = mixer(**inputs)
    changed = {n: t.clone() for n, t in inputs.items()}
    changed["k"][:, :, 25] *= nats * 8**0.5 / (changed["q"][:, :1, 24] * changed["k"][:, :1, 25]).sum(-1).abs().max()
    changed["v"][:, :, 25:] *= 1e3
    changed["x"][:, 25:] *= -50
    after, _ = mixer(**changed)
    assert after.isfinite().all()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(after[:, :, :25], before[:, :, :25], rtol=tolerance, atol=tolerance)


# 3. Padding


@every_mixer
@pytest.mark.parametrize("side", ["left", "right", "both", "inside"])
@pytest.mark.parametrize("content", [0.0, 1e3, float("nan")])
def test_padding_changes_neither_values_nor_gradients(name, side, content):
    mixer, alone = build(name), tokens(10, batch=1)
    where = {
        "left": torch.arange(6, 16), "right": torch.arange(10), "both": torch.arange(3, 13),
        "inside": torch.tensor([0, 1, 2, 5, 6, 7, 8, 12, 14, 15]),
    }[side]  # fmt: skip
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[0, where] = True  # the second row is padding throughout
    padded = tokens(16)
    with torch.no_grad():
        for n, t in padded.items():
            if content == content or n != "x":  # a NaN in x would reach any linear layer's weights
                t[...] = content * torch.randn_like(t) if content == content else content
            if n == "x":
                t[0, where] = alone[n][0]
            else:
                t[0, :, where] = alone[n][0]
    want, _ = mixer(**alone)
    got, _ = mixer(**padded, mask=mask)
    close(got[:1, :, where], want)
    weight = torch.randn(1, 4, 10, 5, dtype=torch.float64)
    full = torch.zeros(2, 4, 16, 5, dtype=torch.float64).index_copy(2, where, torch.cat([weight, weight * 0]))
    want, got = gradients(mixer, alone, want, weight), gradients(mixer, padded, got.nan_to_num(0.0), full)
    for n in alone:
        real = got[n][:1, where] if n == "x" else got[n][:1, :, where]
        close(real, want[n])
    for n in dict(mixer.named_parameters()):
        close(got[n], want[n])


@every_mixer
def test_no_value_depends_on_what_padding_holds(name):
    mixer, inputs = build(name), {n: t.detach() for n, t in tokens(12).items()}
    mask = torch.rand(2, 12) > 0.4
    want, _ = mixer(**inputs, mask=mask)
    for n, t in inputs.items():
        (t if n == "x" else t.transpose(1, 2))[~mask] = float("nan")
    got, _ = mixer(**inputs, mask=mask)
    real = mask[:, None].expand(2, 4, 12)
    close(got[real], want[real])


@every_mixer
def test_a_row_alone_equals_the_row_in_a_batch(name):
    mixer, inputs = build(name), tokens(33, batch=3)
    close(mixer(**inputs)[0][1:2], mixer(**at(inputs, slice(1, 2)))[0])


@every_mixer
def test_a_mask_of_ones_is_no_mask(name):
    mixer, inputs = build(name), tokens(17)
    close(mixer(**inputs, mask=torch.ones(2, 17, dtype=torch.bool))[0], mixer(**inputs)[0])


# 4. Packing


@every_mixer
def test_a_packed_document_equals_the_document_alone(name):
    mixer, inputs = build(name), tokens(150)
    bounds = [(0, 1), (1, 60), (60, 133), (133, 150)]
    segments = torch.cat([torch.full((2, b - a), 7 - i) for i, (a, b) in enumerate(bounds)], 1)
    weight = torch.randn(2, 4, 150, 5, dtype=torch.float64)
    packed, _ = mixer(**inputs, segments=segments)
    alone = torch.cat([mixer(**at(inputs, slice(None), slice(a, b)))[0] for a, b in bounds], 2)
    close(packed, alone)
    assert_same(mixer, gradients(mixer, inputs, packed, weight), gradients(mixer, inputs, alone, weight))


@every_mixer
def test_a_neighbour_with_extreme_keys_does_not_leak(name):
    mixer, inputs = build(name, torch.float32), {n: t.detach() for n, t in tokens(40, dtype=torch.float32).items()}
    segments = (torch.arange(40) >= 15).long().expand(2, -1)
    want, _ = mixer(**at(inputs, slice(None), slice(15, None)))
    inputs["k"][:, :, :15] *= 1e3
    inputs["v"][:, :, :15] *= 1e3
    got, _ = mixer(**inputs, segments=segments)
    assert_close(got[:, :, 15:], want, rtol=1e-4, atol=1e-5)


@every_mixer
def test_a_packed_stream_can_be_split(name):
    mixer, inputs = build(name), tokens(30)
    segments = torch.tensor([0] * 9 + [1] * 12 + [2] * 9).expand(2, -1)
    whole, _ = mixer(**inputs, segments=segments)
    for cut in (4, 9, 15, 21, 29):
        first, state = mixer(**at(inputs, slice(None), slice(0, cut)), segments=segments[:, :cut])
        second, _ = mixer(**at(inputs, slice(None), slice(cut, None)), segments=segments[:, cut:], state=state)
        close(torch.cat([first, second], 2), whole)


# 5. Grouped queries


@every_mixer
def test_grouped_queries_equal_repeated_keys(name):
    grouped, inputs = build(name), tokens(40)
    full = build(name, num_kv_heads=4)
    own = grouped.state_dict()
    for key, value in full.state_dict().items():
        value.copy_(repeat_for_heads(own[key], value.shape))
    repeated = inputs | {n: inputs[n].repeat_interleave(2, 1) for n in "kv"}
    close(grouped(**inputs)[0], full(**repeated)[0])


def repeat_for_heads(value, shape):
    """Repeat the axis that counts key-value heads (alone or times the head's width) from 2 heads to 4."""
    for axis, (have, need) in enumerate(zip(value.shape, shape, strict=True)):
        if have != need:
            value = value.unflatten(axis, (2, have // 2)).repeat_interleave(2, axis).flatten(axis, axis + 1)
    return value


# 8. Hostile input


@every_mixer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["duplicate", "zero", "large", "single", "late spike"])
def test_hostile_input_stays_finite(name, dtype, case):
    mixer = build(name, dtype)
    length = 1 if case == "single" else 200
    inputs = tokens(length, dtype=dtype, batch=1)
    with torch.no_grad():
        if case == "duplicate":
            inputs["k"][:] = inputs["k"][:, :, :1]
            inputs["x"][:] = inputs["x"][:, :1]
        if case == "zero":
            inputs["k"].zero_()
            inputs["x"].zero_()
        if case == "large":
            for n in "qk":
                inputs[n] *= 1e3
        if case == "late spike":
            inputs["k"][:, :, 150] *= 1e4
    o, state = mixer(**inputs)
    assert o.dtype == dtype
    assert o.isfinite().all()
    map_state(state, lambda t: t if t.dtype in (torch.bool, torch.long) else assert_finite_or_empty(t))
    for n, gradient in gradients(mixer, inputs, o.float(), torch.randn(o.shape)).items():
        assert gradient.isfinite().all(), n


def assert_finite_or_empty(tensor):
    assert not tensor.isnan().any()
    return tensor


@every_mixer
def test_four_thousand_tokens_stay_finite(name):
    mixer = build(name, torch.float32, num_heads=1, num_kv_heads=1)
    inputs = tokens(4096, batch=1, dtype=torch.float32, heads=1, kv_heads=1)
    o, _ = mixer(**inputs)
    assert o.isfinite().all()
    for n, gradient in gradients(mixer, inputs, o, torch.randn_like(o)).items():
        assert gradient.isfinite().all(), n


# Nothing at all


@every_mixer
@pytest.mark.parametrize(("batch", "length"), [(0, 3), (2, 0), (0, 0)])
def test_an_empty_batch_or_sequence_gives_an_empty_output(name, batch, length):
    mixer, inputs = build(name), tokens(length, batch=batch)
    o, _ = mixer(**inputs, mask=torch.ones(batch, length, dtype=torch.bool))
    assert o.shape == (batch, 4, length, 5)
    o.sum().backward()


@every_mixer
def test_no_new_token_changes_nothing(name):
    mixer, inputs = build(name), tokens(9)
    _, state = mixer(**at(inputs, slice(None), slice(0, 5)), segments=torch.ones(2, 5, dtype=torch.long))
    _, state = mixer(**at(inputs, slice(None), slice(5, 5)), state=state)
    close(mixer(**at(inputs, slice(None), slice(5, None)), state=state)[0], mixer(**inputs)[0][:, :, 5:])


@every_mixer
def test_no_new_token_at_the_start_changes_nothing(name):
    mixer, inputs = build(name), tokens(9)
    nothing = torch.zeros(2, 0, dtype=torch.long)
    _, state = mixer(**at(inputs, slice(None), slice(0, 0)), segments=nothing, mask=nothing.bool())
    close(mixer(**inputs, state=state)[0], mixer(**inputs)[0])


@every_mixer
def test_on_the_meta_device_there_are_shapes_alone(name):
    inputs = {n: t.detach().to("meta") for n, t in tokens(9).items()}
    o, _ = build(name).to("meta")(**inputs)
    assert o.is_meta
    assert o.shape == (2, 4, 9, 5)


# Derivatives no hand-written backward has


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inside forward_ad
@pytest.mark.parametrize("name", sorted(MIXERS.keys() - {"softmax", "random"}))  # those are PyTorch's own operator
def test_forward_mode_is_refused_and_not_zero(name):
    mixer, inputs = build(name), {n: t.detach() for n, t in tokens(9).items()}
    with pytest.raises(NotImplementedError, match="this operator has no forward-mode derivative"):
        torch.func.jvp(lambda v: mixer(**inputs | {"v": v})[0], (inputs["v"],), (torch.ones_like(inputs["v"]),))


# Training and dtypes


@every_mixer
def test_every_parameter_is_trained(name):
    mixer, inputs = build(name), tokens(10)
    mixer(**inputs)[0].square().sum().backward()
    for key, parameter in mixer.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key


@every_mixer
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_autocast_and_sixteen_bit_weights(name, weights):
    mixer, inputs = build(name, weights), tokens(70, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = mixer(**inputs)
    assert o.dtype == torch.bfloat16
    exact, _ = build(name)(**{n: t.detach().double() for n, t in inputs.items()})
    error = (o.double() - exact).abs().mean() / exact.abs().mean()
    assert error < 0.05
    for n, gradient in gradients(mixer, inputs, o.float(), torch.randn(o.shape)).items():
        assert gradient.isfinite().all(), n


@every_mixer
def test_initial_values_are_those_of_a_new_mixer(name):
    mixer = build(name, torch.float32)
    for key, value in mixer.initial_values().items():
        assert value.device.type == "cpu"
        assert_close(mixer.state_dict()[key], value, rtol=0, atol=0)


# Errors


def test_an_unknown_mixer_is_named_with_the_choices():
    with pytest.raises(ValueError, match=r"unknown mixer 'cubitt'; choose one of constant, cubit, .*mean 'cubit'"):
        build_mixer("cubitt", **SIZES)


@every_mixer
def test_an_unknown_option_is_named_with_the_choices(name):
    with pytest.raises(ValueError, match=f"unknown option 'shaer' for mixer '{name.split()[0]}'; it takes "):
        build(name, shaer=True)


@every_mixer
def test_heads_that_do_not_divide(name):
    with pytest.raises(ValueError, match=r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"):
        build(name, num_kv_heads=3)


@every_mixer
def test_a_pairwise_mask_is_refused(name, without_shape_checks):
    with pytest.raises(ValueError, match="mask has shape"):
        build(name)(**tokens(6), mask=torch.ones(6, 6, dtype=torch.bool).expand(2, 1, 6, 6))


@every_mixer
def test_a_mask_of_numbers_is_refused(name, without_shape_checks):
    with pytest.raises(ValueError, match=r"mask has dtype torch.int64; it must be bool"):
        build(name)(**tokens(6), mask=torch.ones(2, 6, dtype=torch.long))


@every_mixer
@pytest.mark.parametrize("marks", ["mask", "segments"])
def test_marks_of_more_tokens_than_there_are_are_refused(name, marks, without_shape_checks):
    given = torch.ones(2, 8, dtype=torch.bool if marks == "mask" else torch.long)
    with pytest.raises(ValueError, match=rf"{marks} has shape \(2, 8\); it must be \[batch, 6\] over the new tokens"):
        build(name)(**tokens(6), **{marks: given})


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_a_value_of_another_kind_is_refused(name, without_shape_checks):
    for option, default in mixer_options(name).items():
        wrong = 0.5 if isinstance(default, str) else "half"
        with pytest.raises(ValueError, match=rf"{option} \({wrong!r}\) must be |unknown feature map"):
            build_mixer(name, **SIZES, **{option: wrong})
