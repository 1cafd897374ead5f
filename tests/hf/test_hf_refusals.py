"""Every wrong use is refused in words, and a refused model stays as it was."""

import logging

import pytest
import torch
from tiny_models import build, decoder, llama, tokens
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_causal_mask

from mercer.evaluate.layer_costs import layer_costs
from mercer.hf import attach, cache_argument, detach
from mercer.hf.install import attached


def refuse(model, text, mixer="softmax", **options):
    state, config, kind = model.state_dict(), model.config, type(model)
    with pytest.raises(ValueError, match=text):
        attach(model, mixer, **options)
    assert type(model) is kind
    assert model.config is config
    assert config._attn_implementation in ("sdpa", "eager")
    assert model.state_dict().keys() == state.keys()
    assert not list(attached(model))


def test_models_without_a_layer_to_convert():
    refuse(decoder("mistral", sliding_window=4), r"no attention layer .* can carry a mixer .*sliding attention of 4")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    refuse(build("Mamba2ForCausalLM", **small, num_heads=4, head_dim=16, n_groups=1), "it has no attention layer")


def test_logits_with_a_cap():
    model = decoder("gemma2", attn_logit_softcapping=50.0)
    refuse(model, r"caps its attention logits at 50.0 .*drop_softcap=True")
    attach(model, "softmax", drop_softcap=True)
    assert "cap on attention logits (50.0) was dropped" in str(model.mercer_summary())
    assert torch.isfinite(model(tokens(1, 6)).logits).all()


def test_attention_sinks():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    refuse(build("GptOssForCausalLM", **sizes, **heads), "has attention sinks, which mixers do not have")


def test_encoder_decoders_and_cross_attention():
    sizes = {"vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}
    heads = {"decoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    refuse(build("BartForConditionalGeneration", **sizes, **heads), "is an encoder-decoder")
    refuse(decoder("gpt2", add_cross_attention=True), "is cross attention, which mixers cannot serve")


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ("2", r"layers names 2, but the attention layers are \[0, 1\]"),
        ("0", r"layer 0 \(model.layers.0.self_attn\) cannot carry a mixer: sliding attention of 4; choose among \[1\]"),
        ("first", "unknown layers 'first'; choose one of 3,5,7, all, global"),
        ([], "layers is empty"),
    ],
)
def test_layers_that_are_not_there(layers, text):
    refuse(decoder("gemma3"), text, layers=layers)


def test_layers_that_share_keys_go_together():
    refuse(decoder("gemma4"), r"layers \[1, 3\] share their keys and values, so all of them or none", layers="1")


def test_layers_that_share_keys_are_not_measured_one_at_a_time():
    with pytest.raises(ValueError, match=r"layers \[3\] of Gemma4ForCausalLM use the keys of others"):
        layer_costs(decoder("gemma4"), [])


def test_rotary_positions_that_cannot_be_given_to_r():
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    dense = {"num_key_value_heads": 4, "num_hidden_layers": 2, "first_k_dense_replace": 2}
    model = build("DeepseekV3ForCausalLM", **sizes, **dense, **latent)
    refuse(model, r"DeepseekV3Attention applies its rotary positions in a way of its own.*share=True", mixer="cubit")
    attach(model, "cubit", share=True)
    assert torch.isfinite(model(tokens(1, 5)).logits).all()


def test_wrong_names_and_objects():
    refuse(llama(), "unknown mixer 'cubitt'; choose one of .*did you mean 'cubit'", mixer="cubitt")
    refuse(llama(), "must be JSON values", mixer="cubit", ridge=torch.ones(1))
    with pytest.raises((TypeError, ValueError), match="ridgee"):
        attach(llama(), "cubit", ridgee=1.0)
    with pytest.raises(ValueError, match="attach needs a model of transformers, got Linear"):
        attach(nn.Linear(2, 2), "softmax")
    model = attach(llama(), "softmax")
    with pytest.raises(ValueError, match=r"MercerLlamaForCausalLM carries mixers already; call mercer.detach"):
        attach(model, "cubit")
    with pytest.raises(ValueError, match="carries no mixer; there is nothing to detach"):
        detach(llama())
    with pytest.raises(ValueError, match="'eager' would replace the mixers"):
        model.set_attn_implementation("eager")


