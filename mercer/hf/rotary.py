"""Apply to any tensor the positions that an attention module applies to its queries and keys."""

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from mercer.mixers.base import Rotate

# Families whose full-attention layers carry no positions; only their sliding layers, which stay as they are, do.
_POSITIONS_IN_SLIDING_LAYERS_ONLY = {"cohere2", "cohere2_moe", "flint", "afmoe"}
_NO_POSITIONS_IF_HYBRID = {"exaone4", "exaone_moe", "kolibri1"}


def applies_rotation(module: Any) -> bool:
    """Return whether this attention layer rotates its queries and keys (some layers of some families do not)."""
    model_type = getattr(module.config, "model_type", "").removeprefix("mercer_")
    if model_type in _POSITIONS_IN_SLIDING_LAYERS_ONLY:
        return bool(getattr(module, "force_rope", False))
    if model_type in _NO_POSITIONS_IF_HYBRID:
        return getattr(module, "sliding_window", None) is None
    return bool(getattr(module, "use_rope", True))


@functools.lru_cache(maxsize=256)
def _family_rotation(attention_class: type) -> tuple[Any, bool] | None:
    """Return the family's rotary function and whether it takes one tensor instead of q and k; None without one."""
    function = getattr(sys.modules[attention_class.__module__], "apply_rotary_pos_emb", None)
    if function is None:
        return None
    names = list(inspect.signature(function).parameters)
    if names[:3] == ["x", "cos", "sin"]:
        return function, True
    return (function, False) if names[:4] == ["q", "k", "cos", "sin"] else None


def rotation_problem(module: Any) -> str | None:
    """Return why the rotation of this module cannot be repeated for another tensor, or None if it can or has none."""
    source = sys.modules[type(module).__module__]
    rotates = any("rotary" in name.lower() for name in vars(source)) and applies_rotation(module)
    takes_angles = "position_embeddings" in inspect.signature(type(module).forward).parameters
    if not rotates or (takes_angles and _family_rotation(type(module)) is not None):
        return None
    return f"{type(module).__name__} applies its rotary positions in a way of its own"


def rotation(module: Any, position_embeddings: Any) -> Rotate | None:
    """Return a function that rotates [B, H, T, D] tensors of the new tokens as the module rotates q and k.

    Args:
        module: an attention module of transformers.
        position_embeddings: the (cos, sin) its forward was called with, or None.

    Returns:
        The function, or None where the module applies no rotation (GPT-2, BERT, layers without positions).
    """
    family = _family_rotation(type(module))
    if family is None or not isinstance(position_embeddings, tuple) or not applies_rotation(module):
        return None
    function, takes_one = family
    cos, sin = position_embeddings

    def rotate(t: Tensor) -> Tensor:
        # Partial rotary: some families leave the rest out themselves, some inside the function; both agree on this.
        turned, rest = t[..., : cos.shape[-1]], t[..., cos.shape[-1] :]
        turned = function(turned, cos, sin) if takes_one else function(turned, turned, cos, sin)[0]
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned

    return rotate
