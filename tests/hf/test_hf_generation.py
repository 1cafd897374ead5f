"""Decoding with a mixer's state: every way of feeding the tokens gives what one forward pass gives."""

import gc
import inspect
import weakref

import pytest
import torch
from tiny_models import left_padded, llama, tokens
from transformers import DynamicCache

from mercer.hf import MixerCacheLayer, attach, cache_argument
from mercer.hf.install import attached
from mercer.mixers import MIXERS
from mercer.mixers.base import map_state

CAUSAL = sorted(MIXERS)


def greedy(model, ids, **options):
    return model.generate(ids, max_new_tokens=6, do_sample=False, **options)


@pytest.mark.parametrize("mixer", CAUSAL)
@torch.no_grad()
def test_left_padded_batches_and_beams(mixer):
    model = attach(llama(pad_token_id=0), mixer)
    ids, mask, _ = left_padded(tokens(2, 7), [0, 3])
    assert torch.equal(
        greedy(model, ids, attention_mask=mask), greedy(model, ids, attention_mask=mask, use_cache=False)
    )
    beams = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(greedy(model, ids, **beams), greedy(model, ids, **beams, use_cache=False))
    assert torch.equal(greedy(model, ids, attention_mask=mask)[1:, 3:], greedy(model, ids[1:, 3:]))


@pytest.mark.parametrize("mixer", CAUSAL)
@torch.no_grad()
def test_left_padding_does_not_change_real_tokens(mixer):
    model = attach(llama(), mixer)
    ids = tokens(1, 6)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], -1)
    mask = torch.tensor([[0] * 4 + [1] * 6])
    alone = model(ids, use_cache=False).logits
    for positions in (None, (mask.cumsum(-1) - 1).clamp(min=0)):
        logits = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 4:]
        assert (logits - alone).abs().max() <= 1e-4 * alone.abs().max()


@pytest.mark.parametrize("mixer", CAUSAL)
@torch.no_grad()
def test_a_row_of_padding_harms_nobody(mixer):
    model = attach(llama(), mixer)
    ids, mask, positions = left_padded(tokens(2, 6), [0, 6])
    for right in (False, True):
        mask[0, -2:] = 0 if right else 1
        logits = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        assert torch.isfinite(logits).all()
        real = mask[:1].bool()
        alone = model(ids[:1, : real.sum()], use_cache=False).logits
        assert (logits[:1][real] - alone[0]).abs().max() <= 1e-4 * alone.abs().max()


@pytest.mark.parametrize("mixer", CAUSAL)
@torch.no_grad()
def test_packed_documents_equal_the_same_documents_alone(mixer):
    model = attach(llama(), mixer)
    ids = tokens(1, 11)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]])
    packed = model(ids, position_ids=positions, use_cache=False).logits
    for start, end in ((0, 4), (4, 9), (9, 11)):
        alone = model(ids[:, start:end], use_cache=False).logits
        assert (packed[:, start:end] - alone).abs().max() <= 1e-4 * alone.abs().max()


@pytest.mark.parametrize("mixer", CAUSAL)
@torch.no_grad()
def test_any_split_of_the_tokens(mixer):
    model = attach(llama(pad_token_id=0), mixer)
    name = cache_argument(model)
    ids, mask, positions = left_padded(tokens(2, 9), [0, 3])
    whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for cuts in ([4, 5, 9], [1, 2, 9], [8, 9]):
        cache, parts, start = model.new_cache(), [], 0
        for end in cuts:
            call = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end], name: cache}
            parts.append(model(ids[:, start:end], **call).logits)
            start = end
        worst = (torch.cat(parts, 1) - whole)[mask.bool()].abs().max()
        assert worst <= 1e-4 * whole.abs().max()
        assert cache.get_seq_length() == 9