def test_a_mask_for_every_pair_of_tokens():
    model = attach(llama(), "softmax")
    square = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"attention mask of shape \(1, 1, 5, 5\); mixers read padding"):
        model(tokens(1, 5), attention_mask=square)
    arguments = {"config": model.config, "inputs_embeds": torch.zeros(1, 5, 32), "attention_mask": None}
    arguments |= {cache_argument(model): None}
    with pytest.raises(ValueError, match=r"asks for an attention pattern \(N x N mask\)"):
        create_causal_mask(**arguments, or_mask_function=lambda b, h, q, k: k < 2)
    with pytest.raises(ValueError, match=r"asks for an attention pattern \(N x N mask\)"):
        create_causal_mask(**arguments, block_sequence_ids=torch.tensor([[-1, 0, 0, 0, -1]]))


def test_caches_of_another_kind(caplog):
    model, ids = attach(llama(), "softmax"), tokens(1, 5)
    name = cache_argument(model)
    with pytest.raises(ValueError, match=r"static cache.*model.new_cache\(\)"):
        model(ids, **{name: StaticCache(config=model.config, max_cache_len=16)})
    with pytest.raises(ValueError, match=r"static cache.*model.new_cache\(\)"):
        model(ids, attention_mask=torch.ones_like(ids), **{name: StaticCache(config=model.config, max_cache_len=16)})
    filled = DynamicCache(config=model.config)
    llama()(ids, **{name: filled})
    with pytest.raises(ValueError, match="a DynamicLayer that another attention has filled"):
        model(ids, **{name: filled})
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    with caplog.at_level(logging.WARNING):
        replaced = model.generate(ids, max_new_tokens=3, do_sample=False, cache_implementation="static")
    assert torch.equal(replaced, expected)
    assert "cache_implementation 'static' is set aside" in caplog.text


def test_a_mask_that_forgets_the_past():
    model, ids = attach(llama(), "softmax"), tokens(2, 6)
    cache = model.new_cache()
    mask = torch.tensor([[0, 1, 1, 1, 1, 1], [1] * 6])
    model(ids[:, :4], attention_mask=mask[:, :4], **{cache_argument(model): cache})
    with pytest.raises(ValueError, match="attention_mask covers 2 of 6 tokens; it must cover the past"):
        model(ids[:, 4:], attention_mask=mask[:, 4:], **{cache_argument(model): cache})


def test_decoding_that_takes_tokens_back():
    model, ids = attach(llama(), "softmax"), tokens(1, 5)
    with pytest.raises(ValueError, match=r"crop"):
        model.generate(ids, max_new_tokens=4, assistant_model=llama(), do_sample=False)
    cache = model.new_cache()
    model(ids, **{cache_argument(model): cache})
    with pytest.raises(ValueError, match=r"cannot crop the state of a mixer by -1 tokens.*assisted"):
        cache.crop(-1)


def test_packed_rows_with_a_cache():
    model, ids = attach(llama(), "softmax"), tokens(1, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match=r"position_ids restart inside a row .* but use_cache=True"):
        model(ids, position_ids=positions, use_cache=True)
    whole = model(ids, position_ids=positions)  # the cache is turned off where nothing was asked for
    alone = model(ids[:, 3:])
    assert (whole.logits[:, 3:] - alone.logits).abs().max() <= 1e-5


def test_an_attention_that_goes_past_its_mixer():
    model = attach(llama(), "softmax")
    module = next(attached(model))[1]
    module.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    with pytest.raises(RuntimeError, match="LlamaAttention did not use its mixer"):
        model(tokens(1, 5))


def test_dropout_on_attention_weights(caplog):
    model = llama(attention_dropout=0.5)
    ids = tokens(1, 8)

    def twice(model):
        torch.manual_seed(3)
        return model.train()(ids, use_cache=False).logits, model(ids, use_cache=False).logits

    own = twice(model)
    attach(model, "softmax")
    for ours, theirs in zip(twice(model), own, strict=True):  # softmax drops the very same weights
        assert (ours - theirs).abs().max() <= 1e-5
    detach(model)
    attach(model, "cubit")
    assert "attention dropout 0.5 is not applied in training" in str(model.mercer_summary())
    with caplog.at_level(logging.WARNING):
        first, second = twice(model)
    assert torch.equal(first, second)
    assert caplog.text.count("attention dropout 0.5 of LlamaAttention is not applied") == 1
