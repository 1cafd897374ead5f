"""Averages of a Riesz kernel over grid cells: what piecewise constant densities exert on cell centres."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.particles.energy import Number, riesz_value

NODES = 16


def cell_averages(shape: tuple[int, ...], widths: tuple[float, ...], s: Number) -> Float[Tensor, "..."]:
    """Return the mean of `g_s(y)` over the cell at every offset, wrapped for a circular convolution.

    Entry k of an axis of m cells holds offset k for k < m and offset k - 2 m for k > m; m itself is not used.
    One dimension: exact, by the antiderivative. Two: Gauss-Legendre in every cell, and polar coordinates in the cell
    of the singularity.

    Args:
        shape: Cells along each axis.
        widths: Their widths.
        s: Riesz exponent, below the dimension.

    Returns:
        float64, twice `shape`.

    Cost: O(prod(shape) 16^d), once a model.

    >>> cell_averages((2,), (1.0,), -1.0).tolist()
    [-0.25, -1.0, -2.0, -1.0]
    """
    folded = [torch.minimum(k := torch.arange(2 * m), 2 * m - k) for m in shape]
    if len(shape) == 1:
        center = torch.arange(shape[0] + 1, dtype=torch.float64) * widths[0]
        half = widths[0] / 2
        mean = (_antiderivative(center + half, s) - _antiderivative(center - half, s)) / widths[0]
        return mean[folded[0]]
    nodes, weights = gauss_legendre(NODES)
    rows, cols = (
        (h * (torch.arange(m + 1, dtype=torch.float64)[:, None] + nodes / 2)).square()
        for m, h in zip(shape, widths, strict=True)
    )
    mean = torch.zeros(len(rows), len(cols), dtype=torch.float64)
    for row, u in zip(rows.T, weights, strict=True):
        for col, v in zip(cols.T, weights, strict=True):
            mean += u * v / 4 * riesz_value(row[:, None] + col, s)
    mean[0, 0] = _own_cell(widths, s)
    return mean[folded[0][:, None], folded[1]]


def gauss_legendre(count: int) -> tuple[Tensor, Tensor]:
    """Return nodes and weights on [-1, 1], from the eigenvalues of the Jacobi matrix (Golub and Welsch).

    >>> nodes, weights = gauss_legendre(2)
    >>> nodes.round(decimals=4).tolist(), weights.round(decimals=4).tolist()
    ([-0.5774, 0.5774], [1.0, 1.0])
    """
    k = torch.arange(1, count, dtype=torch.float64)
    off = k / (4 * k.square() - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, 2 * vectors[0].square()


def _antiderivative(u: Tensor, s: Number) -> Tensor:
    size = u.abs().clamp_min(torch.finfo(u.dtype).tiny)
    if s == 0:
        return u - u * size.log()
    return math.copysign(1.0, s) * u * size.pow(-s) / (1 - s)


def _own_cell(widths: tuple[float, ...], s: Number) -> float:
    """Integrate g_s over the rectangle around the origin in polar coordinates: r dr by hand, the angle by Gauss."""
    nodes, weights = gauss_legendre(2 * NODES)
    corner = math.atan2(widths[1], widths[0])
    total = 0.0
    for start, stop, width, side in ((0.0, corner, widths[0], torch.cos), (corner, math.pi / 2, widths[1], torch.sin)):
        angle = start + (stop - start) * (nodes + 1) / 2
        reach = width / 2 / side(angle)
        if s == 0:
            radial = reach.square() / 4 - reach.square() / 2 * reach.log()
        else:
            radial = math.copysign(1.0, s) * reach.pow(2 - s) / (2 - s)
        total += float((weights * radial).sum()) * (stop - start) / 2
    return 4 * total / math.prod(widths)
