"""Studies: one trial under many conditions and seeds, sized to a budget, resumed where it stopped, shown on one page.

How to write one, in `mercer/study/NAME.py`. A trial is a function at the top level of a module; it takes a seed and the
keys of a condition, depends on nothing else, and returns plain numbers:

    def trial(*, seed: int, model: str) -> dict[str, float]:
        ...
        return {"accuracy": 0.81, "log_loss": 0.43}

A study is that function, its conditions (most important first) and its seeds:

    study = Study("text", trial, [{"model": name} for name in ("softmax", "favor")], seeds=range(5))
    done = run_study(study, out, resume=resume, budget_minutes=30, jobs=2)

Read values by seed, compare them in pairs, put them into tables and figures (`mercer.report.figures.Figure`), publish:

    ours, theirs = (by_seed(done.trials, "accuracy", model=name) for name in ("favor", "softmax"))
    gain = difference(ours, theirs)
    row = ["favor", show(estimate(list(ours.values()))), show(gain, sign=True), gain.verdict]
    table = Table("accuracy", "Accuracy", ("Model", "Accuracy", "Gain", "Verdict"), [row], text_columns=(0, 3))
    publish(done, title="Text", lead="What was asked.", findings=[...], tables=[table], figures=[...])

Every finished trial is a line of OUT/trials.jsonl, so Ctrl-C loses only the trials in progress. A budget first bounds
the number of seeds, down to three, then drops conditions from the end of the list; `done.left_out` says what.
"""

from mercer.report.statistics import Estimate, estimate
from mercer.study.page import Table, publish, show
from mercer.study.results import Difference, Trial, by_seed, difference
from mercer.study.run import Done, Study, run_study

__all__ = [
    "Difference",
    "Done",
    "Estimate",
    "Study",
    "Table",
    "Trial",
    "by_seed",
    "difference",
    "estimate",
    "publish",
    "run_study",
    "show",
]
