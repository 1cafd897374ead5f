"""How fast N particles approach their mean-field limit."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.particles.energy import Number, riesz_repulsion
from mercer.particles.langevin import langevin_step
from mercer.particles.mean_field import McKeanVlasov
from mercer.particles.projection import project_box


@dataclass(frozen=True)
class Convergence:
    """Wasserstein distances to the mean-field density by number of particles; prints as a table with the rate.

    Attributes:
        sizes: N.
        distances: Mean 1-Wasserstein distance over the repeats.
        errors: Standard error of each mean.
        rate: -slope of log distance against log N; 1/2 for independent draws on the line.
    """

    sizes: list[int]
    distances: list[float]
    errors: list[float]
    rate: float

    def __str__(self) -> str:
        rows = [f"{n:>9}  {w:.4f} +- {e:.4f}" for n, w, e in zip(self.sizes, self.distances, self.errors, strict=True)]
        return "\n".join(["particles  Wasserstein-1", *rows, f"distance ~ N^-{self.rate:.2f}"])


def particle_convergence(
    model: McKeanVlasov,
    sizes: tuple[int, ...] = (16, 64, 256),
    *,
    repeats: int = 4,
    num_steps: int = 300,
    step_size: Number = 0.01,
    cutoff: Number = 1e-3,
    generator: torch.Generator | None = None,
) -> Convergence:
    """Run N particles for each N and compare them with the model's Gibbs fixed point.

    Particles start as independent draws from the fixed point and then move under the same potential, repulsion and
    temperature, boxed into the model's domain.

    Args:
        model: The mean-field equation.
        sizes: Numbers of particles, at least two.
        repeats: Independent systems for each.
        num_steps: Langevin steps before comparing.
        step_size: Langevin step.
        cutoff: Distance below which a pair counts as being this far apart.
        generator: Source of starts and noise.

    Returns:
        A `Convergence`.

    Raises:
        ValueError: For fewer than two sizes or repeats.

    Cost: repeats num_steps sum(N^2).

    >>> model = McKeanVlasov(lambda x: x[:, 0] ** 2, [-4.0], [4.0], 80, strength=1.0, inverse_temperature=2.0)
    >>> report = particle_convergence(model, (16, 256), repeats=2, num_steps=20)
    >>> report.distances[1] < report.distances[0]
    True
    """
    if len(sizes) < 2 or repeats < 2:
        raise ValueError(f"a rate needs at least 2 sizes and 2 repeats; got {len(sizes)} and {repeats}")
    density = model.fixed_point(tolerance=1e-10)
    distances = torch.tensor(
        [
            [
                model.wasserstein(density, _settle(model, density, n, num_steps, step_size, cutoff, generator))
                for _ in range(repeats)
            ]
            for n in sizes
        ],
        dtype=torch.float64,
    )
    mean, error = distances.mean(1), distances.std(1) / math.sqrt(repeats)
    logs = torch.tensor(sizes, dtype=torch.float64).log()
    logs = logs - logs.mean()
    rate = -float((logs * mean.log()).sum() / logs.square().sum())
    return Convergence(list(sizes), mean.tolist(), error.tolist(), rate)


def sample_density(
    model: McKeanVlasov, density: Float[Tensor, "..."], count: int, generator: torch.Generator | None = None
) -> Float[Tensor, "count d"]:
    """Draw independent points from a piecewise constant density."""
    cells = torch.multinomial(density.reshape(-1), count, replacement=True, generator=generator)
    offset = torch.rand(count, len(model.shape), generator=generator, dtype=torch.float64) - 0.5
    return model.centers[cells] + offset * torch.tensor(model.widths, dtype=torch.float64)


def _settle(
    model: McKeanVlasov,
    density: Tensor,
    count: int,
    num_steps: int,
    step_size: Number,
    cutoff: Number,
    generator: torch.Generator | None,
) -> Tensor:
    corners = (torch.tensor(corner, dtype=torch.float64) for corner in (model.lower, model.upper))
    project = partial(project_box, **dict(zip(("lower", "upper"), corners, strict=True)))
    omega = sample_density(model, density, count, generator)
    for _ in range(num_steps):
        drift = model.force(omega)
        if model.strength:
            drift = drift + model.strength * riesz_repulsion(omega, s=model.s, cutoff=cutoff).gradient
        omega = langevin_step(
            omega,
            drift / count,
            step_size=step_size,
            inverse_temperature=model.inverse_temperature,
            projection=project,
            generator=generator,
        )
    return omega
