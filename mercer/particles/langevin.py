"""Projected Langevin dynamics of a particle system: one step, the loop, and the resampling after it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mercer.errors import unknown
from mercer.particles.energy import Number, Repulsion, riesz_repulsion
from mercer.particles.potentials import Potential
from mercer.particles.projection import project_ball

Projection = Callable[[Tensor], Tensor]

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 + 0.5 * math.cos(math.pi * progress),
}


@dataclass(frozen=True)
class Record:
    """The state of a particle system before one step, measured without noise.

    Attributes:
        step: Steps taken so far.
        energy: H_N = -alignment + strength * repulsion.
        alignment: -E_N.
        repulsion: W_{N,s}.
        least_distance: Smallest distance of two particles.
        drift: Root mean square over particles of the noise-free move by projected drift, divided by the step size.
        effective_temperature: Mean squared difference between the step taken and the noise-free one, divided by
            2 step_size d: 1 / inverse_temperature, plus what the mini-batches add, less what the projection takes.
    """

    step: int
    energy: float
    alignment: float
    repulsion: float
    least_distance: float
    drift: float
    effective_temperature: float


@dataclass(frozen=True)
class ParticleFit:
    """What `fit_particles` returns: the particles, whether the noise-free drift fell to the tolerance, the history."""

    omega: Tensor
    converged: bool
    num_steps: int
    history: list[Record]

    def table(self) -> dict[str, list[Number]]:
        """Return the history by column, ready for a data frame or a figure."""
        rows = [asdict(record) for record in self.history]
        return {key: [row[key] for row in rows] for key in rows[0]} if rows else {}


def langevin_step(
    omega: Float[Tensor, "*batch N d"],
    gradient: Float[Tensor, "*batch N d"],
    *,
    step_size: Number,
    inverse_temperature: Number,
    radius: Number | None = None,
    projection: Projection | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "*batch N d"]:
    """Take one projected Langevin step with all particles at once.

    `omega <- project(omega - step_size N gradient + sqrt(2 step_size / inverse_temperature) xi)`, xi ~ N(0, I).

    The factor N makes the drift of a particle independent of how many there are: pass the plain gradient of H_N.
    Order: drift, noise, projection.

    Args:
        omega: Particles; leading dimensions are independent systems.
        gradient: Gradient of H_N, as autograd gives it.
        step_size: eta.
        inverse_temperature: beta; `math.inf` leaves the noise out.
        radius: Cap on every particle's norm; None for no cap.
        projection: Any other projection, in place of `radius` (see `project_l1_ball`, `project_box`).
        generator: Source of the noise.

    Returns:
        The moved particles.

    Raises:
        ValueError: If step_size or inverse_temperature is not positive, or both radius and projection are given.

    Cost: O(N d).

    Source: Coulomb paper Alg. 1; eta, beta there are step_size, inverse_temperature.

    >>> omega = torch.tensor([[3.0, 4.0]])
    >>> langevin_step(omega, torch.zeros(1, 2), step_size=0.1, inverse_temperature=math.inf, radius=10.0).tolist()
    [[3.0, 4.0]]
    """
    if not step_size > 0 or not inverse_temperature > 0:
        raise ValueError(
            f"step_size (={step_size}) and inverse_temperature (={inverse_temperature}) must be positive; "
            "inverse_temperature=inf runs without noise"
        )
    project = _projection(radius, projection)
    noise = torch.randn(omega.shape, generator=generator, dtype=omega.dtype, device=omega.device)
    scale = math.sqrt(2 * step_size / inverse_temperature)
    return project(omega - step_size * omega.shape[-2] * gradient + scale * noise)


def fit_particles(
    omega: Float[Tensor, "N d"],
    potential: Potential,
    *,
    strength: Number = 0.1,
    s: Number | None = 0.0,
    cutoff: Number = 1e-3,
    step_size: Number = 1.0,
    inverse_temperature: Number = 200.0,
    radius: Number | None = None,
    projection: Projection | None = None,
    num_steps: int = 500,
    batch_size: int | None = None,
    schedule: str = "constant",
    clip: Number | None = None,
    tolerance: Number = 1e-6,
    check_every: int = 50,
    check_samples: int = 8192,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> ParticleFit:
    """Move particles by projected Langevin dynamics on `H_N = E_N + strength W_{N,s}`.

    Every `check_every` steps the noise-free drift is measured, on all samples or on `check_samples` of them drawn
    once; the loop stops when it falls to `tolerance`. (Under noise the steps themselves never become small.)

    Args:
        omega: Where the particles start.
        potential: Called with (omega, sample index or None), returns E_N and N grad E_N; see `FourierPotential`.
        strength: Weight lambda of the repulsion; 0 leaves it out of the drift.
        s: Riesz exponent; 0 is the logarithm, None Coulomb for the dimension.
        cutoff: Distance below which a pair counts as being this far apart.
        step_size: eta at the start.
        inverse_temperature: beta.
        radius: Cap on every particle's norm.
        projection: Any other projection, in place of `radius`.
        num_steps: Most steps taken.
        batch_size: Samples a step, drawn by shuffled passes; None for all.
        schedule: How step_size falls: constant, linear or cosine.
        clip: Cap on the norm of every particle's drift.
        tolerance: Noise-free drift (root mean square) at which to stop.
        check_every: Steps between two entries of the history.
        check_samples: Most samples used for the noise-free drift.
        generator: Source of noise and batches.
        progress: Show a progress bar.

    Returns:
        A `ParticleFit`.

    Raises:
        ValueError: For an unknown schedule, a batch below 2 samples, particles that are not finite, or settings
            `langevin_step` refuses.

    Cost: num_steps times one potential and O(N^2 d).

    Source: Coulomb paper Alg. 1, App. D (stopping rule, here on the noise-free drift).

    >>> from mercer.particles import FourierPotential
    >>> x = torch.randn(200, 3)
    >>> fit = fit_particles(torch.randn(16, 3), FourierPotential(x, x[:, 0] > 0), num_steps=100, radius=3.0)
    >>> fit.history[-1].alignment > fit.history[0].alignment
    True
    """
    if schedule not in SCHEDULES:
        raise unknown("schedule", schedule, SCHEDULES)
    if num_steps < 0:
        raise ValueError(f"num_steps (={num_steps}) must not be negative; 0 only projects the start")
    n, project = potential.num_samples, _projection(radius, projection)
    batches = _batches(n, batch_size, omega.device, generator)
    check_index = None if n <= check_samples else _permutation(n, omega.device, generator)[:check_samples]
    omega, history, step, converged = project(omega.detach()), [], 0, False
    move = partial(langevin_step, inverse_temperature=inverse_temperature, projection=project, generator=generator)

    def drift_of(gradient: Tensor, repulsion: Repulsion | None) -> Tensor:
        drift = gradient if repulsion is None or strength == 0 else gradient + strength * repulsion.gradient
        return drift if clip is None else project_ball(drift, clip)

    for step in _track(num_steps, progress):
        eta = step_size * SCHEDULES[schedule](step / num_steps)
        check = step % check_every == 0 or step == num_steps - 1
        repulsion = riesz_repulsion(omega, s=s, cutoff=cutoff) if strength or check else None
        index = next(batches)
        energy, gradient = potential(omega, index)
        drift = drift_of(gradient, repulsion)
        moved = move(omega, drift / len(omega), step_size=eta)
        if check and repulsion is not None:
            if index is not check_index:
                energy, gradient = potential(omega, check_index)
                drift = drift_of(gradient, repulsion)
            history.append(_record(step, omega, moved, drift, eta, energy, repulsion, strength, project))
            if history[-1].drift <= tolerance:
                converged = True
                break
        omega = moved
    return ParticleFit(omega, converged, step if converged else num_steps, history)


def resample_particles(
    omega: Float[Tensor, "N d"],
    energies: Float[Tensor, " N"],
    size: int,
    *,
    inverse_temperature: Number,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "size d"]:
    """Draw `size` different particles with probability proportional to `exp(-inverse_temperature H(omega_k))`.

    Sampling is without replacement (the largest of log weight + Gumbel noise), so no feature comes twice and no
    weight underflows.

    Args:
        omega: Particles.
        energies: H(omega_k) = V(omega_k) + strength * riesz_repulsion(omega).potential_k.
        size: How many to keep.
        inverse_temperature: beta; 0 draws uniformly, `math.inf` takes those of least energy.
        generator: Source of the draw.

    Returns:
        The particles drawn, most probable not first.

    Raises:
        ValueError: If more are asked than there are.

    Cost: O(N log N).

    Source: Coulomb paper Alg. 2; H of one particle is ours.

    >>> resample_particles(torch.eye(3), torch.tensor([0.0, 9.0, 0.0]), 2, inverse_temperature=100.0).sum(0).tolist()
    [1.0, 0.0, 1.0]
    """
    if not 0 < size <= len(omega):
        raise ValueError(f"cannot draw {size} of {len(omega)} particles; ask for between 1 and {len(omega)}")
    uniform = torch.rand(len(omega), generator=generator, dtype=torch.float64, device=omega.device)
    if math.isinf(inverse_temperature):
        keys = -energies.double()
    else:
        keys = -inverse_temperature * energies.double() - (-uniform.clamp_min(1e-300).log()).log()
    return omega[keys.topk(size).indices.sort().values]


def _projection(radius: Number | None, projection: Projection | None) -> Projection:
    if radius is not None and projection is not None:
        raise ValueError(f"pass either radius (={radius}) or projection, not both")
    if projection is not None:
        return projection
    return (lambda omega: omega) if radius is None else partial(project_ball, radius=radius)


def _permutation(n: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    return torch.randperm(n, generator=generator, device=device)


def _batches(
    n: int, batch_size: int | None, device: torch.device, generator: torch.Generator | None
) -> Iterator[Int[Tensor, " batch"] | None]:
    """Yield index sets without end: shuffled passes over the samples, the ragged rest of each left out."""
    if batch_size is not None and batch_size < 2:
        raise ValueError(f"batch_size (={batch_size}) must be at least 2: alignment is a sum over pairs")

    def draw() -> Iterator[Int[Tensor, " batch"] | None]:
        while batch_size is None or batch_size >= n:
            yield None
        while True:
            order = _permutation(n, device, generator)
            yield from order[: n - n % batch_size].split(batch_size)

    return draw()


def _record(
    step: int,
    omega: Tensor,
    moved: Tensor,
    drift: Tensor,
    eta: float,
    energy: Tensor,
    repulsion: Repulsion,
    strength: Number,
    project: Projection,
) -> Record:
    if not bool(torch.isfinite(moved).all()):
        raise ValueError(f"particles are not finite after step {step}; lower step_size or set clip")
    target = omega - eta * drift
    pull = (project(target) - omega).square().sum(-1).mean().sqrt().item() / eta
    temperature = (moved - target).square().mean().item() / (2 * eta)
    push = repulsion.energy.item()
    fit = -energy.item()
    return Record(step, strength * push - fit, fit, push, repulsion.least_distance.item(), pull, temperature)


def _track(num_steps: int, progress: bool) -> Iterator[int]:
    if not progress:
        yield from range(num_steps)
        return
    from rich.progress import track

    yield from track(range(num_steps), description="particles")
