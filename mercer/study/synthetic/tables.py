"""What the trials of the synthetic study say: accuracies by seed, shares kept, exponents, and the tables of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mercer.report.statistics import Estimate, estimate
from mercer.study.page import Table, show
from mercer.study.results import Difference, Trial, by_seed, difference
from mercer.study.synthetic.design import (
    BANDS,
    CEILING,
    CHANCE,
    FRESH,
    LEARNED,
    LINE,
    ON_BUDGETS,
    UNTRAINED,
    USUAL,
    Settings,
)

# Values -----------------------------------------------------------------------------------------------------------


def percent(trials: Sequence[Trial], name: str = "fresh_accuracy", **condition: Any) -> dict[int, float]:
    """Return an accuracy by seed, in per cent, at the usual settings but for those given."""
    return {seed: 100 * value for seed, value in by_seed(trials, name, **USUAL | condition).items()}


def over_levels(trials: Sequence[Trial], method: str, levels: Sequence[float]) -> dict[int, float]:
    """Return the accuracy of a method by seed, noise levels averaged within each."""
    found = [values for sigma in levels if (values := percent(trials, method=method, sigma=sigma))]
    shared = set.intersection(*(set(values) for values in found)) if found else set()
    return {seed: sum(values[seed] for values in found) / len(found) for seed in sorted(shared)}


def retained(few: Mapping[int, float], many: Mapping[int, float], chance: float = CHANCE) -> Estimate | None:
    """Return the share of the accuracy above chance that `many` features have and `few` keep.

    `mean(few - chance) / mean(many - chance)` over the seeds of both; its standard error by the jackknife.

    >>> retained({0: 68.0, 1: 66.0, 2: 70.0}, {0: 70.0, 1: 68.0, 2: 72.0}).mean
    0.9
    """
    seeds = sorted(few.keys() & many.keys())
    kept, whole = ([values[seed] - chance for seed in seeds] for values in (few, many))
    if not seeds or not sum(whole) > 0:
        return None
    ratio, n = sum(kept) / sum(whole), len(seeds)
    if n < 2:
        return Estimate(ratio, None, n)
    without = [(sum(kept) - a) / (sum(whole) - b) for a, b in zip(kept, whole, strict=True)]
    center = sum(without) / n
    return Estimate(ratio, math.sqrt((n - 1) / n * sum((value - center) ** 2 for value in without)), n)


def seconds(trials: Sequence[Trial], method: str, settings: Settings) -> dict[int, dict[int, float]]:
    """Return the times of fit by seed, for each number of samples."""
    given = USUAL | {"method": method, "sigma": min(settings.noise_levels)}
    return {n: by_seed(trials, "fit_seconds", **given | {"num_samples": n}) for n in settings.samples}


def exponent(trials: Sequence[Trial], method: str, settings: Settings) -> Estimate | None:
    """Return the slope of log time of fit against log samples: its mean over seeds."""
    slopes, times = [], seconds(trials, method, settings)
    for seed in sorted(set.intersection(*(set(found) for found in times.values()))):
        points = [(math.log(n), math.log(found[seed])) for n, found in times.items()]
        x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
        spread = sum((a - x) ** 2 for a, _ in points)
        if spread > 0:
            slopes.append(sum((a - x) * (b - y) for a, b in points) / spread)
    return estimate(slopes)


def best_other(trials: Sequence[Trial], settings: Settings, levels: Sequence[float]) -> tuple[str, Difference] | None:
    """Return the best of the other methods on these noise levels, and what learned particles gain over it."""
    scores = {name: over_levels(trials, name, levels) for name in settings.methods}
    ours = scores.pop(LEARNED, {})
    means = {name: found.mean for name, values in scores.items() if (found := estimate(list(values.values())))}
    if not ours or not means:
        return None
    name = max(means, key=lambda name: means[name])
    gain = difference(ours, scores[name])
    return None if gain is None else (name, gain)


# Tables -----------------------------------------------------------------------------------------------------------


def _level(sigma: float) -> str:
    return f"{sigma:.2g}"


def _mean(values: Mapping[int, float]) -> str:
    return show(estimate(list(values.values())), 1)


def _count(trials: Sequence[Trial]) -> str:
    return f"mean ± standard error over {len({trial.seed for trial in trials})} trials"


def accuracy_table(trials: Sequence[Trial], settings: Settings, measure: str = "fresh_accuracy") -> Table:
    """Return accuracies, a row for each method, a column for each noise level."""
    rows = [
        [name, *(_mean(percent(trials, measure, method=name, sigma=sigma)) for sigma in settings.noise_levels)]
        for name in (*settings.methods, CEILING)
    ]
    return Table(
        "accuracy",
        "Accuracy by noise level (per cent)",
        ("Noise", *map(_level, settings.noise_levels)),
        rows,
        f"{_count(trials)}; {FRESH} fresh test samples a trial. {CEILING.capitalize()}: no classifier can do better.",
    )


def paper_split_table(trials: Sequence[Trial], settings: Settings) -> Table:
    """Return accuracies on the test half of the paper."""
    table = accuracy_table(trials, settings, "accuracy")
    title = "The same on the paper's own test half (per cent)"
    return Table("paper-split", title, table.header, table.rows, f"{_count(trials)}; 120 test samples a trial.")


def gain_table(trials: Sequence[Trial], settings: Settings) -> Table:
    """Return what learned particles gain over each other method, with a verdict for each noise level."""
    rows = []
    for name in settings.methods if LEARNED in settings.methods else ():
        if name != LEARNED:
            gains = (
                difference(percent(trials, method=LEARNED, sigma=sigma), percent(trials, method=name, sigma=sigma))
                for sigma in settings.noise_levels
            )
            rows.append([name, *(f"{show(gain, 1, sign=True)} {gain.verdict}" if gain else "-" for gain in gains)])
    return Table(
        "gains",
        "Learned particles minus each other method (points), verdict by noise level",
        ("Noise", *map(_level, settings.noise_levels)),
        rows,
        f"{_count(trials)}, paired by trial.",
    )


def retention_table(trials: Sequence[Trial], settings: Settings) -> Table:
    """Return accuracies by number of features, and the share above chance that each keeps of the largest."""
    rows, most, sigma = [], max(settings.budgets), min(settings.noise_levels)
    floor = percent(trials, method="majority", sigma=sigma)  # classes are not of one size: a stricter zero than 50 %
    for name in (name for name in settings.methods if name in ON_BUDGETS):
        values = {n: percent(trials, method=name, sigma=sigma, num_features=n) for n in settings.budgets}
        if all(values.values()):
            rows.append([name, "accuracy (%)", *(_mean(found) for found in values.values())])
            rows.append([name, "share kept", *(show(retained(found, values[most])) for found in values.values())])
            if name == LEARNED and floor:
                above = {n: {seed: found[seed] - floor[seed] for seed in found} for n, found in values.items()}
                rows.append(
                    [name, "above majority", *(show(retained(few, above[most], 0.0)) for few in above.values())]
                )
    return Table(
        "retention",
        f"Fewer features, at noise {_level(sigma)}",
        ("Method", "", *(f"{n} features" for n in settings.budgets)),
        rows,
        f"{_count(trials)}. Share kept: accuracy above chance (50 %) as a share of that with {most} features, pairs of "
        "the same trial; standard error by the jackknife. Above majority: the same above what the larger class gives.",
        (0, 1),
    )


def ablation_table(trials: Sequence[Trial], settings: Settings) -> Table:
    """Return accuracies by strength of the repulsion, and the gain of each over none."""
    rows, least, sigma = [], min(settings.strengths), min(settings.noise_levels)
    values = {s: percent(trials, method=LEARNED, sigma=sigma, strength=s) for s in settings.strengths}
    for strength, found in values.items():
        gain = difference(found, values[least])
        if gain is not None:
            none = strength == least
            cells = ["-", "baseline"] if none else [show(gain, 1, sign=True), gain.verdict]
            rows.append([f"{strength:g}", _mean(found), *cells])
    header = ("Repulsion", "Accuracy (%)", f"Gain over {least:g} (points)", "Verdict")
    title = f"Learned particles by strength of the repulsion, at noise {_level(sigma)}"
    return Table("ablation", title, header, rows, f"{_count(trials)}, paired by trial.", (0, 3))


def time_table(trials: Sequence[Trial], settings: Settings) -> Table:
    """Return times of fit by number of samples, and their exponents."""
    rows, sigma = [], min(settings.noise_levels)
    for name in settings.methods:
        times = [estimate(list(found.values())) for found in seconds(trials, name, settings).values()]
        slope = exponent(trials, name, settings)
        if slope is not None:
            rows.append([name, show(slope, 2), *(f"{found.mean:.3g}" if found else "-" for found in times)])
    return Table(
        "time",
        f"Time of fit against samples, at noise {_level(sigma)}",
        ("Method", "Exponent", *(f"{round(0.7 * n)} samples (s)" for n in settings.samples)),
        rows,
        f"Exponent: slope of log seconds against log samples, {_count(trials)}.",
    )


def findings(trials: Sequence[Trial], settings: Settings) -> list[str]:
    """Say what came out, negatives too."""
    found = []
    for name, low, high in BANDS if "noise" in settings.parts else ():
        levels = [sigma for sigma in settings.noise_levels if low < sigma <= high]
        other = best_other(trials, settings, levels) if levels else None
        if other is None:
            continue
        ours = estimate(list(over_levels(trials, LEARNED, levels).values()))
        text = f"{name.capitalize()} noise ({', '.join(map(_level, levels))}): learned particles {show(ours, 1)} %"
        found.append(
            f"{text}, {show(other[1], 1, sign=True)} points against the best other, {other[0]}: {other[1].verdict}."
        )
        learning = difference(over_levels(trials, LEARNED, levels), over_levels(trials, UNTRAINED, levels))
        if learning is not None:
            found[-1] += f" Moving the particles adds {show(learning, 1, sign=True)}: {learning.verdict}."
    most, sigma = max(settings.budgets), min(settings.noise_levels)
    few, many = (percent(trials, method=LEARNED, sigma=sigma, num_features=n) for n in (64, most))
    kept = retained(few, many) if "retention" in settings.parts and most > 64 else None
    if kept is not None:
        gap, reach = kept.mean - LINE, 2 * (kept.error or math.inf)
        side = "above" if gap >= 0 else "below"
        how = f"{side} the line of {LINE}, " + ("by more than" if abs(gap) > reach else "but within") + " two errors"
        found.append(f"64 features keep {show(kept)} of the accuracy above chance that {most} have: {how}.")
    return found + _ablation_finding(trials, settings)


def _ablation_finding(trials: Sequence[Trial], settings: Settings) -> list[str]:
    rows = ablation_table(trials, settings).rows[1:] if "ablation" in settings.parts else []
    if not rows:
        return []
    parts = ", ".join(f"{row[0]}: {row[2]} ({row[3]})" for row in rows)
    return [f"Repulsion, in points against {min(settings.strengths):g}: {parts}."]
