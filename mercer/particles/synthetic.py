"""The synthetic task: learned against fixed features, sampled features and kernel machines under label noise.

Everything here returns plain records; nothing prints or writes.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.dummy import DummyClassifier
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline
from sklearn.svm import SVC, LinearSVC

from mercer.errors import unknown
from mercer.particles.energy import Number
from mercer.particles.estimators import ImportanceFeatures, ParticleFeatures

NOISE_LEVELS = tuple(float(sigma) for sigma in np.logspace(-5, 5, 10))
BUDGETS = (16, 32, 64, 128, 256)
STRENGTHS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
LOW, MODERATE = 1e-2, 1.0  # noise up to LOW leaves the labels as they are; up to MODERATE it is below the signal
PAPER_GAMMA = 0.5
BANDWIDTHS = (0.01, 0.03, 0.1, 0.3, 1.0)


@dataclass(frozen=True)
class Task:
    """One draw of the synthetic task, split 70 to 30; `bayes` is the accuracy of sign(l) on the test half."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    bayes: float
    weights: np.ndarray


@dataclass(frozen=True)
class SyntheticRecord:
    """One method on one draw of the task."""

    method: str
    sigma: float
    num_samples: int
    num_features: int
    strength: float
    trial: int
    accuracy: float
    fit_seconds: float
    fresh_accuracy: float = math.nan  # on samples drawn for the purpose, many more than the test half holds


@dataclass(frozen=True)
class Comparison:
    """A paired difference of two methods over the same draws; a gain within two standard errors is none."""

    method: str
    baseline: str
    difference: float
    standard_error: float
    trials: int

    @property
    def verdict(self) -> str:
        """Say better, worse or none."""
        if abs(self.difference) <= 2 * self.standard_error:
            return "none"
        return "better" if self.difference > 0 else "worse"


def synthetic_task(sigma: Number, trial: int, *, num_samples: int = 400, num_inputs: int = 10) -> Task:
    """Draw the task of one noise level and trial.

    `l(x) = 1.5 sin(pi x1) + 0.8 x2^2 - x3 x4 + 0.5 sin(3 x5) + w . x_6:`, x ~ N(0, I), w ~ N(0, 0.09 I);
    `y ~ Bernoulli(sigmoid(l + xi))`, xi ~ N(0, sigma^2), coded -1 and +1. A trial has the same x and w at every sigma.

    Args:
        sigma: Noise level.
        trial: Seed.
        num_samples: Samples, of which 70 % train.
        num_inputs: p, at least 5.

    Raises:
        ValueError: If p is below 5.

    Source: Coulomb paper F.1.

    >>> task = synthetic_task(1e-5, 0)
    >>> task.x.shape, task.x_test.shape
    ((280, 10), (120, 10))
    """
    if num_inputs < 5:
        raise ValueError(f"num_inputs (={num_inputs}) must be at least 5: the signal reads five inputs")
    rng = np.random.default_rng(trial)
    x = rng.normal(size=(num_samples, num_inputs))
    weights = 0.3 * rng.normal(size=num_inputs - 5)
    signal = _signal(x, weights)
    y = _labels(signal, sigma, rng)
    cut = int(0.7 * num_samples)
    return Task(x[:cut], y[:cut], x[cut:], y[cut:], _accuracy_of_sign(signal[cut:], y[cut:]), weights)


def fresh_samples(task: Task, sigma: Number, trial: int, *, count: int = 4000) -> tuple[np.ndarray, np.ndarray, float]:
    """Draw more samples of a task, to measure a fitted model with less noise than its 30 % test half allows.

    120 test samples have a standard error of 4.3 points, 4000 of 0.8; what is left is due to the training sample.

    Args:
        task: the task, whose weights w are kept.
        sigma: its noise level.
        trial: its seed; the new samples have a stream of their own.
        count: samples.

    Returns:
        x [count, p], y [count], and the accuracy of sign(l) on them.

    Source: ours.

    >>> x, y, bayes = fresh_samples(synthetic_task(1e-5, 0), 1e-5, 0)
    >>> x.shape, bayes > 0.7
    ((4000, 10), True)
    """
    rng = np.random.default_rng([trial, 1])
    x = rng.normal(size=(count, task.x.shape[1]))
    signal = _signal(x, task.weights)
    y = _labels(signal, sigma, rng)
    return x, y, _accuracy_of_sign(signal, y)


