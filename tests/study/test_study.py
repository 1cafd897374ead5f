"""A study is its trials: run once each, resumed, sized to a budget, paired by seed, put on one page."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from mercer.errors import DataError
from mercer.report.figures import Figure
from mercer.study import Study, Table, by_seed, difference, estimate, publish, run_study, show
from mercer.study.results import Trial, read_trials
from mercer.study.run import plan

CONDITIONS = [{"base": base} for base in (1.0, 10.0, 100.0)]


def add(*, seed: int, base: float) -> dict[str, float]:
    """The trial of these tests; the number of its process shows where it ran."""
    return {"sum": base + seed, "process": os.getpid()}


def fail_late(*, seed: int, base: float) -> dict[str, float]:
    if seed == 1:
        raise FloatingPointError("loss is not finite")
    return add(seed=seed, base=base)


def die(*, seed: int, base: float) -> dict[str, float]:
    os._exit(3)


def quiet() -> Console:
    return Console(quiet=True)


def lines(folder: Path) -> list[str]:
    return (folder / "trials.jsonl").read_text().splitlines()


def test_every_trial_is_run_once_and_written_down(tmp_path):
    done = run_study(Study("sums", add, CONDITIONS, range(3)), tmp_path, console=quiet())
    assert [(t.condition["base"], t.seed, t.result["sum"]) for t in done.trials] == [
        (base, seed, base + seed) for seed in range(3) for base in (1.0, 10.0, 100.0)
    ]
    assert len(lines(tmp_path)) == 9
    assert done.left_out == ""
    record = json.loads((tmp_path / "study.json").read_text())["starts"][0]
    assert {"command", "commit", "machine", "versions", "created", "seeds"} <= record.keys()
    with pytest.raises(FileExistsError, match=r"holds a study; go on with --resume, start anew with --overwrite"):
        run_study(done.study, tmp_path)


def test_resuming_runs_what_is_missing_and_drops_a_torn_line(tmp_path):
    with pytest.raises(FloatingPointError):
        run_study(Study("sums", fail_late, CONDITIONS, range(3)), tmp_path, console=quiet())
    assert len(lines(tmp_path)) == 3
    file = tmp_path / "trials.jsonl"
    first = file.read_text().replace('"sum": 1.0', '"sum": -1.0')  # kept as it stands: it is not run again
    file.write_text(first + '{"condition": {"base": 1.0}, "seed": 1, "sec')
    done = run_study(Study("sums", add, CONDITIONS, range(3)), tmp_path, resume=True, console=quiet())
    assert [t.result["sum"] for t in done.trials] == [-1, 10, 100, 2, 11, 101, 3, 12, 102]
    assert len(lines(tmp_path)) == 9
    assert len(done.starts) == 2
    again = run_study(done.study, tmp_path, overwrite=True, console=quiet())
    assert again.trials[0].result["sum"] == 1
    file.write_text("{}\n" + file.read_text())
    with pytest.raises(DataError, match=r"line 1 of .*trials.jsonl is no finished trial .*; delete it and go on"):
        read_trials(file)


def test_trials_side_by_side_give_the_same(tmp_path):
    done = run_study(Study("sums", add, CONDITIONS, range(2)), tmp_path, jobs=2, console=quiet())
    assert [t.result["sum"] for t in done.trials] == [1, 10, 100, 2, 11, 101]
    assert os.getpid() not in {t.result["process"] for t in done.trials}
    with pytest.raises(RuntimeError, match="a process died; if memory was short"):
        run_study(Study("deaths", die, CONDITIONS, [0]), tmp_path / "deaths", jobs=2, console=quiet())
    for options, message in (({"jobs": 0}, r"jobs \(0\)"), ({"budget_minutes": -1}, r"budget \(-1\)")):
        with pytest.raises(ValueError, match=message):
            run_study(done.study, tmp_path / "wrong", **options)


def finished(study: Study, seeds: int, seconds: list[float]) -> dict:
    trials = [Trial(c, s, float(t), {}) for s in range(seeds) for c, t in zip(study.conditions, seconds, strict=False)]
    return {trial.key: trial for trial in trials}


def test_a_budget_bounds_the_seeds_then_the_conditions():
    study = Study("sums", add, CONDITIONS, range(10))
    kept = lambda done, budget, jobs=1: [
        (json.loads(name)["base"], s) for name, s in plan(study, done, float(budget), jobs)
    ]
    assert len(kept({}, 60)) == 30
    assert len(kept(finished(study, 1, [1, 2, 3]), 30)) == 5 * 3  # 6 s a seed
    assert len(kept(finished(study, 1, [1, 2, 3]), 30, jobs=2)) == 10 * 3
    # A third of 15 s is gone after the second condition: three seeds of two conditions.
    assert kept(finished(study, 1, [1, 5, 9]), 15) == [(b, s) for s in range(3) for b in (1.0, 10.0)]
    # A seed that was begun is ended, however slow the machine has become.
    assert len(kept(finished(study, 5, [9, 9, 9]), 90)) == 5 * 3
    assert len(plan(study, finished(study, 2, [1, 1, 1]), float("inf"), 1)) == 30


def test_what_was_left_out_is_said(tmp_path):
    study = Study("naps", nap, [{"seconds": 0.02}, {"seconds": 0.0201}, {"seconds": 0.0202}], range(3))
    done = run_study(study, tmp_path, budget_minutes=0.04 / 60, console=quiet())
    assert done.left_out.endswith("left out the last 2 of 3 conditions, from (seconds=0.0201) on.")
    assert len(done.trials) == 3


def nap(*, seed: int, seconds: float) -> dict[str, float]:
    time.sleep(seconds)
    return {}


SCRIPT = """
import sys, time
from mercer.study import Study, run_study
def trial(*, seed, n):
    time.sleep(n)
    return {}
