"""Scores on many resamples of the examples at once: a resample is a row of weights, a score a product with it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

PIECE = 2**23  # weights held at a time: 64 MB


@dataclass(frozen=True, eq=False)
class Pieces:
    """What every score adds up, example by example.

    Args:
        right: 1 where the likeliest class is the label [n].
        loss: -log p(label) [n].
        square: Brier's squared distance [n].
        surplus: right - confidence, in the column of the example's bin of confidence [n, bins].
        label: one-hot labels [n, C].
        predicted: one-hot likeliest classes [n, C].
        probabilities: of each class [n, C].
    """

    right: Float[np.ndarray, " n"]
    loss: Float[np.ndarray, " n"]
    square: Float[np.ndarray, " n"]
    surplus: Float[np.ndarray, "n K"]
    label: Float[np.ndarray, "n C"]
    predicted: Float[np.ndarray, "n C"]
    probabilities: Float[np.ndarray, "n C"]


def resample_weights(num_examples: int, resamples: int, seed: int) -> Iterator[Float[np.ndarray, "R n"]]:
    """Yield how often each example was drawn, n draws with replacement a row, in pieces of bounded size.

    >>> [w.sum(1).tolist() for w in resample_weights(5, 3, seed=0)]
    [[5.0, 5.0, 5.0]]
    """
    generator = np.random.default_rng(seed)
    for rows in _row_counts(num_examples, resamples):
        drawn = generator.integers(num_examples, size=(rows, num_examples)) + num_examples * np.arange(rows)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=rows * num_examples)
        yield counts.reshape(rows, num_examples).astype(np.float64)


def _row_counts(num_examples: int, resamples: int) -> Iterator[int]:
    most = max(1, PIECE // num_examples)
    for start in range(0, resamples, most):
        yield min(most, resamples - start)


def weighted_scores(pieces: Pieces, weights: Float[np.ndarray, "R n"]) -> dict[str, Float[np.ndarray, " R"]]:
    """Return every score of every resample; with all weights 1, those of the examples themselves.

    The ECE is sum_b |sum_{i in b} w_i (right_i - confidence_i)| / n: the size of a bin cancels.
    """
    total = weights.sum(1)
    return {
        "accuracy": weights @ pieces.right / total,
        "matthews": _matthews(pieces, weights, total),
        "log_loss": weights @ pieces.loss / total,
        "brier": weights @ pieces.square / total,
        "calibration_error": np.abs(weights @ pieces.surplus).sum(1) / total,
        "auc": _auc(pieces, weights),
    }


def _matthews(pieces: Pieces, weights: np.ndarray, total: np.ndarray) -> np.ndarray:
    true, predicted, right = weights @ pieces.label, weights @ pieces.predicted, weights @ pieces.right
    covariance = right * total - (true * predicted).sum(1)
    spread = np.sqrt((total**2 - (true**2).sum(1)) * (total**2 - (predicted**2).sum(1)))
    return np.divide(covariance, spread, out=np.zeros_like(spread), where=spread > 0)


def _auc(pieces: Pieces, weights: np.ndarray) -> np.ndarray:
    classes = range(pieces.label.shape[1])
    areas = [
        _area(pieces.probabilities[:, c], pieces.label[:, c], weights)
        for c in (classes[1:] if len(classes) == 2 else classes)
    ]
    return np.mean(areas, axis=0)


def _area(score: np.ndarray, positive: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return P(score of a positive > score of a negative), ties counted half; NaN without either."""
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.diff(score[order], prepend=-math.inf))  # examples of equal score count together
    sorted_weights = weights[:, order]
    positives = np.add.reduceat(sorted_weights * positive[order], starts, axis=1)
    negatives = np.add.reduceat(sorted_weights, starts, axis=1) - positives
    below = np.cumsum(negatives, axis=1) - negatives / 2
    pairs = positives.sum(1) * negatives.sum(1)
    return np.divide((positives * below).sum(1), pairs, out=np.full_like(pairs, np.nan), where=pairs > 0)


def calibrated_errors(
    confidence: Float[np.ndarray, " n"], bins: Float[np.ndarray, "n K"], resamples: int, seed: int
) -> Float[np.ndarray, " R"]:
    """Return the ECE on labels drawn as the confidences say: right_i ~ Bernoulli(confidence_i).

    Args:
        confidence: probability of the likeliest class.
        bins: one-hot, the bin of each example.
        resamples: how many draws of all the labels.
        seed: of the draws.
    """
    generator = np.random.default_rng(seed)
    found = [np.empty(0)]
    for rows in _row_counts(len(confidence), resamples):
        right = generator.random((rows, len(confidence))) < confidence
        found.append(np.abs((right - confidence) @ bins).sum(1) / len(confidence))
    return np.concatenate(found)


def interval(values: Float[np.ndarray, " R"], level: float) -> tuple[float, float]:
    """Return the middle `level` of values, NaN left out; (NaN, NaN) of none.

    >>> interval(np.arange(101.0), 0.5)
    (25.0, 75.0)
    """
    there = values[np.isfinite(values)]
    if not len(there):
        return math.nan, math.nan
    low, high = np.quantile(there, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
