"""The figures of `mercer study synthetic`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mercer.report.figures import Figure
from mercer.report.statistics import Estimate, estimate
from mercer.report.style import Line, Theme, lines_for, literal, themed
from mercer.study.page import show
from mercer.study.results import Trial
from mercer.study.synthetic.design import CEILING, LEARNED, ON_BUDGETS, Settings
from mercer.study.synthetic.tables import percent, retained, seconds

# Each method is drawn as a mixer of the house style.
LOOKS = {
    "particles": "particle",
    "particles, untrained": "lfk",
    "particles, paper settings": "window",
    "fixed": "performer",
    "fixed, chosen width": "deltaformer",
    "importance": "linear_cubit",
    "importance, wide": "cubit",
    "multiple kernels": "darkformer",
    "rbf-svm": "local_linear",
    "logistic": "window",
    "majority": "constant",
    CEILING: "softmax",
}
Curves = dict[str, dict[float, Estimate]]  # name -> abscissa -> mean


def figures(trials: Sequence[Trial], settings: Settings) -> list[Figure]:
    """Return the figures there are data for."""
    makers = {"noise": _noise, "retention": _retention, "ablation": _ablation, "time": _time}
    found = [make(trials, settings) for part, make in makers.items() if part in settings.parts]
    return [figure for figure in found if figure is not None]


def _noise(trials: Sequence[Trial], settings: Settings) -> Figure | None:
    curves = _curves(
        {
            name: {sigma: percent(trials, method=name, sigma=sigma) for sigma in settings.noise_levels}
            for name in (*settings.methods, CEILING)
        }
    )
    return _figure(
        "noise",
        "Accuracy against label noise",
        "Mean over trials; band: one standard error. Ten levels of noise inside the sigmoid; sign of the signal: the "
        "best any classifier can do.",
        curves,
        ("noise (standard deviation)", "accuracy (%)"),
        lambda axes: axes.set_xscale("log"),
    )


def _retention(trials: Sequence[Trial], settings: Settings) -> Figure | None:
    sigma, most = min(settings.noise_levels), max(settings.budgets)
    curves: Curves = {}
    for name in (name for name in settings.methods if name in ON_BUDGETS):
        values = {n: percent(trials, method=name, sigma=sigma, num_features=n) for n in settings.budgets}
        if all(values.values()):
            kept = {float(n): retained(found, values[most]) for n, found in values.items()}
            curves[name] = {n: value for n, value in kept.items() if value is not None}

    def dress(axes: Any) -> None:
        axes.set_xscale("log", base=2)
        axes.set_xticks(settings.budgets, [f"{n:,}" for n in settings.budgets])
        axes.axhline(0.9, color=axes.xaxis.label.get_color(), lw=1, ls=":")

    return _figure(
        "retention",
        "What fewer features keep",
        f"Accuracy above chance as a share of that with {most} features, at noise {sigma:.2g}; band: one standard "
        "error (jackknife over trials). Dotted: 0.9.",
        curves,
        ("features", "share of accuracy above chance"),
        dress,
    )


def _ablation(trials: Sequence[Trial], settings: Settings) -> Figure | None:
    sigma = min(settings.noise_levels)
    values = {s: percent(trials, method=LEARNED, sigma=sigma, strength=s) for s in settings.strengths}
    positive = [strength for strength in settings.strengths if strength > 0]

    def dress(axes: Any) -> None:
        axes.set_xscale("symlog", linthresh=min(positive, default=1.0))
        axes.set_xticks(settings.strengths, [f"{strength:g}" for strength in settings.strengths])
        axes.minorticks_off()

    return _figure(
        "ablation",
        "Strength of the repulsion",
        f"Learned particles at noise {sigma:.2g}, 200 features, mean over trials; band: one standard error of the "
        "mean, not of the paired differences in the table.",
        _curves({LEARNED: values}),
        ("repulsion", "accuracy (%)"),
        dress,
    )


def _time(trials: Sequence[Trial], settings: Settings) -> Figure | None:
    curves = _curves(
        {
            name: {0.7 * n: found for n, found in seconds(trials, name, settings).items()}
            for name in settings.methods
            if name != "majority"
        }
    )

    def dress(axes: Any) -> None:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([0.7 * n for n in settings.samples], [f"{0.7 * n:,.0f}" for n in settings.samples])

    return _figure(
        "time",
        "Time of fit against samples",
        "Mean over trials, one thread, both axes logarithmic; exponents are in the table.",
        curves,
        ("training samples", "seconds"),
        dress,
        digits=4,
    )


def _curves(values: Mapping[str, Mapping[float, Mapping[int, float]]]) -> Curves:
    means = {
        name: {float(x): estimate(list(found.values())) for x, found in points.items()}
        for name, points in values.items()
    }
    kept = {name: {x: mean for x, mean in points.items() if mean is not None} for name, points in means.items()}
    return {name: points for name, points in kept.items() if points}


def _figure(
    name: str,
    title: str,
    caption: str,
    curves: Curves,
    labels: tuple[str, str],
    dress: Callable[[Any], object],
    digits: int = 3,
) -> Figure | None:
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
    return Figure(name, title, caption, alt, header, data, lambda theme: _draw(curves, labels, dress, theme))


def _draw(curves: Curves, labels: tuple[str, str], dress: Callable[[Any], object], theme: Theme) -> Any:
    looks: dict[str, Line] = lines_for([(name, LOOKS[name]) for name in curves], theme)
    with themed(theme) as plt:
        figure, axes = plt.subplots(figsize=(5.4, 3.8))
        for name, points in curves.items():
            xs, look = sorted(points), looks[name]
            means = [points[x].mean for x in xs]
            errors = [points[x].error or 0.0 for x in xs]
            front = 3 if name == LEARNED else 2
            axes.plot(
                xs,
                means,
                color=look.color,
                ls=look.dash,
                marker=look.marker,
                lw=2.4 if name == LEARNED else 1.4,
                zorder=front,
                label=literal(name),
            )
            low, high = ([m + side * e for m, e in zip(means, errors, strict=True)] for side in (-1, 1))
            axes.fill_between(xs, low, high, color=look.color, alpha=0.14, lw=0, zorder=front - 1)
        dress(axes)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        if len(curves) > 1:
            columns = 2 if len(curves) > 3 else 1
            axes.legend(loc="lower left", bbox_to_anchor=(-0.03, 1), ncols=columns, columnspacing=1.2, fontsize=9)
    return figure