if __name__ == "__main__":
    run_study(Study("naps", trial, [{"n": 0.01}, {"n": 60}], [0]), sys.argv[1], jobs=2)
"""


def stop_late(*, seed: int, base: float) -> dict[str, float]:
    if base > 1:
        signal.raise_signal(signal.SIGINT)
    return add(seed=seed, base=base)


def test_an_interruption_keeps_what_is_finished(tmp_path):
    console = Console(file=io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        run_study(Study("sums", stop_late, CONDITIONS, [0]), tmp_path, console=console)
    assert "stopped after 1 trials; go on with: " in console.file.getvalue()
    assert console.file.getvalue().endswith(" --resume\n")
    assert len(lines(tmp_path)) == 1


def test_an_interruption_ends_the_processes_at_once(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen([sys.executable, "script.py", "out"], cwd=tmp_path, stderr=subprocess.PIPE) as process:
        file, start = tmp_path / "out" / "trials.jsonl", time.monotonic()
        while not (file.exists() and file.read_text()) and time.monotonic() < start + 50:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)  # the trial in progress would take a minute
    assert b"stopped after 1 trials; go on with: script.py out --resume" in said
    assert len(lines(tmp_path / "out")) == 1


def test_differences_are_paired_and_noise_is_called_noise():
    trials = [
        Trial({"model": m, "n": n}, s, 1.0, {"a": 0.1 * s + g})
        for m, g in (("x", 0.2), ("y", 0.0))
        for s in range(3)
        for n in (1, 2)
    ]
    ours, theirs = (by_seed(trials, "a", model=model) for model in "xy")
    gain = difference(ours, theirs)
    assert (gain.mean, gain.count, gain.verdict) == (pytest.approx(0.2), 3, "better")
    assert difference(theirs, ours).verdict == "worse"
    assert difference(theirs, ours, higher_is_better=False).verdict == "better"
    assert difference({0: 1.0}, {0: 0.0}).verdict == "one seed"
    assert difference({0: 1.0}, {1: 0.0}) is None
    # A mean of 3.5 standard errors over three seeds is within noise: t reaches to 4.3.
    assert difference({0: 1.0, 1: 2.0, 2: 3.0}, dict.fromkeys(range(3), 0.0)).verdict == "within noise"
    assert show(estimate([0.5, 0.7])) == "0.600 ± 0.100"


def test_the_page_holds_tables_figures_and_record(tmp_path):
    done = run_study(Study("sums", add, CONDITIONS, range(3)), tmp_path, console=quiet())
    table = Table("t", "Sums", ("Base", "Sum", "Verdict"), [["<b>|", "1.0 ± 0.1", "better"]], "A note.", (0, 2))

    def draw(theme):
        from mercer.report.style import pyplot

        figure, axes = pyplot().subplots()
        axes.plot([0, 1])
        return figure

    figure = Figure("line", "A line", "It rises.", "A rising line", ("x", "y"), [("0", "1")], draw)
    console = Console(file=io.StringIO(), width=80)
    page = publish(
        done, title="A & B", lead="Lead.", findings=["It adds."], tables=[table], figures=[figure], console=console
    )
    text = page.read_text()
    for expected in (
        "<title>A &amp; B</title>",
        "It adds.",
        "&lt;b&gt;|",
        '"text better"',
        "--paper",
        "data:image/svg",
    ):
        assert expected in text
    assert "http" not in text.replace("http-equiv", "")
    assert "| <b>\\| | 1.0 ± 0.1 | better |" in (tmp_path / "tables.md").read_text()
    assert "Sums" in console.file.getvalue()
    assert {p.name for p in (tmp_path / "figures").iterdir()} == {"line.png", "line.svg"}
