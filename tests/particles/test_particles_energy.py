"""Energies against hand calculation, definitions as double sums, and autograd."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mercer.particles import (
    FeaturePotential,
    FourierPotential,
    aligned_phase,
    fourier_potential,
    kernel_alignment,
    riesz_energy,
    riesz_energy_naive,
    riesz_repulsion,
)


def double_sum(features, weight):
    n = len(features)
    return sum(weight(i, j) * float(features[i] @ features[j]) for i in range(n) for j in range(n) if i != j)


@pytest.fixture
def features():
    return torch.randn(7, 4, dtype=torch.float64)


def test_signed_alignment_is_the_double_sum(features):
    y = torch.tensor([1, -1, 1, 1, -1, -1, 1])
    expected = double_sum(features, lambda i, j: float(y[i] * y[j])) / (7 * 6)
    assert kernel_alignment(features, y, "signed").item() == pytest.approx(expected, abs=1e-13)


def test_within_class_alignment_counts_each_pair_once(features):
    y = torch.tensor([3, 0, 3, 5, 0, 3, 5])
    expected = double_sum(features, lambda i, j: float(y[i] == y[j])) / 2 / (7 * 6)
    assert kernel_alignment(features, y, "within_class").item() == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("width", [3, 12])
@pytest.mark.parametrize("target", ["classes", "signs", "numbers"])
def test_centered_alignment_is_the_cosine_of_centred_matrices(width, target):
    f = torch.randn(8, width, dtype=torch.float64)
    y = {
        "classes": torch.tensor([0, 1, 2, 0, 1, 2, 2, 0]),
        "signs": torch.tensor([1.0, -1, 1, 1, -1, -1, 1, 1], dtype=torch.float64),
        "numbers": torch.randn(8, dtype=torch.float64),
    }[target]
    labels = (y[:, None] == y).double() if target == "classes" else y[:, None] * y
    center = torch.eye(8, dtype=torch.float64) - 1 / 8
    k, t = center @ f @ f.T @ center, center @ labels @ center
    expected = (k * t).sum() / k.norm() / t.norm()
    assert kernel_alignment(f, y, "centered").item() == pytest.approx(expected.item(), abs=1e-12)


def test_centered_alignment_agrees_on_both_codings_of_two_classes(features):
    y = torch.tensor([1, -1, 1, 1, -1, -1, 1])
    assert torch.allclose(kernel_alignment(features, y, "centered"), kernel_alignment(features, y.double(), "centered"))


@pytest.mark.parametrize("kind", ["signed", "within_class", "centered"])
def test_alignment_gradient(kind, features):
    y = torch.tensor([1, -1, 1, 1, -1, -1, 1])
    assert torch.autograd.gradcheck(lambda f: kernel_alignment(f, y, kind), features.requires_grad_())


def test_centered_alignment_without_variation_is_zero_with_zero_gradient():
    f = torch.ones(5, 3, requires_grad=True)
    value = kernel_alignment(f, torch.tensor([0, 1, 0, 1, 1]), "centered")
    value.backward()
    assert value.item() == 0
    assert bool((f.grad == 0).all())
    assert kernel_alignment(torch.randn(4, 2), torch.zeros(4, dtype=torch.long), "centered").item() == 0


def test_alignment_errors(features):
    with pytest.raises(
        ValueError, match=r"unknown alignment 'centred'; choose one of .* \(did you mean 'centered'\?\)"
    ):
        kernel_alignment(features, torch.ones(7), "centred")
    with pytest.raises(ValueError, match=r"signed alignment needs labels -1 and \+1; recode them"):
        kernel_alignment(features, torch.tensor([0, 1, 0, 1, 1, 1, 0]), "signed")
    with pytest.raises(ValueError, match="alignment of 1 sample: a pair is needed"):
        kernel_alignment(features[:1], torch.ones(1), "signed")


def test_two_particles_by_hand():
    omega = torch.tensor([[0.0, 0.0, 0.0], [0.0, 3.0, 4.0]], dtype=torch.float64)
    # One pair at distance 5, counted twice, over 2 N (N - 1) = 4: W = g(5) / 2.
    for s, value, slope in (
        (1.0, 1 / 5, -1 / 25),
        (0.0, -math.log(5), -1 / 5),
        (-1.0, -5.0, -1.0),
        (2.0, 0.04, -0.016),
    ):
        repulsion = riesz_repulsion(omega, s=s)
        assert repulsion.energy.item() == pytest.approx(value / 2, abs=1e-14)
        assert repulsion.potential.tolist() == pytest.approx([value, value], abs=1e-14)
        away = torch.tensor([0.0, 0.6, 0.8], dtype=torch.float64)
        assert torch.allclose(repulsion.gradient, slope * torch.stack([-away, away]), atol=1e-14)
    assert repulsion.least_distance.item() == pytest.approx(5.0)
    assert riesz_energy(omega).item() == pytest.approx(0.1), "Coulomb in three dimensions is 1 / r"


def test_three_particles_by_hand():
    # Corners (0,0), (3,0), (0,4): distances 3, 4, 5.
    omega = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    repulsion = riesz_repulsion(omega)  # logarithm in the plane
    assert repulsion.energy.item() == pytest.approx(-math.log(60) / 6, abs=1e-14)
    expected = torch.tensor([[1 / 3, 1 / 4], [-1 / 3 - 3 / 25, 4 / 25], [3 / 25, -1 / 4 - 4 / 25]]) / 2
    assert torch.allclose(repulsion.gradient, expected.double(), atol=1e-7)
    assert repulsion.least_distance.item() == 3


@pytest.mark.parametrize("s", [None, 0.0, 1.5, -0.5, 4.0])
def test_fast_repulsion_is_the_naive_one_near_pairs_included(s):
    omega = 3 * torch.randn(60, 4, dtype=torch.float64) + 50
    omega[1], omega[2], omega[3] = omega[0] + 1e-5, omega[0] + 2e-3, omega[0]  # below, above the cut-off, equal
    fast, slow = omega.clone().requires_grad_(), omega.clone().requires_grad_()
    value, expected = riesz_energy(fast, s=s), riesz_energy_naive(slow, s=s)
    (7 * value).backward()
    (7 * expected).backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    assert (fast.grad - slow.grad).norm() < 1e-12 * slow.grad.norm()
    assert riesz_repulsion(omega, s=s).least_distance == 0


def test_blocks_do_not_change_the_result(monkeypatch):
    omega = torch.randn(50, 3, dtype=torch.float64)
    whole = riesz_repulsion(omega)
    monkeypatch.setattr("mercer.particles.energy.PAIRS_PER_BLOCK", 120)
    parts = riesz_repulsion(omega)
    assert torch.allclose(whole.gradient, parts.gradient, atol=1e-13)
    assert torch.allclose(whole.potential, parts.potential, atol=1e-13)


def test_repulsion_in_float32_is_exact_for_near_pairs():
    omega = torch.tensor([[100.0, 0.0], [100.0, 0.0078125]])
    assert riesz_repulsion(omega, s=0.0).gradient[:, 1].tolist() == [128.0, -128.0]


def test_repulsion_limits():
    assert riesz_energy(torch.zeros(1, 3)).item() == 0
    same = torch.zeros(4, 2, dtype=torch.float64)
    assert riesz_energy(same, s=0.0).item() == pytest.approx(-math.log(1e-3) / 2)
    assert bool((riesz_repulsion(same, s=0.0).gradient == 0).all())
    with pytest.raises(ValueError, match=r"s \(=-2.0\) must be above -2"):
        riesz_energy(same, s=-2)
    with pytest.raises(ValueError, match=r"cutoff \(=-1\) must not be negative"):
        riesz_energy(same, cutoff=-1)


class LargestTensor(TorchDispatchMode):
    """Remember the size of the largest tensor that any operation made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_many_particles_need_no_n_by_n_by_d_tensor():
    with LargestTensor() as largest:
        riesz_repulsion(torch.randn(2048, 64), s=0.0)
    assert largest.numel <= 1 << 18, "one block of pairs, not 2048 x 2048"


