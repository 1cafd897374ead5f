"""Put mixers into the attention layers of a model, and take them out again."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mercer.hf.binding import Attachment, argument_names, bind_calls, guard
from mercer.hf.interface import EAGER, SDPA
from mercer.hf.layers import (
    Layer,
    Summary,
    attention_dropout,
    attention_layers,
    check_shared_keys,
    choose_layers,
    head_sizes,
    is_causal,
)
from mercer.hf.rotary import applies_rotation, find_rotary, rotation_problem
from mercer.mixers import build_mixer, mixer_options
from mercer.mixers.base import Mixer

_SEED_STRIDE = 10_000  # layers draw apart: seed 1 of layer 0 must not be seed 0 of layer 1


def install(model: PreTrainedModel, spec: dict[str, Any]) -> list[Layer]:
    """Give every layer the specification names a mixer; change nothing if one of them cannot have it.

    Args:
        model: a model whose attention layers have none yet.
        spec: what the configuration keeps as `mercer`: mixer, options, layers, drop_softcap; by_layer, where some
            layers have another mixer.

    Returns:
        The layers that carry a mixer now.

    Raises:
        ValueError: see `mercer.attach`.
    """
    name, options = spec["mixer"], dict(spec.get("options") or {})
    mixer_options(name)  # an unknown mixer is said before an unfit layer
    chosen, kept = choose_layers(model, spec.get("layers", "all"), spec.get("keep", ()))
    check_shared_keys(chosen, kept)
    drop_softcap = bool(spec.get("drop_softcap", False))
    for layer in chosen + kept:
        if getattr(layer.module, "is_cross_attention", False):
            raise ValueError(f"{layer.name} is cross attention, which mixers cannot serve; choose a decoder-only model")
    for layer in chosen:
        _check_kernel_form(layer, drop_softcap)
    kinds = [mixer_of(spec, layer.index) for layer in chosen]
    mixers = [_build(layer, *kind) for layer, kind in zip(chosen, kinds, strict=True)]
    before = _implementation(model, chosen)
    for layer, mixer, (kind, own) in zip(chosen, mixers, kinds, strict=True):
        _mount(layer, mixer, follows_scaling=_follows_scaling(mixer, own), drop_softcap=drop_softcap, name=kind)
        layer.module.config._attn_implementation = EAGER if before == "eager" else SDPA
    _initialise_projections(model, mixers)
    state: Any = model
    state.mercer_before = before
    state.mercer_guards = guard(model, head=None if model.base_model is model else model)
    state.mercer_description = Summary(
        model=type(model).__name__,
        mixer=_named(kinds),
        options=options,
        converted=tuple(layer.name for layer in chosen),
        left=tuple((layer.name, layer.left or "") for layer in kept),
        notes=tuple(_notes(chosen, name, drop_softcap)),
        added_parameters=sum(p.numel() for mixer in mixers for p in mixer.parameters()),
    )
    return chosen


def mixer_of(spec: dict[str, Any], index: int) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of the mixer that a specification gives to a layer."""
    own = spec.get("by_layer", {}).get(str(index), spec)
    return own["mixer"], dict(own.get("options") or {})


@dataclasses.dataclass(frozen=True)
class Rival:
    """A mixer that could take the place of a layer's."""

    name: str
    options: dict[str, Any]
    mixer: Mixer


def new_mixer(model: Any, layer: str, name: str, options: Mapping[str, Any]) -> Rival:
    """Return a mixer for an attention layer that has one, with as many of that one's options as it knows.

    Args:
        model: a model with mixers.
        layer: the name of the attention module.
        name: of the new mixer.
        options: of its own, over those.

    Raises:
        ValueError: it does not know an option or refuses a value.
    """
    place = next(place for place in attention_layers(model) if place.name == layer)
    old = mixer_of(model.config.mercer, place.index)[1]
    known = mixer_options(name, **options)
    options = {key: value for key, value in old.items() if key in known} | dict(options)
    mixer = _build(place, name, options)
    if _follows_scaling(mixer, options):
        mixer.scale = float(place.module.scaling)
    return Rival(name, options, mixer)


def exchange_mixers(model: Any, chosen: Mapping[str, Rival]) -> None:
    """Give attention layers that have mixers others, from `new_mixer`, and note them in the configuration.

    Args:
        model: a model with mixers, changed in place.
        chosen: the new mixers, by the names of attention modules.
    """
    spec = dict(model.config.mercer)
    by_layer = dict(spec.get("by_layer", {}))
    for place in attention_layers(model):
        if place.name in chosen:
            rival = chosen[place.name]
            by_layer[str(place.index)] = {"mixer": rival.name, "options": rival.options}
            place.module.mixer = rival.mixer
    model.config.mercer = spec | {"by_layer": by_layer}
    kinds = [mixer_of(model.config.mercer, index) for index in spec["layers"]]
    model.mercer_description = dataclasses.replace(model.mercer_description, mixer=_named(kinds))


def _named(kinds: list[tuple[str, dict[str, Any]]]) -> str:
    """Return the names of the mixers of a model, the most frequent first."""
    counts = Counter(name for name, _ in kinds)
    return " and ".join(name for name, _ in counts.most_common())


