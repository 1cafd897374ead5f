"""Scores of classifiers: by hand, against scikit-learn on every resample, and on simulated data."""

import math

import numpy as np
import pytest
import sklearn.metrics

from mercer.evaluate import classification_scores, reliability
from mercer.evaluate.classification import (
    _pieces,
    accuracy,
    auc,
    brier,
    calibration_error,
    log_loss,
    matthews,
)
from mercer.evaluate.resampling import calibrated_errors, resample_weights, weighted_scores


def two_columns(p):
    p = np.asarray(p, float)
    return np.stack([1 - p, p], axis=1)


def simulated(num_examples, num_classes, seed, sharpness=1.0):
    """Probabilities, and labels drawn from them: perfectly calibrated where sharpness is 1."""
    generator = np.random.default_rng(seed)
    logits = 1.5 * generator.normal(size=(num_examples, num_classes))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (p.cumsum(1) < generator.random((num_examples, 1))).sum(1)
    p = p**sharpness
    return p / p.sum(1, keepdims=True), labels


def test_matthews_of_a_two_by_two_table_by_hand():
    # 6 true positives, 1 false negative, 2 false positives, 3 true negatives.
    labels = np.array([1] * 7 + [0] * 5)
    p = two_columns([0.9] * 6 + [0.2] + [0.7] * 2 + [0.1] * 3)
    expected = (6 * 3 - 2 * 1) / math.sqrt((6 + 2) * (6 + 1) * (3 + 2) * (3 + 1))
    assert matthews(p, labels) == pytest.approx(expected, rel=1e-12)
    assert accuracy(p, labels) == 9 / 12
    assert matthews(two_columns([0.9, 0.9]), np.array([0, 1])) == 0.0


def test_brier_by_hand():
    assert brier(two_columns([0.8, 0.3]), np.array([1, 1])) == pytest.approx((0.04 + 0.49) / 2)
    p = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    by_hand = (0.25 + 0.49 + 0.04 + 0.01 + 0.01 + 0.04) / 2
    assert brier(p, np.array([1, 2])) == pytest.approx(by_hand)


def test_log_loss_by_hand_and_of_a_certain_mistake():
    p = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    assert log_loss(p, np.array([1, 2])) == pytest.approx(-(math.log(0.3) + math.log(0.8)) / 2)
    assert log_loss(two_columns([0.0]), np.array([1])) == pytest.approx(-math.log(np.finfo(float).eps))


def test_calibration_error_of_two_bins_by_hand():
    # Confidence 0.9 three times, right twice; 0.6 twice, right once: 3/5 |2/3 - 0.9| + 2/5 |1/2 - 0.6|.
    p, labels = two_columns([0.9, 0.9, 0.1, 0.6, 0.4]), np.array([1, 0, 0, 1, 1])
    assert calibration_error(p, labels) == pytest.approx(0.6 * (0.9 - 2 / 3) + 0.4 * 0.1)
    assert calibration_error(p, labels, bins=1) == pytest.approx(abs(3 / 5 - 3.9 / 5))
    found = reliability(p, labels)
    assert found.count[[8, 13]].tolist() == [2, 3]  # (8/15, 9/15] holds its upper edge, 0.6
    assert found.count.sum() == 5
    np.testing.assert_allclose(found.accuracy[[8, 13]], [1 / 2, 2 / 3])
    np.testing.assert_allclose(found.confidence[[8, 13]], [0.6, 0.9])
    assert np.isnan(found.accuracy[0])


def test_auc_by_hand_counts_ties_half():
    # Of the 2 x 3 pairs the positive is above in 4 and level in 1.
    assert auc(two_columns([0.8, 0.4, 0.4, 0.1, 0.6]), np.array([1, 1, 0, 0, 0])) == pytest.approx(4.5 / 6)
    assert math.isnan(auc(two_columns([0.8, 0.4]), np.array([1, 1])))


@pytest.mark.parametrize("num_classes", [2, 4])
def test_scores_of_resamples_are_those_of_scikit_learn_on_the_resampled_examples(num_classes):
    p, labels = simulated(60, num_classes, seed=1)
    p = np.round(p, 1) + 0.01  # with ties
    p /= p.sum(1, keepdims=True)
    (weights,) = resample_weights(60, 20, seed=5)
    weights = np.concatenate([np.ones((1, 60)), weights])
    found = weighted_scores(_pieces(p, labels), weights)
    for row, counts in enumerate(weights.astype(int)):
        mine, its = np.repeat(p, counts, axis=0), np.repeat(labels, counts)
        one = sklearn.metrics.roc_auc_score(its, mine[:, 1]) if num_classes == 2 else None
        area = sklearn.metrics.roc_auc_score(its, mine, multi_class="ovr") if one is None else one
        expected = {
            "accuracy": sklearn.metrics.accuracy_score(its, mine.argmax(1)),
            "matthews": sklearn.metrics.matthews_corrcoef(its, mine.argmax(1)),
            "log_loss": sklearn.metrics.log_loss(its, mine, labels=range(num_classes)),
            "brier": sklearn.metrics.brier_score_loss(its, mine[:, 1]) if num_classes == 2 else brier(mine, its),
            "calibration_error": calibration_error(mine, its),
            "auc": area,
        }
        assert {name: values[row] for name, values in found.items()} == pytest.approx(expected, abs=1e-12)
        assert auc(mine, its) == pytest.approx(area)


