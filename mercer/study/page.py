"""What a study is shown as: tables for terminal and Markdown, figures, and one HTML page that needs nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.table import Table as Terminal
from rich.text import Text

from mercer.report.figures import Figure
from mercer.report.statistics import Estimate
from mercer.report.style import LIGHT
from mercer.report.template import render_page, shown
from mercer.study.results import Difference
from mercer.study.run import Done, duration

TONES = {"better": "green", "worse": "red"}


@dataclass(frozen=True)
class Table:
    """A table of texts; `note` says how to read it, `text_columns` which columns are words (aligned to the left)."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text_columns: Sequence[int] = (0,)

    def terminal(self, width: int = 80) -> Group:
        """Return the table for `rich.console.Console.print`; one that is too wide is broken between columns."""
        cells = [self.header, *self.rows]
        sizes = [2 + max(len(row[number]) for row in cells) for number in range(len(self.header))]
        lead = [number for number in range(len(sizes)) if set(range(number + 1)) <= set(self.text_columns)] or [0]
        blocks, room = [list(lead)], width - sum(sizes[: len(lead)])
        for number, size in list(enumerate(sizes))[len(lead) :]:
            if size > room and len(blocks[-1]) > len(lead):
                blocks.append(list(lead))  # the words that name a row stand in every block
                room = width - sum(sizes[: len(lead)])
            blocks[-1].append(number)
            room -= size
        parts = [Text(self.title, style="bold"), *map(self._block, blocks)]
        return Group(*parts, Text(f"{self.note}\n" if self.note else ""))

    def _block(self, columns: Sequence[int]) -> Terminal:
        table = Terminal(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for number in columns:
            table.add_column(Text(self.header[number]), justify="left" if number in self.text_columns else "right")
        for row in self.rows:
            table.add_row(*(Text(row[number], style=TONES.get(tone(row[number]), "")) for number in columns))
        return table

    def markdown(self) -> str:
        """Return the table in Markdown, under its title."""
        rules = (" --- " if number in self.text_columns else " ---: " for number in range(len(self.header)))
        rows = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (self.header, *self.rows)]
        lines = [f"### {self.title}", "", f"| {rows[0]} |", f"|{'|'.join(rules)}|", *(f"| {row} |" for row in rows[1:])]
        return "\n".join([*lines, *(["", self.note] if self.note else [])]) + "\n"


def tone(cell: str) -> str:
    """Return the verdict a cell ends with, where it is one that is coloured, else "".

    >>> tone("+1.0 ± 0.1 better"), tone("within noise")
    ('better', '')
    """
    last = cell.rpartition(" ")[2]
    return last if last in TONES else ""


def show(value: Estimate | Difference | None, digits: int = 3, *, sign: bool = False) -> str:
    """Return a mean and its standard error.

    >>> show(Estimate(0.61234, 0.0123, 10)), show(Estimate(0.5, None, 1), sign=True), show(None)
    ('0.612 ± 0.012', '+0.500', '-')
    """
    if value is None:
        return "-"
    mean = f"{value.mean:{'+' if sign else ''}.{digits}f}"
    return mean if value.error is None else f"{mean} ± {value.error:.{digits}f}"


def publish(
    done: Done,
    *,
    title: str,
    lead: str,
    findings: Sequence[str],
    tables: Sequence[Table],
    figures: Sequence[Figure] = (),
    notes: Sequence[str] = (),
    console: Console | None = None,
) -> Path:
    """Print the tables and write report.html, tables.md and figures/*.png and *.svg into the study's folder.

    Args:
        done: what `run_study` returned.
        title: heading of the page.
        lead: what was asked and how it was measured.
        findings: what came out, a sentence each, negatives too.
        tables: in reading order.
        figures: in reading order.
        notes: what a reader must know to read it rightly.
        console: where to print.

    Returns:
        The path of the page.
    """
    console, out = console or Console(), done.out
    notes = [note for note in (done.left_out, *notes) if note]
    for table in tables:
        console.print(table.terminal(console.width))
    for text in (*findings, *notes):
        console.print(f"- {text}", markup=False, highlight=False)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for figure in figures:
        for kind in ("png", "svg"):
            (out / "figures" / f"{figure.name}.{kind}").write_bytes(figure.render(LIGHT, kind))
    lines = [f"# {title}", "", lead, "", *(f"* {text}" for text in findings), ""]
    lines += [*(table.markdown() for table in tables), *(f"* {note}" for note in notes)]
    (out / "tables.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    page = render_page(
        "study/page.html",
        title=title,
        lead=lead,
        findings=findings,
        notes=notes,
        tables=tables,
        figures=[shown(figure) for figure in figures],
        tone=tone,
        commands=list(dict.fromkeys(start["command"] for start in done.starts)),
        facts=_facts(done),
    )
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    console.print(f"written: {path}", soft_wrap=True)
    return path


def _facts(done: Done) -> list[tuple[str, str]]:
    """Return machine, versions and the like; every value that occurs, where starts differ."""
    starts = [
        ("Machine", lambda start: f"{start['device']} ({start['machine']})"),
        ("Versions", lambda start: ", ".join(f"{name} {number}" for name, number in start["versions"].items())),
        ("Commit", lambda start: start["commit"] or "not in a git checkout"),
        ("Started", lambda start: start["created"]),
    ]
    seeds = list(dict.fromkeys(trial.seed for trial in done.trials))
    return [
        *((name, "; ".join(dict.fromkeys(read(start) for start in done.starts))) for name, read in starts),
        ("Seeds", ", ".join(map(str, seeds))),
        ("Trials", f"{len(done.trials)}, {duration(sum(trial.seconds for trial in done.trials))} of computing"),
    ]
