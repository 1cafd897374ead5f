"""The comparison table: rows of means over seeds, and their terminal and Markdown forms."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from mercer.report.groups import BASELINE, Group, Variant, group_runs, status_of
from mercer.report.statistics import Estimate, Gap, estimate, gap
from mercer.train.record import Run

HEADERS = (
    "Mixer",
    "Validation loss (nats/token)",
    f"Gap to {BASELINE}",
    "Verdict",
    "Bits per byte",
    "Perplexity",
    "Parameters",
    "Tokens/s",
    "Peak memory",
    "Seeds",
)
_TERMINAL_HEADERS = ("mixer", "loss", "gap", "verdict", "bits/B", "ppl", "params", "tok/s", "memory")


@dataclass(frozen=True)
class Row:
    """One mixer of one group: means and standard errors over its finished seeds; None where nothing finished."""

    group: str
    label: str
    mixer: str
    valid_loss: Estimate | None
    bits_per_byte: Estimate | None
    perplexity: Estimate | None
    parameters: int | None
    tokens_per_second: Estimate | None
    peak_memory_bytes: Estimate | None
    gap: Gap | None  # validation loss, this mixer - softmax
    verdict: str
    seeds_done: int
    seeds_started: int


def comparison_table(runs: Sequence[Run]) -> list[Row]:
    """Return a row for each mixer, group by group; softmax first, then by validation loss.

    Means and standard errors are over finished seeds. The gap to softmax is paired by seed where both finished the
    same seeds, else unpaired (Welch). The verdict is "better" or "worse" where the 95 % interval under Student's t
    leaves out zero, "within noise" where it does not, and "one seed" where there is no interval.

    Args:
        runs: finished and unfinished runs, of any recipes.

    Returns:
        Rows; empty for no runs.

    >>> comparison_table([])
    []
    """
    return [row for group in group_runs(runs) for row in group_rows(group)]


def group_rows(group: Group) -> list[Row]:
    """Return the rows of one group."""
    return [_row(group, variant) for variant in group.variants]


def _row(group: Group, variant: Variant) -> Row:
    baseline = group.baseline
    difference = None
    if baseline is not None and baseline is not variant:
        difference = gap(variant.by_seed("valid_loss"), baseline.by_seed("valid_loss"))
    figures = {
        name: estimate([getattr(run, name) for run in variant.done])
        for name in ("valid_loss", "bits_per_byte", "perplexity", "tokens_per_second", "peak_memory_bytes")
    }
    return Row(
        group=group.title,
        label=variant.label,
        mixer=variant.mixer,
        parameters=next((run.parameters for run in variant.runs if run.parameters), None),
        gap=difference,
        verdict=_verdict(variant, baseline, difference),
        seeds_done=len(variant.done),
        seeds_started=len({run.seed for run in variant.runs}),
        **figures,
    )


def _verdict(variant: Variant, baseline: Variant | None, difference: Gap | None) -> str:
    if not variant.done:
        return ", ".join(sorted({status_of(run) for run in variant.unfinished}))
    if not variant.by_seed("valid_loss"):
        return "done, no loss"
    if variant is baseline:
        return "baseline"
    return "no baseline" if difference is None else difference.verdict


def quantity(value: float | int) -> str:
    """Return a count with three significant digits and its thousands.

    >>> quantity(829_440), quantity(12_345), quantity(512)
    ('829 k', '12.3 k', '512')
    """
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        # 999,600 is one million to three digits, not 1000 k.
        if abs(value) >= size * 0.9995:
            scaled = value / size
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f}{unit}"
    return f"{value:.0f}" if abs(value) >= 99.5 or value == int(value) else f"{value:.3g}"


def memory(value: float | int) -> str:
    """Return bytes in MiB, or GiB from ten thousand MiB on.

    >>> memory(512 * 2**20)
    '512 MiB'
    """
    mebi = value / 2**20
    return f"{mebi / 1024:.1f} GiB" if mebi >= 10_000 else f"{mebi:.0f} MiB"


def cells(row: Row) -> list[tuple[str, str]]:
    """Return each column's text and its error's text ("" for none), in the order of HEADERS."""
    return [
        (row.label, ""),
        _number(row.valid_loss, ".4f"),
        _number(row.gap, "+.4f"),
        (row.verdict, ""),
        _number(row.bits_per_byte, ".4f"),
        _number(row.perplexity, ".2f"),
        (quantity(row.parameters) if row.parameters else "-", ""),
        (quantity(row.tokens_per_second.mean) if row.tokens_per_second else "-", ""),
        (memory(row.peak_memory_bytes.mean) if row.peak_memory_bytes else "-", ""),
        (
            str(row.seeds_done) if row.seeds_done == row.seeds_started else f"{row.seeds_done} of {row.seeds_started}",
            "",
        ),
    ]


def _number(value: Estimate | Gap | None, form: str) -> tuple[str, str]:
    if value is None:
        return "-", ""
    return format(value.mean, form), "" if value.error is None else f"± {format(value.error, form.lstrip('+'))}"


def format_table(rows: Sequence[Row]) -> Lines:
    """Return the table for a terminal; fits 80 columns, so the standard error stands under its mean.

    >>> from rich.console import Console
    >>> Console(width=80).print(format_table([]))
    no runs to compare
    """
    if not rows:
        return Lines(Text("no runs to compare"))
    parts: list[Table | Text] = []
    for title in dict.fromkeys(row.group for row in rows):
        table = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left", padding=0, pad_edge=False)
        for number, header in enumerate(_TERMINAL_HEADERS):
            left = number in (0, 3)
            table.add_column(header, justify="left" if left else "right", overflow="fold", no_wrap=number > 0)
        for row in (row for row in rows if row.group == title):
            table.add_row(*_terminal_cells(row))
        parts.append(table)
    parts.append(
        Text("loss in nats per token; mean ± standard error over seeds; verdict from a 95 % t interval of the gap")
    )
    return Lines(*parts)


def _terminal_cells(row: Row) -> list[Text]:
    """Return the cells of two lines each: the error stands under its mean, the number of seeds under the verdict."""
    *columns, (seeds, _) = cells(row)
    texts = [f"{value}\n{error.replace(' ', '')}" if error else value for value, error in columns]
    texts[3] += f"\n{seeds} seed{'' if seeds == '1' else 's'}"
    tone = {"better": "green", "worse": "red"}.get(row.verdict, "")
    return [Text(text, style=tone if number == 3 else "") for number, text in enumerate(texts)]


def markdown_table(rows: Sequence[Row]) -> str:
    """Return the table in Markdown, one for each group.

    >>> markdown_table([])
    'No runs to compare.\\n'
    """
    if not rows:
        return "No runs to compare.\n"
    lines: list[str] = []
    for title in dict.fromkeys(row.group for row in rows):
        lines += [f"### {_plain(title)}", "", f"| {' | '.join(HEADERS)} |"]
        lines.append("|" + "|".join(" --- " if number in (0, 3) else " ---: " for number in range(len(HEADERS))) + "|")
        for row in (row for row in rows if row.group == title):
            lines.append(f"| {' | '.join(_plain(' '.join(cell).strip()) for cell in cells(row))} |")
        lines.append("")
    lines.append(
        "Mean ± standard error over seeds. Verdict: better or worse where the 95 % interval of the gap (Student's t, "
        "paired by seed where the seeds are the same) leaves out zero, else within noise."
    )
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Keep a string from being read as Markdown or HTML, or from breaking its line."""
    text = " ".join(text.split())
    for sign, safe in (
        ("\\", "\\\\"),
        ("&", "&amp;"),
        ("<", "&lt;"),
        (">", "&gt;"),
        ("|", "\\|"),
        ("`", "\\`"),
        ("*", "\\*"),
        ("_", "\\_"),
    ):
        text = text.replace(sign, safe)
    return text
