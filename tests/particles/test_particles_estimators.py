"""The scikit-learn transformers: the library's own checks, every kind of target, bad input, memory of nothing."""

import time

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import make_friedman1, make_friedman3, make_moons
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from mercer.particles import ImportanceFeatures, ParticleFeatures
from mercer.particles.reweighting import candidate_scores, importance_weights, project_simplex

QUICK = {"n_components": 16, "random_state": 0}
BOTH = [ParticleFeatures(max_iter=10, **QUICK), ImportanceFeatures(n_candidates=100, **QUICK)]
names = pytest.mark.parametrize("estimator", BOTH, ids=lambda e: type(e).__name__)


@pytest.fixture
def moons():
    return make_moons(200, noise=0.2, random_state=0)


@names
def test_passes_every_check_of_scikit_learn(estimator):
    check_estimator(estimator, on_skip=None)


@names
def test_output_is_the_stated_map_in_the_precision_of_x(estimator, moons):
    X, y = moons
    fitted = clone(estimator).fit(X + 30, y)
    expected = np.sqrt(2 / 16) * np.cos((X + 30) @ fitted.omega_.T + fitted.phase_)
    assert np.allclose(fitted.transform(X + 30), expected, atol=1e-12)
    single = fitted.transform((X + 30).astype(np.float32))
    assert single.dtype == np.float32
    assert np.allclose(single, expected, atol=1e-4)
    assert type(single) is np.ndarray
    name = type(estimator).__name__.lower()
    assert list(fitted.get_feature_names_out()) == [f"{name}{i}" for i in range(16)]


@names
def test_random_state_decides_everything_and_nothing_else_does(estimator, moons):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second = (clone(estimator).fit_transform(*moons) for _ in range(2))
    other = clone(estimator).set_params(random_state=1).fit_transform(*moons)
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


@names
@pytest.mark.parametrize("labels", [["a", "b"], [False, True], [-1, 1], [2.0, 7.0]])
def test_coding_of_the_classes_does_not_matter(estimator, labels, moons):
    X, y = moons
    recoded = clone(estimator).fit(X, np.array(labels)[y])
    assert list(recoded.classes_) == labels
    assert np.allclose(recoded.omega_, clone(estimator).fit(X, y).omega_)


@names
def test_scale_and_shift_of_x_do_not_matter(estimator, moons):
    X, y = moons
    plain, moved = clone(estimator).fit_transform(X, y), clone(estimator).fit_transform(1e3 * X - 5e3, y)
    assert np.allclose(plain, moved, atol=1e-3)


def test_the_number_of_threads_is_put_back(moons):
    torch.set_num_threads(2)
    ParticleFeatures(8, max_iter=2).fit(*moons)
    assert torch.get_num_threads() == 2


def test_grid_search_in_a_pipeline(moons):
    X, y = moons
    model = make_pipeline(StandardScaler(), ParticleFeatures(32, max_iter=40, random_state=0), LogisticRegression(C=10))
    search = GridSearchCV(model, {"particlefeatures__repulsion": [0.0, 0.1]}, cv=2).fit(X, y)
    assert search.score(X, y) > 0.93


def test_more_than_two_classes_beat_random_features_of_equal_number():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(900, 12))
    y = np.digitize(np.sin(3 * X[:, 0]) + 0.1 * rng.normal(size=900), [-0.5, 0.5])
    scores = [
        make_pipeline(features, LogisticRegression(C=10, max_iter=2000)).fit(X[:600], y[:600]).score(X[600:], y[600:])
        for features in (
            ParticleFeatures(48, max_iter=200, random_state=0),
            RBFSampler(gamma="scale", n_components=48, random_state=0),
        )
    ]
    assert scores[0] > scores[1] + 0.15


def test_regression_beats_random_features_of_equal_number():
    X, y = make_friedman1(600, 10, noise=0.5, random_state=0)
    scores = [
        make_pipeline(StandardScaler(), features, Ridge(0.1)).fit(X[:400], y[:400]).score(X[400:], y[400:])
        for features in (
            ParticleFeatures(48, max_iter=200, random_state=0),
            RBFSampler(gamma="scale", n_components=48, random_state=0),
        )
    ]
    assert scores[0] > scores[1] + 0.1


