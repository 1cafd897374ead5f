"""Projections onto the compact convex sets that particles live in."""

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.particles.energy import Number

# A projected point is pulled this many roundings inside, so that its norm, summed in whatever order, stays in the set.
MARGIN = 8


def project_ball(omega: Float[Tensor, "*batch N d"], radius: Number) -> Float[Tensor, "*batch N d"]:
    """Return the nearest points of norm at most `radius`; points inside do not change.

    >>> project_ball(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0).norm(dim=1).round(decimals=4).tolist()
    [1.0, 0.5]
    """
    _check_radius(radius)
    norm = torch.linalg.vector_norm(omega, dim=-1, keepdim=True)
    return torch.where(norm > radius, omega * (_inside(radius, omega) / norm), omega)


def project_l1_ball(omega: Float[Tensor, "*batch N d"], radius: Number) -> Float[Tensor, "*batch N d"]:
    """Return the nearest points whose absolute coordinates sum to at most `radius`.

    `omega <- sign(omega) max(|omega| - theta, 0)`, theta such that the sum is `radius`: a particle pushed out of this
    ball comes back with few non-zero coordinates, so its feature depends on few inputs.

    Cost: O(N d log d), one sort.

    >>> project_l1_ball(torch.tensor([[3.0, 1.0], [0.3, -0.4]]), 1.0).round(decimals=4).tolist()
    [[1.0, 0.0], [0.30000001192092896, -0.4000000059604645]]
    """
    _check_radius(radius)
    size = omega.abs()
    outside = size.sum(-1, keepdim=True) > radius
    ordered = size.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - _inside(radius, omega)
    rank = torch.arange(1, omega.shape[-1] + 1, dtype=omega.dtype, device=omega.device)
    last = (ordered * rank > excess).sum(-1, keepdim=True).clamp_min(1)
    theta = excess.gather(-1, last - 1) / last
    kept = (size - theta).clamp_min(0)
    kept = kept * (_inside(radius, omega) / kept.sum(-1, keepdim=True)).clamp_max(1)  # rounding of a large theta
    return torch.where(outside, omega.sign() * kept, omega)


def project_box(
    omega: Float[Tensor, "*batch N d"], lower: Number | Tensor, upper: Number | Tensor
) -> Float[Tensor, "*batch N d"]:
    """Return the nearest points between `lower` and `upper`, numbers or one bound a coordinate.

    >>> project_box(torch.tensor([[3.0, -4.0]]), -1.0, 1.0).tolist()
    [[1.0, -1.0]]
    """
    low = torch.as_tensor(lower, dtype=omega.dtype, device=omega.device)
    high = torch.as_tensor(upper, dtype=omega.dtype, device=omega.device)
    if not bool((low <= high).all()):
        raise ValueError(f"box from {lower} to {upper} is empty; lower must not exceed upper")
    return torch.minimum(torch.maximum(omega, low), high)


def _inside(radius: Number, omega: Tensor) -> float:
    return radius * (1 - MARGIN * torch.finfo(omega.dtype).eps)


def _check_radius(radius: Number) -> None:
    if not radius > 0:
        raise ValueError(f"radius (={radius}) must be positive")