def test_resamples_draw_evenly_and_do_not_depend_on_the_size_of_pieces(monkeypatch):
    whole = np.concatenate(list(resample_weights(50, 400, seed=3)))
    assert whole.shape == (400, 50)
    assert (whole.sum(1) == 50).all()
    assert whole.mean(0) == pytest.approx(np.ones(50), abs=5 / math.sqrt(400))
    assert whole.var() == pytest.approx(1 - 1 / 50, rel=0.05)
    monkeypatch.setattr("mercer.evaluate.resampling.PIECE", 50 * 7)
    np.testing.assert_array_equal(np.concatenate(list(resample_weights(50, 400, seed=3))), whole)


def test_intervals_have_the_width_that_theory_gives():
    p, labels = simulated(2000, 2, seed=2)
    scores = classification_scores(p, labels)
    for score, spread in (
        (scores.accuracy, (p.argmax(1) == labels).std()),
        (scores.log_loss, np.log(p[np.arange(2000), labels]).std()),
        (scores.brier, ((p[:, 1] - labels) ** 2).std()),
    ):
        assert score.high - score.low == pytest.approx(2 * 1.96 * spread / math.sqrt(2000), rel=0.1)
        assert score.low < score.value < score.high
    assert scores.auc.low < scores.auc.value < scores.auc.high
    assert classification_scores(p, labels) == scores
    assert classification_scores(p, labels, seed=1).accuracy != scores.accuracy


@pytest.mark.parametrize("num_classes", [2, 5])
def test_a_calibrated_classifier_has_no_more_calibration_error_than_chance(num_classes):
    scores = classification_scores(*simulated(4000, num_classes, seed=7), resamples=300)
    assert scores.calibrated_error.low < scores.calibration_error.value < scores.calibrated_error.high
    assert scores.calibration_error.value < 0.03
    assert scores.calibration_error.low < 0.01
    sharpened = classification_scores(*simulated(4000, num_classes, seed=7, sharpness=2.0), resamples=300)
    assert sharpened.calibration_error.low > sharpened.calibrated_error.high


def test_the_error_of_a_calibrated_classifier_is_the_mean_of_the_noise():
    # One bin of n examples at confidence 1/2: |Binomial(n, 1/2) - n/2| / n, whose mean is sqrt(1 / (2 pi n)).
    bins = np.ones((900, 1))
    found = calibrated_errors(np.full(900, 0.5), bins, 4000, seed=0)
    assert found.mean() == pytest.approx(1 / math.sqrt(2 * math.pi * 900), rel=0.05)


def test_no_resamples_and_a_missing_class_leave_nothing_but_nan():
    scores = classification_scores(two_columns([0.7, 0.6]), np.array([1, 1]), resamples=0)
    assert scores.accuracy.value == 1.0
    assert math.isnan(scores.accuracy.low)
    assert math.isnan(scores.auc.value)
    assert math.isnan(classification_scores(two_columns([0.7, 0.6]), np.array([1, 1])).auc.low)


@pytest.mark.parametrize(
    ("p", "labels", "message"),
    [
        ([[2.0, -1.0]], [0], r"row 0 of the probabilities is \[2.0, -1.0\], sum 1; .*take the softmax"),
        ([[0.5, 0.5], [0.9, 0.9]], [0, 1], "row 1 of the probabilities is .*, sum 1.8"),
        ([[math.nan, 1.0]], [0], "row 0 of the probabilities"),
        ([[0.5, 0.5]], [2], "labels reach from 2 to 2; they must be 0 to 1"),
        ([[1.0]], [0], r"probabilities have shape \(1, 1\)"),
        ([[0.5, 0.5]], [0, 1], r"\(2,\) labels for 1 examples"),
    ],
)
def test_what_is_no_probability_is_refused(p, labels, message, without_shape_checks):
    with pytest.raises(ValueError, match=message):
        classification_scores(np.array(p), np.array(labels))
