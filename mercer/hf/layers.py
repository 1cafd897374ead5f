"""Find the attention layers of a transformers model, and say which can carry a mixer and which stay."""

import dataclasses
import re
import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from mercer.errors import unknown


@dataclasses.dataclass(frozen=True)
class Layer:
    """One attention module: `left` says why it keeps its softmax, None that it can carry a mixer."""

    name: str
    index: int
    module: Any
    left: str | None = None


@dataclasses.dataclass(frozen=True)
class Summary:
    """What `attach` did: printed by `print(model.mercer_summary())`."""

    model: str
    mixer: str
    options: dict[str, Any]
    converted: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    added_parameters: int

    def __str__(self) -> str:
        options = "".join(f", {key}={value}" for key, value in self.options.items())
        lines = [
            f"{self.model}: {self.mixer}{options} in {len(self.converted)} of "
            f"{len(self.converted) + len(self.left)} attention layers, {self.added_parameters:,} parameters added"
        ]
        lines += [f"  carries the mixer: {', '.join(self.converted)}"]
        for reason in dict.fromkeys(reason for _, reason in self.left):
            lines.append(f"  left as it was ({reason}): {', '.join(n for n, why in self.left if why == reason)}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def attention_layers(model: PreTrainedModel) -> list[Layer]:
    """Return every attention layer of the model, in order, with the reason where one cannot carry a mixer.

    A layer is any module named `...Attention` with `is_causal` and `scaling`: transformers' mark of an attention that
    goes through its AttentionInterface (looking for attribute names such as `self_attn` misses whole families).
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if re.search("Attention$", type(module).__name__)
        and all(hasattr(module, attribute) for attribute in ("config", "is_causal", "scaling"))
    ]
    decodes = any(is_causal(module) for _, module in found)
    layers = []
    for order, (name, module) in enumerate(found):
        index = getattr(module, "layer_idx", None)
        layers.append(Layer(name, order if index is None else index, module, _reason_to_leave(module, decodes)))
    return layers


# The projection after the mixer, by the names the families of transformers give it; all others come before it.
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "proj")


def output_projection(module: Any) -> Any | None:
    """Return the linear map of an attention module that the mixer's output goes through; None if it is elsewhere."""
    found = (getattr(module, name, None) for name in _OUTPUTS)
    return next((part for part in found if isinstance(getattr(part, "weight", None), Tensor)), None)


def is_causal(module: Any) -> bool:
    """Return whether a token of this attention sees only its past."""
    return bool(module.is_causal) and bool(getattr(module.config, "is_causal", True))


def _reason_to_leave(module: Any, decodes: bool) -> str | None:
    if not hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS"):
        return "its attention does not go through transformers' AttentionInterface"
    if decodes and not is_causal(module):
        return "bidirectional, in a model that decodes"
    config, index = module.config, getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    if kinds and index is not None and index < len(kinds) and kinds[index] != "full_attention":
        size = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}.get(kinds[index])
        return f"{kinds[index].replace('_', ' ')}" + (f" of {getattr(config, size, None)}" if size else "")
    if getattr(module, "is_sliding", False):
        return f"sliding attention of {getattr(module, 'sliding_window', None)}"
    if not kinds:
        window = getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None)
        if window and getattr(config, "use_sliding_window", True):
            return f"sliding attention of {window}"
    return None