@torch.no_grad()
def test_sampling_chunked_prefill_and_a_given_cache():
    model = attach(llama(), "cubit")
    ids = tokens(2, 9)
    torch.manual_seed(5)
    sampled = model.generate(ids, max_new_tokens=6, do_sample=True)
    torch.manual_seed(5)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=True, use_cache=False), sampled)
    expected = greedy(model, ids)
    assert torch.equal(greedy(model, ids, prefill_chunk_size=4), expected)
    assert torch.equal(greedy(model, ids, **{cache_argument(model): model.new_cache()}), expected)


@torch.no_grad()
def test_the_cache_a_model_makes_itself_holds_states():
    model = attach(llama(num_hidden_layers=3), "cubit", layers="0,2")
    ids = tokens(1, 6)
    name = cache_argument(model)
    for cache in (None, DynamicCache(), DynamicCache(config=model.config), model.new_cache()):
        first = model(ids[:, :4], **({} if cache is None else {name: cache}), use_cache=True)
        layers = first[name].layers
        assert [isinstance(layer, MixerCacheLayer) for layer in layers] == [True, False, True]
        second = model(ids[:, 4:], **{name: first[name]})
        assert (second.logits - model(ids, use_cache=False).logits[:, 4:]).abs().max() <= 1e-4
        assert [layer.get_seq_length() for layer in layers] == [6, 6, 6]


@torch.no_grad()
def test_cache_layers_follow_the_batch():
    model = attach(llama(), "cubit")
    name = cache_argument(model)
    ids, more = tokens(3, 5), tokens(3, 2)
    alone = model(torch.cat([ids, more], 1), use_cache=False).logits[:, 5:]

    def filled():
        cache = model.new_cache()
        model(ids, **{name: cache})
        return cache

    def after(cache, rows):
        return (model(more[rows], **{name: cache}).logits - alone[rows]).abs().max()

    order = torch.tensor([2, 0, 0])
    cache = filled()
    cache.reorder_cache(order)
    assert after(cache, order) <= 1e-4
    cache = filled()
    cache.batch_select_indices(torch.tensor([1]))
    assert after(cache, torch.tensor([1])) <= 1e-4
    cache = filled()
    cache.batch_repeat_interleave(2)
    assert after(cache, torch.tensor([0, 0, 1, 1, 2, 2])) <= 1e-4
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.layers[0].state is None
    model(ids, **{name: cache})
    assert after(cache, torch.arange(3)) <= 1e-4


def test_cache_layers_answer_what_every_version_asks():
    layer = MixerCacheLayer()
    assert layer.get_mask_sizes(3) == (3, 0)
    layer.store(None, 4)
    assert layer.get_mask_sizes(2) == (6, 0)
    assert layer.get_max_length() == layer.get_max_cache_shape() == -1
    assert not layer.is_croppable
    assert not layer.is_compileable
    assert map_state(layer.state, torch.neg) is None


@torch.no_grad()
def test_nothing_of_a_call_outlives_it():
    model = attach(llama(), "cubit")
    kept = []

    def remember(module, args, kwargs):
        kept.append(weakref.ref(kwargs["x"]))

    for _, module in attached(model):
        module.mixer.register_forward_pre_hook(remember, with_kwargs=True)
    gc.collect()
    gc.disable()
    try:
        model(tokens(1, 5), use_cache=False)
        assert len(kept) == 2
        assert all(reference() is None for reference in kept)
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="shape"):
        next(attached(model))[1](torch.zeros(1, 5, 31))
    assert all(module.mercer_call is None for _, module in attached(model))


def test_replicas_of_data_parallel_keep_their_calls_apart():
    model = attach(llama(), "cubit")
    module = next(attached(model))[1]
    replica = module._replicate_for_data_parallel()
    replica.mercer_call = object()
    assert module.mercer_call is None
    assert replica.mercer_attachment is module.mercer_attachment


def test_the_signature_of_forward_is_transformers_own():
    model = llama()
    own = inspect.signature(model.forward)
    assert inspect.signature(attach(model, "softmax").forward) == own