def uninstall(model: PreTrainedModel) -> None:
    """Take the mixers, hooks and the attention implementation out again; the inverse of `install`."""
    state: Any = model
    for _, module in attached(model):
        for handle in module.mercer_attachment.handles:
            handle.remove()
        module.config._attn_implementation = state.mercer_before
        del module.mixer, module.mercer_attachment, module.mercer_call
    for handle in state.mercer_guards:
        handle.remove()
    del state.mercer_before, state.mercer_guards, state.mercer_description


def attached(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name and module of every attention layer that carries a mixer, in order."""
    for name, module in list(model.named_modules()):
        if isinstance(getattr(module, "mercer_attachment", None), Attachment):
            yield name, module


def fill_initial_values(model: nn.Module) -> None:
    """Fill what mixers and feature maps draw themselves and no checkpoint brought.

    transformers leaves missing tensors as uninitialised memory unless something copies into them through its own
    `initialization`, whose functions pass over tensors that were loaded.
    """
    from transformers import initialization

    for module in model.modules():
        values = getattr(module, "initial_values", None)
        if values is None or getattr(module, "_is_hf_initialized", False):
            continue
        for key, value in values().items():
            tensor = getattr(module, key)
            if tensor.device.type != "meta":
                initialization.copy_(tensor, value.to(tensor))


def _build(layer: Layer, name: str, options: dict[str, Any]) -> Mixer:
    kept = [p for p in layer.module.parameters() if p.is_floating_point()]
    device, dtype = kept[0].device, kept[0].dtype
    options = dict(options)
    if "seed" in mixer_options(name):
        options["seed"] = int(options.get("seed", 0)) + _SEED_STRIDE * layer.index
    sizes = head_sizes(layer.module)
    with torch.device(device):
        mixer = build_mixer(name, **sizes, causal=is_causal(layer.module), **options)
    projects = any(hasattr(mixer, projection) for projection in ("r_proj", "w_proj"))
    if projects and (problem := rotation_problem(layer.module)):
        raise ValueError(
            f"{layer.name}: {problem}, so mixer {name!r} cannot apply them to its own projections; choose a mixer "
            "(or options, as share=True) that reads q, k and v only"
        )
    return mixer.to(device=device, dtype=dtype).train(layer.module.training)


def _follows_scaling(mixer: Mixer, options: dict[str, Any]) -> bool:
    """Return whether the model's own factor takes the place of D^-1/2; a map of another kernel keeps its own."""
    return "scale" not in options and abs(mixer.scale * mixer.head_dim**0.5 - 1.0) < 1e-6


def _mount(layer: Layer, mixer: Mixer, *, follows_scaling: bool, drop_softcap: bool, name: str) -> None:
    module: Any = layer.module
    if follows_scaling:
        mixer.scale = float(module.scaling)
    module.mixer, module.mercer_call = mixer, None
    module.mercer_attachment = Attachment(
        cache_index=getattr(module, "layer_idx", None),
        follows_scaling=follows_scaling,
        drop_softcap=drop_softcap,
        is_softmax=name == "softmax",
        arguments=argument_names(module),
        rotary=find_rotary(type(module)) if applies_rotation(module) else None,
        handles=bind_calls(module),
    )


def _check_kernel_form(layer: Layer, drop_softcap: bool) -> None:
    module, name = layer.module, layer.name
    cap = getattr(module, "attn_logit_softcapping", None)
    if cap and not drop_softcap:
        raise ValueError(
            f"{name} caps its attention logits at {cap} (attn_logit_softcapping), which has no kernel form; pass "
            "drop_softcap=True to go on without it, and finetune"
        )
    if getattr(module, "sinks", None) is not None:
        raise ValueError(
            f"{name} has attention sinks, which mixers do not have; convert other layers (layers=) or another model"
        )


def _implementation(model: PreTrainedModel, chosen: list[Layer]) -> str:
    """Return the attention implementation that layers without a mixer go back to."""
    names = {layer.module.config._attn_implementation for layer in chosen}
    name = names.pop() if len(names) == 1 else None
    return name if name not in (None, SDPA, EAGER) else "sdpa" if model._supports_sdpa else "eager"


def _initialise_projections(model: PreTrainedModel, mixers: list[Mixer]) -> None:
    """Start the projections of the mixers (r, w, gates) as the model starts its own."""
    for mixer in mixers:
        for module in mixer.modules():
            if isinstance(module, nn.Linear) and module.weight.device.type != "meta":
                model._init_weights(module)


def _notes(chosen: list[Layer], name: str, drop_softcap: bool) -> Iterator[str]:
    dropout = max(attention_dropout(layer.module) for layer in chosen)
    if dropout and name != "softmax":
        yield f"attention dropout {dropout:g} is not applied in training: mixers have no weights to drop"
    caps = {cap for layer in chosen if (cap := getattr(layer.module, "attn_logit_softcapping", None))}
    if caps and drop_softcap:
        yield f"the cap on attention logits ({', '.join(map(str, sorted(caps)))}) was dropped"
