"""scikit-learn transformers whose Fourier features are learned from the labels."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import assert_all_finite, check_consistent_length, check_random_state, column_or_1d
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from mercer.errors import unknown
from mercer.particles.energy import Number, riesz_repulsion
from mercer.particles.langevin import SCHEDULES, fit_particles, resample_particles
from mercer.particles.potentials import FourierPotential, aligned_phase, fourier_potential, label_targets
from mercer.particles.projection import project_ball, project_l1_ball
from mercer.particles.reweighting import candidate_scores, importance_weights

BALLS = {"l1": project_l1_ball, "l2": project_ball}
PHASES = ("auto", "aligned", "random")
# Arrays of a step below this size are worked by one thread: two wait for each other longer than they compute.
SMALL_STEP = 1 << 20
TASKS = ("auto", "classification", "regression")


class FourierFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator, ABC):
    """Map x to `sqrt(2 / n_components) cos(omega_k' x + b_k)`; subclasses choose omega and b from the labels.

    Frequencies are in units of the spread of X (root mean variance of its columns), so bring columns of different
    units to one scale first, for instance by `StandardScaler`.
    """

    n_components: int
    gamma: Number | str
    task: str
    unlabelled: Any
    random_state: Any

    def fit(self, X: Any, y: Any) -> "FourierFeatures":
        """Learn the features from labelled samples.

        Args:
            X: Samples [n, d], at least 2, finite.
            y: Class labels or a numeric target [n]; entries equal to `unlabelled` do not count.

        Returns:
            The fitted transformer.

        Raises:
            ValueError: For fewer than 2 samples, values that are not finite, features that are all constant, labels
                of one class, or parameters out of range.
        """
        self._check_parameters()
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        X = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        y = column_or_1d(y, warn=True)
        check_consistent_length(X, y)
        kept = _labelled(y, self.unlabelled)
        target = self._target(y[kept])
        center, variance = X.mean(0, dtype=np.float64), X.var(0, dtype=np.float64)
        if not variance.max() > 0:
            raise ValueError(f"all {X.shape[1]} features are constant in X; at least one has to vary")
        spread = float(np.sqrt(variance[variance > 0].mean()))
        samples = torch.from_numpy(np.asarray((X[kept] - center) / spread, dtype=np.float32))
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        omega, phase = self._learn(samples, torch.from_numpy(target), torch.Generator().manual_seed(seed))
        self.omega_ = omega.double().numpy() / spread
        self.phase_ = np.mod(phase.double().numpy() - self.omega_ @ center, 2 * np.pi)
        self._n_features_out = self.n_components
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return the features [n, n_components] of samples [n, d], in X's precision.

        Cost: one matrix product with the phases as its last row, one cosine, one scaling, all in one array.
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        ones = np.ones((len(X), 1), dtype=X.dtype)
        out = np.hstack([X, ones]) @ np.vstack([self.omega_.T, self.phase_]).astype(X.dtype)
        if out.dtype == np.float64:  # numpy's double cosine is not vectorised: five times slower than torch's
            torch.from_numpy(out).cos_()
        else:
            np.cos(out, out=out)
        out *= out.dtype.type(np.sqrt(2 / self.n_components))
        return out

    @abstractmethod
    def _learn(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return frequencies [n_components, d] and phases [n_components] for centred samples of unit spread."""

    def _check_parameters(self) -> None:
        _check_number("n_components", self.n_components, 1, Integral)
        if self.gamma != "scale":
            _check_number("gamma", self.gamma, 0, Real, strict=True)
        _check_choice("task", self.task, TASKS)

    def _target(self, y: np.ndarray) -> np.ndarray:
        """Return class numbers (int64) or a numeric target (float32)."""
        assert_all_finite(y, input_name="y", estimator_name=type(self).__name__)
        if len(y) < 2:
            raise ValueError(f"y has {len(y)} labelled sample(s); at least 2 are required")
        task = self.task
        if task == "auto":
            kind = type_of_target(y, input_name="y")
            task = "regression" if kind == "continuous" else "classification"
        if task == "regression":
            target = np.asarray(y, dtype=np.float64)
            if not np.ptp(target) > 0:
                raise ValueError(f"the target y is constant (={target[0]}); it has to vary")
            return ((target - target.mean()) / target.std()).astype(np.float32)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"{type(self).__name__} needs samples of at least 2 classes in the data, "
                f"but the data contains only one class: {self.classes_[0]}"
            )
        return codes.astype(np.int64)

    def _random_frequencies(self, count: int, dim: int, generator: torch.Generator) -> Tensor:
        """Draw from the spectral measure N(0, 2 gamma I) of the kernel exp(-gamma ||x - x'||^2)."""
        gamma = 1 / dim if isinstance(self.gamma, str) else float(self.gamma)
        return torch.randn(count, dim, generator=generator) * (2 * gamma) ** 0.5

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags


