"""Exchange the attention of a transformers model for a mixer, in place, and back."""

import copy
import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel

from mercer.hf.block import arrangement
from mercer.hf.classes import MercerModel, base_class, check_options, generated
from mercer.hf.install import install, uninstall
from mercer.hf.layers import kept_numbers

M = TypeVar("M")


def attach(
    model: M,
    mixer: str = "darkformer",
    *,
    layers: str | Iterable[int] = "all",
    keep: Iterable[int] = (),
    drop_softcap: bool = False,
    **options: Any,
) -> M:
    """Let the attention layers of a transformers model mix with `mixer`.

    The model is changed in place, without a copy of its weights: its class becomes the generated one
    (`MercerLlamaForCausalLM`), its configuration a copy with the field `mercer`. q, k and v are the model's own, with
    its norms and positions; so is the factor on q.k, unless the mixer's kernel has one of its own. What the mixer
    adds (Cubit's r, DeltaFormer's gate) starts as the model's own projections do.

    With mixer="softmax" every logit stays as it was (to rounding); that is the check of a new family.

    Args:
        model: a decoder or a bidirectional encoder of transformers, pretrained or built from a configuration.
        mixer: a name of `mercer.MIXERS`.
        layers: "all" or "global": every layer with full attention; "3,5,7" or numbers: those. Layers with a sliding
            window keep their softmax, which is linear in time already; `model.mercer_summary()` lists them.
        keep: numbers of layers that keep theirs all the same; `mercer layers` finds those that reach far back.
        drop_softcap: convert although the model caps its attention logits (Gemma 2), without the cap.
        **options: options of the mixer. A `seed` gives every layer a draw of its own.

    Returns:
        The same model.

    Raises:
        ValueError: no layer can be converted, or one of them has what no mixer has: a cap on its logits, sinks, cross
            attention, rotary positions that cannot be repeated for r; an unknown mixer or option.

    Cost: the mixers' own parameters; nothing else is allocated.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
        >>> model = attach(model, "cubit", layers=[1])
        >>> print(model.mercer_summary())
        MercerLlamaForCausalLM: cubit in 1 of 2 attention layers, 602 parameters added
          carries the mixer: model.layers.1.self_attn
          left as it was (not asked for): model.layers.0.self_attn
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"attach needs a model of transformers, got {type(model).__name__}; unwrap it first "
            "(peft: get_base_model()), or use mercer.MixerAttention in a model of your own"
        )
    if isinstance(model, MercerModel):
        raise ValueError(f"{type(model).__name__} carries mixers already; call mercer.detach(model) first")
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder: its cross attention reads keys of another sequence, which "
            "mixers cannot; choose a decoder-only or an encoder-only model"
        )
    check_options(options)
    spec = {
        "mixer": mixer,
        "options": options,
        "layers": layers if isinstance(layers, str) else [int(index) for index in layers],
        "keep": kept_numbers(keep),
        "drop_softcap": drop_softcap,
    }
    config_class, model_class = generated(type(model))
    originals = _own_configs(model)
    try:
        chosen = install(model, spec)
    except BaseException:
        _exchange_configs(model, originals)
        raise
    del spec["keep"]
    spec["layers"] = sorted({layer.index for layer in chosen})  # a checkpoint must not depend on what "all" means later
    model.config.__class__ = config_class
    model.config.mercer = spec
    model.__class__ = model_class
    converted: Any = model
    converted.mercer_description = dataclasses.replace(converted.mercer_description, model=model_class.__name__)
    return model


def detach(model: M) -> M:
    """Give a model its own attention back; what the mixers had learned is lost.

    The class and the type of the configuration become transformers' own again, the logits those of the weights as they
    are now: bit-equal to before `attach` if nothing was trained.

    Args:
        model: a model with mixers, attached or loaded.

    Returns:
        The same model.

    Raises:
        ValueError: the model carries no mixer, or its layers were changed beside the mixer (`from_scratch` with
            projections or pooling), so that no attention of its own is left.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4))
        >>> type(detach(attach(model, "softmax"))).__name__
        'GPT2LMHeadModel'
    """
    if not isinstance(model, MercerModel):
        raise ValueError(f"{type(model).__name__} carries no mixer; there is nothing to detach")
    own: Any = model
    if changed := arrangement(own.config.mercer):
        asked = ", ".join(f"{key}={value!r}" for key, value in changed.items())
        raise ValueError(f"{type(model).__name__} was built with {asked}: it has no attention of its own to go back to")
    uninstall(own)
    del own.config.mercer
    own.config.__class__ = type(own.config).__mro__[1]
    own.__class__ = base_class(type(own))
    return model


def _own_configs(model: PreTrainedModel) -> dict[int, PreTrainedConfig]:
    """Give the model its own copies of its configurations, which it may share with other models.

    Returns:
        The original of every copy, by the copy's id.
    """
    memo: dict[int, Any] = {}
    held = [value for module in model.modules() for value in vars(module).values()]
    originals = {id(config): config for config in held if isinstance(config, PreTrainedConfig)}
    copies = {key: copy.deepcopy(config, memo) for key, config in originals.items()}
    _exchange_configs(model, copies)
    return {id(copies[key]): originals[key] for key in originals}


def _exchange_configs(model: PreTrainedModel, replacements: dict[int, PreTrainedConfig]) -> None:
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig) and id(value) in replacements:
                setattr(module, name, replacements[id(value)])
