"""One HTML page that needs nothing else: styles, figures and numbers inside, every string escaped."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from mercer.report.figures import Figure, group_figures
from mercer.report.groups import BASELINE, Group, group_runs, status_of
from mercer.report.statistics import estimate, usable
from mercer.report.style import LIGHT
from mercer.report.table import HEADERS, Row, cells, group_rows, markdown_table, memory, quantity
from mercer.report.template import render_page, shown
from mercer.train.record import Run

_TONES = {
    "better": "better",
    "worse": "worse",
    "failed": "failed",
    "diverged": "diverged",
    "interrupted": "interrupted",
}


def write_report(runs: Sequence[Run], out: str | Path, title: str = "Attention mixers compared") -> Path:
    """Write `report.html`, `table.md` and `figures/*.png` into a folder.

    The page is one file without outside references: it can be mailed, and opens without a network. Runs of
    different recipes or settings stand in sections of their own; failed and interrupted runs are listed and not
    counted.

    Args:
        runs: what `mercer.train.record.read_runs` returns; may be empty.
        out: the folder; made where missing.
        title: heading of the page.

    Returns:
        The path of the page.

    Raises:
        ModuleNotFoundError: there are figures to draw and matplotlib is not installed.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    groups = group_runs(runs)
    sections = []
    for number, group in enumerate(groups, start=1):
        figures = group_figures(group)
        for figure in figures:
            (out / "figures").mkdir(exist_ok=True)
            name = figure.name if len(groups) == 1 else f"{number}-{figure.name}"
            (out / "figures" / f"{name}.png").write_bytes(figure.render(LIGHT, "png"))
        sections.append(_section(group, figures))
    rows = [row for group in groups for row in group_rows(group)]
    (out / "table.md").write_text(markdown_table(rows), encoding="utf-8")
    page = render_page("report/page.html", title=title, subtitle=_subtitle(runs), sections=sections, headers=HEADERS)
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _subtitle(runs: Sequence[Run]) -> str:
    if not runs:
        return "mercer: attention as kernel regression."
    days = sorted(run.created[:10] for run in runs)
    when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    return f"{_count(len(runs), 'training run')}, made {when}."


def _section(group: Group, figures: list[Figure]) -> dict[str, Any]:
    rows = group_rows(group)
    return {
        "title": group.title,
        "setting": _setting(group),
        "findings": [_finding(row, rows) for row in rows],
        "caution": _caution(rows),
        "notes": group.notes,
        "rows": [{"cells": _page_cells(row), "tone": _TONES.get(row.verdict, "")} for row in rows],
        "figures": [shown(figure) for figure in figures],
        "runs": _run_lines(group),
        "commands": list(dict.fromkeys(run.command for run in group.runs)),
        "facts": _facts(group),
        "config": yaml.safe_dump(json.loads(json.dumps(group.runs[0].config, default=str)), sort_keys=False),
    }


def _minus(text: str) -> str:
    """Return a number with a true minus sign, at which no line breaks."""
    return text.replace("-", "\N{MINUS SIGN}")


