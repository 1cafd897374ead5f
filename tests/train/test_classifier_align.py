"""Phase A: the particles follow the gradient of the alignment and their repulsion, and nothing else moves."""

import copy
import dataclasses
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mercer.errors import NumericalWarning
from mercer.hf import Size, from_scratch
from mercer.hf.pooling import pooled_states
from mercer.ops import linear_attention, linear_attention_naive
from mercer.particles import riesz_energy
from mercer.train.classifier import freeze_particles
from mercer.train.classifier_recipe import AlignConfig
from mercer.train.particles import ParticleSystem, align_particles, label_alignment, particles

# Directions of favor and lfk start at norm sqrt(D): outside of the ball by default, as one test here says.
pytestmark = pytest.mark.filterwarnings("ignore:.*particles lie outside the radius:mercer.errors.NumericalWarning")
MAPS = ("favor", "elu", "softplus", "sigmoid2", "softmaxfeat", "cos2", "porf_softplus")
SMALL = Size(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, learning_rate=1e-3)
FREE = AlignConfig(inverse_temperature=math.inf, radius=1e3, clip=1e9, step_size=1.0, strength=0.1)


def build(features="softplus", kind="classifier", num_features=6, **options):
    extra = {"pooling": "mean", "dropout": 0.2} if kind == "classifier" else {}
    model = from_scratch(
        SMALL,
        "particle",
        vocab_size=40,
        max_length=16,
        kind=kind,
        projections="value",
        pad_token_id=0,
        mixer_options={"features": features, "num_features": num_features, **options},
        **extra,
    )
    with torch.no_grad():  # at BERT's own start all outputs are alike
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(10 if "embed" in name else 20)
    return model


def make_batch(seed=0, size=8, length=6, pad=0):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 40, (size, length), generator=draw)
    mask = (torch.arange(length) < torch.randint(2, length + 1, (size, 1), generator=draw)).long()
    labels = (ids[:, 0] > 20).long()
    ids, mask = (torch.nn.functional.pad(t, (0, pad)) for t in (ids, mask))
    return SimpleNamespace(inputs=lambda: {"input_ids": ids, "attention_mask": mask}, labels=labels)


