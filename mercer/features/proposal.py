"""Where to draw random features of the exponential kernel from, when the covariance of queries and keys is known."""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def optimal_proposal(covariance: Float[Tensor, "*H D D"]) -> Float[Tensor, "*H D D"]:
    """Return the covariance of the best Gaussian proposal for exp(q.k), q, k ~ N(0, covariance).

    `Sigma* = (I + 2 Lambda) (I - 2 Lambda)^-1`: never worse than isotropic draws, equal to them only at Lambda = 0.

    Args:
        covariance: Lambda, of the scaled queries and keys whose product is the logit.

    Returns:
        Sigma*, symmetric.

    Raises:
        ValueError: an eigenvalue of Lambda is not below 1/2, where every estimate has infinite variance.

    Source:
        DARKFormer (arXiv:2603.04127), Thm 3.2.

    >>> optimal_proposal(torch.tensor([[0.1]]))
    tensor([[1.5000]])
    """
    values, vectors = torch.linalg.eigh(covariance)
    if not bool((values < 0.5).all()) or not bool((values > -1e-4).all()):
        raise ValueError(
            f"the covariance has eigenvalues from {values.min():.4g} to {values.max():.4g}; the best proposal exists "
            "only for 0 <= eigenvalue < 1/2: scale queries and keys down, or whiten them"
        )
    values = values.clamp_min(0)
    return (vectors * ((1 + 2 * values) / (1 - 2 * values))[..., None, :]) @ vectors.mT


def root(matrix: Float[Tensor, "*H D D"]) -> Float[Tensor, "*H D D"]:
    """Return the symmetric square root of a positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT


def tilt(
    w: Float[Tensor, "H M r"], proposal: Float[Tensor, "H r r"]
) -> tuple[Float[Tensor, "H M r"], Float[Tensor, "H M"]]:
    """Return directions B w for isotropic w, and the log weights that keep the kernel what it is at w.

    The weight is `sqrt(p / psi) = exp(w'Aw) det(B)^(1/2)`, B = `proposal`, A = (I - B^2) / 4, once on either side.
    """
    omega = w @ proposal
    quadratic = (w.square().sum(-1) - omega.square().sum(-1)) / 4
    return omega, quadratic + torch.linalg.slogdet(proposal).logabsdet[..., None] / 2


def mean_square_proposal(mean_square: float, dim: int) -> float:
    """Return the variance of the isotropic proposal that is best at ||q + k||^2 = `mean_square`: 1 - 4A.

    `A = (1 - 1/rho) / 8`, `rho = (sqrt((2S + D)^2 + 8DS) - 2S - D) / (4S)`.

    Raises:
        ValueError: a mean square that is not positive.

    Source:
        FAVOR++ (arXiv:2205.15317), Thm 2: S = `mean_square`, D = `dim`.
    """
    if not mean_square > 0:
        raise ValueError(f"mean_square ({mean_square}) must be positive: it estimates E||q + k||^2")
    rho = (math.sqrt((2 * mean_square + dim) ** 2 + 8 * dim * mean_square) - 2 * mean_square - dim) / (4 * mean_square)
    return (1 + 1 / rho) / 2
