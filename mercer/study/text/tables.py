"""What the trials of the text study say: scores, learned against vanilla, phase A, robustness; in tables and words."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mercer.report.statistics import estimate
from mercer.study.page import Table, show
from mercer.study.results import Difference, Trial, by_seed, difference
from mercer.study.text.design import BASES, DAMAGES, Settings, base_variant

# name -> (heading, factor, digits, whether higher is better)
METRICS: dict[str, tuple[str, int, int, bool]] = {
    "accuracy": ("Accuracy (%)", 100, 1, True),
    "matthews": ("MCC", 1, 3, True),
    "log_loss": ("Log loss (nats)", 1, 3, False),
    "brier": ("Brier", 1, 3, False),
    "calibration_error": ("ECE", 1, 3, False),
    "auc": ("AUC", 1, 3, True),
}
Values = dict[int, float]  # by seed
DAMAGE_WORDS = {"drop": "words left out", "typos": "words with a typing error", "label_noise": "wrong training labels"}


def values(trials: Sequence[Trial], name: str, method: str, variant: str, noise: float = 0.0) -> Values:
    """Return a result by seed, where it is a number."""
    there = [trial for trial in trials if trial.result.get(name) is not None and math.isfinite(trial.result[name])]
    return by_seed(there, name, method=method, variant=variant, label_noise=noise)


def cases(trials: Sequence[Trial], settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield each method and variant there are trials of, without label noise."""
    listed = [(name, base_variant(name)) for name in BASES]
    listed += [(name, variant) for name in settings.maps for variant in settings.variants]
    yield from (case for case in listed if values(trials, "accuracy", *case))


def methods_table(trials: Sequence[Trial], settings: Settings) -> Table:
    """Return every score of every method: mean and standard error over the seeds."""
    rows = []
    for case in cases(trials, settings):
        scores = [
            _mean(values(trials, name, *case), digits, factor) for name, (_, factor, digits, _) in METRICS.items()
        ]
        ends = [_plain(values(trials, f"calibration_{end}", *case)) for end in ("low", "high")]
        perfect = _plain(values(trials, "calibrated_error", *case))
        rows.append([*case, *scores[:5], f"{ends[0]} to {ends[1]}", perfect, scores[5]])
    headings = [heading for heading, *_ in METRICS.values()]
    header = ("Method", "Particles", *headings[:5], "ECE, 95 % over texts", "ECE if calibrated", headings[5])
    note = (
        f"{_count(trials)}. ECE: top label, 15 bins; its interval is a bootstrap over the test texts of one seed, its "
        "ends averaged over the seeds; beside it what a perfectly calibrated classifier of the same confidences has on "
        "as many texts. Brier: two classes in one column; more classes summed over them, 0 to 2."
    )
    return Table("methods", "Scores on the test texts", header, rows, note, (0, 1))


def gains_table(trials: Sequence[Trial], settings: Settings) -> Table:
    """Return learned minus vanilla, paired by seed, for each map and over all of them."""
    rows = []
    for variant in _learned(settings):
        for method in (*settings.maps, None):
            found = {name: gain(trials, settings, name, variant, method) for name in METRICS}
            if any(found.values()):
                cells = [_verdict(found[name], digits) for name, (_, _, digits, _) in METRICS.items()]
                rows.append([method or "mean of the maps", variant, *cells])
    header = ("Method", "Particles", *(heading for heading, *_ in METRICS.values()))
    note = (
        f"{_count(trials)}, paired: same weights, texts, order. A difference inside two standard errors, or inside the "
        "95 % interval of Student's t, is within noise. Accuracy in points; better is lower for log loss, Brier, ECE."
    )
    return Table("gains", "Learned minus vanilla particles", header, rows, note, (0, 1))


def softmax_table(trials: Sequence[Trial], settings: Settings) -> Table:
    """Return the difference of each method to softmax."""
    rows = []
    for case in cases(trials, settings):
        if case[0] != "softmax":
            found = {name: _against(trials, name, case, ("softmax", "exact")) for name in METRICS}
            rows.append([*case, *(_verdict(found[name], digits) for name, (_, _, digits, _) in METRICS.items())])
    header = ("Method", "Particles", *(heading for heading, *_ in METRICS.values()))
    note = f"{_count(trials)}, paired by seed; accuracy in points."
    return Table("softmax", "Each method minus softmax", header, [r for r in rows if set(r[2:]) != {"-"}], note, (0, 1))


