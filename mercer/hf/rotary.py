"""Apply to any tensor the positions that an attention module applies to its queries and keys."""

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
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


@dataclasses.dataclass(frozen=True)
class Rotary:
    """A family's own rotary function, and whether it takes one tensor instead of q and k."""

    function: Callable[..., Any]
    takes_one: bool

    def __call__(self, t: Float[Tensor, "B H T R"], cos: Tensor, sin: Tensor) -> Float[Tensor, "B H T R"]:
        return self.function(t, cos, sin) if self.takes_one else self.function(t, t, cos, sin)[0]


def find_rotary(attention_class: type) -> Rotary | None:
    """Return the rotary function in the file of an attention class, or None without one of a known form."""
    function = getattr(sys.modules[attention_class.__module__], "apply_rotary_pos_emb", None)
    if function is None:
        return None
    names = list(inspect.signature(function).parameters)
    if names[:3] == ["x", "cos", "sin"]:
        return Rotary(function, True)
    return Rotary(function, False) if names[:4] == ["q", "k", "cos", "sin"] else None


def rotation_problem(module: Any) -> str | None:
    """Return why the rotation of this module cannot be repeated for another tensor, or None if it can or has none."""
    source = sys.modules[type(module).__module__]
    rotates = any("rotary" in name.lower() for name in vars(source)) and applies_rotation(module)
    takes_angles = "position_embeddings" in inspect.signature(type(module).forward).parameters
    partly = hasattr(module, "qk_rope_head_dim")  # latent attention turns the last dimensions of a head only
    if not rotates or (takes_angles and not partly and find_rotary(type(module)) is not None):
        return None
    return f"{type(module).__name__} applies its rotary positions in a way of its own"


def rotation(rotary: Rotary | None, position_embeddings: Any) -> Rotate | None:
    """Return a function that rotates [B, H, T, D] tensors of the new tokens as a module rotates its q and k.

    Args:
        rotary: the module's rotary function; None for one that applies no rotation (GPT-2, BERT, some layers).
        position_embeddings: the (cos, sin) its forward was called with, or None.

    Returns:
        The function, or None without a rotation.
    """
    if rotary is None or not isinstance(position_embeddings, tuple):
        return None
    cos, sin = position_embeddings

    def rotate(t: Tensor) -> Tensor:
        # Partial rotary: some families leave the rest out themselves, some inside the function; both agree on this.
        turned, rest = rotary(t[..., : cos.shape[-1]], cos, sin), t[..., cos.shape[-1] :]
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned

    return rotate
