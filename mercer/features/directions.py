"""Random directions of feature maps: independent, orthogonal or simplex, every one of them N(0, I) by itself."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.errors import unknown

_NEXT_DRAW = 0x9E3779B97F4A7C15  # odd, so that draws 0, 1, 2, ... of one seed never meet those of its neighbours


def draw_directions(
    kind: str, num_heads: int, count: int, dim: int, *, seed: int = 0, number: int = 0
) -> Float[Tensor, "H M D"]:
    """Draw `count` directions of R^dim a head; each is N(0, I), those of one block of `dim` depend on each other.

    Args:
        kind: "gaussian", independent; "orthogonal", blocks of rows of a Haar-random rotation, which are orthogonal;
            "simplex", blocks whose rows have pairwise cosine -1/(dim - 1), rotated likewise. Lengths are chi(dim).
        num_heads: heads, drawn independently.
        count: directions a head.
        dim: width of a direction.
        seed: of the generator, which is this function's own.
        number: which draw of that seed.

    Returns:
        Directions in float32 on the CPU.

    Raises:
        ValueError: unknown kind, or a simplex in one dimension.

    Source:
        Orthogonal random features (arXiv:1610.09072); simplex random features (arXiv:2301.13856), diag(chi) S R.

    >>> w = draw_directions("orthogonal", 1, 4, 4)[0]
    >>> bool(((w @ w.T).triu(1).abs() < 1e-5).all())
    True
    """
    generator = torch.Generator("cpu").manual_seed((seed + _NEXT_DRAW * number) % 2**63)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    if kind not in DIRECTIONS:
        raise unknown("directions", kind, DIRECTIONS)
    if kind == "gaussian":
        return normal(num_heads, count, dim).float()
    rows = haar(normal(num_heads, -(-count // dim), dim, dim))
    if kind == "simplex":
        rows = simplex(dim) @ rows
    rows = rows.flatten(1, 2)[:, :count]
    return (rows * normal(num_heads, count, dim).norm(dim=-1, keepdim=True)).float()


DIRECTIONS = ("gaussian", "orthogonal", "simplex")


def haar(gaussian: Float[Tensor, "*N D D"]) -> Float[Tensor, "*N D D"]:
    """Turn Gaussian matrices into rotations (and reflections) with the Haar distribution.

    QR alone is not enough: its signs are a convention of the library, which would prefer some directions.
    """
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]


def simplex(dim: int) -> Float[Tensor, "D D"]:
    """Return `dim` unit vectors, as rows, with pairwise cosine -1/(dim - 1): the corners of a regular simplex."""
    if dim < 2:
        raise ValueError(f"simplex directions need a width of at least 2, got {dim}; choose gaussian or orthogonal")
    corners = torch.eye(dim, dtype=torch.float64, device="cpu") - 1 / dim
    return corners * math.sqrt(dim / (dim - 1))