def phase_table(trials: Sequence[Trial], settings: Settings) -> Table:
    """Return what phase A did to the particles: how far drift and noise move them, and the alignment."""
    rows = []
    for variant in _learned(settings):
        for method in settings.maps:
            found = [values(trials, name, method, variant) for name in ("drift_step", "noise_step", "moved")]
            if not found[0]:
                continue
            drift, noise = (estimate(list(part.values())) for part in found[:2])
            assert drift is not None
            assert noise is not None
            ends = (values(trials, f"alignment_{end}", method, variant) for end in ("before", "after"))
            steps = [f"{drift.mean:.1e}", f"{noise.mean:.1e}", f"{noise.mean / max(drift.mean, 1e-30):,.3g}"]
            outside = 100 * _average(values(trials, "outside", method, variant))
            rows.append(
                [method, variant, *steps, _mean(found[2], 2), *(_mean(end, 4) for end in ends), f"{outside:.0f} %"]
            )
    header = (
        "Method",
        "Particles",
        "Drift a step",
        "Noise a step",
        "Noise / drift",
        "Moved in all",
        "Alignment before",
        "After",
        "Outside at the start",
    )
    note = (
        f"{_count(trials)}. Root mean square moves of a particle; noise before the projection. Alignment on four fixed "
        "training batches. Outside: particles beyond the radius, which the first step puts on the sphere. "
        + "; ".join(f"{variant}: {_words(settings.align(variant))}" for variant in _learned(settings))
        + "."
    )
    return Table("phase-a", "What phase A does to the particles", header, rows, note, (0, 1))


def robustness_table(trials: Sequence[Trial], settings: Settings) -> Table:
    """Return accuracy by level of damage, of softmax and of the best map of the validation texts."""
    levels = sorted({*settings.levels, *settings.label_noise})
    rows = []
    for kind in (*DAMAGES, "label_noise"):
        for case in robust_cases(trials, settings, kind):
            curve = robust_values(trials, settings, kind, case)
            if any(found for level, found in curve.items() if level):
                cells = [_mean(curve.get(level, {}), 1) for level in (0.0, *levels)]
                rows.append([DAMAGE_WORDS[kind], *case, *cells])
    header = ("Damage", "Method", "Particles", "None", *(f"{100 * level:g} %" for level in levels))
    note = (
        f"{_count(trials)}. Typing errors and lost words are in the test texts, wrong labels in the training texts "
        f"alone. The map under damaged texts has the least validation log loss; under wrong labels it is "
        f"{settings.noise_map}, chosen beforehand."
    )
    return Table("robustness", "Accuracy (%) under damage", header, rows, note, (0, 1, 2))


def robust_cases(trials: Sequence[Trial], settings: Settings, kind: str) -> list[tuple[str, str]]:
    """Return the methods whose curves are shown."""
    best = settings.noise_map if kind == "label_noise" else best_map(trials, settings)
    variants = [v for v in settings.variants if v != "sharp"] if kind == "label_noise" else settings.variants
    return [("softmax", "exact"), *((best, variant) for variant in variants if best is not None)]


def robust_values(trials: Sequence[Trial], settings: Settings, kind: str, case: tuple[str, str]) -> dict[float, Values]:
    """Return the accuracy in per cent by level of damage and seed."""
    curve = {0.0: values(trials, "accuracy", *case)}
    if kind == "label_noise":
        curve |= {level: values(trials, "accuracy", *case, level) for level in settings.label_noise}
    else:
        curve |= {level: values(trials, f"{kind}@{level:g}", *case) for level in settings.levels}
    return {level: {seed: 100 * value for seed, value in found.items()} for level, found in curve.items()}


def best_map(trials: Sequence[Trial], settings: Settings) -> str | None:
    """Return the map with the least validation log loss, vanilla and learned together; None without trials."""
    means = {}
    for method in settings.maps:
        found = [values(trials, "validation_log_loss", method, variant) for variant in ("vanilla", "learned")]
        both = [value for part in found for value in part.values()]
        if both:
            means[method] = sum(both) / len(both)
    return min(means, key=lambda name: means[name]) if means else None


