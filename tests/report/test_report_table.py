"""Which runs are compared, and what the rows say."""

import dataclasses
import io
import math

import pytest
from rich.console import Console

from mercer.report import comparison_table, format_table, markdown_table, write_report
from mercer.report.groups import group_runs
from mercer.report.table import memory, quantity


def shown(rows, width=80):
    out = io.StringIO()
    Console(file=out, width=width).print(format_table(rows))
    return out.getvalue()


def test_rows_by_hand(three_mixers):
    rows = {row.label: row for row in comparison_table(three_mixers)}
    assert list(rows) == ["softmax", "cubit", "deltaformer"]  # the baseline, then by loss
    softmax, cubit = rows["softmax"], rows["cubit"]
    assert softmax.valid_loss is not None
    assert softmax.valid_loss.mean == pytest.approx(2.12)
    assert softmax.valid_loss.error == pytest.approx(0.02 / math.sqrt(3))
    assert softmax.verdict == "baseline"
    assert softmax.gap is None
    assert cubit.gap is not None
    assert cubit.gap.mean == pytest.approx(-0.02)  # -0.020, -0.019, -0.021
    assert cubit.gap.error == pytest.approx(0.001 / math.sqrt(3))
    assert cubit.verdict == "better"
    assert rows["deltaformer"].verdict == "within noise"  # 0.02, -0.03, 0.01
    assert cubit.perplexity is not None
    assert cubit.perplexity.mean == pytest.approx(sum(math.exp(x) for x in (2.08, 2.121, 2.099)) / 3)
    assert (cubit.seeds_done, cubit.seeds_started, cubit.parameters) == (3, 3, 1_053_184)


def test_a_worse_mixer_is_called_worse(make_run):
    runs = [make_run("softmax", s, 2.0 + s) for s in range(3)] + [
        make_run("cubit", s, 2.1 + 1.001 * s) for s in range(3)
    ]
    assert [row.verdict for row in comparison_table(runs)] == ["baseline", "worse"]


def test_no_runs_and_one_run(make_run):
    assert comparison_table([]) == []
    assert "no runs to compare" in shown([])
    assert "No runs" in markdown_table([])
    (row,) = comparison_table([make_run("cubit", 0, 2.0)])
    assert (row.verdict, row.gap) == ("no baseline", None)
    assert "No finished softmax run" in group_runs([make_run("cubit", 0, 2.0)])[0].notes[0]


def test_unequal_seeds(make_run):
    runs = [make_run("softmax", s, 2.0 + 0.01 * s) for s in (0, 1, 2)] + [make_run("cubit", s, 1.9) for s in (2, 3)]
    rows = comparison_table(runs)
    assert rows[1].gap is not None
    assert not rows[1].gap.paired
    assert any("did not finish the same seeds" in note for note in group_runs(runs)[0].notes)


def test_unfinished_and_diverged_runs_are_shown_and_not_counted(make_run, three_mixers):
    runs = [
        *three_mixers,
        make_run("cubit", 3, None, status="failed"),
        make_run("cubit", 4, 9.0, status="interrupted"),
        make_run("local_linear", 0, math.nan),
        make_run("random", 0, None, status="failed"),
    ]
    rows = {row.label: row for row in comparison_table(runs)}
    assert (rows["cubit"].seeds_done, rows["cubit"].seeds_started) == (3, 5)
    assert rows["cubit"].verdict == "better"
    assert (rows["local_linear"].verdict, rows["local_linear"].valid_loss) == ("diverged", None)
    assert rows["random"].verdict == "failed"
    text = shown(list(rows.values()))
    assert "3 of 5 seeds" in text
    assert "diverged" in text
    notes = " ".join(group_runs(runs)[0].notes)
    for part in ("cubit: 1 run failed", "cubit: 1 run interrupted", "local_linear: 1 run diverged"):
        assert part in notes


def test_a_phase_without_validation_loss_is_done_and_not_diverged(make_run, tmp_path):
    aligned = make_run("particle", 0, None, measures={"phase": "align", "before": {}, "after": {}})
    lost = make_run("cubit", 0, None, measures={"phase": "finetune", "validation": {"log_loss": {"value": None}}})
    rows = {row.label: row for row in comparison_table([aligned, lost])}
    assert (rows["particle"].verdict, rows["particle"].seeds_done) == ("done, no loss", 1)
    assert (rows["cubit"].verdict, rows["cubit"].seeds_done) == ("diverged", 0)
    page = write_report([aligned], tmp_path).read_text()
    assert "its phase has no validation loss" in page
    assert "1 run diverged" not in page


