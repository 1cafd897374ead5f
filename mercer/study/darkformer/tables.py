"""What the trials of the DARKFormer study say: perplexity, accuracy, recall and spikes, in tables and sentences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mercer.report.statistics import Estimate, estimate
from mercer.study.darkformer.design import BASE, COMPARED, METHODS, Settings
from mercer.study.page import Table, show
from mercer.study.results import Trial, by_seed, difference


def values(trials: Sequence[Trial], name: str, settings: Settings, **condition: Any) -> dict[int, float]:
    """Return a result by seed, at the usual settings but for those given."""
    usual = {
        "parameters": "attention",
        "num_features": settings.num_features,
        "learning_rate": settings.learning_rate,
    }
    chosen = [trial for trial in trials if name in trial.result]
    return by_seed(chosen, name, **usual | condition)


def steps_of(settings: Settings) -> list[int]:
    """Return the numbers of steps after which the held-out text was looked at."""
    return list(range(0, settings.steps + 1, settings.steps // settings.looks))


def perplexities(losses: Mapping[int, float]) -> dict[int, float]:
    """Return exp of losses in nats."""
    return {seed: math.exp(min(loss, 700.0)) for seed, loss in losses.items()}


def methods_table(trials: Sequence[Trial], settings: Settings, parameters: str = "attention") -> Table:
    """Return perplexity before and after, accuracy, the gap to softmax and recall, a row for each method."""
    rows, last = [], f"loss@{settings.steps}"
    base = values(trials, last, settings, method=BASE, parameters=parameters)
    for method in settings.compared:

        def of(name: str, method: str = method) -> dict[int, float]:
            return values(trials, name, settings, method=method, parameters=parameters)

        after = of(last)
        if not after:
            continue
        gap = difference(after, base, higher_is_better=False)
        accuracy = {seed: 100 * value for seed, value in of(f"accuracy@{settings.steps}").items()}
        recalls = ({s: 100 * v for s, v in of(f"recall@{d}").items()} for d in settings.distances)
        rows.append(
            [
                method,
                _mean(perplexities(of("loss@0")), 2),
                _mean(perplexities(after), 2),
                _mean(accuracy, 1),
                "-" if method == BASE else show(gap, 3, sign=True),
                "baseline" if method == BASE else gap.verdict if gap else "-",
                *(_mean(found, 0) for found in recalls),
            ]
        )
    part = "q, k, v and the mixers learn" if parameters == "attention" else "all parameters learn"
    header = (
        "Method",
        "Perplexity before",
        f"After {settings.steps} steps",
        "Next token (%)",
        "Loss over softmax",
        "Verdict",
        *(f"Recall over {d} (%)" for d in settings.distances),
    )
    near = METHODS["window"].options
    note = (
        f"{_count(trials)}; {settings.windows} held-out windows of {settings.length} tokens. Window: the last "
        f"{near['window']} and the first {near['sinks']} keys. Recall: a number read once and asked for after so many "
        f"tokens, {settings.questions} questions. Taught: the loss is the divergence from the model with its softmax."
    )
    return Table(f"methods-{parameters}", f"After finetuning; {part}", header, rows, note, (0, 5))


def errors_table(trials: Sequence[Trial], settings: Settings) -> Table:
    """Return the error of aligned layers beside the plain average of v and the window alone."""
    rows = []
    for method in settings.compared:
        found = [values(trials, name, settings, method=method) for name in ("error", "window_error", "uniform_error")]
        if found[0]:
            rows.append([method, *(_mean(errors, 4) for errors in found)])
    header = ("Method", "Aligned", "Window alone", "Plain average")
    title = "Relative squared error of attention outputs to exact softmax, mean over the layers, before finetuning"
    return Table("errors", title, header, rows, f"{_count(trials)}; on held-out text, behind the output projection.")


def features_table(trials: Sequence[Trial], settings: Settings) -> Table:
    """Return the loss by number of features."""
    rows, last = [], f"loss@{settings.steps}"
    for method in COMPARED:
        found = [values(trials, last, settings, method=method, num_features=m) for m in settings.features]
        if sum(map(bool, found)) > 1:
            rows.append([method, *(_mean(losses, 3) for losses in found)])
    header = ("Method", *(f"{m} features" for m in settings.features))
    return Table("features", f"Loss after {settings.steps} steps by number of features", header, rows, _count(trials))


def rates_table(trials: Sequence[Trial], settings: Settings) -> Table:
    """Return final loss and spikes by learning rate."""
    rows = []
    for method in COMPARED:
        for name, title, digits in ((f"loss@{settings.steps}", "loss", 3), ("spikes", "spikes", 1)):
            given = {"method": method, "parameters": "all"}
            found = [values(trials, name, settings, learning_rate=rate, **given) for rate in settings.rates]
            if sum(map(bool, found)) > 1:
                rows.append([method, title, *(_mean(numbers, digits) for numbers in found)])
    header = ("Method", "", *(f"{rate:g}" for rate in settings.rates))
    note = f"{_count(trials)}. A spike: a step whose loss lies half a nat above the median of the eight before."
    return Table("rates", "Full finetuning by learning rate", header, rows, note, (0, 1))


def findings(trials: Sequence[Trial], settings: Settings) -> list[str]:
    """Say what came out, negatives too."""
    last, found = f"loss@{settings.steps}", []
    base = values(trials, last, settings, method=BASE)
    start = estimate(list(perplexities(values(trials, "loss@0", settings, method=BASE)).values()))
    for method in settings.compared:
        losses = values(trials, last, settings, method=method)
        gap = difference(losses, base, higher_is_better=False)
        if method == BASE or gap is None:
            continue
        text = f"{method}: perplexity {_mean(perplexities(losses), 2)} after {settings.steps} steps"
        text += f", {_mean(perplexities(base), 2)} for softmax finetuned alike and {show(start, 2)} for the original"
        alike = "window, taught" if METHODS[method].teacher else "window"  # finetuned by the same loss
        window = values(trials, last, settings, method=alike)
        over = None if method == alike else difference(losses, window, higher_is_better=False)
        beside = f"; {show(over, 3, sign=True)} nats beside the {alike}: {over.verdict}" if over else ""
        found.append(f"{text}{beside}.")
    return found


def _mean(found: Mapping[int, float], digits: int) -> str:
    mean: Estimate | None = estimate(list(found.values()))
    return show(mean, digits)


def _count(trials: Sequence[Trial]) -> str:
    seeds = len({trial.seed for trial in trials})
    return "one seed, no standard error" if seeds == 1 else f"mean ± standard error over {seeds} seeds"