@names
def test_samples_without_a_label_do_not_pull(estimator, moons):
    X, y = moons
    partial = y.astype(float)
    partial[::2] = np.nan
    by_nan = clone(estimator).set_params(unlabelled=np.nan).fit(X, partial)
    by_code = clone(estimator).set_params(unlabelled=-1).fit(X, np.where(np.isnan(partial), -1, y))
    assert list(by_nan.classes_) == [0, 1]
    assert np.allclose(by_nan.omega_, by_code.omega_)
    assert not np.allclose(by_nan.omega_, clone(estimator).fit(X, y).omega_)
    with pytest.raises(ValueError, match=r"y has 0 labelled sample\(s\); at least 2 are required"):
        clone(estimator).set_params(unlabelled=-1).fit(X, np.full(200, -1))


def test_learning_keeps_its_history_and_resamples(moons):
    X, y = moons
    fitted = ParticleFeatures(8, n_particles=32, max_iter=60, random_state=0).fit(X, y)
    assert fitted.omega_.shape == (8, 2)
    assert fitted.n_iter_ == 60
    assert fitted.history_[-1].alignment > fitted.history_[0].alignment
    spread = np.sqrt(X.var(0).mean())
    assert (np.abs(fitted.omega_ * spread).sum(1) <= 3.5).all()
    ball = ParticleFeatures(8, ball="l2", radius=0.5, max_iter=5, random_state=0).fit(X, y)
    assert (np.linalg.norm(ball.omega_ * spread, axis=1) <= 0.5).all()


def test_phases_are_aligned_for_two_classes_and_random_for_all_else(moons):
    X, y = moons
    fit = lambda phase, y: ParticleFeatures(16, max_iter=20, phase=phase, random_state=0).fit(X, y)
    for target, chosen in ((y, "aligned"), (y + (X[:, 0] > 1), "random"), (X[:, 0] + 0.1, "random")):
        found = {phase: fit(phase, target) for phase in ("auto", "aligned", "random")}
        assert np.array_equal(found["aligned"].omega_, found["random"].omega_)
        assert np.array_equal(found["auto"].phase_, found[chosen].phase_)
        assert not np.allclose(found["aligned"].phase_, found["random"].phase_)
    signs = 2 * y - 1 - (2 * y - 1).mean()
    agreement = {phase: (signs @ fit(phase, y).transform(X)) ** 2 for phase in ("aligned", "random")}
    assert (agreement["aligned"] >= agreement["random"] - 1e-9).all()


def test_random_phases_keep_what_aligned_ones_lose_in_regression():
    X, y = make_friedman3(500, noise=0.1, random_state=1)
    scores = {
        phase: make_pipeline(StandardScaler(), ParticleFeatures(64, phase=phase, random_state=1), Ridge(0.01))
        .fit(X[:300], y[:300])
        .score(X[300:], y[300:])
        for phase in ("auto", "aligned")
    }
    assert scores["auto"] > scores["aligned"] + 0.1


@names
def test_bad_input_is_refused_as_scikit_learn_does(estimator, moons):
    X, y = moons
    broken = X.copy()
    broken[3, 1] = np.nan
    with pytest.raises(ValueError, match="Input X contains NaN"):
        clone(estimator).fit(broken, y)
    with pytest.raises(ValueError, match="Input X contains NaN"):
        clone(estimator).fit(X, y).transform(broken)
    with pytest.raises(ValueError, match="at least 2 classes in the data, but the data contains only one class: 1"):
        clone(estimator).fit(X, np.ones(200, dtype=int))
    with pytest.raises(ValueError, match="Input y contains NaN"):
        clone(estimator).fit(X, np.where(y == 1, np.nan, 0.5))
    with pytest.raises(ValueError, match="minimum of 2 is required"):
        clone(estimator).fit(X[:1], y[:1])
    with pytest.raises(ValueError, match="all 2 features are constant in X; at least one has to vary"):
        clone(estimator).fit(np.ones((200, 2)), y)
    with pytest.raises(ValueError, match="the target y is constant"):
        clone(estimator).set_params(task="regression").fit(X, np.full(200, 0.5))
    with pytest.raises(ValueError, match="requires y to be passed, but the target y is None"):
        clone(estimator).fit(X, None)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        clone(estimator).fit(X, y[:-1])
    with pytest.raises(ValueError, match=r"X has 3 features, but .* is expecting 2 features"):
        clone(estimator).fit(X, y).transform(np.ones((2, 3)))


