"""The synthetic study: what it varies, what it says of made-up trials, and one small run of the command."""

import dataclasses
import json

import pytest
from rich.console import Console

from mercer.cli import main
from mercer.study import Trial
from mercer.study.synthetic import Settings, tables
from mercer.study.synthetic.design import CEILING, LEARNED, UNTRAINED, USUAL, check, conditions
from mercer.study.synthetic.figures import LOOKS, figures

SMALL = Settings(
    methods=(LEARNED, UNTRAINED, "logistic"),
    noise_levels=(0.001, 10.0),
    budgets=(64, 256),
    strengths=(0.0, 0.1),
    samples=(200, 400),
)


def accuracy(condition: dict, seed: int) -> float:
    """Learned: 70 % less what few features lose, at low noise; all others 60 %; nobody more than 50 % at high noise."""
    if condition["sigma"] > 1:
        return 0.5 + 0.01 * (seed - 1)
    learned = 0.7 - (0.02 if condition["num_features"] == 64 else 0.0) + (0.01 if condition["strength"] == 0 else 0.0)
    wobble = 0.01 * seed if condition["strength"] else 0.03 * (seed == 0)  # so that the ablation is within noise
    return (learned if condition["method"] == LEARNED else 0.6) + wobble


def made_up(settings: Settings) -> list[Trial]:
    trials = []
    for condition in {json.dumps(c): c for c in conditions(settings)}.values():
        for seed in range(3):
            score = accuracy(condition, seed)
            result = {"accuracy": score, "fresh_accuracy": score}
            if condition["method"] != CEILING:
                result["fit_seconds"] = 1e-3 * condition["num_samples"] ** 1.5
            trials.append(Trial(condition, seed, 1.0, result))
    return trials


def test_conditions_are_those_of_the_paper_noise_first():
    found = conditions(Settings())
    assert len([c for c in found if c["method"] == LEARNED and c | USUAL == c]) >= 10
    assert found[0]["sigma"] == pytest.approx(1e-5)
    assert found[10 * 11 - 1]["sigma"] == pytest.approx(1e5)
    assert {c["num_features"] for c in found if c["method"] == "fixed"} == {16, 32, 64, 128, 200, 256}
    assert {c["strength"] for c in found if c["method"] == LEARNED} >= {0.0, 0.1, 1.0}
    assert set(LOOKS) > set(Settings().methods)
    for changed, message in (
        ({"methods": ("particle",)}, r"unknown method 'particle'; .*did you mean 'particles'"),
        ({"parts": ("noises",)}, "unknown part 'noises'"),
        ({"noise_levels": (0.0,)}, r"noise_levels \(\(0.0,\)\) must be positive numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            check(Settings(**changed), range(3))
    with pytest.raises(ValueError, match="no trials; ask for at least 3"):
        check(Settings(), range(0))


def test_tables_say_what_the_trials_say():
    trials = made_up(SMALL)
    rows = {row[0]: row for row in tables.accuracy_table(trials, SMALL).rows}
    assert rows[LEARNED][1:] == ["71.0 ± 0.6", "50.0 ± 0.6"]
    assert rows["logistic"][1:] == ["61.0 ± 0.6", "50.0 ± 0.6"]
    gains = {row[0]: row for row in tables.gain_table(trials, SMALL).rows}
    assert gains["logistic"][1:] == ["+10.0 ± 0.0 better", "+0.0 ± 0.0 within noise"]
    kept = tables.retention_table(trials, SMALL).rows[1]
    assert kept[1:] == ["share kept", "0.905 ± 0.003", "1.000 ± 0.000"]
    with_majority = dataclasses.replace(SMALL, methods=(*SMALL.methods, "majority"))
    above = tables.retention_table(made_up(with_majority), with_majority).rows[2]
    assert above[1:] == ["above majority", "0.800 ± 0.000", "1.000 ± 0.000"]  # (68 - 60) / (70 - 60)
    assert tables.retained({0: 68.0, 1: 66.0}, {0: 70.0, 1: 66.0}).mean == pytest.approx(34 / 36)
    assert tables.ablation_table(trials, SMALL).rows[1][3] == "within noise"
    slopes = {row[0]: row[1] for row in tables.time_table(trials, SMALL).rows}
    assert slopes["logistic"] == "1.50 ± 0.00"
    said = " ".join(tables.findings(trials, SMALL))
    assert "Low noise (0.001): learned particles 71.0 ± 0.6 %, +10.0 ± 0.0 points" in said
    assert "64 features keep 0.905 ± 0.003 of the accuracy above chance that 256 have: above the line of 0.9" in said
    assert "0.1: +" not in said or "within noise" in said


def test_figures_are_drawn_for_what_there_is():
    from mercer.report.style import LIGHT

    found = figures(made_up(SMALL), SMALL)
    assert [figure.name for figure in found] == ["noise", "retention", "ablation", "time"]
    for figure in found:
        assert figure.render(LIGHT, "svg").startswith(b"<?xml")
        assert len(figure.data[0]) == len(figure.header)
    assert figures([], SMALL) == []


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mercer.study.synthetic.design.FRESH", 200)
    words = ["study", "synthetic", "--trials", "3", "--methods", "fixed; logistic;majority", "--noise-levels", "0.01,1"]
    words += ["--parts", "noise", "--jobs", "1", "--out", str(tmp_path / "s")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "Accuracy by noise level (per cent)" in printed
    assert "The budget" not in printed
    assert "written:" in printed
    assert {p.name for p in (tmp_path / "s").iterdir()} == {
        "figures",
        "report.html",
        "study.json",
        "tables.md",
        "trials.jsonl",
    }
    trials = (tmp_path / "s" / "trials.jsonl").read_text().count("\n")
    assert main(words) == 2
    assert "holds a study; go on with --resume" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 0
    assert (tmp_path / "s" / "trials.jsonl").read_text().count("\n") == trials
    assert main(["study", "synthetic", "--noise-levels", "low"]) == 2
    assert "noise-levels ('low') must be numbers separated by commas" in capsys.readouterr().err


def test_a_wide_table_is_broken_between_columns():
    console = Console(width=80, file=None, record=True, quiet=False)
    trials = made_up(Settings(parts=("noise",)))
    with console.capture() as capture:
        console.print(tables.gain_table(trials, Settings()).terminal(80))
    text = capture.get()
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("rbf-svm") > 1
    assert "…" not in text
