"""Importance weights of random features by their alignment with the labels (Sinha and Duchi)."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.particles.energy import Number

CANDIDATES_PER_BLOCK = 1 << 22


def candidate_scores(
    x: Float[Tensor, "n d"], targets: Float[Tensor, "n C"], omega: Float[Tensor, "M d"], phase: Float[Tensor, " M"]
) -> Float[Tensor, " M"]:
    """Return how strongly each candidate feature agrees with the labels.

    `v_k = sum_c (sum_i t_ic cos(omega_k' x_i + b_k) / n)^2`.

    Cost: O(n M (d + C)) time, O(M C + 2^22) memory.

    Source: Sinha and Duchi 2016; blocks.md. Several columns of targets are ours.

    >>> x = torch.tensor([[0.0], [torch.pi]])
    >>> scores = candidate_scores(x, torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
    >>> scores.round(decimals=4).tolist()
    [1.0, 0.0]
    """
    sums = x.new_zeros(targets.shape[1], len(omega))
    size = max(1, CANDIDATES_PER_BLOCK // len(omega))
    for samples, weights in zip(x.split(size), targets.split(size), strict=True):
        sums += weights.T @ torch.addmm(phase, samples, omega.T).cos_()
    return sums.div(len(x)).square().sum(0)


def importance_weights(scores: Float[Tensor, " M"], rho: Number, *, steps: int = 100) -> Float[Tensor, " M"]:
    """Return the distribution over candidates that aligns best within a chi-square ball around the uniform one.

    Maximises `scores . alpha` over the simplex with `||alpha - 1/M||^2 <= rho / M`. The maximiser is
    `alpha(mu) = project_simplex(1/M + scores / mu)`; mu is found by bisection, as the distance falls with mu.

    Args:
        scores: v, non-negative.
        rho: Radius; 0 keeps the uniform distribution, M - 1 or more lets one candidate take everything.
        steps: Halvings of the bracket.

    Returns:
        alpha, float64, on the simplex and in the ball.

    Raises:
        ValueError: If rho is negative.

    Cost: O(steps M log M).

    Source: Sinha and Duchi 2016, eq. 4 and the dual bisection of its App. A.

    >>> importance_weights(torch.tensor([1.0, 1.0, 4.0, 0.0]), 1.0).round(decimals=3).tolist()
    [0.167, 0.167, 0.667, 0.0]
    """
    if not rho >= 0:
        raise ValueError(f"rho (={rho}) must not be negative; it is the radius around the uniform distribution")
    m = len(scores)
    v = scores.double()
    spread = (v - v.mean()).abs().max()
    if rho == 0 or spread == 0:
        return torch.full_like(v, 1 / m)
    v = (v - v.mean()) / spread  # a shift of v does not move the maximiser, a scale only rescales mu
    low, high = -40.0, 40.0  # log mu: from a single candidate to uniform
    for _ in range(steps):
        middle = 0.5 * (low + high)
        alpha = project_simplex(1 / m + v * math.exp(-middle))
        inside = (alpha - 1 / m).square().sum() <= rho / m
        low, high = (low, middle) if inside else (middle, high)
    return project_simplex(1 / m + v * math.exp(-high))


def project_simplex(point: Float[Tensor, " M"]) -> Float[Tensor, " M"]:
    """Return the nearest point whose coordinates are non-negative and sum to 1.

    >>> project_simplex(torch.tensor([0.8, 0.6, -1.0])).round(decimals=4).tolist()
    [0.6000000238418579, 0.4000000059604645, 0.0]
    """
    ordered = point.sort(descending=True).values
    excess = ordered.cumsum(0) - 1
    rank = torch.arange(1, len(point) + 1, dtype=point.dtype, device=point.device)
    last = int((ordered * rank > excess).sum().clamp_min(1))
    return (point - excess[last - 1] / last).clamp_min(0)
