"""Training: gradients through checkpointing, low precision, tied weights; compiling."""

import pytest
import torch
from tiny_models import clone, llama, tokens

from mercer.hf import attach
from mercer.hf.install import attached
from mercer.mixers import MIXERS

ALL = sorted(MIXERS)


def gradients(model, ids, **options):
    model.zero_grad()
    model.train()(ids, labels=ids, use_cache=False, **options).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mixer", ALL)
def test_gradient_checkpointing_computes_the_same(mixer):
    model, ids = attach(llama(), mixer), tokens(2, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
    expected = [gradients(model, ids), gradients(model, ids, position_ids=positions)]
    newer = hasattr(model, "activation_checkpointing_enable")
    (model.activation_checkpointing_enable if newer else model.gradient_checkpointing_enable)()
    for want, options in zip(expected, ({}, {"position_ids": positions}), strict=True):
        got = gradients(model, ids, **options)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    assert all(module.mercer_call is None for _, module in attached(model))


def test_softmax_trains_as_the_original():
    model, ids = llama(tie_word_embeddings=True), tokens(2, 9)
    expected = gradients(clone(model), ids)
    attach(model, "softmax")
    got = gradients(model, ids)
    assert got.keys() == expected.keys()
    assert max((got[name] - expected[name]).abs().max() for name in expected) <= 1e-5
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("mixer", ALL)
def test_low_precision_is_finite(mixer):
    ids = tokens(2, 9)
    model = attach(llama(), mixer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model.train()(ids, labels=ids, use_cache=False)
    output.loss.backward()
    assert torch.isfinite(output.logits).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    model = attach(llama().to(torch.bfloat16), mixer)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    output = model.train()(ids, labels=ids, use_cache=False)
    assert output.logits.dtype == torch.bfloat16
    output.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("mixer", ["cubit", "deltaformer"])
def test_every_parameter_of_the_mixer_learns(mixer):
    model, ids = attach(llama(), mixer), tokens(2, 9)
    got = gradients(model, ids)
    own = [name for name, _ in model.named_parameters() if ".mixer." in name]
    assert own
    assert all(got[name].abs().sum() > 0 for name in own)


@pytest.mark.compile
@pytest.mark.parametrize("mixer", ["softmax", "cubit"])
def test_a_compiled_model_computes_the_same(mixer):
    model, ids = attach(llama(), mixer), tokens(2, 9)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, use_cache=False).logits
    assert (compiled - expected).abs().max() <= 1e-4