def _page_cells(row: Row) -> list[tuple[str, str]]:
    texts = cells(row)
    texts[2] = (_minus(texts[2][0]) if row.gap else "-", texts[2][1])
    return texts


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _listed(names: Iterable[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


def _setting(group: Group) -> str:
    """Say in words what was trained on what, for how long, and where."""
    first = group.runs[0]
    data = first.config.get("data", {})
    source = data.get("source") if isinstance(data, dict) else None
    labels = [variant.label for variant in group.variants]
    counts = sorted({len(variant.done) for variant in group.variants})
    seeds = _count(counts[0], "seed") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"
    tokens = sorted({run.train_tokens for variant in group.variants for run in variant.done})
    were = "were" if len(labels) > 1 else "was"
    text = f"{_listed(labels)} {were} trained with the recipe {first.recipe}" + (f" on {source}" if source else "")
    if tokens:
        read = quantity(tokens[0]) if len(tokens) == 1 else f"{quantity(tokens[0])} to {quantity(tokens[-1])}"
        text += f": {read} tokens a run"
    sizes = sorted({run.parameters for run in group.runs if run.parameters})
    if sizes:
        span = quantity(sizes[0]) if sizes[0] == sizes[-1] else f"{quantity(sizes[0])} to {quantity(sizes[-1])}"
        text += f", {span} parameters"
    threads = f", {_count(first.num_threads, 'thread')}" if first.num_threads else ""
    return f"{text}, {seeds} finished for each, on {first.device}{threads}."


def _finding(row: Row, rows: list[Row]) -> dict[str, str]:
    """Say in words how one mixer stands to softmax, and what it costs."""
    tone = _TONES.get(row.verdict, "")
    if row.valid_loss is None:
        text = "finished; its phase has no validation loss." if row.seeds_done else "no run finished."
        return {"label": row.label, "verdict": row.verdict, "tone": tone, "text": text}
    loss = f"validation loss {row.valid_loss.mean:.4f} nats per token"
    if row.gap is None:
        return {"label": row.label, "verdict": row.verdict, "tone": tone, "text": f"{loss}."}
    side = "below" if row.gap.mean < 0 else "above"
    text = f"{loss}, {abs(row.gap.mean):.4f} {side} {BASELINE}"
    if row.gap.low is None:
        text += " with a single seed, so nothing can be said about noise"
    else:
        text += f" (95 % interval of the gap: {_minus(f'{row.gap.low:+.4f} to {row.gap.high:+.4f}')})"
    base = next(other for other in rows if other.verdict == "baseline")
    if row.tokens_per_second and base.tokens_per_second and base.tokens_per_second.mean > 0:
        speed = row.tokens_per_second.mean / base.tokens_per_second.mean
        text += f"; trains at {speed:.2f} times {BASELINE}'s speed"
    return {"label": row.label, "verdict": row.verdict, "tone": tone, "text": f"{text}."}


def _caution(rows: list[Row]) -> str:
    counts = [row.gap.count for row in rows if row.gap is not None and row.gap.low is not None]
    if not counts:
        return f"No gap could be tested for noise: that takes {BASELINE} and two or more seeds of each mixer."
    return (
        "This holds for this size, this text and this length of training; it says nothing about larger models. With "
        f"{min(counts)} seeds, only a gap that is large beside its spread over seeds can be told from none."
    )


def _run_lines(group: Group) -> list[dict[str, Any]]:
    lines = []
    for variant in group.variants:
        for run in variant.runs:
            status = status_of(run)
            planned = run.config.get("train", {}).get("steps") if isinstance(run.config.get("train"), dict) else None
            short = isinstance(planned, int) and run.steps < planned
            lines.append(
                {
                    "label": variant.label,
                    "seed": run.seed,
                    "status": status,
                    "tone": _TONES.get(status, ""),
                    "loss": f"{run.valid_loss:.4f}" if usable(run.valid_loss) else "-",
                    "steps": f"{run.steps:,} of {planned:,}" if short else f"{run.steps:,}",
                    "time": _duration(run.train_seconds),
                    "options": ", ".join(f"{key}={value}" for key, value in run.mixer_options.items()) or "-",
                    "run_id": run.run_id,
                }
            )
    return lines


def _duration(seconds: float | int | None) -> str:
    """Return a time in the two units a reader needs.

    >>> _duration(75), _duration(3700)
    ('1 min 15 s', '1 h 1 min')
    """
    if seconds is None or not usable(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    return f"{whole // 3600} h {whole % 3600 // 60} min" if whole >= 3600 else f"{whole // 60} min {whole % 60} s"


def _facts(group: Group) -> list[tuple[str, str]]:
    """Return machine, versions and the like; every value that occurs, where runs differ."""
    runs = group.runs

    def each(values: Iterable[Any]) -> str:
        return "; ".join(dict.fromkeys(str(value) for value in values))

    peak = estimate([run.peak_memory_bytes for run in runs])
    return [
        ("Device", each(f"{run.device}, {_count(run.num_threads, 'thread')}" for run in runs)),
        ("Versions", each(", ".join(f"{k} {v}" for k, v in run.versions.items()) for run in runs)),
        ("Commit", each(run.commit or "not in a git checkout" for run in runs)),
        ("Seeds", each(sorted({run.seed for run in runs}))),
        ("Memory needed", memory(max(run.peak_memory_bytes for run in runs)) if peak else "-"),
        ("Training time", _duration(sum(run.train_seconds for run in runs if usable(run.train_seconds)))),
    ]
