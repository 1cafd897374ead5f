"""Langevin dynamics: the step, the sets, the law it samples, the loop, the resampling."""

import math

import pytest
import torch
from scipy import stats

from mercer.particles import (
    FourierPotential,
    fit_particles,
    langevin_step,
    project_ball,
    project_box,
    project_l1_ball,
    resample_particles,
    riesz_energy,
)


def test_a_step_is_drift_noise_projection():
    omega, gradient = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    moved = langevin_step(omega, gradient, step_size=0.1, inverse_temperature=2.0, radius=1.0, generator=generator)
    noise = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = omega - 0.1 * 5 * gradient + math.sqrt(2 * 0.1 / 2.0) * noise
    expected = expected / expected.norm(dim=1, keepdim=True).clamp_min(1.0)
    assert torch.allclose(moved, expected, atol=1e-12)


def test_leading_dimensions_are_independent_systems():
    omega, gradient = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    options = {"step_size": 0.1, "inverse_temperature": math.inf}
    both = langevin_step(omega, gradient, **options)
    assert torch.equal(both[1], langevin_step(omega[1], gradient[1], **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e6])
@pytest.mark.parametrize("radius", [0.1, 1.5, 7])
def test_projection_never_leaves_the_set(dtype, scale, radius):
    omega = scale * torch.randn(2000, 33, dtype=dtype)
    ball, diamond, box = (
        langevin_step(omega, torch.zeros_like(omega), step_size=1, inverse_temperature=1, projection=projection)
        for projection in (
            lambda x: project_ball(x, radius),
            lambda x: project_l1_ball(x, radius),
            lambda x: project_box(x, -radius, radius),
        )
    )
    assert bool((ball.norm(dim=1) <= radius).all())
    assert bool((ball.double().square().sum(1).sqrt() <= radius).all())
    assert bool((diamond.double().abs().sum(1) <= radius).all())
    assert bool((box.double().abs() <= torch.tensor(radius, dtype=dtype)).all())
    assert torch.equal(project_ball(ball, radius), ball)
    assert torch.equal(project_l1_ball(diamond, radius), diamond)


def test_l1_projection_is_the_nearest_point():
    omega = 3 * torch.randn(40, 4, dtype=torch.float64)
    near = project_l1_ball(omega, 2.0)
    others = project_l1_ball(torch.randn(500, 4, dtype=torch.float64), 2.0)
    best = torch.cdist(omega, others).min(1).values
    assert bool(((omega - near).norm(dim=1) <= best + 1e-12).all())
    inside = omega.abs().sum(1) <= 2
    assert torch.equal(near[inside], omega[inside])


def sampled(step_size, chains, burn):
    """Run independent chains of one particle in V(x) = x^4 / 4 - x^2 / 2 and return where they end."""
    omega, generator = torch.zeros(chains, 1, 1, dtype=torch.float64), torch.Generator().manual_seed(11)
    for _ in range(round(burn / step_size)):
        omega = langevin_step(
            omega, omega**3 - omega, step_size=step_size, inverse_temperature=2.0, generator=generator
        )
    return omega.reshape(-1)


def chi_square(samples):
    """Return the statistic and p-value against exp(-2 V) in 16 cells of equal probability."""
    x = torch.linspace(-4, 4, 200_001, dtype=torch.float64)
    cumulative = torch.exp(-2 * (x**4 / 4 - x**2 / 2)).cumsum(0)
    edges = x[torch.searchsorted(cumulative / cumulative[-1], torch.arange(1, 16) / 16)]
    counts = torch.bincount(torch.bucketize(samples, edges), minlength=16).numpy()
    return stats.chisquare(counts)


def test_one_particle_without_repulsion_samples_the_gibbs_law():
    """Every chain gives one draw, so draws are independent; the bias of the step must be below what they resolve."""
    fine = chi_square(sampled(0.01, 4000, 10))
    assert fine.pvalue > 1e-3
    bias = [chi_square(sampled(step, 100_000, 10)).statistic for step in (0.2, 0.1, 0.05)]
    assert bias[0] > 3 * bias[1] > 0
    assert bias[1] > 2 * bias[2]


def test_step_errors():
    omega = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"step_size \(=0\) and inverse_temperature \(=1\) must be positive"):
        langevin_step(omega, omega, step_size=0, inverse_temperature=1)
    with pytest.raises(ValueError, match=r"pass either radius \(=1\) or projection, not both"):
        langevin_step(omega, omega, step_size=1, inverse_temperature=1, radius=1, projection=lambda x: x)
    with pytest.raises(ValueError, match=r"radius \(=-1\) must be positive"):
        langevin_step(omega, omega, step_size=1, inverse_temperature=1, radius=-1)
    with pytest.raises(ValueError, match="is empty; lower must not exceed upper"):
        project_box(omega, 1, -1)


@pytest.fixture
def problem():
    x = torch.randn(300, 3)
    return torch.randn(24, 3), FourierPotential(x, (torch.sin(2 * x[:, 0]) + 0.3 * x[:, 1] > 0).long())


def fit(problem, **options):
    settings = {"radius": 4.0, "num_steps": 150, "check_every": 10, "generator": torch.Generator().manual_seed(0)}
    return fit_particles(*problem, **(settings | options))