def choose_layers(
    model: PreTrainedModel, layers: str | Iterable[int], keep: Iterable[int] = ()
) -> tuple[list[Layer], list[Layer]]:
    """Split the attention layers into those that get a mixer and those that stay, each with its reason.

    Args:
        model: any transformers model.
        layers: "all" or "global" (every layer that can), "3,5,7", or layer numbers.
        keep: numbers of layers that stay all the same.

    Raises:
        ValueError: no layer can carry a mixer, or one that was asked for cannot or does not exist; nothing is left to
            convert.
    """
    found = attention_layers(model)
    keep = set(keep)
    if strange := keep - {layer.index for layer in found}:
        raise ValueError(f"keep names {min(strange)}, but the attention layers are {sorted({x.index for x in found})}")
    found = [
        dataclasses.replace(layer, left="to be kept") if layer.index in keep and layer.left is None else layer
        for layer in found
    ]
    able = [layer for layer in found if layer.left is None]
    if not able:
        reasons = sorted({f"{layer.name}: {layer.left}" for layer in found}) or ["it has no attention layer"]
        raise ValueError(
            f"no attention layer of {type(model).__name__} can carry a mixer ({'; '.join(reasons[:4])}); choose a "
            "model with full attention that goes through transformers' AttentionInterface, or build the model around "
            "mercer.MixerAttention"
        )
    if layers in ("all", "global"):
        return able, [layer for layer in found if layer.left is not None]
    wanted = _layer_numbers(layers)
    by_index = {layer.index: layer for layer in reversed(found) if layer.left is not None}
    by_index |= {layer.index: layer for layer in able}
    for index in wanted:
        if index not in by_index:
            raise ValueError(f"layers names {index}, but the attention layers are {sorted(by_index)}")
        if by_index[index].left is not None:
            raise ValueError(
                f"layer {index} ({by_index[index].name}) cannot carry a mixer: {by_index[index].left}; "
                f"choose among {sorted(layer.index for layer in able)}"
            )
    chosen = [layer for layer in able if layer.index in wanted]
    kept = [dataclasses.replace(layer, left="not asked for") for layer in able if layer.index not in wanted]
    return chosen, kept + [layer for layer in found if layer.left is not None]


def kept_numbers(keep: Any) -> list[int]:
    """Return the numbers of layers to keep; text is refused, whose characters would be taken for numbers.

    >>> kept_numbers((18, 20))
    [18, 20]
    """
    if isinstance(keep, str):
        raise ValueError(f"keep ({keep!r}) must be layer numbers, as [18, 20]")
    return [int(index) for index in keep]


def _layer_numbers(layers: str | Iterable[int]) -> set[int]:
    if isinstance(layers, str):
        if not all(part.strip().isdigit() for part in layers.split(",")):
            raise unknown("layers", layers, ["all", "global", "3,5,7"])
        layers = [int(part) for part in layers.split(",")]
    numbers = {int(number) for number in layers}
    if not numbers:
        raise ValueError("layers is empty; name at least one layer, or 'all'")
    return numbers


def borrowers(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers that read another one's keys and values."""
    return [layer for layer in layers if getattr(layer.module, "is_kv_shared_layer", False)]


def check_shared_keys(chosen: list[Layer], kept: list[Layer]) -> None:
    """Refuse to convert only some of the layers that read one layer's keys (Gemma 4, Gemma 3n).

    Raises:
        ValueError: a layer that reuses keys and the layer they come from would be of different kinds.
    """
    shares = borrowers(chosen + kept)
    for sharer in shares:
        kind = getattr(sharer.module, "layer_type", None)
        group = [
            layer
            for layer in chosen + kept
            if getattr(layer.module, "layer_type", None) == kind
            and (layer in shares or getattr(layer.module, "store_full_length_kv", False))
        ]
        mixed = {layer.index in {c.index for c in chosen} for layer in group}
        if len(mixed) > 1:
            raise ValueError(
                f"layers {sorted(layer.index for layer in group)} share their keys and values, so all of them or none "
                "can carry a mixer; name them all, or use layers='all'"
            )


def head_sizes(module: Any) -> dict[str, int]:
    """Return num_heads, num_kv_heads, head_dim and hidden_size as the attention module itself uses them."""
    config = module.config

    def first(*names: str) -> Any:
        for owner in (module, config):
            for name in names:
                if isinstance(value := getattr(owner, name, None), int) and value > 0:
                    return value
        return None

    heads = first("num_heads", "num_attention_heads")
    head_dim = first("qk_head_dim", "head_dim", "attention_head_size", "head_size") or config.hidden_size // heads
    groups = getattr(module, "num_key_value_groups", None)
    kv_heads = heads // groups if groups else (getattr(config, "num_key_value_heads", None) or heads)
    projection = next((getattr(module, n) for n in ("q_proj", "query") if hasattr(module, n)), None)
    width = getattr(projection, "in_features", None) or config.hidden_size
    return {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "hidden_size": width}


def attention_dropout(module: Any) -> float:
    """Return the dropout probability this module applies to its attention weights when it trains."""
    for name in ("attention_dropout", "attn_dropout", "dropout", "dropout_prob"):
        value = getattr(module, name, None)
        value = value.p if isinstance(value, nn.Dropout) else value
        if isinstance(value, float):
            return value
    return 0.0
