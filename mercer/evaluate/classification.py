"""How good a classifier's probabilities are: accuracy, MCC, log loss, Brier score, calibration error, AUC."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Integer

from mercer.data.packages import require
from mercer.evaluate.resampling import (
    Pieces,
    calibrated_errors,
    interval,
    resample_weights,
    weighted_scores,
)

BINS = 15


@dataclass(frozen=True)
class Score:
    """A figure and its bootstrap interval; NaN where there is none."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ClassificationScores:
    """What `classification_scores` returns.

    Args:
        accuracy: share of examples whose likeliest class is right.
        matthews: Matthews correlation coefficient; for more than two classes Gorodkin's.
        log_loss: mean -log p(label), nats.
        brier: for two classes mean (p_1 - y)^2, one column, 0 to 1; for more mean sum_c (p_c - [y = c])^2, 0 to 2.
        calibration_error: top-label ECE, 15 equally wide bins.
        auc: area under the ROC curve; for more than two classes the mean of each class against the rest.
        calibrated_error: the calibration error that a perfectly calibrated classifier of the same confidences has on
            as many examples, by simulation: mean and middle 95 %. On a finite set it is never 0.
        num_examples: how many examples.
        num_classes: how many classes.
    """

    accuracy: Score
    matthews: Score
    log_loss: Score
    brier: Score
    calibration_error: Score
    auc: Score
    calibrated_error: Score
    num_examples: int
    num_classes: int


@dataclass(frozen=True, eq=False)
class Reliability:
    """The data of a reliability diagram: how often a classifier is right where it is so sure.

    Args:
        edges: of the bins of confidence [K + 1].
        count: examples in each bin [K].
        confidence: their mean confidence [K]; NaN in an empty bin.
        accuracy: their share of right answers [K]; NaN in an empty bin.
    """

    edges: Float[np.ndarray, " E"]
    count: Integer[np.ndarray, " K"]
    confidence: Float[np.ndarray, " K"]
    accuracy: Float[np.ndarray, " K"]


