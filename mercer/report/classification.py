"""Figures of classifiers: whether they know how sure to be, and how they fare on damaged text."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mercer.errors import unknown
from mercer.evaluate.classification import Reliability
from mercer.evaluate.robustness import RobustnessRow
from mercer.report.figures import Figure
from mercer.report.statistics import Estimate, estimate
from mercer.report.style import Theme, lines_for, literal, themed

METRICS = {
    "accuracy": "accuracy",
    "log_loss": "log loss (nats)",
    "brier": "Brier score",
    "calibration_error": "calibration error (ECE)",
}
DAMAGE = {"drop": "share of words left out", "typos": "share of words with a typing error"}


def reliability_figure(found: Mapping[str, Reliability], mixers: Mapping[str, str] | None = None) -> Figure:
    """Return the reliability diagram of some classifiers: accuracy against confidence, and where the examples are.

    Args:
        found: what `mercer.evaluate.reliability` returned, by label.
        mixers: the mixer of each label, which decides its colour; by default the label is the mixer.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not found:
        raise ValueError("no classifiers to draw; give the reliability of at least one")
    named = [(label, (mixers or {}).get(label, label)) for label in found]

    def draw(theme: Theme) -> Any:
        with themed(theme) as plt:
            figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(4.4, 5.2), height_ratios=[3, 1])
            lines = lines_for(named, theme)
            top.plot([0, 1], [0, 1], color=theme.faint, lw=1.0)
            for label, its in found.items():
                line, there = lines[label], its.count > 0
                style = {"color": line.color, "ls": line.dash, "label": literal(label)}
                top.plot(its.confidence[there], its.accuracy[there], marker=line.marker, **style)
                bottom.stairs(its.count / its.count.sum(), its.edges, color=line.color, ls=line.dash, lw=1.5)
            start = min(float(its.edges[:-1][its.count > 0].min()) for its in found.values())
            top.set(xlim=(start, 1.0), ylim=(0.0, 1.02), ylabel="share of right answers")
            bottom.set(xlabel="confidence (probability of the likeliest class)", ylabel="examples", ylim=(0.0, None))
            top.legend(loc="lower right", fontsize=9.5)
            figure.align_ylabels()
            figure.subplots_adjust(hspace=0.1)
        return figure

    data = [
        (label, f"{low:.3f} to {high:.3f}", f"{count:,}", f"{confidence:.4f}", f"{right:.4f}")
        for label, its in found.items()
        for low, high, count, confidence, right in zip(
            its.edges[:-1], its.edges[1:], its.count, its.confidence, its.accuracy, strict=True
        )
        if count
    ]
    return Figure(
        "reliability",
        "Reliability",
        "Share of right answers of the examples in each bin of confidence; on the thin diagonal confidence is what it "
        "says, below it is overconfidence. Bins of few examples are noisy: below, the share of examples in each.",
        "Expected calibration error: "
        + ", ".join(f"{label} {_calibration_error(its):.4f}" for label, its in found.items())
        + ". The numbers are in the table below the figure.",
        ("Classifier", "Confidence", "Examples", "Mean confidence", "Accuracy"),
        data,
        draw,
    )


def _calibration_error(found: Reliability) -> float:
    there = found.count > 0
    gaps = np.abs(found.accuracy[there] - found.confidence[there])
    return float((gaps * found.count[there]).sum() / found.count.sum())


def robustness_figure(
    found: Mapping[str, Sequence[RobustnessRow]],
    metric: str = "accuracy",
    mixers: Mapping[str, str] | None = None,
) -> Figure:
    """Return the curves of a score over the level of damage: mean over seeds, with a band of one standard error.

    Args:
        found: rows of `mercer.evaluate.robustness_curve`, of all seeds together, by label; all of one kind of damage.
        metric: `accuracy`, `log_loss`, `brier` or `calibration_error`.
        mixers: the mixer of each label, which decides its colour; by default the label is the mixer.

    Raises:
        ValueError: there is nothing to draw, no such metric, or rows of two kinds of damage.
    """
    if metric not in METRICS:
        raise unknown("metric", metric, METRICS)
    kinds = sorted({row.kind for rows in found.values() for row in rows})
    if len(kinds) != 1:
        raise ValueError(f"rows of {len(kinds)} kinds of damage ({', '.join(kinds)}); a figure shows exactly one")
    named = [(label, (mixers or {}).get(label, label)) for label in found]
    curves = {label: _by_level(rows, metric) for label, rows in found.items()}

    def draw(theme: Theme) -> Any:
        with themed(theme) as plt:
            figure, axes = plt.subplots(figsize=(5.0, 3.3))
            lines = lines_for(named, theme)
            for label, curve in curves.items():
                line, levels = lines[label], list(curve)
                means = np.array([value.mean for value in curve.values()])
                errors = np.array([value.error or 0.0 for value in curve.values()])
                style = {"color": line.color, "ls": line.dash, "marker": line.marker}
                axes.plot(levels, means, label=literal(label), **style)
                if errors.any():
                    axes.fill_between(levels, means - errors, means + errors, color=line.color, alpha=0.13, lw=0)
            axes.set(xlabel=DAMAGE.get(kinds[0], kinds[0]), ylabel=METRICS[metric])
            axes.legend(loc="best", fontsize=9.5)
        return figure

    data = [
        (
            label,
            f"{level:g}",
            f"{value.mean:.4f}",
            "-" if value.error is None else f"{value.error:.4f}",
            str(value.count),
        )
        for label, curve in curves.items()
        for level, value in curve.items()
    ]
    ends = [f"{label} {next(reversed(curve.values())).mean:.4f}" for label, curve in curves.items() if curve]
    return Figure(
        f"robustness-{kinds[0]}-{metric}",
        f"Robustness: {DAMAGE.get(kinds[0], kinds[0])}",
        f"{METRICS[metric].capitalize()} on damaged text, mean over seeds; band: one standard error over them.",
        f"{METRICS[metric].capitalize()} at the highest level: {', '.join(ends)}. The numbers are in the table below.",
        ("Classifier", "Level", METRICS[metric].capitalize(), "Standard error", "Seeds"),
        data,
        draw,
    )


def _by_level(rows: Sequence[RobustnessRow], metric: str) -> dict[float, Estimate]:
    levels = sorted({row.level for row in rows})
    found = {level: estimate([getattr(row, metric) for row in rows if row.level == level]) for level in levels}
    return {level: value for level, value in found.items() if value is not None}
