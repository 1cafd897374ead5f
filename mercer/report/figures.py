"""Figures of one group: the gap to softmax with its interval, the loss over training and by position in context."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mercer.report.groups import BASELINE, Group, Variant
from mercer.report.statistics import estimate, gap, usable
from mercer.report.style import Line, Theme, lines_for, literal, themed

Series = dict[int, dict[float, float]]  # seed -> abscissa -> value


@dataclass(frozen=True)
class Figure:
    """A figure and what it says in words and numbers, for who cannot see it."""

    name: str
    title: str
    caption: str
    alt: str
    header: tuple[str, ...]
    data: list[tuple[str, ...]]
    draw: Callable[[Theme], Any]

    def render(self, theme: Theme, kind: str) -> bytes:
        """Return the figure as "svg" or "png"; the same group always gives the same bytes."""
        with themed(theme) as plt:
            figure = self.draw(theme)
            buffer = io.BytesIO()
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(buffer, format=kind, dpi=180, bbox_inches="tight", pad_inches=0.08, metadata=metadata)
            plt.close(figure)
        return buffer.getvalue()


def group_figures(group: Group) -> list[Figure]:
    """Return the figures a group has data for."""
    found = [_gap_figure(group), _curve_figure(group), _position_figure(group)]
    return [figure for figure in found if figure is not None]


def _lines(group: Group, theme: Theme) -> dict[str, Line]:
    return lines_for([(variant.label, variant.mixer) for variant in group.variants], theme)


# The gap to softmax -----------------------------------------------------------------------------------------------


def _gap_figure(group: Group) -> Figure | None:
    baseline = group.baseline
    if baseline is None:
        return None
    theirs = baseline.by_seed("valid_loss")
    others = [variant for variant in group.variants if variant is not baseline and variant.done]
    gaps = [(v, found) for v in others if (found := gap(v.by_seed("valid_loss"), theirs)) is not None]
    if not gaps:
        return None

    def draw(theme: Theme) -> Any:
        with themed(theme) as plt:
            figure, axes = plt.subplots(figsize=(5.2, 0.9 + 0.5 * len(gaps)))
            lines = _lines(group, theme)
            for place, (variant, found) in enumerate(gaps):
                color = lines[variant.label].color
                if found.low is not None:
                    axes.plot([found.low, found.high], [place, place], color=color, lw=2.4, solid_capstyle="round")
                axes.plot(found.mean, place, lines[variant.label].marker, color=color, ms=9)
                if found.paired:
                    mine = variant.by_seed("valid_loss")
                    dots = [mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()]
                    axes.plot(dots, [place + 0.22] * len(dots), "|", color=color, ms=8, mew=1.4, alpha=0.8)
            axes.axvline(0, color=theme.ink, lw=1.2)
            axes.set_yticks(range(len(gaps)), [literal(variant.label) for variant, _ in gaps])
            axes.tick_params(axis="y", colors=theme.ink, length=0)
            axes.set_ylim(len(gaps) - 0.5, -0.6)
            axes.grid(axis="y", visible=False)
            axes.spines["left"].set_visible(False)
            axes.set_xlabel(f"validation loss minus {BASELINE}'s (nats per token); left is better")
        return figure

    def interval(found: Any) -> str:
        return "-" if found.low is None else f"{found.low:+.4f} to {found.high:+.4f}"

    data = [(v.label, f"{found.mean:+.4f}", interval(found), found.verdict) for v, found in gaps]
    return Figure(
        "gap",
        f"Gap to {BASELINE}",
        "Marker: mean over seeds. Bar: 95 % interval. Ticks below it: single seeds, where they pair. "
        "A bar that crosses zero is a gap within noise.",
        f"Gap of validation loss to {BASELINE}: "
        + "; ".join(f"{label} {mean} ({end})" for label, mean, _, end in data),
        ("Mixer", "Gap (nats/token)", "95 % interval", "Verdict"),
        data,
        draw,
    )


# Loss over training -----------------------------------------------------------------------------------------------


def _validation(variant: Variant) -> Series:
    return {
        run.seed: {float(p["step"]): float(p["valid_loss"]) for p in run.curve if usable(p.get("valid_loss"))}
        for run in variant.done
    }


def _curve_figure(group: Group) -> Figure | None:
    series = {variant.label: _validation(variant) for variant in group.variants if variant.done}
    if not any(_means(found) for found in series.values()):
        return None
    steps = max(step for found in series.values() for points in found.values() for step in points)

    def dress(axes: Any) -> None:
        axes.set_xlabel("training step")

    data = [
        (label, f"{int(step):,}", f"{mean:.4f}", "-" if error is None else f"{error:.4f}")
        for label, found in series.items()
        for step, mean, error in _means(found)
    ]
    return Figure(
        "loss",
        "Loss during training",
        f"Validation loss, mean over seeds; band: one standard error. Below: the same minus {BASELINE}'s at the same "
        "step. The steep start is cut off. These looks read a part of the validation text; the table reads more.",
        _describe("Validation loss at the last step", series),
        ("Mixer", "Step", "Validation loss (nats/token)", "Standard error"),
        data,
        lambda theme: _two_panels(group, theme, series, "validation loss (nats/token)", dress, from_x=0.1 * steps),
    )


# Loss by position -------------------------------------------------------------------------------------------------


def _by_position(variant: Variant) -> Series:
    return {
        run.seed: {
            (row[0] + row[1]) / 2: float(row[2]) for row in run.loss_by_position if row[3] > 0 and usable(row[2])
        }
        for run in variant.done
    }


def _position_figure(group: Group) -> Figure | None:
    series = {variant.label: _by_position(variant) for variant in group.variants if variant.done}
    if not any(_means(found) for found in series.values()):
        return None
    spans = {
        (row[0] + row[1]) / 2: f"{int(row[0])} to {int(row[1]) - 1}"
        for run in group.runs
        for row in run.loss_by_position
    }

    def dress(axes: Any) -> None:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("position in the context (tokens before it)")

    data = [
        (label, spans[place], f"{mean:.4f}", "-" if error is None else f"{error:.4f}")
        for label, found in series.items()
        for place, mean, error in _means(found)
    ]
    return Figure(
        "position",
        "Loss by position in the context",
        "How much each mixer gains from what it has already read: validation loss of the tokens at a position, mean "
        f"over seeds; band: one standard error. Below: the same minus {BASELINE}'s. The first few positions hold few "
        "tokens; they are noisy, and do not set the lower scale.",
        _describe("Validation loss at the last positions", series),
        ("Mixer", "Positions", "Validation loss (nats/token)", "Standard error"),
        data,
        lambda theme: _two_panels(group, theme, series, "validation loss (nats/token)", dress, from_x=4.0, whole=True),
    )


# Shared -----------------------------------------------------------------------------------------------------------


def _means(series: Series) -> list[tuple[float, float, float | None]]:
    """Return (abscissa, mean, standard error) where every seed has a value."""
    if not series:
        return []
    common = set.intersection(*(set(points) for points in series.values()))
    found = [(x, estimate([points[x] for points in series.values()])) for x in sorted(common)]
    return [(x, value.mean, value.error) for x, value in found if value is not None]


def _differences(series: Series, baseline: Series) -> list[tuple[float, float, float | None]]:
    """Return the gap of the means with its standard error, paired by seed where the seeds are the same."""
    points = []
    for x in sorted({x for values in series.values() for x in values}):
        mine = {seed: values[x] for seed, values in series.items() if x in values}
        theirs = {seed: values[x] for seed, values in baseline.items() if x in values}
        complete = len(mine) == len(series) and len(theirs) == len(baseline)
        if complete and (found := gap(mine, theirs)) is not None:
            points.append((x, found.mean, found.error))
    return points


def _describe(what: str, series: dict[str, Series]) -> str:
    ends = [f"{label} {points[-1][1]:.4f}" for label, found in series.items() if (points := _means(found))]
    return f"{what}, nats per token: {', '.join(ends)}. The numbers are in the table below the figure."


def _two_panels(
    group: Group,
    theme: Theme,
    series: dict[str, Series],
    label: str,
    dress: Callable[[Any], None],
    *,
    from_x: float,
    whole: bool = False,
) -> Any:
    """Draw means over the abscissa and, with a baseline, their gap to it below; the scale is for x >= `from_x`.

    With `whole` the means are drawn at their whole height, and only the gaps are cut.
    """
    baseline = group.baseline
    gaps: dict[str, Sequence[tuple[float, float, float | None]]] = {}
    if baseline is not None and len(series) > 1:
        theirs = series[baseline.label]
        gaps = {name: _differences(found, theirs) for name, found in series.items() if name != baseline.label}
    with themed(theme) as plt:
        rows = 2 if any(gaps.values()) else 1
        figure, panels = plt.subplots(
            rows, 1, sharex=True, squeeze=False, figsize=(5.0, 2.9 * rows), height_ratios=[1.25, 1][:rows]
        )
        top = panels[0, 0]
        lines = _lines(group, theme)
        _plot(top, {name: _means(found) for name, found in series.items()}, lines, -math.inf if whole else from_x)
        top.set_ylabel(label)
        if rows == 2:
            _plot(panels[1, 0], gaps, lines, from_x, 0.0)
            panels[1, 0].axhline(0, color=theme.ink, lw=1.4)
            panels[1, 0].set_ylabel(f"gap to {BASELINE} (nats/token)")
        dress(panels[-1, 0])
        handles, labels = top.get_legend_handles_labels()
        columns = min(len(labels), max(1, 46 // (max(map(len, labels)) + 4)))
        top.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(-0.03, 1), ncols=columns, columnspacing=1.2, fontsize=9.5
        )
        figure.align_ylabels()
        figure.subplots_adjust(hspace=0.12)
    return figure


def _plot(
    axes: Any,
    curves: dict[str, Sequence[tuple[float, float, float | None]]],
    lines: dict[str, Line],
    from_x: float,
    *shown: float,
) -> None:
    """Draw means with their error bands; the scale is for x >= `from_x` and for the values that must be `shown`."""
    extent = list(shown)
    for name, points in curves.items():
        if not points:
            continue
        line = lines[name]
        xs, means = [point[0] for point in points], [point[1] for point in points]
        every = max(1, len(xs) // 12)
        axes.plot(xs, means, color=line.color, ls=line.dash, marker=line.marker, markevery=every, label=literal(name))
        errors = [point[2] for point in points]
        low = [mean - (error or 0) for mean, error in zip(means, errors, strict=True)]
        high = [mean + (error or 0) for mean, error in zip(means, errors, strict=True)]
        if any(errors):
            axes.fill_between(xs, low, high, color=line.color, alpha=0.13, lw=0)
        extent += [y for x, pair in zip(xs, zip(low, high, strict=True), strict=True) if x >= from_x for y in pair]
    if from_x > -math.inf and len(extent) > 2 and max(extent) > min(extent):
        pad = 0.06 * (max(extent) - min(extent))
        axes.set_ylim(min(min(extent) - pad, axes.get_ylim()[1]), max(extent) + pad)
