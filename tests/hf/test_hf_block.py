"""Classifiers of the Coulomb paper: queries and keys are the layer's input, padding is out of every sum and mean."""

import copy

import pytest
import torch
from tiny_models import tokens
from transformers import AutoModelForSequenceClassification

from mercer.hf import Size, from_scratch, load
from mercer.hf.install import attached
from mercer.hf.pooling import pool, pooled_states
from mercer.mixers import build_mixer

MAPS = ("favor", "elu", "softplus", "sigmoid2", "softmaxfeat", "cos2", "porf_softplus")
SMALL = Size(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, learning_rate=1e-3)


def classifier(features="softplus", **options):
    arguments = {"kind": "classifier", "projections": "value", "pooling": "mean", "pad_token_id": 0} | options
    mixer_options = {"features": features, "num_features": 8} if features else {}
    mixer = "particle" if features else "softmax"
    return from_scratch(SMALL, mixer, vocab_size=64, max_length=32, mixer_options=mixer_options, **arguments).eval()


@torch.no_grad()
@pytest.mark.parametrize(
    ("features", "projections", "pooling"),
    [*((name, "value", "mean") for name in MAPS), ("favor", "all", "first"), ("softplus", "all", None)],
)
def test_padding_is_out_of_every_sum(features, projections, pooling):
    model = classifier(features, projections=projections, pooling=pooling).double()
    ids, real = tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
    padded, mask = torch.cat([ids, torch.full((2, 5), 3)], 1), torch.cat([real, torch.zeros(2, 5, dtype=torch.long)], 1)

    def states(ids, mask):
        return model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state[:, :7]

    assert torch.allclose(states(padded, mask), states(ids, real), atol=1e-12)
    logits = model(input_ids=ids, attention_mask=real).logits
    assert torch.allclose(model(input_ids=padded, attention_mask=mask).logits, logits, atol=1e-12)
    assert not torch.allclose(states(padded, None), states(ids, real), atol=1e-7)  # it is the mask that keeps it out


@torch.no_grad()
def test_queries_and_keys_are_the_reshaped_input():
    model = classifier()
    seen = {}
    layer = next(layer for _, layer in attached(model))
    layer.mixer.register_forward_hook(lambda _, args, out: seen.update(zip("qkv", args, strict=True)))
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(x=[*args, *kwargs.values()][0]), with_kwargs=True
    )
    model(input_ids=tokens(2, 5))
    heads = seen["x"].view(2, 5, 2, 8).transpose(1, 2)
    assert torch.equal(seen["q"], heads)
    assert torch.equal(seen["k"], heads)
    assert torch.allclose(seen["v"], layer.value(seen["x"]).view(2, 5, 2, 8).transpose(1, 2))
    names = {name.rpartition("self.")[2] for name in model.state_dict() if "self." in name}
    assert names == {"value.weight", "value.bias", "mixer.features.omega"}


def test_the_paper_s_model_has_its_sizes():
    with torch.device("meta"):
        paper = Size(hidden_size=128, num_layers=2, num_heads=2, intermediate_size=256, learning_rate=2e-4)
        model = from_scratch(
            paper, "particle", kind="classifier", vocab_size=30522, max_length=128, projections="value", pooling="mean",
            dropout=0.1,
        )  # fmt: skip
    width, feed_forward = 128, 256
    embeddings = (30522 + 128 + 2) * width + 2 * width
    layer = 2 * (width * width + width) + 2 * width * feed_forward + feed_forward + width + 4 * width
    assert sum(p.numel() for p in model.parameters()) == embeddings + 2 * layer + 2 * width + 2
    assert {layer.mixer.features.omega.shape for _, layer in attached(model)} == {(2, 256, 64)}
    config = model.config
    assert (config.hidden_act, config.hidden_dropout_prob, config.max_position_embeddings) == ("gelu", 0.1, 128)


@pytest.mark.parametrize("features", MAPS)
def test_particles_start_as_decided(features):
    mixer = build_mixer("particle", num_heads=2, head_dim=64, causal=False, features=features, num_features=512)
    exponential = features == "favor"
    lengths = mixer.features.omega.norm(dim=-1)
    assert lengths.square().mean().item() == pytest.approx(64.0 if exponential else 1.0, rel=0.05)
    assert mixer.scale == pytest.approx(64**-0.5 if exponential else 1.0)  # split as a root on q and k


@torch.no_grad()
def test_the_mean_is_over_real_tokens():
    model = classifier(features=None)
    ids, mask = tokens(2, 6), torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
    expected = torch.stack([hidden[0].mean(0), hidden[1, :3].mean(0)])
    assert torch.allclose(pooled_states(model, {"input_ids": ids, "attention_mask": mask}), expected, atol=1e-6)
    assert torch.allclose(model(input_ids=ids, attention_mask=mask).logits, model.classifier(expected), atol=1e-6)
    first = classifier(features=None, pooling="first")
    assert torch.allclose(first(input_ids=ids, attention_mask=mask).logits, first.classifier(hidden[:, 0]), atol=1e-6)


def test_pooling_reads_left_padded_rows_too():
    hidden, mask = torch.arange(8.0).view(1, 4, 2), torch.tensor([[0, 1, 1, 0]])
    assert pool(hidden, mask, "first").tolist() == [[2.0, 3.0]]
    assert pool(hidden, mask, "last").tolist() == [[4.0, 5.0]]
    assert pool(hidden, mask).tolist() == [[3.0, 4.0]]
    assert pool(hidden, torch.zeros(1, 4)).tolist() == [[0.0, 0.0]]
    assert pool(hidden, None, "last").tolist() == [[6.0, 7.0]]


@torch.no_grad()
def test_a_saved_classifier_is_the_same(tmp_path):
    model, ids = classifier(dropout=0.1), tokens(2, 6)
    mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    logits = model(input_ids=ids, attention_mask=mask).logits
    model.save_pretrained(tmp_path)
    for again in (load(tmp_path), AutoModelForSequenceClassification.from_pretrained(tmp_path), copy.deepcopy(model)):
        assert torch.equal(again(input_ids=ids, attention_mask=mask).logits, logits)
        assert again.config.mercer["projections"] == "value"


@torch.no_grad()
def test_a_language_model_can_share_its_input_too():
    model = from_scratch(SMALL, "particle", vocab_size=64, max_length=32, projections="value").eval()
    assert not any("q_proj" in name or "k_proj" in name for name, _ in model.named_parameters())
    ids = tokens(2, 6)
    assert torch.allclose(model(ids).logits[:, :4], model(ids[:, :4]).logits, atol=1e-5)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="unknown projections 'values'; choose one of all, value"):
        classifier(projections="values")
    with pytest.raises(ValueError, match="unknown pooling 'max'; choose one of first, last, mean"):
        classifier(pooling="max")
    with pytest.raises(ValueError, match=r"pooling \(mean\) and dropout \(0.0\) are a classifier's"):
        from_scratch(SMALL, "particle", vocab_size=64, max_length=32, pooling="mean")
    from mercer import detach

    with pytest.raises(ValueError, match="built with projections='value', pooling='mean': it has no attention"):
        detach(classifier())