class ParticleFeatures(FourierFeatures):
    """Fourier features whose frequencies are particles: pulled to agree with the labels, pushing one another apart.

    Minimises `H_N = E_N + repulsion W_{N,s}` by projected Langevin dynamics from the frequencies of the Gaussian
    kernel `exp(-gamma ||x - x'||^2)`, X centred and in units of its spread. E_N is the centred alignment: class
    indicators for any number of classes, the standardised target for regression.

    Args:
        n_components: Features given out.
        gamma: Width of the kernel at the start; "scale" is 1 / n_features.
        radius: Size of the set that the frequencies stay in.
        ball: Shape of that set. "l1" favours features of few inputs (additive structure, low-order interactions),
            "l2" is the paper's.
        repulsion: Weight of the Riesz energy.
        exponent: Riesz exponent s; 0 is the logarithm, None Coulomb for the dimension.
        step_size: Langevin step.
        inverse_temperature: Langevin inverse temperature; inf for descent without noise.
        max_iter: Most steps; 0 keeps the start, as a control of what the learning adds.
        batch_size: Samples a step.
        schedule: How the step falls: constant, linear, cosine.
        clip: Cap on every particle's drift.
        tol: Noise-free drift at which to stop.
        n_particles: Particles moved; more than n_components are resampled by exp(-inverse_temperature H) at the end.
        phase: "random" takes a uniform phase for each frequency, as in the paper: features average to a shift-invariant
            kernel. "aligned" takes the one that agrees best with the labels: worth a point of accuracy where features
            are few, but what is left of a target once its best cosines are out is lost, in regression up to 25 points
            of R^2. "auto": aligned for two classes, random for more and for regression. Figures: LOG.md.
        task: "auto" reads integers and strings as classes and fractional numbers as regression targets.
        unlabelled: Value of y that marks a sample without label (NaN works); None if all have one.
        random_state: Seed.
        verbose: Show a progress bar.

    Attributes:
        omega_: Frequencies [n_components, n_features].
        phase_: Phases [n_components].
        history_: List of `mercer.particles.Record`.
        n_iter_: Steps taken.
        classes_: Labels, for classification.

    Cost: fit O(max_iter (batch_size n_components n_features + n_components^2 n_features)).

    Source: Coulomb paper Algs. 1 and 2, App. B; the l1 ball and aligned phases are ours.

    >>> from sklearn.datasets import make_moons
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.pipeline import make_pipeline
    >>> X, y = make_moons(200, noise=0.1, random_state=0)
    >>> model = make_pipeline(ParticleFeatures(64, max_iter=100, random_state=0), LogisticRegression(C=10))
    >>> model.fit(X, y).score(X, y) > 0.9
    True
    """

    # Constructors take anything, as scikit-learn has it; `fit` checks.
    def __init__(
        self,
        n_components: Any = 256,
        *,
        gamma: Any = "scale",
        radius: Any = 3.5,
        ball: Any = "l1",
        repulsion: Any = 0.1,
        exponent: Any = 0.0,
        step_size: Any = 1.0,
        inverse_temperature: Any = 200.0,
        max_iter: Any = 500,
        batch_size: Any = 1024,
        schedule: Any = "constant",
        clip: Any = None,
        tol: Any = 1e-6,
        n_particles: Any = None,
        phase: Any = "auto",
        task: Any = "auto",
        unlabelled: Any = None,
        random_state: Any = None,
        verbose: Any = False,
    ):
        self.n_components = n_components
        self.gamma = gamma
        self.radius = radius
        self.ball = ball
        self.repulsion = repulsion
        self.exponent = exponent
        self.step_size = step_size
        self.inverse_temperature = inverse_temperature
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.schedule = schedule
        self.clip = clip
        self.tol = tol
        self.n_particles = n_particles
        self.phase = phase
        self.task = task
        self.unlabelled = unlabelled
        self.random_state = random_state
        self.verbose = verbose

    def _check_parameters(self) -> None:
        super()._check_parameters()
        for name in ("radius", "step_size", "inverse_temperature"):
            _check_number(name, getattr(self, name), 0, Real, strict=True)
        for name in ("repulsion", "tol"):
            _check_number(name, getattr(self, name), 0, Real)
        _check_number("max_iter", self.max_iter, 0, Integral)
        numbers = (("clip", 0, Real), ("exponent", -2, Real), ("batch_size", 2, Integral), ("n_particles", 1, Integral))
        for name, least, kind in numbers:
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), least, kind, strict=kind is Real)
        if self.n_particles is not None and self.n_particles < self.n_components:
            raise ValueError(
                f"n_components (={self.n_components}) must not exceed n_particles (={self.n_particles}), "
                "the candidates they are drawn from"
            )
        for name, choices in (("ball", BALLS), ("phase", PHASES), ("schedule", SCHEDULES)):
            _check_choice(name, getattr(self, name), choices)

    def _learn(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        potential = FourierPotential(x, y)
        start = self._random_frequencies(self.n_particles or self.n_components, x.shape[1], generator)
        with _threads_for(len(start) * max(len(start), min(len(x), self.batch_size or len(x)))):
            fit = fit_particles(
                start,
                potential,
                strength=self.repulsion,
                s=self.exponent,
                step_size=self.step_size,
                inverse_temperature=self.inverse_temperature,
                projection=partial(BALLS[self.ball], radius=self.radius),
                num_steps=self.max_iter,
                batch_size=self.batch_size,
                schedule=self.schedule,
                clip=self.clip,
                tolerance=self.tol,
                generator=generator,
                progress=self.verbose,
            )
        self.history_, self.n_iter_, omega = fit.history, fit.num_steps, fit.omega
        if len(omega) > self.n_components:
            value, _ = fourier_potential(omega, x, potential.targets)
            energies = value + self.repulsion * riesz_repulsion(omega, s=self.exponent).potential
            omega = resample_particles(
                omega,
                energies,
                self.n_components,
                inverse_temperature=self.inverse_temperature,
                generator=generator,
            )
        two_classes = not y.is_floating_point() and int(y.max()) == 1
        if self.phase == "aligned" or (self.phase == "auto" and two_classes):
            return omega, aligned_phase(omega, x, potential.targets)
        return omega, torch.rand(len(omega), generator=generator) * (2 * torch.pi)


class ImportanceFeatures(FourierFeatures):
    """Fourier features drawn from random candidates by how well each agrees with the labels (Sinha and Duchi).

    Candidates come from the Gaussian kernel's spectral measure. `alpha` maximises the total alignment over a
    chi-square ball around the uniform distribution, `||alpha - 1/M||^2 <= rho / M` with `rho = radius * M`, and
    n_components different candidates are drawn with probability alpha. Labels are centred, so the answer does not
    depend on how they are coded, nor on how unequal the classes are.

    Args:
        n_components: Features given out.
        n_candidates: Candidates M.
        gamma: Width of the kernel; "scale" is 1 / n_features (X in units of its spread).
        radius: rho / M; 0 draws uniformly (plain random features).
        task: "auto" reads integers and strings as classes and fractional numbers as regression targets.
        unlabelled: Value of y that marks a sample without label (NaN works); None if all have one.
        random_state: Seed.

    Attributes:
        omega_: Frequencies [n_components, n_features].
        phase_: Phases [n_components].
        alpha_: Distribution over the candidates [n_candidates].
        classes_: Labels, for classification.

    Cost: fit O(n n_candidates n_features).

    Source: Sinha and Duchi 2016; blocks.md; Coulomb paper F.1 (1e4 candidates, rho = 0.005 M).

    >>> X = np.random.default_rng(0).normal(size=(100, 3))
    >>> ImportanceFeatures(16, n_candidates=200, random_state=0).fit_transform(X, X[:, 0] > 0).shape
    (100, 16)
    """

    def __init__(
        self,
        n_components: Any = 256,
        *,
        n_candidates: Any = 10_000,
        gamma: Any = "scale",
        radius: Any = 0.005,
        task: Any = "auto",
        unlabelled: Any = None,
        random_state: Any = None,
    ):
        self.n_components = n_components
        self.n_candidates = n_candidates
        self.gamma = gamma
        self.radius = radius
        self.task = task
        self.unlabelled = unlabelled
        self.random_state = random_state

    def _check_parameters(self) -> None:
        super()._check_parameters()
        _check_number("n_candidates", self.n_candidates, 1, Integral)
        _check_number("radius", self.radius, 0, Real)
        if self.n_components > self.n_candidates:
            raise ValueError(
                f"n_components (={self.n_components}) must not exceed n_candidates (={self.n_candidates}), "
                "the candidates they are drawn from"
            )

    def _learn(self, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        omega = self._random_frequencies(self.n_candidates, x.shape[1], generator)
        phase = torch.rand(self.n_candidates, generator=generator) * (2 * torch.pi)
        scores = candidate_scores(x, label_targets(y, "centered", x.dtype), omega, phase)
        alpha = importance_weights(scores, self.radius * self.n_candidates)
        self.alpha_ = alpha.numpy()
        # Where fewer candidates than asked have any weight, the best of the rest follow, in order of their scores.
        order = torch.where(alpha > 0, alpha.log(), scores.double() / scores.max().clamp_min(1e-30) - 1e6)
        chosen = resample_particles(
            torch.arange(self.n_candidates)[:, None].double(),
            -order,
            self.n_components,
            inverse_temperature=1.0,
            generator=generator,
        )[:, 0].long()
        return omega[chosen], phase[chosen]


@contextmanager
def _threads_for(size: int) -> Iterator[None]:
    """Run torch on one thread while the arrays are small, and put the setting back."""
    threads = torch.get_num_threads()
    try:
        if size < SMALL_STEP:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


def _labelled(y: np.ndarray, unlabelled: Any) -> np.ndarray:
    if unlabelled is None:
        return np.ones(len(y), dtype=bool)
    return np.asarray(y == y) if unlabelled != unlabelled else np.asarray(y != unlabelled)


def _check_number(name: str, value: Any, least: Number, kind: type, *, strict: bool = False) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} (={value!r}) must be {'an integer' if kind is Integral else 'a number'}")
    if not (value > least if strict else value >= least):
        raise ValueError(f"{name} (={value!r}) must be {'above' if strict else 'at least'} {least}")


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value not in choices:
        raise unknown(name, str(value), choices)