def _signal(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    signal = 1.5 * np.sin(np.pi * x[:, 0]) + 0.8 * x[:, 1] ** 2 - x[:, 2] * x[:, 3] + 0.5 * np.sin(3 * x[:, 4])
    return signal + x[:, 5:] @ weights


def _labels(signal: np.ndarray, sigma: Number, rng: np.random.Generator) -> np.ndarray:
    noise, uniform = rng.normal(size=len(signal)), rng.random(len(signal))
    chance = 0.5 * (1 + np.tanh(0.5 * (signal + sigma * noise)))  # the sigmoid, without overflow
    return np.where(uniform < chance, 1, -1)


def _accuracy_of_sign(signal: np.ndarray, y: np.ndarray) -> float:
    return float(np.mean(np.where(signal > 0, 1, -1) == y))


class MultipleKernels(BaseEstimator):
    """A support vector machine on a sum of Gaussian kernels, weighted by their centred alignment with the labels.

    `K = sum_b w_b K_b`, w maximises the centred alignment over non-negative weights (one bandwidth each).

    Source: Cortes, Mohri and Rostamizadeh 2012 (alignf).
    """

    def __init__(self, bandwidths: tuple[float, ...] = BANDWIDTHS, C: float = 1.0):
        self.bandwidths = bandwidths
        self.C = C

    def fit(self, X: np.ndarray, y: np.ndarray) -> "MultipleKernels":
        """Weight the kernels and fit the machine on their sum."""
        from scipy.optimize import nnls

        signs = np.where(y == y.max(), 1.0, -1.0)
        centred = [_centred(rbf_kernel(X, gamma=gamma)) for gamma in self.bandwidths]
        gram = np.array([[np.sum(a * b) for b in centred] for a in centred])
        agreement = np.array([signs @ k @ signs for k in centred])
        # max a'w / sqrt(w'Gw), w >= 0, is the direction of min w'Gw - 2 a'w, w >= 0: least squares in Cholesky form.
        root = np.linalg.cholesky(gram + 1e-10 * np.trace(gram) * np.eye(len(gram)))
        weights, _ = nnls(root.T, np.linalg.solve(root, agreement))
        self.weights_ = weights / weights.sum() if weights.sum() > 0 else np.full(len(weights), 1 / len(weights))
        self.samples_ = X
        self.machine_ = SVC(C=self.C, kernel="precomputed").fit(self._kernel(X), y)
        return self

    def score(self, X: np.ndarray, y: np.ndarray) -> float:
        """Return the accuracy."""
        return float(self.machine_.score(self._kernel(X), y))

    def _kernel(self, X: np.ndarray) -> np.ndarray:
        kernels = (
            w * rbf_kernel(X, self.samples_, gamma=g) for w, g in zip(self.weights_, self.bandwidths, strict=True)
        )
        return np.sum(list(kernels), axis=0)


def _centred(kernel: np.ndarray) -> np.ndarray:
    return kernel - kernel.mean(0) - kernel.mean(1)[:, None] + kernel.mean()


def _on_features(features: BaseEstimator) -> Pipeline:
    machine = LinearSVC(C=1.0, dual=False, max_iter=10_000)  # pyright: ignore[reportArgumentType]
    return Pipeline([("features", features), ("machine", machine)])


def _paper_particles(size: int, strength: float, seed: int) -> ParticleFeatures:
    """Return the paper's own setting of F.1: a ball, large hot steps, 300 particles resampled to `size`."""
    return ParticleFeatures(
        size,
        gamma=PAPER_GAMMA,
        radius=5.0,
        ball="l2",
        repulsion=5 * strength,  # 0.5 where the default is 0.1
        step_size=30.0,
        inverse_temperature=100.0,
        max_iter=2000,
        clip=1.0,
        n_particles=max(300, size),
        phase="random",
        random_state=seed,
    )


# From (features, strength of repulsion, seed) to an unfitted classifier.
METHODS: dict[str, Callable[[int, float, int], BaseEstimator]] = {
    "particles": lambda size, strength, seed: _on_features(
        ParticleFeatures(size, repulsion=strength, random_state=seed)
    ),
    "particles, untrained": lambda size, strength, seed: _on_features(
        ParticleFeatures(size, max_iter=0, random_state=seed)
    ),
    "particles, paper settings": lambda size, strength, seed: _on_features(_paper_particles(size, strength, seed)),
    "fixed": lambda size, strength, seed: _on_features(
        RBFSampler(gamma=PAPER_GAMMA, n_components=size, random_state=seed)
    ),
    "fixed, chosen width": lambda size, strength, seed: GridSearchCV(
        _on_features(RBFSampler(n_components=size, random_state=seed)), {"features__gamma": BANDWIDTHS}, cv=3
    ),
    "importance": lambda size, strength, seed: _on_features(
        ImportanceFeatures(size, gamma=PAPER_GAMMA, random_state=seed)
    ),
    "importance, wide": lambda size, strength, seed: _on_features(ImportanceFeatures(size, random_state=seed)),
    "multiple kernels": lambda size, strength, seed: MultipleKernels(),
    "rbf-svm": lambda size, strength, seed: SVC(C=1.0, gamma="scale"),
    "logistic": lambda size, strength, seed: LogisticRegression(C=1.0, max_iter=1000),
    "majority": lambda size, strength, seed: DummyClassifier(),
}


def measure(
    method: str,
    task: Task,
    *,
    sigma: float,
    trial: int,
    num_features: int = 200,
    strength: float = 0.1,
    fresh: int = 0,
) -> SyntheticRecord:
    """Fit one method on one draw and return its test accuracy, that on `fresh` more samples, and the time of the fit.

    Raises:
        ValueError: For an unknown method.

    >>> record = measure("majority", synthetic_task(1.0, 0), sigma=1.0, trial=0)
    >>> 0.5 <= record.accuracy <= 0.8
    True
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    model = METHODS[method](num_features, strength, trial)
    start = time.perf_counter()
    model.fit(task.x, task.y)  # pyright: ignore[reportAttributeAccessIssue]
    seconds = time.perf_counter() - start
    accuracy = float(model.score(task.x_test, task.y_test))  # pyright: ignore[reportAttributeAccessIssue]
    more = math.nan
    if fresh:
        x, y, _ = fresh_samples(task, sigma, trial, count=fresh)
        more = float(model.score(x, y))  # pyright: ignore[reportAttributeAccessIssue]
    return SyntheticRecord(method, sigma, len(task.x), num_features, strength, trial, accuracy, seconds, more)


def sweep(
    methods: Sequence[str],
    *,
    sigmas: Sequence[float] = NOISE_LEVELS,
    trials: Sequence[int] = range(10),
    num_samples: Sequence[int] = (400,),
    num_features: Sequence[int] = (200,),
    strengths: Sequence[float] = (0.1,),
    num_inputs: int = 10,
    on_record: Callable[[SyntheticRecord], None] | None = None,
) -> list[SyntheticRecord]:
    """Measure every method on every combination; all of them see the same draws.

    The study's four parts are calls of this: noise (the defaults), retention (`num_features=BUDGETS`), ablation
    (`strengths=STRENGTHS`) and run time (`num_samples=(200, 400, ...)`, one sigma).

    Args:
        methods: Names in `METHODS`.
        sigmas: Noise levels.
        trials: Seeds.
        num_samples: Sizes of the whole sample.
        num_features: Feature budgets.
        strengths: Weights of the repulsion.
        num_inputs: p.
        on_record: Called with every record as it comes, to show progress.

    Returns:
        The records, in the order measured.

    >>> len(sweep(["logistic", "majority"], sigmas=[1.0], trials=range(3)))
    6
    """
    records = []
    for sigma, trial, size in ((a, b, c) for a in sigmas for b in trials for c in num_samples):
        task = synthetic_task(sigma, trial, num_samples=size, num_inputs=num_inputs)
        for method, budget, strength in ((a, b, c) for a in methods for b in num_features for c in strengths):
            record = measure(method, task, sigma=sigma, trial=trial, num_features=budget, strength=strength)
            records.append(record)
            if on_record is not None:
                on_record(record)
    return records


def mean_accuracy(records: Sequence[SyntheticRecord]) -> tuple[float, float]:
    """Return the mean accuracy and its standard error over trials (noise levels of one trial are averaged first)."""
    return _over_trials({_draw(r): r.accuracy for r in records})


def compare(records: Sequence[SyntheticRecord], method: str, baseline: str) -> Comparison:
    """Compare two methods on the draws they share, paired by draw; standard error over trials.

    Noise levels share the samples of a trial, so their differences are averaged within it before the error is taken.

    Raises:
        ValueError: If fewer than two trials are shared.

    >>> records = sweep(["logistic", "majority"], sigmas=[1e5], trials=range(4))
    >>> compare(records, "logistic", "majority").trials
    4
    """
    scores = {name: {_draw(r): r.accuracy for r in records if r.method == name} for name in (method, baseline)}
    shared = scores[method].keys() & scores[baseline].keys()
    trials = {draw[0] for draw in shared}
    if len(trials) < 2:
        raise ValueError(f"{method!r} and {baseline!r} share {len(trials)} trial(s); a standard error needs at least 2")
    mean, error = _over_trials({draw: scores[method][draw] - scores[baseline][draw] for draw in shared})
    return Comparison(method, baseline, mean, error, len(trials))


def retention(
    records: Sequence[SyntheticRecord], method: str, *, small: int = 64, large: int = 256, chance: float = 0.5
) -> float:
    """Return the share of the accuracy above chance at `large` features that `small` features keep."""
    few, many = (
        mean_accuracy([r for r in records if r.method == method and r.num_features == size])[0]
        for size in (small, large)
    )
    return (few - chance) / (many - chance)


def time_exponent(records: Sequence[SyntheticRecord], method: str) -> float:
    """Return the slope of log fit time against log number of training samples.

    Raises:
        ValueError: If only one size was measured.
    """
    points = [(math.log(r.num_samples), math.log(r.fit_seconds)) for r in records if r.method == method]
    x, t = np.array(points, dtype=float).reshape(-1, 2).T
    if len(set(x)) < 2:
        raise ValueError(f"run times of {method!r} at {len(set(x))} size(s); an exponent needs at least 2")
    return float(np.polyfit(x, t, 1)[0])


def _draw(record: SyntheticRecord) -> tuple[int, float, int, int, float]:
    return record.trial, record.sigma, record.num_samples, record.num_features, record.strength


def _over_trials(values: dict[tuple, float]) -> tuple[float, float]:
    by_trial: dict[int, list[float]] = {}
    for (trial, *_), value in values.items():
        by_trial.setdefault(trial, []).append(value)
    means = np.array([np.mean(group) for group in by_trial.values()])
    error = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan
    return float(means.mean()), error
