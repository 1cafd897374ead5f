"""The figures of the text study: reliability, and accuracy by level of damage."""

from collections.abc import Sequence

import numpy as np

from mercer.evaluate import Reliability
from mercer.report.classification import DAMAGE, reliability_figure
from mercer.report.figures import Figure
from mercer.study.curves import curve_figure, curves_of
from mercer.study.results import Trial
from mercer.study.text import tables
from mercer.study.text.design import DAMAGES, Settings

LOOKS = {"exact": "softmax", "vanilla": "lfk", "learned": "particle", "sharp": "cubit"}
LABELS = {**DAMAGE, "label_noise": "share of wrong training labels"}


def figures(trials: Sequence[Trial], settings: Settings) -> list[Figure]:
    """Return the figures there are data for."""
    made = [_reliability(trials, settings)]
    if "robustness" in settings.parts:
        made += [_curve(trials, settings, kind) for kind in (*DAMAGES, "label_noise")]
    return [figure for figure in made if figure is not None]


def pooled(trials: Sequence[Trial], method: str, variant: str) -> Reliability | None:
    """Return the reliability of a method over the test texts of all seeds together; None without trials."""
    chosen = [t.result["bins"] for t in trials if t.condition["method"] == method
              and t.condition["variant"] == variant and not t.condition["label_noise"]]  # fmt: skip
    if not chosen:
        return None
    counts, confidence, right = np.array(chosen).transpose(2, 0, 1)
    total = counts.sum(0)
    means = [
        np.divide((counts * part).sum(0), total, out=np.full(len(total), np.nan), where=total > 0)
        for part in (confidence, right)
    ]
    return Reliability(np.linspace(0, 1, len(total) + 1), total.astype(np.int64), means[0], means[1])


def _reliability(trials: Sequence[Trial], settings: Settings) -> Figure | None:
    cases = tables.robust_cases(trials, settings, "drop")
    found = {_label(case): its for case in cases if (its := pooled(trials, *case)) is not None}
    return reliability_figure(found, {_label(case): LOOKS[case[1]] for case in cases}) if found else None


def _curve(trials: Sequence[Trial], settings: Settings, kind: str) -> Figure | None:
    cases = tables.robust_cases(trials, settings, kind)
    curves = {_label(case): tables.robust_values(trials, settings, kind, case) for case in cases}
    title = f"Accuracy against {LABELS[kind]}"
    caption = "Mean over the seeds; band: one standard error."
    looks = {_label(case): LOOKS[case[1]] for case in cases}
    return curve_figure(kind, title, caption, curves_of(curves), (LABELS[kind], "accuracy (%)"), looks)


def _label(case: tuple[str, str]) -> str:
    return case[0] if case[1] == "exact" else f"{case[0]}, {case[1]}"
