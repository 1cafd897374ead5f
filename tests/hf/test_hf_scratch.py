"""Models from nothing: the sizes of the paper, the same start for every mixer."""

import pytest
import torch
from tiny_models import tokens

from mercer.hf import SIZES, from_scratch


def parameters(*arguments, **options):
    with torch.device("meta"):
        model = from_scratch(*arguments, vocab_size=256, max_length=64, **options)
    return sum(p.numel() for p in model.parameters())


def test_cubit_adds_what_the_paper_says():
    plain = parameters("125m", "softmax")
    assert parameters("125m", "cubit") - plain == 7_198_416
    assert parameters("125m", "cubit", mixer_options={"share": True}) - plain == 111_312


@pytest.mark.parametrize(
    ("size", "millions"),
    [("tiny", 0.855), ("small", 4.83), ("base", 25.7), ("125m", 85.0), ("350m", 303.7), ("1.3b", 1214.5)],
)
def test_sizes_without_their_vocabulary(size, millions):
    row = SIZES[size]
    assert row.hidden_size % row.num_heads == 0
    assert (parameters(size, "softmax") - 256 * row.hidden_size) / 1e6 == pytest.approx(millions, rel=0.02)


def test_mixers_share_their_start():
    models = [from_scratch("tiny", name, vocab_size=64, max_length=32, seed=3) for name in ("softmax", "cubit")]
    other = from_scratch("tiny", "softmax", vocab_size=64, max_length=32, seed=4)
    own, cubit = (model.state_dict() for model in models)
    assert all(torch.equal(own[name], cubit[name]) for name in own)
    assert not torch.equal(other.state_dict()["model.embed_tokens.weight"], own["model.embed_tokens.weight"])
    assert models[0].model.layers[0].self_attn.q_proj.bias is not None
    assert models[0].lm_head.weight is models[0].model.embed_tokens.weight
    assert models[0].training


def test_building_a_model_leaves_the_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    from_scratch("tiny", "cubit", vocab_size=64, max_length=32)
    assert torch.equal(torch.rand(1), expected)


@torch.no_grad()
def test_a_classifier_reads_both_ways():
    model = from_scratch(
        "tiny", "softmax", vocab_size=64, max_length=32, kind="classifier", num_labels=3, pad_token_id=0
    ).eval()
    assert type(model).__name__ == "MercerBertForSequenceClassification"
    ids = tokens(2, 6)
    assert model(ids).logits.shape == (2, 3)
    assert not any(module.mixer.causal for module in model.modules() if hasattr(module, "mercer_attachment"))


def test_wrong_sizes_and_kinds():
    with pytest.raises(ValueError, match=r"unknown size 'tini'; choose one of .*did you mean 'tiny'"):
        from_scratch("tini", "softmax", vocab_size=64, max_length=32)
    with pytest.raises(ValueError, match="unknown kind 'regressor'; choose one of classifier, language"):
        from_scratch("tiny", "softmax", vocab_size=64, max_length=32, kind="regressor")
    with pytest.raises(ValueError, match="unknown mixer 'softmux'"):
        from_scratch("tiny", "softmux", vocab_size=64, max_length=32)