def test_other_recipes_and_settings_are_not_mixed(make_run, three_mixers):
    long = dataclasses.replace(make_run("cubit", 0, 1.0), config={"train": {"steps": 900}, "seed": 0})
    short = dataclasses.replace(make_run("cubit", 0, 1.5), config={"train": {"steps": 100}, "seed": 0})
    other = make_run("softmax", 0, 3.0, recipe="tiny")
    groups = group_runs([*three_mixers, long, short, other])
    assert [len(group.runs) for group in groups] == [9, 1, 1, 1]
    assert "train.steps=100" in groups[1].title
    assert "train.steps=900" in groups[2].title
    assert groups[3].title == "tiny, size tiny"


def test_options_tell_variants_of_one_mixer_apart(make_run):
    runs = [
        make_run("cubit", 0, 2.0),
        make_run("cubit", 0, 2.1, mixer_options={"share": True, "ridge": 1e-3}),
        make_run("deltaformer", 0, 2.2, mixer_options={"w": "q"}),
    ]
    assert [row.label for row in comparison_table(runs)] == ["cubit", "cubit (ridge=0.001, share=True)", "deltaformer"]


def test_a_mixer_that_is_alone_shows_the_options_it_does_not_have_by_default(make_run):
    runs = [
        make_run("cubit", 0, 2.0, mixer_options={"ridge": 1.0, "share": False}),
        make_run("particle", 0, 2.1, mixer_options={"features": "cos2"}),
        make_run("of another version", 0, 2.2, mixer_options={"size": 3}),
        make_run("performer", 0, 2.3),
        make_run("linear_cubit", 0, 2.4, mixer_options={"features": "of another version"}),
    ]
    labels = [row.label for row in comparison_table(runs)]
    assert labels == [
        "cubit (ridge=1.0)",
        "particle (features=cos2)",
        "of another version (size=3)",
        "performer",
        "linear_cubit (features=of another version)",
    ]


def test_a_seed_run_twice_counts_once_and_the_newest(make_run):
    runs = [make_run("softmax", 0, 2.0, created="2026-01-01"), make_run("softmax", 0, 2.5, created="2026-01-02")]
    (group,) = group_runs(runs)
    assert group.variants[0].by_seed("valid_loss") == {0: 2.5}
    assert "only the newest of each seed counts" in group.notes[0]


def test_what_may_not_be_compared_is_noted(make_run):
    runs = [make_run("softmax"), make_run("cubit", device="cuda", train_tokens=1, commit="other")]
    notes = " ".join(group_runs(runs)[0].notes)
    assert "different amounts of text: 1 to 819,200 tokens" in notes
    assert "different devices" in notes
    assert "different versions" in notes


def test_terminal_table_fits_eighty_columns(three_mixers):
    text = shown(comparison_table(three_mixers))
    assert max(map(len, text.splitlines())) <= 80
    for part in ("deltaformer", "within noise", "±0.0115", "-0.0200", "1.05 M", "20.0 k", "600 MiB"):
        assert part in text


def test_markdown_keeps_its_columns_whatever_the_names(make_run):
    rows = comparison_table([make_run("a|b\nc", 0, 2.0, recipe="x|<b>`y`")])
    lines = markdown_table(rows).splitlines()
    assert lines[0] == r"### x\|&lt;b&gt;\`y\`, size tiny"
    columns = [line.replace(r"\|", "").count("|") for line in lines[2:5]]
    assert columns == [11, 11, 11]


def test_terminal_shows_markup_in_names_as_text(make_run):
    assert "[bold]x[/bold]" in shown(comparison_table([make_run("softmax", 0, 2.0, recipe="[bold]x[/bold]")]))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7.25, "7.25"),
        (999, "999"),
        (999.6, "1.00 k"),
        (12_345, "12.3 k"),
        (999_900, "1.00 M"),
        (1.3e9, "1.30 G"),
    ],
)
def test_quantities_have_three_digits(value, text):
    assert quantity(value) == text


def test_memory():
    assert (memory(2**20), memory(20 * 2**30)) == ("1 MiB", "20.0 GiB")