def test_fitting_raises_the_alignment_and_keeps_a_history(problem):
    result = fit(problem, inverse_temperature=1e4)
    assert result.history[-1].alignment > 5 * result.history[0].alignment
    assert [record.step for record in result.history] == [*range(0, 150, 10), 149]
    last = result.history[-1]
    assert last.energy == pytest.approx(0.1 * last.repulsion - last.alignment, abs=1e-6)
    assert result.num_steps == 150
    assert not result.converged
    assert list(result.table()["alignment"])[-1] == last.alignment


def test_history_measures_the_temperature_that_was_asked_for(problem):
    cold, hot = (fit(problem, inverse_temperature=beta, radius=None).table() for beta in (2000.0, 200.0))
    assert sum(cold["effective_temperature"]) / 16 == pytest.approx(1 / 2000, rel=0.1)
    assert sum(hot["effective_temperature"]) / 16 == pytest.approx(1 / 200, rel=0.1)
    batched = fit(problem, inverse_temperature=2000.0, radius=None, batch_size=8).table()
    assert sum(batched["effective_temperature"]) / 16 > 2 / 2000, "mini-batches heat"


def test_repulsion_raises_the_least_distance(problem):
    apart, free = (fit(problem, inverse_temperature=1e4, strength=strength) for strength in (0.3, 0.0))
    assert apart.history[-1].least_distance > 3 * free.history[-1].least_distance
    assert riesz_energy(apart.omega, s=0.0) < riesz_energy(free.omega, s=0.0)


def test_particles_of_a_box_stay_in_it_all_the_way(problem):
    corners = torch.tensor([-0.5, -2.0, -1.0]), torch.tensor([0.5, 2.0, 0.0])
    seen = []

    def box(omega):
        seen.append(project_box(omega, *corners))
        return seen[-1]

    result = fit(problem, radius=None, projection=box, inverse_temperature=1e4, schedule="linear", batch_size=64)
    assert len(seen) > 150
    assert all(bool(((corners[0] <= omega) & (omega <= corners[1])).all()) for omega in seen)
    assert torch.equal(result.omega, project_box(result.omega, *corners))
    assert result.history[-1].energy < result.history[0].energy


def test_stopping_looks_at_the_drift_without_noise(problem):
    quiet = fit(problem, inverse_temperature=math.inf, num_steps=5000, tolerance=1e-3, strength=0.0)
    assert quiet.converged
    assert quiet.num_steps < 5000
    assert quiet.history[-1].drift <= 1e-3
    moved = langevin_step(
        quiet.omega, problem[1](quiet.omega, None)[1] / 24, step_size=1, inverse_temperature=math.inf, radius=4.0
    )
    assert (moved - quiet.omega).square().sum(1).mean().sqrt() <= 1.1e-3


def test_mini_batches_pass_over_all_samples():
    seen = []

    class Spy:
        num_samples = 10

        def __call__(self, omega, index):
            if index is not None:
                seen.append(index)
            return omega.new_zeros(()), torch.zeros_like(omega)

    fit_particles(torch.randn(4, 2), Spy(), num_steps=4, batch_size=5, tolerance=0.0, check_every=100, strength=0.5)
    assert torch.equal(torch.cat(seen[:2]).sort().values, torch.arange(10))
    assert torch.equal(torch.cat(seen[2:]).sort().values, torch.arange(10))


def test_schedule_and_progress(problem, capsys):
    slow = fit(problem, schedule="cosine", progress=True, num_steps=30)
    assert "particles" in capsys.readouterr().out
    assert slow.num_steps == 30
    assert torch.equal(fit(problem, num_steps=0).omega, project_ball(problem[0], 4.0))


def test_fit_errors(problem):
    with pytest.raises(ValueError, match=r"unknown schedule 'cosin'; .* \(did you mean 'cosine'\?\)"):
        fit(problem, schedule="cosin")
    with pytest.raises(ValueError, match=r"batch_size \(=1\) must be at least 2: alignment is a sum over pairs"):
        fit(problem, batch_size=1)
    with pytest.raises(ValueError, match=r"num_steps \(=-1\) must not be negative"):
        fit(problem, num_steps=-1)
    with pytest.raises(ValueError, match="particles are not finite after step 0; lower step_size or set clip"):
        fit((torch.full((4, 3), math.nan), problem[1]))


def test_clipping_caps_the_drift(problem):
    result = fit(problem, clip=1e-3, inverse_temperature=math.inf, num_steps=1)
    assert (result.omega - project_ball(problem[0], 4.0)).norm(dim=1).max() <= 1.001e-3


def test_resampling_follows_the_weights_without_repeats():
    omega = torch.arange(4.0)[:, None]
    energies = torch.tensor([0.0, math.log(2), math.log(4), 1e6])
    generator = torch.Generator().manual_seed(0)
    draws = torch.cat(
        [resample_particles(omega, energies, 1, inverse_temperature=1.0, generator=generator) for _ in range(2000)]
    )
    share = torch.bincount(draws.flatten().long(), minlength=4) / 2000
    assert torch.allclose(share, torch.tensor([4.0, 2.0, 1.0, 0.0]) / 7, atol=0.04)
    assert len(resample_particles(omega, energies, 4, inverse_temperature=1.0).unique()) == 4
    coldest = resample_particles(omega, torch.tensor([0.5, -1.0, 2.0, 0.0]), 2, inverse_temperature=math.inf)
    assert coldest.flatten().tolist() == [1.0, 3.0]
    with pytest.raises(ValueError, match="cannot draw 5 of 4 particles; ask for between 1 and 4"):
        resample_particles(omega, energies, 5, inverse_temperature=1.0)
