"""`mercer study text`: classifiers of texts whose attention kernel is learned from labels, against random features.

`design` says what is varied, `trial` what is done once, `tables` and `figures` what came out.

Source: Coulomb paper (arXiv:2607.23869), sec. 3, Tables 1-3.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mercer.study.page import publish
from mercer.study.run import Study, run_study
from mercer.study.text import figures, tables
from mercer.study.text.design import PARTS, SIZES, Settings, check, conditions, sized
from mercer.study.text.trial import trial

LEAD = (
    "Does a classifier of texts gain from particles that have learned from the labels (phase A), where all else then "
    "learns in the same way (phase B)? Feature maps with vanilla, that is random, and with learned particles, beside "
    "softmax attention and Performer; everything is measured on held-out test texts."
)
NOTES = (
    "Under one seed all methods see the same training texts in the same order, and the two of a pair start from the "
    "same weights. A seed draws weights, particles, texts, order and dropout anew; the test texts stay.",
    "In all of them queries and keys are the layer's input itself, as in the paper's model; softmax too.",
    "learned: phase A with the paper's own settings. sharp: ours, with nearly no noise and steps that move something.",
    "Learned has seen the training texts more often than vanilla: phase A reads them too.",
    "Verdicts are not corrected for how many there are: of twenty comparisons without any effect one is expected to be "
    "called better or worse.",
)


def run_text(
    settings: Settings,
    out: str | Path,
    *,
    seeds: Sequence[int] = range(3),
    budget_minutes: float | int | None = 30,
    jobs: int = 2,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> Path:
    """Run the study, print its tables and write its page.

    Args:
        settings: what is varied.
        out: the folder.
        seeds: each draws weights, particles, training texts and their order anew.
        budget_minutes: see `run_study`.
        jobs: processes, of one thread each.
        resume: go on with the trials in the folder.
        overwrite: forget the trials in the folder.
        console: where tables are printed.

    Returns:
        The page.

    Raises:
        ValueError: a map, a variant, a part or a number is none.
        FileNotFoundError: no such text.
        DataError: the text cannot be used.
    """
    check(settings, seeds)
    study = Study("text", trial, conditions(settings), seeds, ("numpy", "transformers", "scikit-learn"))
    done = run_study(
        study, out, resume=resume, overwrite=overwrite, budget_minutes=budget_minutes, jobs=jobs, threads=1
    )
    shown = [make(done.trials, settings) for part in PARTS if part in settings.parts for make in tables.TABLES[part]]
    return publish(
        done,
        title="Learned particles on texts",
        lead=LEAD,
        findings=tables.findings(done.trials, settings),
        tables=[table for table in shown if table.rows],
        figures=figures.figures(done.trials, settings),
        notes=NOTES,
        console=console,
    )


__all__ = ["PARTS", "SIZES", "Settings", "run_text", "sized"]
