"""Positive features of one projection t = omega.x each, whose kernel is learned with omega, not known beforehand."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from mercer.features.base import FeatureMap, unit_sum


class Elu(FeatureMap):
    """max(1 + ELU(t / tau + b), floor), per token rescaled to sum sqrt(M).

    Args:
        *sizes: see `FeatureMap`.
        tau: temperature.
        shift: b.
        floor: least feature before the rescaling.
        **options: see `FeatureMap`; directions are N(0, I/D), gaussian.

    Source:
        Coulomb (arXiv:2607.23869), App. C; linear transformers (arXiv:2006.16236) at omega = I.
    """

    def __init__(
        self,
        *sizes: int,
        tau: float = 1.0,
        shift: float = 0.0,
        floor: float = 1e-6,
        directions: str = "gaussian",
        **options: Any,
    ):
        super().__init__(*sizes, directions=directions, **options)
        _positive(tau=tau, floor=floor)
        self.tau, self.shift, self.floor = tau, shift, floor
        self.register_initial_values()

    def log_features(self, x):
        t = project(x, self.omega) / self.tau + self.shift
        log_phi = torch.where(t < 0, t, torch.log1p(t.clamp_min(0)))  # 1 + ELU(t) = exp(t) below 0
        return unit_sum(log_phi.clamp_min(math.log(self.floor)))


class Softplus(FeatureMap):
    """softplus(t / tau) + floor, per token rescaled to sum sqrt(M).

    Args:
        *sizes: see `FeatureMap`.
        tau: temperature.
        floor: added to every feature before the rescaling.
        **options: see `FeatureMap`; directions are N(0, I/D), gaussian.

    Source:
        Coulomb (arXiv:2607.23869), App. C.
    """

    def __init__(
        self,
        *sizes: int,
        tau: float = 1.0,
        floor: float = 1e-6,
        directions: str = "gaussian",
        **options: Any,
    ):
        super().__init__(*sizes, directions=directions, **options)
        _positive(tau=tau, floor=floor)
        self.tau, self.floor = tau, floor
        self.register_initial_values()

    def log_features(self, x):
        return _log_softplus(project(x, self.omega) / self.tau, self.floor)


class PorfSoftplus(FeatureMap):
    """softplus(t / tau) + floor at directions in orthogonal blocks, per token rescaled to sum sqrt(M).

    Args:
        *sizes: see `FeatureMap`.
        tau: temperature.
        floor: added to every feature before the rescaling.
        **options: see `FeatureMap`; directions are of N(0, I/D), orthogonal at the start.

    Source:
        Coulomb (arXiv:2607.23869), App. C, porf-softplus.
    """

    def __init__(self, *sizes: int, tau: float = 1.0, floor: float = 1e-6, **options: Any):
        super().__init__(*sizes, **options)
        _positive(tau=tau, floor=floor)
        self.tau, self.floor = tau, floor
        self.register_initial_values()

    def log_features(self, x):
        return _log_softplus(project(x, self.omega) / self.tau, self.floor)


class Sigmoid2(FeatureMap):
    """sigmoid(t / tau)^2, per token rescaled to sum sqrt(M).

    Args:
        *sizes: see `FeatureMap`.
        tau: temperature.
        **options: see `FeatureMap`; directions are N(0, I/D), gaussian.

    Source:
        Coulomb (arXiv:2607.23869), App. C.
    """

    def __init__(self, *sizes: int, tau: float = 1.0, directions: str = "gaussian", **options: Any):
        super().__init__(*sizes, directions=directions, **options)
        _positive(tau=tau)
        self.tau = tau
        self.register_initial_values()

    def log_features(self, x):
        return unit_sum(2 * F.logsigmoid(project(x, self.omega) / self.tau))


class SoftmaxFeat(FeatureMap):
    """sqrt(M) softmax over the features of t / tau.

    Args:
        *sizes: see `FeatureMap`.
        tau: temperature.
        **options: see `FeatureMap`; directions are N(0, I/D), gaussian.

    Source:
        Coulomb (arXiv:2607.23869), App. C; not Efficient Attention, whose keys take the softmax over time.
    """

    def __init__(self, *sizes: int, tau: float = 1.0, directions: str = "gaussian", **options: Any):
        super().__init__(*sizes, directions=directions, **options)
        _positive(tau=tau)
        self.tau = tau
        self.register_initial_values()

    def log_features(self, x):
        return unit_sum(project(x, self.omega) / self.tau)


class Cos2(FeatureMap):
    """cos(t + b)^2 with fixed phases b, per token rescaled to sum sqrt(M).

    Args:
        *sizes: see `FeatureMap`.
        **options: see `FeatureMap`; directions are N(0, I/D), gaussian; phases are uniform.

    Source:
        Coulomb (arXiv:2607.23869), App. C.
    """

    phase: Tensor

    def __init__(self, *sizes: int, directions: str = "gaussian", **options: Any):
        super().__init__(*sizes, directions=directions, **options)
        self.register_initial_values()

    def initial_values(self):
        generator = torch.Generator("cpu").manual_seed(self.seed + 1)
        shape = (self.num_heads, self.num_features)
        phase = 2 * math.pi * torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32)
        return {**super().initial_values(), "phase": phase}

    def log_features(self, x):
        angle = project(x, self.omega) + self.phase.to(x.dtype)[:, None]
        # a feature of exactly 0 has an infinite log; 1e-12 below a mean of 1/2 is nothing to the sums
        return unit_sum(angle.cos().square().clamp_min(1e-12).log())


def project(x: Float[Tensor, "B Hk N D"], omega: Float[Tensor, "Hk M D"]) -> Float[Tensor, "B Hk N M"]:
    """Return t = omega.x."""
    return x @ omega.to(x.dtype).mT


def _log_softplus(t: Float[Tensor, "B Hk N M"], floor: float) -> Float[Tensor, "B Hk N M"]:
    return unit_sum(torch.log(F.softplus(t) + floor))


def _positive(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise ValueError(f"{name} ({value}) must be positive")
