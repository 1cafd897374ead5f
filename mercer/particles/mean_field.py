"""The limit of infinitely many particles: a density that flows down its free energy, in one or two dimensions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from mercer.particles.energy import Number, coulomb_exponent
from mercer.particles.riesz_cells import cell_averages

MOST_HALVINGS = 30
MOST_ITERATIONS = 60
SOLVED = 1e-13  # change of an iterate, as a share of the largest density, at which the implicit step counts as solved
ROUNDING = 1e-14  # share of the free energy by which two evaluations of the same one may differ


@dataclass(frozen=True)
class Evolution:
    """A run of the mean-field equation: the density at its end, and mass and free energy after every step."""

    density: Tensor
    time: float
    mass: Tensor
    free_energy: Tensor
    converged: bool


class McKeanVlasov:
    """Solve the mean-field equation of the particles on an interval or a rectangle, nothing crossing its boundary.

    `d rho/dt = div(rho grad U) + Laplace(rho) / inverse_temperature`, `U = V + strength g_s * rho`,

    the Wasserstein gradient flow of the free energy

    `F(rho) = int V rho + strength / 2 int int g_s(x - y) rho(x) rho(y) + int rho log rho / inverse_temperature`.

    Finite volumes with exponentially fitted (Scharfetter-Gummel) fluxes: between cells i and i + 1 of width h

    `J = -(B(-z) rho_{i+1} - B(z) rho_i) / (inverse_temperature h)`, `z = inverse_temperature (U_{i+1} - U_i)`,
    `B(z) = z / (exp(z) - 1)`,

    which vanishes exactly on Gibbs densities. A step is implicit, with U taken at the mean of the old and the new
    density: then the free energy of the cells cannot rise, whatever the step (the interaction is quadratic and the
    entropy convex), the matrix is an M-matrix (the density stays positive), and its columns sum to 1 (mass is kept).
    In two dimensions the axes take turns. The interaction is averaged over the cells, so singular kernels are exact
    on piecewise constant densities.

    Args:
        potential: V at points [M, d], returns [M]; float64.
        lower: Lower corner, one number a dimension.
        upper: Upper corner.
        cells: Cells along each dimension.
        strength: Weight lambda of the repulsion.
        s: Riesz exponent below d; None is Coulomb (-1 on the line, the logarithm in the plane).
        inverse_temperature: beta.

    Raises:
        ValueError: For dimensions other than 1 and 2, an empty domain, s outside (-2, d), or non-positive sizes.
        ImportError: If scipy is missing.

    Cost: a step solves one tridiagonal system an axis and iteration, O(cells^d), and convolves by FFT.

    Source: Coulomb paper, mean-field equation; Scharfetter-Gummel for aggregation: Schlichting and Seis 2022.

    >>> model = McKeanVlasov(lambda x: x[:, 0] ** 2 / 2, [-6.0], [6.0], 100)
    >>> run = model.evolve(time=5.0, step_size=0.05)
    >>> bool((run.free_energy.diff() <= 1e-12).all())
    True
    """

    def __init__(
        self,
        potential: Callable[[Tensor], Tensor],
        lower: Sequence[Number],
        upper: Sequence[Number],
        cells: int | tuple[int, ...] = 128,
        *,
        strength: Number = 0.0,
        s: Number | None = None,
        inverse_temperature: Number = 1.0,
    ):
        dim = len(lower)
        shape = (cells,) * dim if isinstance(cells, int) else tuple(cells)
        if dim not in (1, 2) or len(upper) != dim or len(shape) != dim:
            raise ValueError(f"lower ({lower}), upper ({upper}) and cells ({cells}) must agree on 1 or 2 dimensions")
        if min(shape) < 2 or not all(a < b for a, b in zip(lower, upper, strict=True)):
            raise ValueError(f"the domain from {lower} to {upper} in {shape} cells is empty; use at least 2 cells each")
        s = coulomb_exponent(dim) if s is None else float(s)
        if not -2 < s < dim:
            raise ValueError(f"s (={s}) must lie in (-2, {dim}): no density has finite energy beyond")
        if not inverse_temperature > 0 or strength < 0:
            raise ValueError(
                f"inverse_temperature (={inverse_temperature}) must be positive and strength (={strength}) not negative"
            )
        self.shape, self.strength, self.s, self.inverse_temperature = shape, strength, s, inverse_temperature
        self.lower, self.upper = tuple(lower), tuple(upper)
        self.widths = tuple((b - a) / m for a, b, m in zip(lower, upper, shape, strict=True))
        self.volume = math.prod(self.widths)
        axes = [
            a + h * (torch.arange(m, dtype=torch.float64) + 0.5)
            for a, h, m in zip(lower, self.widths, shape, strict=True)
        ]
        self.axes = axes
        self.centers = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, dim)
        self.potential = potential
        self.external = potential(self.centers).double().reshape(shape)
        if not bool(torch.isfinite(self.external).all()):
            raise ValueError("the potential is not finite in some cell; shrink the domain or bound the potential")
        # Symmetric kernel values at all cell offsets, laid out for a circular convolution twice as long.
        self._kernel = torch.fft.rfftn(cell_averages(shape, self.widths, s)) if strength else None

    def force(self, points: Float[Tensor, "M d"]) -> Float[Tensor, "M d"]:
        """Return grad V at any points, by autograd."""
        with torch.enable_grad():
            leaf = points.detach().requires_grad_()
            return torch.autograd.grad(self.potential(leaf).sum(), leaf)[0]

    def free_energy(self, density: Tensor) -> float:
        """Return F of a density given by its cell values."""
        entropy = torch.special.xlogy(density, density) / self.inverse_temperature
        interaction = self.strength / 2 * self._interact(density) * density if self.strength else 0.0
        return float((self.external * density + interaction + entropy).sum()) * self.volume

    def gibbs(self, density: Tensor) -> Tensor:
        """Return `exp(-inverse_temperature (V + strength g_s * density))`, normalised to mass 1."""
        exponent = -self.inverse_temperature * self._field(density)
        return torch.softmax(exponent.reshape(-1), 0).reshape(self.shape) / self.volume

    def uniform(self) -> Tensor:
        """Return the uniform density."""
        return torch.full(self.shape, 1 / (math.prod(self.shape) * self.volume), dtype=torch.float64)

    def evolve(
        self,
        density: Tensor | None = None,
        *,
        time: Number,
        step_size: Number,
        tolerance: Number | None = None,
    ) -> Evolution:
        """Follow the equation from `density` (default: uniform) for `time`.

        Args:
            density: Positive cell values; not normalised.
            time: How long.
            step_size: Time step; one at which the implicit equations cannot be solved is halved on the way.
            tolerance: Stop when no cell changes faster than this; None goes on to the end.

        Returns:
            An `Evolution`; `converged` says that the tolerance was reached.

        Raises:
            ValueError: If the density has the wrong shape or is not positive.
        """
        rho = self.uniform() if density is None else density.double()
        if rho.shape != self.shape or not bool((rho > 0).all()):
            raise ValueError(f"density of shape {tuple(rho.shape)} must be positive and of shape {self.shape}")
        count = max(1, round(time / step_size))
        masses, energies = [float(rho.sum()) * self.volume], [self.free_energy(rho)]
        moves = [torch.zeros_like(rho) for _ in self.shape]  # last change by each axis: where to look for the next
        converged, done = False, 0
        while done < count and not converged:
            old, energy, done = rho, energies[-1], done + 1
            for axis, move in enumerate(moves):
                new, energy = self._sweep(rho, energy, rho + move, step_size, axis)
                moves[axis], rho = new - rho, new
            masses.append(float(rho.sum()) * self.volume)
            energies.append(energy)
            converged = tolerance is not None and float((rho - old).abs().max()) <= tolerance * step_size
        return Evolution(rho, done * step_size, _column(masses), _column(energies), converged)

    def fixed_point(
        self, density: Tensor | None = None, *, tolerance: Number = 1e-12, most_steps: int = 100_000
    ) -> Float[Tensor, "..."]:
        """Return the density that is its own Gibbs density, found without the equation.

        `rho <- rho + theta (gibbs(rho) - rho)`: a direction in which the free energy falls. theta is halved where a
        step lowers neither the free energy nor the distance `sum (gibbs - rho)^2 / gibbs` (the energy is flat to
        rounding long before the density has settled), and grows again.

        Args:
            density: Where to start; default uniform.
            tolerance: Largest |gibbs(rho) - rho|, as a share of the largest density.
            most_steps: Steps after which to give up.

        Returns:
            Cell values of the density.

        Raises:
            ArithmeticError: If it is not found.
        """
        rho, theta = self.uniform() if density is None else density.double(), 1.0
        energy, target = self.free_energy(rho), self.gibbs(rho)
        distance = _chi_square(rho, target)
        for _ in range(most_steps):
            if float((target - rho).abs().max()) <= tolerance * float(rho.max()):
                return rho
            tried = rho + theta * (target - rho)
            tried_energy, tried_target = self.free_energy(tried), self.gibbs(tried)
            tried_distance = _chi_square(tried, tried_target)
            if tried_distance < distance or tried_energy < energy - ROUNDING * (1 + abs(energy)):
                rho, energy, target, distance = tried, tried_energy, tried_target, tried_distance
                theta = min(1.0, 1.2 * theta)
            else:
                theta /= 2
        raise ArithmeticError(
            f"no Gibbs fixed point within {tolerance} after {most_steps} steps (damping {theta:.1e}); "
            "lower strength or inverse_temperature, or start nearer"
        )

    def wasserstein(self, density: Float[Tensor, "..."], particles: Float[Tensor, "N d"]) -> float:
        """Return the 1-Wasserstein distance between a density and a set of particles.

        On the line the density is spread over 8 points a cell and compared through the quantiles (scipy); in the
        plane its cells are points at their centres and the transport problem is solved exactly (POT).

        Raises:
            ImportError: If scipy or POT is missing.
        """
        weights = (density / density.sum()).reshape(-1)
        if len(self.shape) == 1:
            from scipy.stats import wasserstein_distance

            inner = (torch.arange(8, dtype=torch.float64) + 0.5) / 8 - 0.5
            points = (self.centers + self.widths[0] * inner).reshape(-1)
            return float(
                wasserstein_distance(
                    points.numpy(), particles[:, 0].double().numpy(), weights.repeat_interleave(8).numpy()
                )
            )
        try:
            import ot
        except ImportError as error:
            raise ImportError("Wasserstein distances in the plane need POT: pip install POT") from error
        costs = torch.cdist(self.centers, particles.double()).numpy()
        equal = torch.full((len(particles),), 1 / len(particles), dtype=torch.float64).numpy()
        return float(
            ot.emd2(  # pyright: ignore[reportArgumentType]
                weights.numpy(), equal, costs, numItermax=10_000_000
            )
        )

    def _interact(self, density: Tensor) -> Tensor:
        """Return g_s * density at the cell centres."""
        size = [2 * m for m in self.shape]
        axes = list(range(len(size)))
        wide = torch.fft.irfftn(self._kernel * torch.fft.rfftn(density, size, axes), size, axes)
        return wide[tuple(slice(m) for m in self.shape)] * self.volume

    def _field(self, density: Tensor) -> Tensor:
        return self.external + self.strength * self._interact(density) if self.strength else self.external

    def _sweep(
        self, rho: Tensor, energy: float, guess: Tensor, step_size: Number, axis: int, halvings: int = 0
    ) -> tuple[Tensor, float]:
        """Take one implicit step along one axis, or two of half the size where it cannot be solved."""
        new, change, mixing = guess, math.inf, _Anderson()
        for _ in range(MOST_ITERATIONS):
            solved = self._solve(self._field((rho + new) / 2), rho, step_size, axis)
            change = float((solved - new).abs().max() / solved.max()) if self.strength else 0.0
            if change <= SOLVED:
                new = solved
                break
            new = mixing.next(new, solved)
        value = self.free_energy(new)
        if change <= SOLVED and value <= energy + ROUNDING * (1 + abs(energy)):
            return new, value
        if halvings == MOST_HALVINGS:
            raise ArithmeticError(f"the implicit step was not solved even at step_size {step_size:.1e}; use more cells")
        for _ in range(2):
            rho, energy = self._sweep(rho, energy, rho, step_size / 2, axis, halvings + 1)
        return rho, energy

    def _solve(self, field: Tensor, rho: Tensor, step_size: Number, axis: int) -> Tensor:
        """Solve `rho_new + step_size div J(rho_new) = rho` on all lines along `axis`, as one tridiagonal system."""
        from scipy.linalg.lapack import dgtsv  # pyright: ignore[reportAttributeAccessIssue]

        rate = step_size / (self.inverse_temperature * self.widths[axis] ** 2)
        field, lines = field.movedim(axis, -1), rho.movedim(axis, -1)
        z = self.inverse_temperature * field.diff(dim=-1)
        # No flux through the ends: a zero after every line, which also keeps the lines apart.
        out, back = torch.zeros_like(field), torch.zeros_like(field)
        out[..., :-1], back[..., :-1] = rate * _bernoulli(z), rate * _bernoulli(-z)
        leave = 1 + out
        leave[..., 1:] += back[..., :-1]
        below, above = -out.reshape(-1)[:-1], -back.reshape(-1)[:-1]
        *_, solved, info = dgtsv(below.numpy(), leave.reshape(-1).numpy(), above.numpy(), lines.reshape(-1).numpy())
        assert info == 0, "an M-matrix with unit column sums is not singular"
        return torch.from_numpy(solved).reshape(lines.shape).movedim(-1, axis)


class _Anderson:
    """Anderson mixing: extrapolate a fixed-point iteration from its last residuals, contractive or not."""

    def __init__(self, depth: int = 6):
        self.depth, self.values, self.residuals = depth, [], []

    def next(self, point: Tensor, value: Tensor) -> Tensor:
        """Return where to look next, after `point` has been mapped to `value`."""
        self.values = [*self.values[-self.depth :], value.reshape(-1)]
        self.residuals = [*self.residuals[-self.depth :], (value - point).reshape(-1)]
        if len(self.values) == 1:
            return value
        slopes = torch.stack(self.residuals, 1).diff(dim=1)
        weights = torch.linalg.lstsq(slopes, self.residuals[-1][:, None]).solution
        return value - (torch.stack(self.values, 1).diff(dim=1) @ weights).reshape(value.shape)


def _bernoulli(z: Tensor) -> Tensor:
    """Return z / (exp(z) - 1), 1 at 0."""
    return torch.where(z == 0, 1.0, z / torch.expm1(z))


def _chi_square(density: Tensor, target: Tensor) -> float:
    return float(((target - density).square() / target.clamp_min(torch.finfo(target.dtype).tiny)).sum())


def _column(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
