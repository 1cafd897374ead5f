"""Bring a mixer what transformers' attention function is not given: hidden states, rotation, and its state.

A forward pre-hook of the attention module collects them; the attention function takes them; the forward hook clears
what is left, after an error too. Nothing of a call outlives it, so hidden states are not kept alive and no reference
runs in a circle. Hooks also run when gradient checkpointing computes a layer again.
"""

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from mercer.hf.cache import MixerCacheLayer, mixer_layer
from mercer.hf.rotary import Rotary, rotation
from mercer.mixers.base import Rotate


@dataclasses.dataclass(frozen=True)
class Call:
    """What one forward call brings to the mixer."""

    x: Tensor | None = None
    rotate: Rotate | None = None
    layer: MixerCacheLayer | None = None


@dataclasses.dataclass(frozen=True)
class Attachment:
    """What an attention module that carries a mixer remembers; lies on the module as `mercer_attachment`.

    The call in progress lies beside it as `mercer_call`, on the module itself: DataParallel's replicas share all
    objects that a module holds, and run at the same time.
    """

    cache_index: int | None
    follows_scaling: bool  # whether the mixer's factor on q.k is the model's own
    drop_softcap: bool
    is_softmax: bool
    arguments: tuple[str, ...]  # of the module's forward
    rotary: Rotary | None  # None where the module does not rotate
    handles: list[RemovableHandle]


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's forward, in order."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]  # without self


def _by_name(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _bind(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    attachment: Attachment = module.mercer_attachment
    given = _by_name(attachment.arguments, args, kwargs)
    cache = next(
        (given[name] for name in ("cache", "past_key_values", "layer_past") if given.get(name) is not None), None
    )
    cache = getattr(cache, "self_attention_cache", cache)
    layer = None
    if cache is not None and attachment.cache_index is not None and module.mixer.causal:
        layer = mixer_layer(cache, attachment.cache_index)
    rotate = rotation(attachment.rotary, given.get("position_embeddings"))
    module.mercer_call = Call(x=given.get("hidden_states"), rotate=rotate, layer=layer)


def _release(module: Any, args: tuple[Any, ...], output: Any) -> None:
    call, module.mercer_call = module.mercer_call, None
    if call is not None and output is not None:  # output is None after an error, which then speaks for itself
        raise RuntimeError(
            f"{type(module).__name__} did not use its mixer: its forward bypassed transformers' AttentionInterface; "
            "detach the model and convert other layers"
        )


def bind_calls(module: nn.Module) -> list[RemovableHandle]:
    """Let every call of an attention module with a mixer be collected and cleared; returns the hooks' handles."""
    return [
        module.register_forward_pre_hook(_bind, with_kwargs=True),
        module.register_forward_hook(_release, always_call=True),
    ]


def take_call(module: Any) -> Call:
    """Return what the pre-hook collected and forget it."""
    call, module.mercer_call = module.mercer_call, None
    return Call() if call is None else call


@dataclasses.dataclass(frozen=True)
class _Settle:
    """A forward pre-hook of a model's body; see `guard`."""

    arguments: tuple[str, ...]
    counts_tokens: bool

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given, changes = _by_name(self.arguments, args, kwargs), {}
        if isinstance(given.get("logits_to_keep"), int):
            changes["logits_to_keep"] = None  # read by the bodies of models that would drop queries half-way (Gemma 4)
        if _is_packed_and_cached(given):
            if given.get("use_cache"):
                raise ValueError(
                    "position_ids restart inside a row (packed documents), but use_cache=True: a cache would join the "
                    "documents; pass use_cache=False, or one document a row with an attention_mask"
                )
            changes["use_cache"] = False
        if (
            self.counts_tokens
            and given.get("position_ids") is None
            and (positions := _real_positions(given)) is not None
        ):
            changes["position_ids"] = positions
        return ((), {**given, **changes}) if changes else None


def _is_packed_and_cached(given: dict[str, Any]) -> bool:
    positions = given.get("position_ids")
    if positions is None or positions.dim() != 2 or given.get("use_cache") is False:
        return False
    if any(given.get(name) is not None for name in ("attention_mask", "cache", "past_key_values")):
        return False
    return bool((positions.diff(dim=-1) != 1).any())


def _real_positions(given: dict[str, Any]) -> Tensor | None:
    """Return the positions of the new tokens, over real ones; None where they are given or none is padded."""
    mask, tokens = given.get("attention_mask"), given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if given.get("position_ids") is not None or tokens is None or not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    if not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, mask.shape[1] - tokens.shape[1] :]


def _depends_on_positions(body: nn.Module) -> bool:
    """Whether rotated keys of a body meet a kernel that knows where they stand, and not only how far apart.

    Softmax sees distances alone, so shifted positions do not show; features of a rotated key are other features.
    """
    attachments = (getattr(module, "mercer_attachment", None) for module in body.modules())
    return not hasattr(body, "get_rope_index") and any(  # those count real tokens themselves
        a is not None and a.rotary is not None and not a.is_softmax for a in attachments
    )


def guard(model: nn.Module, head: nn.Module | None) -> list[RemovableHandle]:
    """Keep the bodies of a model from three shortcuts that mixers would pay for.

    A cache for packed rows lets the documents of a row read each other; dropping queries before the last layers keeps
    the mixers there from seeing the past; positions that count padding give rotated keys other features.

    Args:
        model: the whole model.
        head: the outermost module where it is not a body itself; its own `logits_to_keep` is harmless.

    Returns:
        The hooks' handles.
    """
    handles = []
    for body in model.modules():
        if isinstance(body, PreTrainedModel) and body is not head:
            names = argument_names(body)
            counts_tokens = "position_ids" in names and _depends_on_positions(body)
            if counts_tokens or "logits_to_keep" in names or {"position_ids", "use_cache"} <= set(names):
                handles.append(body.register_forward_pre_hook(_Settle(names, counts_tokens), with_kwargs=True))
    return handles
