"""The mean-field equation: exact solutions, structure kept to rounding, Gibbs fixed point, particles."""

import math

import pytest
import torch

from mercer.particles import McKeanVlasov, particle_convergence
from mercer.particles.convergence import sample_density
from mercer.particles.riesz_cells import cell_averages


def double_well(x):
    return (x[:, 0] ** 2 - 1) ** 2


def bump(model, center):
    density = torch.exp(-10 * (model.centers - center).square().sum(1)).reshape(model.shape) + 1e-12
    return density / (density.sum() * model.volume)


@pytest.fixture(scope="module")
def long_run():
    model = McKeanVlasov(double_well, [-2.2], [2.2], 48, strength=1.0, inverse_temperature=2.0)
    return model, model.evolve(bump(model, 0.5), time=100.0, step_size=0.01)


def test_structure_holds_over_ten_thousand_steps(long_run):
    _, run = long_run
    assert len(run.mass) == 10_001
    assert (run.mass - 1).abs().max() < 1e-12
    assert run.free_energy.diff().max() <= 1e-12
    assert run.free_energy[0] - run.free_energy[-1] > 0.1
    assert run.density.min() > 0


def test_steady_state_is_the_gibbs_fixed_point(long_run):
    model, run = long_run
    fixed = model.fixed_point()
    assert (run.density - fixed).abs().max() < 1e-6
    assert (model.gibbs(fixed) - fixed).abs().max() < 1e-11


@pytest.mark.parametrize("s", [-0.5, 0.0, 0.5])
def test_any_exponent_and_any_step_on_the_line(s):
    model = McKeanVlasov(double_well, [-2.5], [2.5], 40, strength=2.0, s=s, inverse_temperature=5.0)
    run = model.evolve(bump(model, -1.0), time=400.0, step_size=4.0, tolerance=1e-8)
    assert (run.mass - 1).abs().max() < 1e-12
    assert run.free_energy.diff().max() <= 1e-12
    assert run.density.min() > 0
    assert run.converged
    assert (run.density - model.fixed_point()).abs().max() < 1e-6


@pytest.mark.parametrize("s", [None, 1.0])
def test_two_dimensions(s):
    well = lambda x: x.square().sum(1) / 2 + x[:, 0] * x[:, 1] / 4
    model = McKeanVlasov(well, [-4.0, -3.5], [4.0, 3.5], (20, 22), strength=2.0, s=s, inverse_temperature=3.0)
    run = model.evolve(bump(model, 1.0), time=20.0, step_size=0.2, tolerance=1e-9)
    assert (run.mass - 1).abs().max() < 1e-12
    assert run.free_energy.diff().max() <= 1e-12
    assert run.density.min() > 0
    assert (run.density - model.fixed_point()).abs().max() < 1e-6


def test_without_interaction_the_fixed_point_is_the_gibbs_density_of_v():
    model = McKeanVlasov(double_well, [-3.0], [3.0], 60, inverse_temperature=2.0)
    expected = torch.exp(-2 * double_well(model.centers))
    assert torch.allclose(model.fixed_point(), expected / (expected.sum() * model.volume), atol=1e-12)


def ornstein_uhlenbeck_error(cells):
    """Return the largest error at time 1 against the exact Gaussian, the time step falling with the squared width."""
    model = McKeanVlasov(lambda x: x[:, 0] ** 2 / 2, [-7.0], [7.0], cells)
    x = model.axes[0]

    def exact(t):
        mean, variance = 1.5 * math.exp(-t), 1 - 0.5 * math.exp(-2 * t)
        return torch.exp(-((x - mean) ** 2) / (2 * variance)) / math.sqrt(2 * math.pi * variance)

    run = model.evolve(exact(0.0), time=1.0, step_size=(25 / cells) ** 2 / 10)
    return (run.density - exact(1.0)).abs().max().item()


def test_second_order_in_the_cell_width_in_time():
    errors = [ornstein_uhlenbeck_error(cells) for cells in (50, 100, 200)]
    assert errors[0] / errors[1] > 3.6
    assert errors[1] / errors[2] > 3.6


@pytest.mark.parametrize(
    ("dim", "s", "sizes"), [(1, 0.0, (40, 80, 320)), (1, -1.0, (40, 80, 320)), (2, 0.0, (12, 24, 96))]
)
def test_second_order_in_the_cell_width_at_rest(dim, s, sizes):
    def second_moment(cells):
        well = lambda x: x.square().sum(1)
        model = McKeanVlasov(well, [-3.0] * dim, [3.0] * dim, cells, strength=2.0, s=s, inverse_temperature=3.0)
        density = model.fixed_point(tolerance=1e-11)
        return float((density.reshape(-1) * model.centers.square().sum(1)).sum()) * model.volume

    coarse, middle, fine = (second_moment(cells) for cells in sizes)
    assert abs(coarse - fine) / abs(middle - fine) > 3.5