def classification_scores(
    probabilities: Float[np.ndarray, "n C"],
    labels: Integer[np.ndarray, " n"],
    *,
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> ClassificationScores:
    """Score a classifier's probabilities, with bootstrap intervals over the examples.

    Intervals are percentiles over the same resamples for all scores. Only that of the calibration error is reflected,
    [2 e - high, 2 e - low] cut at 0: noise in the bins adds to it, and more so in a resample than in the data. Near 0
    even that covers less than it should (simulated: 90 % at 0.04 and above, 66 % at 0); read `calibrated_error` there.
    Intervals are over examples; what another training seed would give is another question.

    Args:
        probabilities: of each class [n, C]; rows sum to 1.
        labels: the right class of each example [n].
        resamples: how many; 0 leaves the intervals NaN.
        seed: of the resamples.
        level: the share of the resamples that an interval holds.

    Returns:
        Scores with intervals; the AUC is NaN where `labels` lack a class.

    Raises:
        ValueError: shapes, probabilities or labels are out of range, or scikit-learn is missing.

    Cost: O(resamples n C) in numpy, in pieces of 64 MB.

    Source: Gorodkin (2004), eq. 8, for MCC; Guo et al. (2017), eq. 3, for ECE.

    >>> p = np.array([[0.8, 0.2], [0.4, 0.6], [0.3, 0.7], [0.9, 0.1]])
    >>> scores = classification_scores(p, np.array([0, 1, 0, 0]))
    >>> scores.accuracy.value, round(scores.brier.value, 4)
    (0.75, 0.175)
    """
    if resamples < 0 or not 0 < level < 1:
        raise ValueError(f"resamples ({resamples}) must be at least 0, level ({level}) above 0 and below 1")
    p = _checked(probabilities, labels)
    pieces = _pieces(p, labels)
    values = {
        "accuracy": accuracy(p, labels),
        "matthews": matthews(p, labels),
        "log_loss": log_loss(p, labels),
        "brier": brier(p, labels),
        "calibration_error": calibration_error(p, labels),
        "auc": auc(p, labels),
    }
    drawn = [weighted_scores(pieces, weights) for weights in resample_weights(len(p), resamples, seed)]
    ends = {name: interval(np.array([x for part in drawn for x in part[name]]), level) for name in values}
    low, high = ends["calibration_error"]
    twice = 2 * values["calibration_error"]
    ends["calibration_error"] = max(0.0, twice - high), max(0.0, twice - low)
    simulated = calibrated_errors(p.max(1), _in_bins(p.max(1), BINS), resamples, seed)
    mean = float(simulated.mean()) if resamples else math.nan
    return ClassificationScores(
        **{name: Score(value, *ends[name]) for name, value in values.items()},
        calibrated_error=Score(mean, *interval(simulated, level)),
        num_examples=len(p),
        num_classes=p.shape[1],
    )


def accuracy(probabilities: Float[np.ndarray, "n C"], labels: Integer[np.ndarray, " n"]) -> float:
    """Return the share of examples whose likeliest class is the label; of equally likely ones the first counts.

    >>> accuracy(np.array([[0.9, 0.1], [0.6, 0.4]]), np.array([0, 1]))
    0.5
    """
    p = _checked(probabilities, labels)
    return float(_metrics().accuracy_score(labels, p.argmax(1)))


def matthews(probabilities: Float[np.ndarray, "n C"], labels: Integer[np.ndarray, " n"]) -> float:
    """Return the Matthews correlation of likeliest class and label: 1 right, 0 chance or a constant answer, -1 wrong.

    >>> matthews(np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 1]))
    1.0
    """
    predicted = _checked(probabilities, labels).argmax(1)
    if len(np.unique(predicted)) == 1 or len(np.unique(labels)) == 1:
        return 0.0
    return float(_metrics().matthews_corrcoef(labels, predicted))


def log_loss(probabilities: Float[np.ndarray, "n C"], labels: Integer[np.ndarray, " n"]) -> float:
    """Return the mean of -log p(label) in nats; a probability of 0 counts as 2.2e-16, so it is finite.

    >>> round(log_loss(np.array([[0.5, 0.5], [0.25, 0.75]]), np.array([0, 1])), 4)
    0.4904
    """
    p = _checked(probabilities, labels)
    return float(_metrics().log_loss(labels, p, labels=np.arange(p.shape[1])))


def brier(probabilities: Float[np.ndarray, "n C"], labels: Integer[np.ndarray, " n"]) -> float:
    """Return the Brier score: for two classes mean (p_1 - y)^2, for more mean sum_c (p_c - [y = c])^2.

    The one-column form of two classes is half the many-column one.

    >>> brier(np.array([[0.5, 0.5], [0.0, 1.0]]), np.array([0, 1])), brier(np.array([[0.5, 0.5, 0.0]]), np.array([0]))
    (0.125, 0.5)
    """
    return float(_squares(_checked(probabilities, labels), labels).mean())


def calibration_error(
    probabilities: Float[np.ndarray, "n C"], labels: Integer[np.ndarray, " n"], *, bins: int = BINS
) -> float:
    """Return the expected calibration error: sum_b (n_b / n) |accuracy_b - confidence_b|.

    Confidence is the probability of the likeliest class; bins are equally wide over [0, 1], each with its upper edge.

    >>> round(calibration_error(np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0])), 3)
    0.35
    """
    found = reliability(probabilities, labels, bins=bins)
    there = found.count > 0
    gaps = np.abs(found.accuracy[there] - found.confidence[there])
    return float((found.count[there] * gaps).sum() / found.count.sum())


def auc(probabilities: Float[np.ndarray, "n C"], labels: Integer[np.ndarray, " n"]) -> float:
    """Return the area under the ROC curve of class 1, or for more classes the mean of each against the rest.

    >>> auc(np.array([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]]), np.array([0, 1, 0]))
    1.0
    """
    p = _checked(probabilities, labels)
    classes = np.arange(p.shape[1])
    if len(np.unique(labels)) < len(classes):
        return math.nan
    areas = [_metrics().roc_auc_score(labels == c, p[:, c]) for c in (classes[1:] if len(classes) == 2 else classes)]
    return float(np.mean(areas))


def reliability(
    probabilities: Float[np.ndarray, "n C"], labels: Integer[np.ndarray, " n"], *, bins: int = BINS
) -> Reliability:
    """Return accuracy and mean confidence of the examples in each bin of confidence.

    Args:
        probabilities: of each class [n, C].
        labels: the right class of each example [n].
        bins: how many, equally wide over [0, 1].

    >>> found = reliability(np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0]), bins=2)
    >>> found.count.tolist(), float(found.accuracy[1]), float(found.confidence[1])
    ([0, 2], 0.5, 0.75)
    """
    if bins < 1:
        raise ValueError(f"bins ({bins}) must be at least 1")
    p = _checked(probabilities, labels)
    confidence, right = p.max(1), p.argmax(1) == labels
    inside = _in_bins(confidence, bins)
    count = inside.sum(0)
    sums = np.stack([confidence @ inside, right @ inside])
    means = np.divide(sums, count, out=np.full_like(sums, np.nan), where=count > 0)
    return Reliability(np.linspace(0, 1, bins + 1), count.astype(np.int64), means[0], means[1])


def _checked(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the probabilities in float64, with rows that sum to 1."""
    if probabilities.ndim != 2 or probabilities.shape[1] < 2 or len(probabilities) == 0:
        raise ValueError(
            f"probabilities have shape {probabilities.shape}; they must be [examples, two or more classes]"
        )
    if labels.shape != probabilities.shape[:1]:
        raise ValueError(f"{labels.shape} labels for {len(probabilities)} examples; give one label for each")
    p = probabilities.astype(np.float64)
    totals = p.sum(1)
    wrong = ~np.isfinite(p).all(1) | (p < -1e-6).any(1) | (np.abs(totals - 1) > 1e-2)
    if wrong.any():
        first = int(np.argmax(wrong))
        raise ValueError(
            f"row {first} of the probabilities is {p[first, :4].tolist()}, sum {totals[first]:.4g}; rows must be "
            "probabilities (of logits, take the softmax)"
        )
    if labels.min() < 0 or labels.max() >= p.shape[1]:
        raise ValueError(f"labels reach from {labels.min()} to {labels.max()}; they must be 0 to {p.shape[1] - 1}")
    p = p.clip(0)
    totals = p.sum(1, keepdims=True)
    return p / np.where(np.abs(totals - 1) > 1e-9, totals, 1.0)  # the last bits of the others keep what is tied tied


def _pieces(p: np.ndarray, labels: np.ndarray) -> Pieces:
    classes = np.eye(p.shape[1])
    predicted = p.argmax(1)
    right = (predicted == labels).astype(np.float64)
    return Pieces(
        right=right,
        loss=-np.log(p[np.arange(len(p)), labels].clip(np.finfo(p.dtype).eps)),
        square=_squares(p, labels),
        surplus=(right - p.max(1))[:, None] * _in_bins(p.max(1), BINS),
        label=classes[labels],
        predicted=classes[predicted],
        probabilities=p,
    )


def _squares(p: np.ndarray, labels: np.ndarray) -> np.ndarray:
    if p.shape[1] == 2:
        return (p[:, 1] - labels) ** 2
    return ((p - np.eye(p.shape[1])[labels]) ** 2).sum(1)


def _in_bins(confidence: np.ndarray, bins: int) -> np.ndarray:
    """Return the bin of each example, one-hot [n, bins]."""
    return np.eye(bins)[np.digitize(confidence, np.linspace(0, 1, bins + 1)[1:-1], right=True)]


def _metrics():
    return require("sklearn.metrics", extra="particles", purpose="scoring a classifier")
