"""Figures of classifiers: their numbers are those of the scores, and they draw the same every time."""

import dataclasses

import numpy as np
import pytest

from mercer.evaluate import RobustnessRow, reliability
from mercer.report.classification import reliability_figure, robustness_figure
from mercer.report.style import DARK, LIGHT, pyplot


@pytest.fixture(autouse=True)
def closed_figures():
    """Close what a test drew: pyplot keeps figures for the whole process."""
    yield
    pyplot().close("all")


P = np.array([[0.1, 0.9], [0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.6, 0.4]])
Y = np.array([1, 0, 1, 1, 1])


def rows(*values, kind="drop", metric="accuracy"):
    """Rows of two levels by seed: values[seed] = (at level 0, at level 0.5)."""
    blank = RobustnessRow(kind, 0.0, 0, 0.0, 0.0, 0.0, 0.0, 10)
    return [
        dataclasses.replace(blank, level=level, seed=seed, **{metric: value})
        for seed, pair in enumerate(values)
        for level, value in zip((0.0, 0.5), pair, strict=True)
    ]


def test_reliability_says_the_numbers_and_the_calibration_error():
    figure = reliability_figure({"softmax": reliability(P, Y), "cubit": reliability(P, 1 - Y)})
    assert ("softmax", "0.867 to 0.933", "3", "0.9000", "0.6667") in figure.data
    assert ("softmax", "0.533 to 0.600", "2", "0.6000", "0.5000") in figure.data
    assert len(figure.data) == 4
    assert "softmax 0.1800" in figure.alt  # 3/5 |2/3 - 0.9| + 2/5 |1/2 - 0.6|
    drawn = figure.draw(LIGHT)
    diagonal, softmax, cubit = drawn.axes[0].lines
    assert diagonal.get_xydata().tolist() == [[0, 0], [1, 1]]
    np.testing.assert_allclose(softmax.get_xydata(), [[0.6, 0.5], [0.9, 2 / 3]])
    np.testing.assert_allclose(cubit.get_ydata(), [0.5, 1 / 3])
    assert figure.render(DARK, "svg") == figure.render(DARK, "svg")
    assert figure.render(LIGHT, "png").startswith(b"\x89PNG")


def test_robustness_shows_means_and_standard_errors_over_seeds():
    figure = robustness_figure({"cubit": rows((0.9, 0.6), (0.8, 0.8)), "softmax": rows((0.7, 0.5))})
    assert figure.data == [
        ("cubit", "0", "0.8500", "0.0500", "2"),
        ("cubit", "0.5", "0.7000", "0.1000", "2"),
        ("softmax", "0", "0.7000", "-", "1"),
        ("softmax", "0.5", "0.5000", "-", "1"),
    ]
    assert "cubit 0.7000, softmax 0.5000" in figure.alt
    drawn = figure.draw(LIGHT)
    (band,) = drawn.axes[0].collections  # one seed has no band
    corners = band.get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == pytest.approx((0.6, 0.9))
    assert figure.render(LIGHT, "svg") == figure.render(LIGHT, "svg")


def test_figures_of_nothing_or_of_two_things_are_refused():
    with pytest.raises(ValueError, match="no classifiers to draw"):
        reliability_figure({})
    with pytest.raises(ValueError, match=r"rows of 2 kinds of damage \(drop, typos\)"):
        robustness_figure({"a": rows((1.0, 1.0)), "b": rows((1.0, 1.0), kind="typos")})
    with pytest.raises(ValueError, match="unknown metric 'acc'; choose one of accuracy"):
        robustness_figure({"a": rows((1.0, 1.0))}, metric="acc")
