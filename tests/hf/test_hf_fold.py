"""Folding the metric into the projections: exact where it is done, refused in words elsewhere."""

import pytest
import torch
from test_hf_families import BIDIRECTIONAL
from tiny_models import build, decoder, llama, tokens

import mercer
from mercer.hf.install import attached


def with_metrics(model, **options):
    """Attach DARKFormer with metrics away from the identity."""
    mercer.attach(model, "darkformer", num_features=16, **options)
    with torch.no_grad():
        for _, layer in attached(model):
            metric = layer.mixer.features.metric
            metric.add_(0.3 * torch.randn_like(metric))
    return model


FOLDABLE = {"gpt2": {}, "opt": {"rank": 5}, "gpt2 of lower rank": {"rank": 3}, "bert": {}, "vit": {}}


@pytest.mark.parametrize("case", sorted(FOLDABLE))
@torch.no_grad()
def test_folding_keeps_the_logits(case):
    family = case.split()[0]
    if family in BIDIRECTIONAL:
        class_name, arguments = BIDIRECTIONAL[family]
        model = build(class_name, **arguments)
    else:
        model = decoder(family)
    call = {"pixel_values": torch.randn(2, 3, 16, 16)} if family == "vit" else {"input_ids": tokens(2, 9)}
    with_metrics(model, **FOLDABLE[case])
    before = model(**call).logits
    assert mercer.fold(model) is model
    assert (model(**call).logits - before).abs().max() <= 2e-5 * before.abs().max()
    for _, layer in attached(model):
        metric = layer.mixer.features.metric
        assert torch.equal(metric, torch.eye(*metric.shape[1:]).expand_as(metric))
    assert "the metric is folded into the projections of " in model.mercer_summary().notes[-1]


@torch.no_grad()
def test_folded_darkformer_is_performer():
    model = mercer.fold(with_metrics(decoder("gpt2")))
    ids = tokens(2, 9)
    logits = model(ids).logits
    performer = mercer.attach(mercer.detach(model), "performer", num_features=16)
    torch.testing.assert_close(performer(ids).logits, logits)


@torch.no_grad()
def test_layers_without_positions_fold_and_the_others_are_named():
    model = with_metrics(decoder("smollm3", num_key_value_heads=2))
    ids = tokens(2, 9)
    before = model(ids).logits
    mercer.fold(model)
    assert (model(ids).logits - before).abs().max() <= 2e-5 * before.abs().max()
    folded, left = model.mercer_summary().notes
    assert folded == "the metric is folded into the projections of model.layers.1.self_attn"
    assert left.startswith("the metric is not folded: model.layers.0.self_attn: rotary positions come between")


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("llama", r"model\.layers\.\{0-1\}\.self_attn: rotary positions come between the projections and M"),
        ("gpt_neox", "rotary positions come between"),
        ("nanochat", "rotary positions come between"),
        ("exaone4", r"model\.layers\.1\.self_attn: q and k are normalised between the projections and M"),
    ],
)
def test_what_cannot_be_folded_is_refused_with_the_reason(family, words):
    model = with_metrics(decoder(family))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"cannot fold the metric of Mercer.*: .*{words}"):
        mercer.fold(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_near_fields_and_centres_read_keys_without_the_metric():
    with pytest.raises(ValueError, match="the exact near keys read q and k without M"):
        mercer.fold(with_metrics(decoder("gpt2"), window=4))
    centred = with_metrics(decoder("gpt2"), center=True)
    mercer.calibrate(centred, [tokens(1, 9)], mode="center")
    with pytest.raises(ValueError, match="centring reads the keys without M"):
        mercer.fold(centred)


def test_there_must_be_a_metric():
    with pytest.raises(ValueError, match="the mixer Performer has no metric"):
        mercer.fold(mercer.attach(decoder("gpt2"), "performer", num_features=16))
    with pytest.raises(ValueError, match="LlamaForCausalLM carries no mixer; there is nothing to fold"):
        mercer.fold(llama())
