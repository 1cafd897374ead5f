"""`mercer study synthetic`: learned particles against fixed, sampled and kernel features under label noise.

`design` says what is varied and what a trial is, `tables` and `figures` what the trials show.

Source: Coulomb paper F.1.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mercer.study.page import publish
from mercer.study.run import Study, run_study
from mercer.study.synthetic import figures, tables
from mercer.study.synthetic.design import FRESH, PARTS, Settings, check, conditions, trial

LEAD = (
    "Do features learned from the labels predict better than fixed, sampled or kernel ones, under rising label noise? "
    "280 training samples of 10 inputs, 200 features for every method that has features, a linear support vector "
    f"machine (C = 1) on them. Accuracies are on {FRESH} fresh samples of the same distribution, with less noise "
    "than the 120 of the paper's own test half; the table of that half stands beside."
)
NOTES = (
    "A trial is one draw of samples, weights and labels; all methods see the same draws, and differences are paired.",
    "The lowest noise levels hardly change a label, so within a trial they are nearly the same data: their rows "
    "are one observation rather than several. So are those of the highest levels, where labels are coin tosses.",
    "The l1 ball that the particles stay in favours features of few inputs, and the task is of that kind.",
    "Every particle takes the phase that agrees best with the training labels; so does the untrained control.",
    "Verdicts are not corrected for how many there are: of twenty comparisons without any effect one is expected to be "
    "called better or worse. Where the sign of the signal is itself at chance, that is what such a verdict is.",
)
TIME_NOTE = (
    "Run times are of one thread each, as many at a time as there were jobs; read their exponents, not their seconds."
)


def run_synthetic(
    settings: Settings,
    out: str | Path,
    *,
    seeds: Sequence[int] = range(10),
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
        seeds: trials; each is a draw of samples, of w and of whatever a method draws.
        budget_minutes: see `run_study`.
        jobs: processes, of one thread each.
        resume: go on with the trials in the folder.
        overwrite: forget the trials in the folder.
        console: where tables are printed.

    Returns:
        The page.

    Raises:
        ValueError: a method, a part or a number is none.
    """
    check(settings, seeds)
    study = Study("synthetic", trial, conditions(settings), seeds, ("numpy", "scipy", "scikit-learn"))
    done = run_study(
        study, out, resume=resume, overwrite=overwrite, budget_minutes=budget_minutes, jobs=jobs, threads=1
    )
    trials = done.trials
    makers = {
        "noise": (tables.accuracy_table, tables.gain_table, tables.paper_split_table),
        "retention": (tables.retention_table,),
        "ablation": (tables.ablation_table,),
        "time": (tables.time_table,),
    }
    shown = [make(trials, settings) for part in PARTS if part in settings.parts for make in makers[part]]
    return publish(
        done,
        title="Learned particles on the synthetic task",
        lead=LEAD,
        findings=tables.findings(trials, settings),
        tables=[table for table in shown if table.rows],
        figures=figures.figures(trials, settings),
        notes=(*NOTES, *((TIME_NOTE,) if "time" in settings.parts else ())),
        console=console,
    )