@names
def test_a_constant_column_is_harmless(estimator, moons):
    X, y = moons
    features = clone(estimator).fit_transform(np.hstack([X, np.full((200, 1), 7.0)]), y)
    assert np.isfinite(features).all()


def test_more_features_than_candidates(moons):
    with pytest.raises(ValueError, match=r"n_components \(=50\) must not exceed n_candidates \(=20\)"):
        ImportanceFeatures(50, n_candidates=20).fit(*moons)
    with pytest.raises(ValueError, match=r"n_components \(=50\) must not exceed n_particles \(=20\)"):
        ParticleFeatures(50, n_particles=20).fit(*moons)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"n_components": 0}, r"n_components \(=0\) must be at least 1"),
        ({"gamma": -1.0}, r"gamma \(=-1.0\) must be above 0"),
        ({"gamma": "auto"}, r"gamma \(='auto'\) must be a number"),
        ({"radius": 0.0}, r"radius \(=0.0\) must be above 0"),
        ({"batch_size": 1}, r"batch_size \(=1\) must be at least 2"),
        ({"clip": 0}, r"clip \(=0\) must be above 0"),
        ({"exponent": -2.0}, r"exponent \(=-2.0\) must be above -2"),
        ({"n_particles": 300.5}, r"n_particles \(=300.5\) must be an integer"),
        ({"repulsion": float("nan")}, r"repulsion \(=nan\) must be at least 0"),
        ({"max_iter": -1}, r"max_iter \(=-1\) must be at least 0"),
        ({"ball": "l3"}, "unknown ball 'l3'; choose one of l1, l2"),
        ({"phase": "aligne"}, r"unknown phase 'aligne'; .* \(did you mean 'aligned'\?\)"),
        ({"task": "ranking"}, "unknown task 'ranking'"),
        ({"schedule": "step"}, "unknown schedule 'step'"),
    ],
)
def test_bad_parameters(option, message, moons):
    with pytest.raises(ValueError, match=message):
        ParticleFeatures(**option).fit(*moons)


def test_importance_weights_solve_their_problem():
    """The bisection against projected gradient ascent from the definition."""
    scores, rho = torch.rand(30, dtype=torch.float64), 4.0
    alpha = importance_weights(scores, rho)
    assert alpha.sum().item() == pytest.approx(1.0)
    assert bool((alpha >= 0).all())
    assert (alpha - 1 / 30).square().sum().item() == pytest.approx(rho / 30, rel=1e-9)
    for _ in range(200):  # no feasible point nearby or far does better
        other = project_simplex(alpha + torch.randn(30, dtype=torch.float64) * 0.1)
        gap = (other - 1 / 30).norm()
        other = 1 / 30 + (other - 1 / 30) * min(1.0, ((rho / 30) ** 0.5 / gap).item())
        assert scores @ other <= scores @ alpha + 1e-12
    assert torch.allclose(importance_weights(scores, 0), torch.full((30,), 1 / 30, dtype=torch.float64))
    assert importance_weights(scores, 1e6).argmax() == scores.argmax()
    assert importance_weights(torch.ones(5), 2.0).tolist() == pytest.approx([0.2] * 5)
    with pytest.raises(ValueError, match=r"rho \(=-1\) must not be negative"):
        importance_weights(scores, -1)


def test_candidate_scores_are_the_squared_correlations(monkeypatch):
    monkeypatch.setattr("mercer.particles.reweighting.CANDIDATES_PER_BLOCK", 20)
    x, t = torch.randn(11, 2, dtype=torch.float64), torch.randn(11, 3, dtype=torch.float64)
    omega, phase = torch.randn(5, 2, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    expected = (t.T @ torch.cos(x @ omega.T + phase) / 11).square().sum(0)
    assert torch.allclose(candidate_scores(x, t, omega, phase), expected)


def test_transform_runs_at_the_speed_of_the_product_and_the_cosine():
    X = np.random.default_rng(0).normal(size=(20_000, 50))
    fitted = ParticleFeatures(256, max_iter=0, random_state=0).fit(X, X[:, 0] > 0)
    weights = np.ascontiguousarray(fitted.omega_.T)
    best = [1e9, 1e9]
    for _ in range(5):
        for i, work in enumerate((lambda: np.cos(X @ weights), lambda: fitted.transform(X))):
            start = time.process_time()
            work()
            best[i] = min(best[i], time.process_time() - start)
    assert best[1] <= 1.3 * best[0]
