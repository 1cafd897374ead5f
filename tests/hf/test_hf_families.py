"""Every family: exact with mixer="softmax", sliding layers left, generation with the mixer's own state."""

import sys

import pytest
import torch
from tiny_models import DECODERS, build, clone, decoder, left_padded, llama, tokens

from mercer.hf import attach, detach
from mercer.hf.install import attached

FAMILIES = sorted(DECODERS)
WITH_SLIDING_LAYERS = {"gemma2", "gemma3", "gemma4", "cohere2", "exaone4"}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_softmax_leaves_every_logit_and_detach_gives_the_model_back(family, record_property):
    model = decoder(family)
    ids = tokens(2, 9)
    padded, mask, positions = left_padded(ids, [0, 4])
    calls = [{"input_ids": ids}, {"input_ids": padded, "attention_mask": mask, "position_ids": positions}]
    before = [model(**call, use_cache=False).logits for call in calls]
    kind, config = type(model), model.config

    attach(model, "softmax")
    real = [torch.ones_like(ids, dtype=torch.bool), mask.bool()]
    worst = max(
        (model(**call, use_cache=False).logits - old)[rows].abs().max().item()
        for call, old, rows in zip(calls, before, real, strict=True)
    )
    record_property("worst", worst)
    print(f"{family}: {worst:.1e}")
    assert worst <= 2e-6 * max(1.0, before[0].abs().max().item())
    left = model.mercer_summary().left
    assert bool(left) == (family in WITH_SLIDING_LAYERS)
    assert all("sliding attention of 4" in reason for _, reason in left)
    assert model.config.model_type == f"mercer_{config.model_type}"

    detach(model)
    assert type(model) is kind
    assert type(model.config) is type(config)
    assert model.config.to_dict() == config.to_dict()
    assert not any("mercer" in name for module in model.modules() for name in vars(module))
    for call, old in zip(calls, before, strict=True):
        assert torch.equal(model(**call, use_cache=False).logits, old)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mixer", ["softmax", "cubit"])
@torch.no_grad()
def test_generation_with_a_state_equals_generation_without_cache(family, mixer):
    model = attach(decoder(family, pad_token_id=0), mixer)
    ids, mask, _ = left_padded(tokens(2, 7), [0, 3])
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(**call), model.generate(**call, use_cache=False))


ROTATED = {"cohere2": [], "exaone4": [], "smollm3": [0], "gpt2": [], "opt": []}  # the others: every converted layer


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_rotation_given_to_mixers_is_the_one_of_q(family, monkeypatch):
    model = decoder(family)
    attention = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
    source = sys.modules[type(attention).__module__]
    own, rotated, given = getattr(source, "apply_rotary_pos_emb", None), [], {}
    attach(model, "cubit")

    def record(*args, **kwargs):
        result = own(*args, **kwargs)
        pair = (args[0], result[0] if isinstance(result, tuple) else result)
        rotated.append([t.transpose(1, 2) for t in pair] if kwargs.get("unsqueeze_dim") == 2 else pair)
        return result

    def watch(module, args, kwargs):
        given[module] = kwargs["rotate"], (rotated[0] if rotated else None)
        rotated.clear()

    if own is not None:
        monkeypatch.setattr(source, "apply_rotary_pos_emb", record)
    layers = [module for _, module in attached(model)]
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_pre_hook(lambda module, args: rotated.clear())
    for module in layers:
        module.mixer.register_forward_pre_hook(watch, with_kwargs=True)
    model(tokens(2, 9), use_cache=False)

    assert len(given) == len(layers)
    expected = ROTATED.get(family, range(len(layers)))
    for order, module in enumerate(layers):
        rotate, pair = given[module.mixer]
        assert (rotate is not None) == (order in expected)
        if rotate is not None:
            before, after = pair
            rest = torch.randn(*before.shape[:-1], module.mixer.head_dim - before.shape[-1])
            assert torch.equal(rotate(torch.cat([before, rest], -1)), torch.cat([after, rest], -1))


BIDIRECTIONAL = {
    "bert": (
        "BertForMaskedLM",
        {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
    ),
}


@pytest.mark.parametrize("family", sorted(BIDIRECTIONAL))
@torch.no_grad()
def test_bidirectional_models_are_exact(family):
    class_name, arguments = BIDIRECTIONAL[family]
    model = build(class_name, **arguments)
    if family == "vit":
        calls = [({"pixel_values": torch.randn(2, 3, 16, 16)}, slice(None))]
    else:
        mask = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
        calls = [({"input_ids": tokens(2, 9)}, slice(None))]
        calls += [({"input_ids": tokens(2, 9), "attention_mask": mask}, mask.bool())]
    before = [model(**call).logits for call, _ in calls]
    attach(model, "softmax")
    assert len(model.mercer_summary().converted) == 2
    for (call, real), old in zip(calls, before, strict=True):
        assert (model(**call).logits - old)[real].abs().max() <= 2e-6 * old.abs().max()
    with pytest.raises(ValueError, match="is bidirectional: it has no cache"):
        model.new_cache()
    detach(model)
    assert torch.equal(model(**calls[0][0]).logits, before[0])


@torch.no_grad()
def test_eager_models_stay_eager_where_they_have_no_mixer():
    model = decoder("gemma3", attn_implementation="eager")
    ids, mask, _ = left_padded(tokens(2, 9), [0, 4])
    before = model(ids, attention_mask=mask).logits
    attach(model, "softmax")
    assert (model(ids, attention_mask=mask).logits - before)[mask.bool()].abs().max() <= 1e-5
    detach(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids, attention_mask=mask).logits, before)


@torch.no_grad()
def test_hybrids_serve_full_layers_without_a_mixer_from_the_same_mask():
    model = llama(num_hidden_layers=4, pad_token_id=0)
    ids, mask, _ = left_padded(tokens(2, 9), [0, 4])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]])
    packed = {"input_ids": ids[:1], "position_ids": positions, "use_cache": False}
    before, before_packed = model(ids, attention_mask=mask).logits, model(**packed).logits
    attach(model, "softmax", layers="1,3")
    assert (model(ids, attention_mask=mask).logits - before)[mask.bool()].abs().max() <= 1e-5
    assert (model(**packed).logits - before_packed).abs().max() <= 1e-5
    assert [reason for _, reason in model.mercer_summary().left] == ["not asked for"] * 2
    call = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**call), model.generate(**call, use_cache=False))


@torch.no_grad()
def test_models_with_one_configuration_do_not_change_each_other():
    model = llama()
    other = type(model)(model.config).eval()
    ids = tokens(1, 5)
    before = other(ids).logits
    attach(model, "cubit")
    assert type(other.config).__name__ == "LlamaConfig"
    assert other.config._attn_implementation == "sdpa"
    assert torch.equal(other(ids).logits, before)


def test_copies_are_independent():
    model = attach(llama(), "cubit")
    copy = clone(model)
    ids = tokens(1, 5)
    before = model(ids).logits
    detach(copy)
    assert torch.equal(model(ids).logits, before)
    assert not list(attached(copy))
    assert len(list(attached(model))) == 2
