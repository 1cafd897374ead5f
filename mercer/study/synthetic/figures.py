"""The figures of `mercer study synthetic`."""

from collections.abc import Callable, Sequence
from typing import Any

from mercer.report.figures import Figure
from mercer.study.curves import Curves, curve_figure, curves_of
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


def figures(trials: Sequence[Trial], settings: Settings) -> list[Figure]:
    """Return the figures there are data for."""
    makers = {"noise": _noise, "retention": _retention, "ablation": _ablation, "time": _time}
    found = [make(trials, settings) for part, make in makers.items() if part in settings.parts]
    return [figure for figure in found if figure is not None]


def _noise(trials: Sequence[Trial], settings: Settings) -> Figure | None:
    curves = curves_of(
        {
            name: {sigma: percent(trials, method=name, sigma=sigma) for sigma in settings.noise_levels}
            for name in (*settings.methods, CEILING)
        }
    )
    return _drawn(
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

    return _drawn(
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

    return _drawn(
        "ablation",
        "Strength of the repulsion",
        f"Learned particles at noise {sigma:.2g}, 200 features, mean over trials; band: one standard error of the "
        "mean, not of the paired differences in the table.",
        curves_of({LEARNED: values}),
        ("repulsion", "accuracy (%)"),
        dress,
    )


def _time(trials: Sequence[Trial], settings: Settings) -> Figure | None:
    curves = curves_of(
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

    return _drawn(
        "time",
        "Time of fit against samples",
        "Mean over trials, one thread, both axes logarithmic; exponents are in the table.",
        curves,
        ("training samples", "seconds"),
        dress,
        digits=4,
    )


def _drawn(
    name: str,
    title: str,
    caption: str,
    curves: Curves,
    labels: tuple[str, str],
    dress: Callable[[Any], object],
    digits: int = 3,
) -> Figure | None:
    return curve_figure(name, title, caption, curves, labels, LOOKS, dress=dress, front=LEARNED, digits=digits)
