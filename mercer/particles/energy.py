"""Energies of a particle system: how well its features fit the labels, and how far its particles keep apart."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from mercer.errors import unknown

Number = float | int  # the checks in the tests take `float` at its word

KINDS = ("signed", "within_class", "centered")

# Pairs nearer than this share of their squared norms are measured by subtraction: ||a||^2 + ||b||^2 - 2 a.b loses
# log10(1 / share) of float64's 16 digits, so the rest keep 12 of them.
CLOSE_SHARE = 1e-4
PAIRS_PER_BLOCK = 1 << 18


@dataclass(frozen=True)
class Repulsion:
    """Riesz repulsion of one set of particles, everything from one pass over the pairs.

    Attributes:
        energy: W_{N,s}, a scalar.
        potential: [N], sum_{l != k} g_s(omega_k - omega_l) / (N - 1).
        gradient: [N, d], sum_{l != k} grad g_s(omega_k - omega_l) / (N - 1), which is N grad W_{N,s}.
        least_distance: smallest distance of two particles, inf for a single one.
    """

    energy: Tensor
    potential: Tensor
    gradient: Tensor
    least_distance: Tensor


def kernel_alignment(
    features: Float[Tensor, "n M"], y: Shaped[Tensor, " n"], kind: str = "signed"
) -> Float[Tensor, ""]:
    """Return how well the kernel of a feature map agrees with the labels; more is better.

    With `K = features @ features.T`:

    * signed: `sum_{i != j} y_i y_j K_ij / (n (n - 1))`, labels -1 and +1; equals `-E_N`;
    * within_class: `sum_{i < j} [y_i == y_j] K_ij / (n (n - 1))`;
    * centered: `<K_c, Y_c> / (||K_c|| ||Y_c||)`, `K_c = H K H`, `H = I - 1 1' / n`. Integer labels are classes,
      `Y_ij = [y_i == y_j]`; floating targets are numbers, `Y_ij = y_i y_j`. For labels -1 and +1 both agree.

    The double sums are taken in closed form, `sum_{i != j} y_i y_j K_ij = ||features' y||^2 - sum_i y_i^2 K_ii`.

    Args:
        features: Feature vectors, already divided by sqrt(M), so that K is a mean over features.
        y: Labels or targets, one a sample.
        kind: One of signed, within_class, centered.

    Returns:
        A scalar, differentiable in `features`. `centered` is 0 where the features or the labels do not vary.

    Raises:
        ValueError: For an unknown kind, fewer than two samples, or signed labels other than -1 and +1.

    Cost: O(n M), and O(n M min(n, M)) for centered; n x n is formed only where n < M.

    Source: Coulomb paper sec. 2 (E_N), C.4 (within_class), App. D (centered).

    >>> features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    >>> round(kernel_alignment(features, torch.tensor([1, -1, 1])).item(), 4)
    0.3333
    >>> round(kernel_alignment(features, torch.tensor([0, 1, 0]), "centered").item(), 4)
    1.0
    """
    n = y.shape[0]
    if n < 2:
        raise ValueError(f"alignment of {n} sample: a pair is needed; pass at least 2 samples")
    if kind == "signed":
        if not bool(((y == 1) | (y == -1)).all()):
            raise ValueError("signed alignment needs labels -1 and +1; recode them, or choose kind='centered'")
        signs = y.to(features.dtype)
        diagonal = features.square().sum()
        return ((signs @ features).square().sum() - diagonal) / (n * (n - 1))
    if kind == "within_class":
        sums = class_indicators(y).to(features.dtype).T @ features
        return (sums.square().sum() - features.square().sum()) / (2 * n * (n - 1))
    if kind == "centered":
        targets = (y[:, None] if y.is_floating_point() else class_indicators(y)).to(features.dtype)
        return centered_alignment(features, targets)
    raise unknown("alignment", kind, KINDS)


def centered_alignment(features: Float[Tensor, "n M"], targets: Float[Tensor, "n C"]) -> Float[Tensor, ""]:
    """Return `<K_c, Y_c> / (||K_c|| ||Y_c||)` for `Y = targets @ targets.T`; 0 where either does not vary."""
    features, targets = features - features.mean(0), targets - targets.mean(0)
    agreement = (features.T @ targets).square().sum()
    norms = _gram_norm(features) * _gram_norm(targets)
    return agreement / norms.clamp_min(torch.finfo(norms.dtype).tiny)


def class_indicators(y: Shaped[Tensor, " n"]) -> Float[Tensor, "n C"]:
    """Return one column a class, 1 where a sample belongs to it.

    >>> class_indicators(torch.tensor([5, 7, 5])).tolist()
    [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    """
    classes = torch.unique(y)
    return (y[:, None] == classes).to(torch.get_default_dtype())


def _gram_norm(factor: Tensor) -> Tensor:
    """Return ||factor factor'||_F through the smaller of the two Gram matrices."""
    n, m = factor.shape
    return torch.linalg.matrix_norm(factor.T @ factor if m <= n else factor @ factor.T)


def coulomb_exponent(dim: int) -> float:
    """Return the Riesz exponent s = d - 2 of the Coulomb kernel (0, the logarithm, in the plane; -1 on the line)."""
    return float(dim - 2)


def riesz_energy(omega: Float[Tensor, "N d"], *, s: Number | None = None, cutoff: Number = 1e-3) -> Float[Tensor, ""]:
    """Return the Riesz repulsion energy of a set of particles.

    `W_{N,s} = sum_{k != l} g_s(omega_k - omega_l) / (2 N (N - 1))` with `g_s(u) = ||u||^-s` (s > 0), `-log ||u||`
    (s = 0), `-||u||^-s` (-2 < s < 0); g is evaluated at max(||u||, cutoff), so its gradient is 0 below the cut-off.

    `riesz_energy_naive` forms every difference; this one works in blocks of pairs, in float64, and subtracts only
    the pairs too near for the binomial formula.

    Args:
        omega: Particles.
        s: Exponent; None is Coulomb for the dimension (d - 2).
        cutoff: Distance below which a pair counts as being this far apart.

    Returns:
        A scalar of omega's dtype, differentiable once; 0 for a single particle.

    Raises:
        ValueError: If s <= -2 or cutoff < 0.

    Cost: O(N^2 d) time, O(N d + 2^18) memory.

    Source: Coulomb paper sec. 2; the cut-off is ours.

    >>> riesz_energy(torch.tensor([[0.0, 0.0], [0.0, 2.0]]), s=1.0).item()
    0.25
    """
    return _RieszEnergy.apply(omega, *_checked(omega, s, cutoff))  # pyright: ignore[reportReturnType]


def riesz_energy_naive(
    omega: Float[Tensor, "N d"], *, s: Number | None = None, cutoff: Number = 1e-3
) -> Float[Tensor, ""]:
    """Return what `riesz_energy` returns, from all N x N x d differences; differentiable by autograd.

    >>> round(riesz_energy_naive(torch.tensor([[0.0], [math.e]]), s=0.0).item(), 6)
    -0.5
    """
    s, cutoff = _checked(omega, s, cutoff)
    n = omega.shape[0]
    first, second = torch.triu_indices(n, n, offset=1)
    squared = (omega[first] - omega[second]).square().sum(1).clamp_min(cutoff**2)
    return riesz_value(squared, s).sum() / max(n * (n - 1), 1)


def riesz_repulsion(omega: Float[Tensor, "N d"], *, s: Number | None = None, cutoff: Number = 1e-3) -> Repulsion:
    """Return the energy, the potential and the gradient of the repulsion, and the least distance, in one pass.

    `N grad_k W = sum_{l != k} grad g_s(omega_k - omega_l) / (N - 1)`, `grad g_s(u) = -|s| u / ||u||^(s + 2)`, or
    `-u / ||u||^2` for s = 0, taken as two matrix products `c @ omega` and `sum(c) omega` with c the pair weights.

    Args:
        omega: Particles.
        s: Exponent; None is Coulomb for the dimension.
        cutoff: Distance below which a pair counts as being this far apart.

    Returns:
        A `Repulsion`, its tensors in omega's dtype.

    Raises:
        ValueError: If s <= -2 or cutoff < 0.

    Cost: O(N^2 d) time, O(N d + 2^18) memory; 16384 particles of 16 dimensions take a few seconds on one core.

    Source: Coulomb paper Alg. 1; H(omega_k) of Alg. 2 is V(omega_k) + strength * potential_k [ours].

    >>> riesz_repulsion(torch.tensor([[0.0, 0.0], [0.0, 2.0]]), s=0.0).gradient.tolist()
    [[0.0, 0.5], [0.0, -0.5]]
    """
    return _pair_sums(omega.detach(), *_checked(omega, s, cutoff))


def _checked(omega: Tensor, s: Number | None, cutoff: Number) -> tuple[float, float]:
    s = coulomb_exponent(omega.shape[1]) if s is None else float(s)
    if not s > -2:
        raise ValueError(f"s (={s}) must be above -2, where the Riesz kernel repels; choose s=0 for the logarithm")
    if not cutoff >= 0:
        raise ValueError(f"cutoff (={cutoff}) must not be negative; it is the least distance that counts")
    return s, float(cutoff)


def riesz_value(squared: Tensor, s: Number) -> Tensor:
    """Return g_s at squared distances.

    >>> riesz_value(torch.tensor([4.0]), 1.0).item()
    0.5
    """
    if s == 0:
        return -0.5 * squared.log()
    return math.copysign(1.0, s) * squared.pow(-0.5 * s)


def _riesz_weight(squared: Tensor, s: Number) -> Tensor:
    """Return c in grad g_s(u) = -c u."""
    return squared.reciprocal() if s == 0 else abs(s) * squared.pow(-0.5 * s - 1)


def _pair_sums(omega: Tensor, s: Number, cutoff: Number) -> Repulsion:
    """Visit each pair l > k once, rows in blocks, and add what it gives to both of its particles."""
    n = omega.shape[0]
    raw = omega.double()
    points = raw - raw.mean(0)
    norms = points.square().sum(1)
    potential, gradient = torch.zeros_like(norms), torch.zeros_like(points)
    least = norms.new_full((), math.inf)
    size = max(1, min(n, PAIRS_PER_BLOCK // max(n, 1)))
    for start in range(0, n - 1, size):
        rows, cols = slice(start, min(start + size, n)), slice(start, n)
        done = torch.ones(rows.stop - start, n - start, dtype=torch.bool, device=omega.device).tril_()
        scale = norms[rows, None] + norms[cols]
        squared = torch.addmm(scale, points[rows], points[cols].T, alpha=-2)
        first, second = torch.nonzero((squared < CLOSE_SHARE * scale) & ~done, as_tuple=True)
        exact = _exact_squares(raw, first + start, second + start)
        squared[first, second] = exact
        least = torch.minimum(least, squared.masked_fill(done, math.inf).min())
        near = squared < cutoff**2
        squared = squared.clamp_min_(cutoff**2).masked_fill_(done, 1.0)
        value = riesz_value(squared, s).masked_fill_(done, 0.0)
        potential[rows] += value.sum(1)
        potential[cols] += value.sum(0)
        weight = _riesz_weight(squared, s).masked_fill_(done | near, 0.0)
        _add_exact_forces(gradient, raw, first + start, second + start, weight[first, second])
        weight[first, second] = 0.0
        gradient[rows] += weight @ points[cols] - weight.sum(1, keepdim=True) * points[rows]
        gradient[cols] += weight.T @ points[rows] - weight.sum(0)[:, None] * points[cols]
    others = max(n - 1, 1)
    energy = potential.sum() / (2 * n * others)
    parts = (energy, potential / others, gradient / others, least.sqrt())
    return Repulsion(*(part.to(omega.dtype) for part in parts))


def _exact_squares(points: Tensor, first: Tensor, second: Tensor) -> Tensor:
    squares = [points.new_zeros(0)]
    for i, j in _pieces(points, first, second):
        squares.append((points[i] - points[j]).square_().sum(1))
    return torch.cat(squares)


def _add_exact_forces(gradient: Tensor, points: Tensor, first: Tensor, second: Tensor, weight: Tensor) -> None:
    for i, j, c in _pieces(points, first, second, weight):
        force = c[:, None] * (points[i] - points[j])
        gradient.index_add_(0, i, force, alpha=-1).index_add_(0, j, force)


def _pieces(points: Tensor, *columns: Tensor) -> zip:
    """Split the list of close pairs so that its differences stay as small as one block."""
    size = max(1, PAIRS_PER_BLOCK // max(points.shape[1], 1))
    return zip(*(column.split(size) for column in columns), strict=True)


class _RieszEnergy(torch.autograd.Function):
    """riesz_energy with its gradient taken along in the forward pass: it is only N x d."""

    @staticmethod
    def forward(ctx: Any, omega: Tensor, s: Number, cutoff: Number) -> Tensor:
        sums = _pair_sums(omega.detach(), s, cutoff)
        ctx.save_for_backward(sums.gradient)
        return sums.energy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = ctx.saved_tensors
        return grad * gradient / max(gradient.shape[0], 1), None, None
