"""Log features as callers give them: multiplied out, or in two factors that an operator multiplies a chunk at a time.

Log features of the exponential kernel are linear in x and its square norm: m numbers made of D + 1. Multiplied out,
they and their gradients would be most of what these operators read and write; in factors they never leave the cache.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mercer.ops.checks import compute_dtype, zero_padding


def group_heads(x: Float[Tensor, "B H T r"], groups: int) -> Float[Tensor, "B G N r"]:
    """Put the tokens of consecutive heads below each other, N = T H / G of them."""
    return x.reshape(len(x), groups, x.shape[1] // groups * x.shape[2], x.shape[3])


@dataclass(frozen=True)
class Factored:
    """Log features `x weight' + square ||x||^2 + constant + offset`, kept as their factors.

    Attributes:
        x: r numbers a token.
        weight: what a feature counts each with; consecutive heads of x share one.
        square: how much of ||x||^2 is added to all features of a token.
        constant: what is added to all features.
        offset: what else is added to all features of a token; None: 0.

    Raises:
        ValueError: x and weight do not fit together.

    >>> Factored(torch.ones(1, 2, 3, 4), torch.ones(1, 5, 4)).dense().shape
    torch.Size([1, 2, 3, 5])
    """

    x: Float[Tensor, "B H T r"]
    weight: Float[Tensor, "Hw m r"]
    square: float = 0.0
    constant: float = 0.0
    offset: Float[Tensor, "B H T 1"] | None = None

    def __post_init__(self):
        if self.x.shape[1] % max(1, len(self.weight)) or self.x.shape[3] != self.weight.shape[2]:
            raise ValueError(
                f"weight {tuple(self.weight.shape)} must have the width of x {tuple(self.x.shape)}, and a number of "
                "heads that divides that of x"
            )

    def dense(self) -> Float[Tensor, "B H T m"]:
        """Return the log features, in float32 at least."""
        dtype = compute_dtype(self.x)
        product = group_heads(self.x.to(dtype), len(self.weight)) @ self.weight.to(dtype).mT
        product, added = product.reshape(*self.x.shape[:3], product.shape[-1]), self.added()
        return product if added is None else product + added

    def added(self) -> Float[Tensor, "B H T 1"] | None:
        """Return what is added to all features of a token; None: nothing."""
        if not self.square and not self.constant:
            return self.offset
        by_token = self.square * self.x.square().sum(-1, keepdim=True) + self.constant
        return by_token if self.offset is None else by_token + self.offset

    def without_padding(self, mask: Bool[Tensor, "B T"] | None) -> "Factored":
        """Return the features with zeros for x where padded: NaN there would reach the gradient of the weight."""
        return replace(self, x=zero_padding(self.x, mask))

    def without_offset(self) -> "Factored":
        """Return the features without their offset."""
        return replace(self, offset=None)

    def plus(self, offset: Float[Tensor, "B H T 1"]) -> "Factored":
        """Return the features with a number added to all of a token."""
        return replace(self, offset=offset if self.offset is None else self.offset + offset)

    def outline(self) -> Float[Tensor, "B H T m"]:
        """Return a view with the shape of the log features, and none of their values, to check shapes with."""
        return self.x[..., :1].expand(*self.x.shape[:3], self.weight.shape[1])


LogFeatures = Tensor | Factored


def outline(log_phi: LogFeatures) -> Float[Tensor, "B H T m"]:
    """Return something with the shape and type of the log features."""
    return log_phi.outline() if isinstance(log_phi, Factored) else log_phi


def dense(log_phi: LogFeatures, mask: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "B H T m"]:
    """Return the log features multiplied out, with zeros for padded tokens."""
    if not isinstance(log_phi, Factored):
        return zero_padding(log_phi, mask)
    return zero_padding(log_phi.without_padding(mask).dense(), mask)


def arguments_of(
    log_phi: LogFeatures, kv_heads: int, dtype: torch.dtype, mask: Bool[Tensor, "B T"] | None
) -> tuple[Tensor, Tensor | None]:
    """Return log features, up to what is added to a token, as an operator takes them: x and weight.

    Multiplied out, and with None for a weight, is what an accelerator gets, where fewer calls count for more than
    memory, and what has not one weight a key head.
    """
    if not isinstance(log_phi, Factored):
        return log_phi, None
    x = log_phi.without_padding(mask).x
    if x.device.type != "cpu" or len(log_phi.weight) != kv_heads:
        return Factored(x, log_phi.weight).dense(), None
    return x.to(dtype), log_phi.weight.to(dtype)


def offset_of(
    log_phi: LogFeatures, dtype: torch.dtype, mask: Bool[Tensor, "B T"] | None = None
) -> Float[Tensor, "B H T"] | None:
    """Return what `arguments_of` left out: 0 for padded tokens."""
    added = log_phi.without_padding(mask).added() if isinstance(log_phi, Factored) else None
    if added is None:
        return None
    offset = added.squeeze(-1).to(dtype)
    return offset if mask is None else offset.masked_fill(~mask[:, None], 0)


def added_of(
    log_phi: LogFeatures, weight: Tensor | None, dtype: torch.dtype, mask: Bool[Tensor, "B T"] | None
) -> tuple[Float[Tensor, "B H T"] | None, float, float]:
    """Return what `arguments_of` left out as offset, square and constant: all in the offset if there is no weight."""
    if not isinstance(log_phi, Factored) or weight is None:
        return offset_of(log_phi, dtype, mask), 0.0, 0.0
    rest = replace(log_phi, square=0.0, constant=0.0)
    return offset_of(rest, dtype, mask), log_phi.square, log_phi.constant
