"""The potential a particle feels from the labels: minus the alignment its feature adds, and the gradient."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from mercer.errors import unknown
from mercer.particles.energy import class_indicators, kernel_alignment

WAVES_PER_BLOCK = 1 << 22
FOURIER_KINDS = ("signed", "centered")


@runtime_checkable
class Potential(Protocol):
    """What `fit_particles` descends: the energy E_N of all particles and the drift's part N grad E_N."""

    num_samples: int

    def __call__(
        self, omega: Float[Tensor, "N d"], index: Int[Tensor, " batch"] | None
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "N d"]]:
        """Return E_N and N grad E_N on the samples `index`, on all of them for None."""
        ...


def fourier_potential(
    omega: Float[Tensor, "N d"], x: Float[Tensor, "n d"], targets: Float[Tensor, "n C"]
) -> tuple[Float[Tensor, " N"], Float[Tensor, "N d"]]:
    """Return V(omega_k) and its gradient for the Fourier feature `sqrt(2) cos(omega' x + b)`, averaged over b.

    With `e_kc = sum_i t_ic exp(i omega_k' x_i)`, one column of targets a class (or one column y = +-1):

    `V(omega_k) = -(sum_c |e_kc|^2 - sum_ic t_ic^2) / (n (n - 1))`, so that `E_N = mean_k V(omega_k)`, and
    `grad V = -2 / (n (n - 1)) sum_c [ -(t_c . cos) X' (t_c * sin) + (t_c . sin) X' (t_c * cos) ]`.

    This equals `-sum_c sum_{i != j} t_ic t_jc cos(omega_k' (x_i - x_j)) / (n (n - 1))` without the n^2 terms.

    Args:
        omega: Particles (frequencies).
        x: Samples.
        targets: Target columns; centred ones give the centred alignment.

    Returns:
        The potential [N] and its gradient [N, d].

    Raises:
        ValueError: For fewer than two samples.

    Cost: O(n N (d + C)) time, O(N (d + C) + 2^22) memory.

    Source: Coulomb paper eqs. B.8-B.9 with the constant that B.7 misprints; c, s there are cos, sin here.

    >>> x, y = torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0], [-1.0]])
    >>> value, gradient = fourier_potential(torch.tensor([[torch.pi]]), x, y)
    >>> round(value.item(), 4)
    -1.0
    """
    n = x.shape[0]
    if n < 2:
        raise ValueError(f"alignment of {n} sample: a pair is needed; pass at least 2 samples")
    size = max(1, WAVES_PER_BLOCK // omega.shape[0])
    blocks = list(zip(x.split(size), targets.split(size), strict=True))
    waves = _waves(blocks[0][0], omega) if len(blocks) == 1 else None  # one block: compute the cosines once
    real = imaginary = omega.new_zeros(())
    for samples, weights in blocks:
        cos, sin = waves or _waves(samples, omega)
        real, imaginary = real + weights.T @ cos, imaginary + weights.T @ sin  # e_kc as [C, N]
    gradient = torch.zeros_like(omega)
    for samples, weights in blocks:
        cos, sin = waves or _waves(samples, omega)
        pull = (weights @ imaginary) * cos - (weights @ real) * sin
        gradient += pull.T @ samples
    pairs = n * (n - 1)
    value = -(real.square() + imaginary.square()).sum(0) + targets.square().sum()
    return value / pairs, gradient * (-2 / pairs)


def aligned_phase(
    omega: Float[Tensor, "N d"], x: Float[Tensor, "n d"], targets: Float[Tensor, "n C"]
) -> Float[Tensor, " N"]:
    """Return the phase of each frequency at which its cosine agrees best with the targets.

    Maximises `sum_c (sum_i t_ic cos(omega_k' x_i + b_k))^2 = sum_c (Re(e_kc) cos b_k - Im(e_kc) sin b_k)^2`, so
    `b_k = -arg(sum_c e_kc^2) / 2`, in (-pi/2, pi/2]. For one column the squared sum becomes |e_k|^2, twice what a
    uniform phase gives on average.

    Cost: O(n N (d + C)) time, O(N C + 2^22) memory.

    Source: ours; e_k as in Coulomb paper B.8.

    >>> x, y = torch.tensor([[-1.0], [1.0]]), torch.tensor([[-1.0], [1.0]])
    >>> round(aligned_phase(torch.tensor([[1.0]]), x, y).abs().item(), 4)  # the sine
    1.5708
    """
    real = imaginary = omega.new_zeros(())
    size = max(1, WAVES_PER_BLOCK // omega.shape[0])
    for samples, weights in zip(x.split(size), targets.split(size), strict=True):
        cos, sin = _waves(samples, omega)
        real, imaginary = real + weights.T @ cos, imaginary + weights.T @ sin
    return -0.5 * torch.atan2(2 * (real * imaginary).sum(0), (real.square() - imaginary.square()).sum(0))


def _waves(samples: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    phase = samples @ omega.T
    return phase.cos(), phase.sin()


def label_targets(y: Shaped[Tensor, " n"], kind: str, dtype: torch.dtype) -> Float[Tensor, "n C"]:
    """Return the target columns whose products are the label kernel of an alignment.

    signed: the labels -1 and +1 themselves. centered: class indicators (integer y) or the numbers (floating y),
    centred and scaled so that the squares of all columns sum to n, as they do for signed labels.

    >>> label_targets(torch.tensor([0, 1]), "centered", torch.float64).round(decimals=4).tolist()
    [[0.7071, -0.7071], [-0.7071, 0.7071]]

    Raises:
        ValueError: For an unknown kind, or signed labels other than -1 and +1.
    """
    if kind == "signed":
        if not bool(((y == 1) | (y == -1)).all()):
            raise ValueError("signed alignment needs labels -1 and +1; recode them, or choose kind='centered'")
        return y.to(dtype)[:, None]
    if kind != "centered":
        raise unknown("alignment of Fourier features", kind, FOURIER_KINDS)
    targets = (y[:, None] if y.is_floating_point() else class_indicators(y)).to(dtype)
    targets = targets - targets.mean(0)
    scale = targets.square().sum().div(len(y)).sqrt()
    return targets / scale.clamp_min(torch.finfo(dtype).tiny)


class FourierPotential:
    """Alignment of Fourier features with labels, in closed form: a `Potential` for `fit_particles`.

    >>> x = torch.randn(64, 3)
    >>> potential = FourierPotential(x, torch.sign(x[:, 0]).long(), kind="signed")
    >>> energy, gradient = potential(torch.randn(8, 3), None)
    >>> gradient.shape
    torch.Size([8, 3])
    """

    def __init__(self, x: Float[Tensor, "n d"], y: Shaped[Tensor, " n"], *, kind: str = "centered"):
        self.x = x
        self.targets = label_targets(y, kind, x.dtype)
        self.num_samples = len(x)

    def __call__(
        self, omega: Float[Tensor, "N d"], index: Int[Tensor, " batch"] | None
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "N d"]]:
        """Return the mean of V over the particles, and grad V of each."""
        x, targets = (self.x, self.targets) if index is None else (self.x[index], self.targets[index])
        value, gradient = fourier_potential(omega, x, targets)
        return value.mean(), gradient


class FeaturePotential:
    """Alignment of any feature map with labels, through autograd: a `Potential` for `fit_particles`.

    `feature_map(x, omega)` returns [n, N], divided by sqrt(N); `E_N = -kernel_alignment(feature_map(x, omega), y)`.

    >>> softplus = lambda x, omega: torch.nn.functional.softplus(x @ omega.T) / len(omega) ** 0.5
    >>> x = torch.randn(64, 3)
    >>> potential = FeaturePotential(softplus, x, torch.sign(x[:, 0]).long(), kind="within_class")
    >>> potential(torch.randn(8, 3), None)[1].shape
    torch.Size([8, 3])
    """

    def __init__(
        self,
        feature_map: Callable[[Tensor, Tensor], Tensor],
        x: Float[Tensor, "n d"],
        y: Shaped[Tensor, " n"],
        *,
        kind: str = "centered",
    ):
        self.feature_map, self.x, self.y, self.kind = feature_map, x, y, kind
        self.num_samples = len(x)

    def __call__(
        self, omega: Float[Tensor, "N d"], index: Int[Tensor, " batch"] | None
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "N d"]]:
        """Return E_N and N grad E_N."""
        x, y = (self.x, self.y) if index is None else (self.x[index], self.y[index])
        with torch.enable_grad():
            leaf = omega.detach().requires_grad_()
            energy = -kernel_alignment(self.feature_map(x, leaf), y, self.kind)
            (gradient,) = torch.autograd.grad(energy, leaf)
        return energy.detach(), gradient * len(omega)