def squared_sum(omega, x, y):
    """Return |sum_i y_i exp(i omega' x_i)|^2 for every particle."""
    return (torch.exp(1j * (x @ omega.T)) * y[:, None]).sum(0).abs().square()


def test_fourier_alignment_is_the_squared_sum_up_to_the_stated_constant():
    n, x, omega = 9, torch.randn(9, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    y = torch.tensor([1.0, -1, 1, 1, -1, -1, 1, -1, 1], dtype=torch.float64)
    energy, _ = FourierPotential(x, y, kind="signed")(omega, None)
    assert energy.item() == pytest.approx(-(squared_sum(omega, x, y).mean().item() - n) / (n * (n - 1)), abs=1e-14)
    phases = torch.arange(64, dtype=torch.float64) * (2 * torch.pi / 64)  # an equidistant average over b is exact
    features = [2**0.5 * torch.cos(x @ omega.T + b) / 5**0.5 for b in phases]
    average = sum(kernel_alignment(f, y, "signed") for f in features) / 64
    assert energy.item() == pytest.approx(-average.item(), abs=1e-13)


@pytest.mark.parametrize("block", [1 << 22, 10])
@pytest.mark.parametrize("kind", ["signed", "centered"])
def test_fourier_gradient_is_autograd(kind, block, monkeypatch):
    monkeypatch.setattr("mercer.particles.potentials.WAVES_PER_BLOCK", block)
    x, omega = torch.randn(9, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    y = torch.tensor([1, -1, 1, 1, -1, -1, 1, -1, 1]) if kind == "signed" else torch.arange(9) % 3
    potential = FourierPotential(x, y, kind=kind)
    leaf = omega.clone().requires_grad_()
    waves = potential.targets.T.to(torch.complex128) @ torch.exp(1j * (x @ leaf.T))
    (-(waves.abs().square().sum() - 9) / 72).backward()  # both codings have squares that sum to n
    assert torch.allclose(potential(omega, None)[1], leaf.grad, atol=1e-13)


def test_drift_is_n_times_the_gradient_of_the_whole_energy():
    """H_N written out as its definition, differentiated by autograd, against the closed forms."""
    n, count = 11, 6
    x, omega = torch.randn(n, 3, dtype=torch.float64), torch.randn(count, 3, dtype=torch.float64)
    y = torch.sign(torch.randn(n, dtype=torch.float64))
    leaf = omega.clone().requires_grad_()
    kernel = torch.cos((x[:, None] - x[None]) @ leaf.T).mean(-1)
    off = ~torch.eye(n, dtype=torch.bool)
    align = -(torch.outer(y, y) * kernel)[off].sum() / (n * (n - 1))
    gaps = (leaf[:, None] - leaf[None])[~torch.eye(count, dtype=torch.bool)].norm(dim=1)
    (align + 0.3 * (1 / gaps).sum() / (2 * count * (count - 1))).backward()
    drift = FourierPotential(x, y, kind="signed")(omega, None)[1] + 0.3 * riesz_repulsion(omega).gradient
    assert (drift - count * leaf.grad).abs().max() < 1e-10


def test_any_feature_map_gives_the_fourier_drift_through_autograd():
    x, y = torch.randn(20, 2, dtype=torch.float64), torch.arange(20) % 2 * 2 - 1
    pair = lambda x, omega: torch.cat([(x @ omega.T).cos(), (x @ omega.T).sin()], 1) / len(omega) ** 0.5
    omega, index = torch.randn(4, 2, dtype=torch.float64), torch.arange(5, 18)
    closed = FourierPotential(x, y, kind="signed")(omega, index)
    general = FeaturePotential(pair, x, y, kind="signed")(omega, index)
    assert torch.allclose(closed[0], general[0], atol=1e-13)
    assert torch.allclose(closed[1], general[1], atol=1e-13)


def test_aligned_phase_is_the_best_one():
    x, targets = torch.randn(30, 2, dtype=torch.float64), torch.randn(30, 3, dtype=torch.float64)
    omega = torch.randn(6, 2, dtype=torch.float64)
    agreement = lambda b: (targets.T @ torch.cos(x @ omega.T + b)).square().sum(0)
    best = agreement(aligned_phase(omega, x, targets))
    grid = torch.stack([agreement(b) for b in torch.linspace(0, math.pi, 400, dtype=torch.float64)])
    assert bool((best >= grid.max(0).values - 1e-12).all())
    one = aligned_phase(omega, x, targets[:, :1])
    expected = squared_sum(omega, x, targets[:, 0])
    assert torch.allclose((targets[:, :1].T @ torch.cos(x @ omega.T + one)).square()[0], expected)


def test_fourier_errors():
    with pytest.raises(ValueError, match="unknown alignment of Fourier features 'within_class'"):
        FourierPotential(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]), kind="within_class")
    with pytest.raises(ValueError, match=r"signed alignment needs labels -1 and \+1"):
        FourierPotential(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]), kind="signed")
    with pytest.raises(ValueError, match="alignment of 1 sample"):
        fourier_potential(torch.randn(4, 2), torch.randn(1, 2), torch.randn(1, 1))