def gain(
    trials: Sequence[Trial], settings: Settings, name: str, variant: str, method: str | None = None
) -> Difference | None:
    """Return learned minus vanilla of a score; without a method the mean of the maps, of seeds that have them all."""
    if method is not None:
        return _against(trials, name, (method, variant), (method, "vanilla"))
    sides = []
    for which in (variant, "vanilla"):
        found = [values(trials, name, one, which) for one in settings.maps]
        shared = set.intersection(*(set(part) for part in found)) if found else set()
        sides.append({seed: METRICS[name][1] * _average([part[seed] for part in found]) for seed in shared})
    return difference(*sides, higher_is_better=METRICS[name][3])


def findings(trials: Sequence[Trial], settings: Settings) -> list[str]:
    """Say what came out, negatives too."""
    said = []
    ends = [(name, _mean(values(trials, "accuracy", name, base_variant(name)), 1, 100)) for name in BASES]
    majority = [trial.result["majority"] for trial in trials]
    if majority:
        told = ", ".join(f"{name} {text} %" for name, text in ends)
        said.append(f"Accuracy: {told}; always the commonest class {100 * _average(majority):.1f} %.")
    for variant in _learned(settings):
        said += _gain_sentences(trials, settings, variant)
        ratios = [
            _average(values(trials, "noise_step", method, variant)) / max(_average(drift), 1e-30)
            for method in settings.maps
            if (drift := values(trials, "drift_step", method, variant))
        ]
        if ratios:
            said.append(
                f"{variant}: in a step of phase A the noise moves a particle {min(ratios):,.2g} to {max(ratios):,.2g} "
                f"times as far as the labels and the repulsion do{_read(min(ratios))}."
            )
    return said


def _gain_sentences(trials: Sequence[Trial], settings: Settings, variant: str) -> Iterator[str]:
    overall = {name: gain(trials, settings, name, variant) for name in ("accuracy", "log_loss")}
    if (accuracy := overall["accuracy"]) and (loss := overall["log_loss"]):
        yield (
            f"{variant} minus vanilla, mean of {len(settings.maps)} maps: accuracy {show(accuracy, 1, sign=True)} "
            f"points, {accuracy.verdict}; log loss {show(loss, 3, sign=True)}, {loss.verdict}."
        )
    found = {name: [gain(trials, settings, name, variant, method) for method in settings.maps] for name in METRICS}
    verdicts = [its.verdict for part in found.values() for its in part if its is not None]
    if verdicts:
        counts = ", ".join(
            f"{verdicts.count(word)} {word}"
            for word in ("better", "worse", "within noise", "one seed")
            if word in verdicts
        )
        yield f"{variant} minus vanilla, map by map: of {len(verdicts)} comparisons {counts}."


def _read(ratio: float) -> str:
    return ": what moves the particles is noise" if ratio > 10 else ""


def _learned(settings: Settings) -> list[str]:
    return [variant for variant in settings.variants if variant != "vanilla"]


def _against(trials: Sequence[Trial], name: str, ours: tuple[str, str], theirs: tuple[str, str]) -> Difference | None:
    _, factor, _, higher = METRICS[name]
    sides = [{seed: factor * value for seed, value in values(trials, name, *case).items()} for case in (ours, theirs)]
    return difference(*sides, higher_is_better=higher)


def _verdict(found: Difference | None, digits: int) -> str:
    return "-" if found is None else f"{show(found, digits, sign=True)} {found.verdict}"


def _mean(found: Mapping[int, float], digits: int, factor: float | int = 1) -> str:
    return show(estimate([factor * value for value in found.values()]), digits)


def _plain(found: Mapping[int, float]) -> str:
    return f"{_average(found):.3f}" if found else "-"


def _average(found: Mapping[int, float] | Sequence[float]) -> float:
    numbers = list(found.values()) if isinstance(found, Mapping) else list(found)
    return math.fsum(numbers) / max(1, len(numbers))


def _words(align: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in (align or {}).items())


def _count(trials: Sequence[Trial]) -> str:
    seeds = len({trial.seed for trial in trials})
    return "one seed, no standard error" if seeds == 1 else f"mean ± standard error over {seeds} seeds"


Maker = Callable[[Sequence[Trial], Settings], Table]
TABLES: dict[str, tuple[Maker, ...]] = {
    "methods": (methods_table, gains_table, softmax_table, phase_table),
    "robustness": (robustness_table,),
}
