"""The synthetic task and its bookkeeping; the study itself is a command, run at full size elsewhere."""

import numpy as np
import pytest

from mercer.particles.synthetic import (
    METHODS,
    MultipleKernels,
    SyntheticRecord,
    compare,
    mean_accuracy,
    measure,
    retention,
    sweep,
    synthetic_task,
    time_exponent,
)


def record(method, trial, accuracy, sigma=1.0, features=200, samples=280, seconds=1.0):
    return SyntheticRecord(method, sigma, samples, features, 0.1, trial, accuracy, seconds)


def test_the_task_is_the_stated_one():
    quiet, loud = synthetic_task(1e-5, 3), synthetic_task(1e5, 3)
    assert np.array_equal(quiet.x, loud.x)
    assert set(np.unique(quiet.y)) == {-1, 1}
    assert quiet.bayes > 0.65
    many = synthetic_task(1e-5, 0, num_samples=200_000, num_inputs=5)
    x = np.vstack([many.x, many.x_test])
    signal = 1.5 * np.sin(np.pi * x[:, 0]) + 0.8 * x[:, 1] ** 2 - x[:, 2] * x[:, 3] + 0.5 * np.sin(3 * x[:, 4])
    y = np.concatenate([many.y, many.y_test])
    for low, high in ((-1.1, -0.9), (-0.1, 0.1), (0.9, 1.1)):
        near = (signal > low) & (signal < high)
        assert np.mean(y[near] == 1) == pytest.approx(1 / (1 + np.exp(-(low + high) / 2)), abs=0.03)
    with pytest.raises(ValueError, match=r"num_inputs \(=4\) must be at least 5"):
        synthetic_task(1.0, 0, num_inputs=4)


def test_every_method_runs():
    task = synthetic_task(1e-5, 0, num_samples=120)
    for method in sorted(METHODS.keys() - {"particles, paper settings"}):
        result = measure(method, task, sigma=1e-5, trial=0, num_features=16)
        assert 0.2 < result.accuracy <= 1
        assert result.fit_seconds > 0
    with pytest.raises(ValueError, match=r"unknown method 'rbf-smv'; .*did you mean 'rbf-svm'"):
        measure("rbf-smv", task, sigma=1e-5, trial=0)


def test_learned_features_beat_fixed_ones_and_importance_is_above_chance():
    """A small version of the study's claim: 6 draws at low noise, 64 features."""
    records = sweep(["particles", "fixed", "importance"], sigmas=[1e-5], trials=range(6), num_features=[64])
    result = compare(records, "particles", "fixed")
    assert result.difference > 2 * result.standard_error
    assert result.verdict == "better"
    assert mean_accuracy([r for r in records if r.method == "importance"])[0] > 0.5


def test_kernel_weights_maximise_the_alignment():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(80, 3))
    y = np.where(np.sin(4 * X[:, 0]) > 0, 1, -1)
    model = MultipleKernels().fit(X, y)
    assert model.weights_.sum() == pytest.approx(1.0)
    center = np.eye(80) - 1 / 80

    def alignment(weights):
        kernel = sum(
            w * np.exp(-g * ((X[:, None] - X) ** 2).sum(-1)) for w, g in zip(weights, model.bandwidths, strict=True)
        )
        kernel = center @ kernel @ center
        return y @ kernel @ y / np.linalg.norm(kernel)

    best = alignment(model.weights_)
    assert all(alignment(rng.dirichlet(np.full(5, 0.3))) <= best + 1e-9 for _ in range(200))


def test_comparison_is_paired_and_counts_trials_once():
    records = [
        record(method, trial, 0.5 + 0.1 * trial + gain, sigma)
        for trial in range(3)
        for sigma in (0.1, 1.0)
        for method, gain in (("a", 0.04 + 0.01 * trial), ("b", 0.0))
    ]
    result = compare(records, "a", "b")
    assert (result.trials, result.verdict) == (3, "better")
    assert result.difference == pytest.approx(0.05)
    assert result.standard_error == pytest.approx(0.01 / 3**0.5)
    assert mean_accuracy([r for r in records if r.method == "b"]) == pytest.approx((0.6, 0.1 / 3**0.5))
    noisy = [record("a", 0, 0.6), record("b", 0, 0.5), record("a", 1, 0.4), record("b", 1, 0.5)]
    assert compare(noisy, "a", "b").verdict == "none"
    assert compare(records, "b", "a").verdict == "worse"
    with pytest.raises(ValueError, match=r"'a' and 'c' share 0 trial\(s\); a standard error needs at least 2"):
        compare(records, "a", "c")


def test_retention_and_time_exponent():
    records = [record("a", 0, 0.68, features=64), record("a", 0, 0.70, features=256)]
    assert retention(records, "a") == pytest.approx(0.9)
    timed = [record("a", 0, 0.5, samples=n, seconds=1e-3 * n**1.5) for n in (100, 200, 400)]
    assert time_exponent(timed, "a") == pytest.approx(1.5)
    with pytest.raises(ValueError, match=r"run times of 'a' at 1 size\(s\); an exponent needs at least 2"):
        time_exponent(timed[:1], "a")
