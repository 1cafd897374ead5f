"""Line figures of studies: the mean over the seeds and its standard error, a line for each name."""

from collections.abc import Callable, Mapping
from typing import Any

from mercer.report.figures import Figure
from mercer.report.statistics import Estimate, estimate
from mercer.report.style import Line, Theme, lines_for, literal, themed
from mercer.study.page import show

Curves = dict[str, dict[float, Estimate]]  # name -> abscissa -> mean


def curves_of(values: Mapping[str, Mapping[Any, Mapping[int, float]]]) -> Curves:
    """Return the means over the seeds of values by name, abscissa and seed; points and names without any are left out.

    >>> curves_of({"a": {1: {0: 2.0, 1: 4.0}, 2: {}}, "b": {1: {}}})["a"][1.0].mean
    3.0
    """
    means = {
        name: {float(x): estimate(list(found.values())) for x, found in points.items()}
        for name, points in values.items()
    }
    kept = {name: {x: mean for x, mean in points.items() if mean is not None} for name, points in means.items()}
    return {name: points for name, points in kept.items() if points}


def curve_figure(
    name: str,
    title: str,
    caption: str,
    curves: Curves,
    labels: tuple[str, str],
    looks: Mapping[str, str],
    *,
    dress: Callable[[Any], object] = lambda axes: None,
    front: str | None = None,
    digits: int = 3,
) -> Figure | None:
    """Return a figure of curves with bands of one standard error; None if no curve has two points.

    Args:
        name: of the file.
        title: of the figure.
        caption: how to read it.
        curves: what is drawn.
        labels: of the two axes.
        looks: for each curve, the mixer of the house style whose look it has.
        dress: sets scales and ticks of the axes.
        front: the curve that is drawn over the others, and stronger.
        digits: of the numbers in the data below the figure.
    """
    if not any(len(points) > 1 for points in curves.values()):
        return None
    data = [
        (label, f"{x:.3g}", show(mean, digits))
        for label, points in curves.items()
        for x, mean in sorted(points.items())
    ]
    ends = ", ".join(f"{label} {show(points[max(points)], digits)}" for label, points in curves.items())
    alt = f"{title}: {labels[1]} against {labels[0]}. At the right end: {ends}. All numbers are below the figure."
    header = ("Method", labels[0].capitalize(), labels[1].capitalize())

    def draw(theme: Theme) -> Any:
        return _draw(curves, labels, lines_for([(label, looks[label]) for label in curves], theme), dress, front, theme)

    return Figure(name, title, caption, alt, header, data, draw)


def _draw(
    curves: Curves,
    labels: tuple[str, str],
    looks: Mapping[str, Line],
    dress: Callable[[Any], object],
    front: str | None,
    theme: Theme,
) -> Any:
    with themed(theme) as plt:
        figure, axes = plt.subplots(figsize=(5.4, 3.8))
        for name, points in curves.items():
            xs, look, first = sorted(points), looks[name], name == front
            means, errors = [points[x].mean for x in xs], [points[x].error or 0.0 for x in xs]
            line = {"color": look.color, "ls": look.dash, "marker": look.marker, "label": literal(name)}
            axes.plot(xs, means, lw=2.4 if first else 1.4, zorder=3 if first else 2, **line)
            low, high = ([m + side * e for m, e in zip(means, errors, strict=True)] for side in (-1, 1))
            axes.fill_between(xs, low, high, color=look.color, alpha=0.14, lw=0, zorder=2 if first else 1)
        dress(axes)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        if len(curves) > 1:
            columns = 2 if len(curves) > 3 else 1
            axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 1), ncols=columns, columnspacing=1.2, fontsize=9)
    return figure