def in_float64(model):
    """Let a model compute in float64 throughout; Llama's norms go through float32, which differences would show."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: (
                m.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + m.variance_epsilon)
            )
    return model.double()


def energy_of(model, batch, kind, pooling, strength):
    pooled = pooled_states(model, batch.inputs(), pooling)
    repulsion = sum(riesz_energy(head, s=0.0).item() for omega in particles(model) for head in omega)
    return strength * repulsion - label_alignment(pooled, batch.labels, kind).item()


@pytest.mark.parametrize(
    ("features", "kind", "skeleton"),
    [
        *((name, "within_class", "classifier") for name in MAPS),
        *((name, "centered", "language") for name in ("softplus", "favor", "sigmoid2")),
    ],
)
def test_a_step_without_noise_goes_down_the_energy(features, kind, skeleton):
    model, batch = in_float64(build(features, skeleton)).eval(), make_batch()
    pooling = "mean" if skeleton == "classifier" else "last"
    before = [omega.clone() for omega in particles(model)]
    config = dataclasses.replace(FREE, kind=kind)
    with ParticleSystem(model, config, pooling=pooling) as system:
        state = system.step(batch)
    moves = [omega - old for omega, old in zip(particles(model), before, strict=True)]
    draw = torch.Generator().manual_seed(1)
    h = 1e-5
    for layer, (omega, old) in enumerate(zip(particles(model), before, strict=True)):
        direction = torch.randn(old.shape, generator=draw, dtype=old.dtype)
        energies = []
        for sign in (1, -1):
            for other, start in zip(particles(model), before, strict=True):
                other.copy_(start)
            omega.copy_(old + sign * h * direction)
            energies.append(energy_of(model, batch, kind, pooling, config.strength))
        slope = (energies[0] - energies[1]) / (2 * h)
        assert -(moves[layer] * direction).sum().item() / old.shape[1] == pytest.approx(slope, rel=1e-4, abs=1e-9)
    for other, start in zip(particles(model), before, strict=True):
        other.copy_(start)
    assert state.energy == pytest.approx(energy_of(model, batch, kind, pooling, config.strength), rel=1e-6)
    assert state.least_distance == pytest.approx(
        min(torch.pdist(head).min().item() for omega in before for head in omega), rel=1e-9
    )
    square = sum(move.square().sum().item() for move in moves)
    assert state.drift == pytest.approx(math.sqrt(square / (4 * before[0].shape[1])), rel=1e-9)


@pytest.mark.parametrize("skeleton", ["classifier", "language"])
@pytest.mark.parametrize("features", ["favor", "cos2", "lfk"])
def test_nothing_but_the_particles_moves(skeleton, features):
    model = build(features, skeleton).train()
    before, learned = copy.deepcopy(model.state_dict()), [p.requires_grad for p in model.parameters()]
    align_particles(model, make_batch, steps=3, pooling="mean", check=[make_batch()])
    after = model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.endswith("omega")}
    assert model.training
    assert [p.requires_grad for p in model.parameters()] == learned
    assert all(p.grad is None for p in model.parameters())
    assert not any(omega.requires_grad for omega in particles(model) if not isinstance(omega, torch.nn.Parameter))


@pytest.mark.parametrize("skeleton", ["classifier", "language"])
def test_the_alignment_of_an_encoder_and_of_a_decoder_rises(skeleton):
    model, batch = build("softplus", skeleton), make_batch(size=32)
    config = AlignConfig(kind="centered", inverse_temperature=math.inf, step_size=0.2, radius=5.0, check_every=4)
    history = align_particles(model, lambda i: batch, steps=12, config=config, check=[batch])
    assert [state.step for state in history] == [0, 4, 8, 12]
    rise = [state.alignment for state in history]
    assert rise == sorted(rise)
    assert rise[-1] > 1.08 * rise[0]
    assert all(state.drift > 0 and state.least_distance > 0 for state in history)


def test_particles_stay_in_their_ball_and_a_head_s_drift_below_its_clip():
    model = build("favor")  # its directions start at norm 4
    align_particles(model, make_batch, steps=2, config=AlignConfig(radius=1.5))
    for omega in particles(model):
        assert omega.norm(dim=-1).max() <= 1.5
    model = build()
    before = [omega.clone() for omega in particles(model)]
    config = dataclasses.replace(FREE, clip=1e-4, strength=10.0)
    align_particles(model, make_batch, steps=1, config=config)
    for omega, old in zip(particles(model), before, strict=True):
        assert torch.allclose((omega - old).flatten(1).norm(dim=1), torch.tensor(1e-4), rtol=1e-2)


def test_the_noise_has_its_temperature_and_its_seed():
    config = dataclasses.replace(FREE, clip=1e-9, step_size=2e-3, inverse_temperature=50.0)
    moves = []
    for seed in (0, 0, 1):
        model = build(num_features=400)
        before = torch.stack(particles(model)).clone()
        align_particles(model, make_batch, steps=1, config=config, seed=seed)
        moves.append(torch.stack(particles(model)) - before)
    assert torch.equal(moves[0], moves[1])
    assert not torch.equal(moves[0], moves[2])
    assert moves[0].square().mean().item() == pytest.approx(2 * 2e-3 / 50, rel=0.05)
    assert abs(torch.corrcoef(moves[0].flatten(1))[0, 1]) < 0.1  # layers draw apart


@pytest.mark.parametrize("features", ["softplus", "favor", "sigmoid2"])
@pytest.mark.parametrize("skeleton", ["classifier", "language"])
def test_padding_does_not_change_a_step(skeleton, features):
    found, config = [], AlignConfig(radius=10.0)
    for pad in (0, 5):
        model = build(features, skeleton)
        history = align_particles(
            model, lambda i, pad=pad: make_batch(i, pad=pad), steps=2, config=config, check=[make_batch(pad=pad)]
        )
        found.append((torch.stack(particles(model)), history[-1].energy))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-5)


@pytest.mark.parametrize("features", ["favor", "sigmoid2"])
@pytest.mark.parametrize("skeleton", ["classifier", "language"])
def test_a_step_by_the_definition_of_attention_is_the_same(skeleton, features, monkeypatch):
    """Autograd through the quadratic definition in float64, against the backward pass that is written by hand."""
    moved = []
    for operator in (linear_attention, linear_attention_naive):
        monkeypatch.setattr("mercer.ops.linear_attention", operator)
        model = in_float64(build(features, skeleton))
        start = torch.stack(particles(model)).clone()
        align_particles(model, lambda i: make_batch(i, pad=3), steps=2, config=dataclasses.replace(FREE, strength=0.0))
        moved.append(torch.stack(particles(model)) - start)
    assert moved[1].abs().max() > 1e-5
    assert (moved[0] - moved[1]).abs().max() < 1e-9 * moved[1].abs().max()


def test_a_decoder_is_aligned_and_then_learns_around_its_particles():
    model = build("sigmoid2", "language")
    align_particles(model, make_batch, steps=2, pooling="last")
    before, batch = copy.deepcopy(model.state_dict()), make_batch()
    freeze_particles(model)
    optimiser = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    model.train()(**batch.inputs(), labels=batch.inputs()["input_ids"]).loss.backward()
    optimiser.step()
    kept = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert kept == {name for name in before if name.endswith("omega")}


def test_it_stops_when_the_drift_without_noise_is_small():
    seen = []
    config = AlignConfig(tolerance=1e9, check_every=2)
    history = align_particles(build(), make_batch, steps=50, config=config, check=[make_batch()], report=seen.append)
    assert [state.step for state in history] == [0, 2]
    assert [state.step for state in seen] == [1, 2]
    config = dataclasses.replace(config, tolerance=0.0)
    assert len(align_particles(build(), make_batch, steps=4, config=config, check=[make_batch()])) == 3


def test_rows_that_fill_a_batch_do_not_count():
    pooled, labels = torch.randn(6, 4), torch.tensor([0, 1, 0, 1, -100, -100])
    for kind in ("within_class", "centered", "signed"):
        assert torch.equal(label_alignment(pooled, labels, kind), label_alignment(pooled[:4], labels[:4], kind))


def test_what_cannot_be_aligned_is_refused():
    softmax = from_scratch(SMALL, "softmax", vocab_size=40, max_length=16, kind="classifier")
    with pytest.raises(ValueError, match="has no random features to align; choose the mixer particle"):
        align_particles(softmax, make_batch, steps=1)
    with pytest.raises(ValueError, match="redraw_steps would replace the particles"):
        align_particles(build(redraw_steps=5), make_batch, steps=1)
    batch = make_batch()
    batch.labels[0] = 2
    with pytest.raises(ValueError, match="signed alignment is for two classes, and there is a class 2"):
        align_particles(build(), lambda i: batch, steps=1, config=AlignConfig(kind="signed"))
    with pytest.raises(ValueError, match=r"align.batch_size \(1\) must be at least 2"):
        AlignConfig(batch_size=1)


@pytest.mark.parametrize("features", ["softplus", "favor"])
def test_a_step_of_phase_a_takes_fewer_products_than_one_of_phase_b(features):
    """Time is measured elsewhere; products of matrices outside of attention's own operator do not vary."""
    model = from_scratch(
        Size(128, 2, 2, 256, 2e-4), "particle", vocab_size=64, max_length=32, kind="classifier", projections="value",
        pooling="mean", mixer_options={"features": features},
    )  # fmt: skip
    batch = make_batch(size=16, length=32)
    with ParticleSystem(model) as system, FlopCounterMode(display=False) as align:
        system.step(batch)
    with FlopCounterMode(display=False) as finetune:
        torch.nn.functional.cross_entropy(model(**batch.inputs()).logits, batch.labels).backward()
    assert 0 < align.get_total_flops() < finetune.get_total_flops()


def test_particles_outside_the_ball_are_announced_before_the_first_step():
    model, batch = build("favor", num_features=16), make_batch()  # N(0, I) in 8 dimensions: norms about 2.8
    config = AlignConfig(radius=1.5)
    with ParticleSystem(model, config) as system:
        with pytest.warns(
            NumericalWarning, match=r"of 64 particles lie outside the radius 1.5, .* raise --align.radius"
        ):
            system.step(batch)
        system.step(batch)  # once
    assert max(omega.norm(dim=-1).max().item() for omega in particles(model)) <= 1.5 + 1e-6
    for calm in (build("softplus"), build("favor")):
        with (
            warnings.catch_warnings(),
            ParticleSystem(calm, dataclasses.replace(config, radius=10.0)) as system,
        ):
            warnings.simplefilter("error")
            system.step(batch)