def test_cell_averages_against_fine_quadrature():
    for s in (0.0, 0.7, -1.0):
        line = cell_averages((4,), (0.5,), s)
        points = 0.5 * 2 + 0.5 * ((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000 - 0.5)
        value = -points.log() if s == 0 else math.copysign(1, s) * points.pow(-s)
        assert line[2].item() == pytest.approx(value.mean().item(), abs=1e-8)
        plane = cell_averages((2, 2), (0.5, 0.3), s)
        u, v = (h * ((torch.arange(2000, dtype=torch.float64) + 0.5) / 2000 - 0.5) for h in (0.5, 0.3))
        squared = u[:, None] ** 2 + v**2
        value = -0.5 * squared.log() if s == 0 else math.copysign(1, s) * squared.pow(-s / 2)
        assert plane[0, 0].item() == pytest.approx(value.mean().item(), abs=1e-3)
        assert torch.equal(plane[3], plane[1])


def test_particles_approach_the_density_as_they_grow_in_number():
    model = McKeanVlasov(lambda x: x[:, 0] ** 2, [-3.0], [3.0], 120, strength=1.0, inverse_temperature=2.0)
    report = particle_convergence(
        model, (16, 64, 256), repeats=6, num_steps=60, step_size=0.02, generator=torch.Generator().manual_seed(0)
    )
    assert report.distances[0] > report.distances[1] > report.distances[2]
    assert report.rate > 0.35
    assert "distance ~ N^-" in str(report)
    assert str(report).splitlines()[1].split()[0] == "16"


def test_particles_approach_the_density_in_the_plane_too():
    model = McKeanVlasov(
        lambda x: x.square().sum(1), [-2.5, -2.5], [2.5, 2.5], 24, strength=1.0, inverse_temperature=2.0
    )
    report = particle_convergence(
        model, (16, 64, 256), repeats=4, num_steps=40, step_size=0.02, generator=torch.Generator().manual_seed(0)
    )
    assert report.distances[0] > report.distances[1] > report.distances[2]
    assert report.rate > 0.3
    assert f"distance ~ N^-{report.rate:.2f}" in str(report)


def test_wasserstein_distance_of_a_shift_is_the_shift():
    line = McKeanVlasov(double_well, [-4.0], [4.0], 80, inverse_temperature=2.0)
    density, generator = line.fixed_point(), torch.Generator().manual_seed(0)
    drawn = sample_density(line, density, 20_000, generator)
    assert line.wasserstein(density, drawn) < 0.03
    assert line.wasserstein(density, drawn + 0.5) == pytest.approx(0.5, abs=0.03)
    plane = McKeanVlasov(lambda x: x.square().sum(1), [-3.0, -3.0], [3.0, 3.0], 15)
    density = plane.fixed_point()
    drawn = sample_density(plane, density, 400, generator)
    assert plane.wasserstein(density, drawn + 1.0) == pytest.approx(2**0.5, abs=0.15)


def test_mean_field_errors():
    with pytest.raises(ValueError, match="must agree on 1 or 2 dimensions"):
        McKeanVlasov(double_well, [0.0] * 3, [1.0] * 3)
    with pytest.raises(ValueError, match=r"the domain from .* is empty"):
        McKeanVlasov(double_well, [1.0], [0.0])
    with pytest.raises(ValueError, match=r"s \(=1.0\) must lie in \(-2, 1\): no density has finite energy beyond"):
        McKeanVlasov(double_well, [0.0], [1.0], s=1)
    with pytest.raises(ValueError, match=r"inverse_temperature \(=0\) must be positive"):
        McKeanVlasov(double_well, [0.0], [1.0], inverse_temperature=0)
    with pytest.raises(ValueError, match="the potential is not finite in some cell"):
        McKeanVlasov(lambda x: x[:, 0].log(), [-1.0], [1.0])
    model = McKeanVlasov(double_well, [-1.0], [1.0], 8)
    with pytest.raises(ValueError, match=r"density of shape \(7,\) must be positive and of shape \(8,\)"):
        model.evolve(torch.ones(7), time=1.0, step_size=0.1)
    with pytest.raises(ValueError, match="a rate needs at least 2 sizes and 2 repeats; got 1 and 4"):
        particle_convergence(model, (16,))
    with pytest.raises(ArithmeticError, match="no Gibbs fixed point within 1e-12 after 1 steps"):
        McKeanVlasov(double_well, [-1.0], [1.0], 8, strength=1.0).fixed_point(most_steps=1)
