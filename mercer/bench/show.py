"""Show a benchmark of operators: tables for the terminal, a figure of the ratios over length, and the files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mercer.bench.operators import DEFAULT_OPERATORS
from mercer.bench.ops import PHASES, bench_ops
from mercer.bench.record import Measurement, OpsBench, crossover
from mercer.report.style import LIGHT, lines_for, literal, themed

DEFAULT_LENGTHS = (1024, 2048, 4096)
_REFERENCE = {"decode": "the softmax mixer"}
_RATIO_TICKS = (0.03125, 0.0625, 0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 16, 32, 64, 128)


def run_ops(
    names: Sequence[str] = DEFAULT_OPERATORS,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    *,
    heads: int = 8,
    head_dim: int = 64,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    passes: Sequence[str] = PHASES,
    chunk_sizes: Sequence[int] = (),
    repeats: int = 5,
    device: str = "cpu",
    out: str | Path | None = None,
    console: Console | None = None,
) -> None:
    """Measure operators with `bench_ops`, print the tables, and write `ops.json` and `ops.png` into a folder.

    Args:
        names: operators of BENCHES.
        lengths: tokens.
        heads: heads.
        head_dim: width of a head.
        batch: sequences.
        dtype: of the inputs.
        passes: of "forward", "forward+backward" and "decode".
        chunk_sizes: of operators that work in chunks; none: their default.
        repeats: turns of which the median is taken.
        device: "cpu" or "cuda".
        out: the folder, made where missing; None writes nothing.
        console: where to print; the terminal by default.

    Raises:
        ValueError: a name or pass is unknown, or a size is below 1.
    """
    console = console or Console()
    with console.status("starting") as status:
        record = bench_ops(
            names,
            lengths,
            heads=heads,
            head_dim=head_dim,
            batch=batch,
            dtype=dtype,
            passes=passes,
            chunk_sizes=chunk_sizes,
            repeats=repeats,
            device=device,
            watch=lambda what: status.update(f"measuring {what}"),
        )
    console.print(format_bench(record))
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "ops.json").write_text(record.to_json(), encoding="utf-8")
        ratio_figure(record, folder / "ops.png")
        console.print(f"written: {folder / 'ops.json'}, {folder / 'ops.png'}", soft_wrap=True)


def format_bench(record: OpsBench) -> Group:
    """Return the tables of a record for a terminal: ratio first, then milliseconds, then peak memory."""
    head = (
        f"batch {record.batch}, {record.heads} heads of {record.head_dim}, {record.dtype}, "
        f"{record.num_threads} thread, {record.device} ({record.machine}); median of {record.repeats}"
    )
    parts: list[Text | Table] = [Text(head)]
    for phase in PHASES:
        if found := record.select(phase):
            parts.append(_phase_table(phase, found))
    parts.append(
        Text(
            "a cell: time as a multiple of the reference (and of another operator where one is named), milliseconds, "
            "peak memory above the inputs"
        )
    )
    return Group(*parts)


def _phase_table(phase: str, found: dict[str, list[Measurement]]) -> Table:
    reference = _REFERENCE.get(phase, "SDPA")
    title = "decoding one token after a context" if phase == "decode" else _spaced(phase)
    table = Table(box=box.SIMPLE_HEAD, title=f"{title}, against {reference}", title_justify="left", padding=(0, 1))
    lengths = sorted({line.length for lines in found.values() for line in lines})
    table.add_column("operator", no_wrap=True)
    for length in lengths:
        table.add_column(f"T = {length:,}", justify="right", no_wrap=True)
    table.add_column("faster", no_wrap=True)
    by_length = {line.length: line for lines in found.values() for line in lines}
    table.add_row(
        reference.removeprefix("the "),
        *(_cell("", by_length[n].reference_milliseconds, by_length[n].reference_peak_bytes) for n in lengths),
        "",
    )
    for name, lines in found.items():
        cells = {line.length: _cell(_ratios(line), line.milliseconds, line.peak_bytes) for line in lines}
        faster = "" if name == "softmax" else _from(lines)  # SDPA itself: what differs from 1 is noise
        table.add_row(name, *(cells.get(length, "-") for length in lengths), faster)
    return table


def _ratios(line: Measurement) -> str:
    """Return the ratio to the reference and, below it, to the operator that this one is compared with besides."""
    below = "" if line.beside_ratio is None else f"\n{three(line.beside_ratio)}x {line.beside}"
    return f"{three(line.ratio)}x{below}"


def _spaced(phase: str) -> str:
    return phase.replace("+", " + ")


def _cell(ratio: str, milliseconds: float, peak: int) -> str:
    return f"{ratio}\n{three(milliseconds)} ms\n{three(peak / 2**20)} MiB".lstrip()


def three(value: float) -> str:
    """Return a number with three digits, or all it has before the point."""
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _from(lines: list[Measurement]) -> str:
    """Say from which length on an operator is at least as fast as its reference."""
    at = crossover([line.length for line in lines], [line.ratio for line in lines])
    if at is None:
        return f"not by {lines[-1].length:,}"
    return "everywhere" if at == lines[0].length else f"from {at:,.0f}"


def ratio_figure(record: OpsBench, path: Path) -> None:
    """Draw the ratios of time and of peak memory to SDPA over length, both axes logarithmic, into a PNG file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    panels = [(phase, record.select(phase)) for phase in PHASES if record.select(phase)]
    if not panels:
        return
    with themed(LIGHT) as plt:
        figure, grid = plt.subplots(
            1, len(panels) + 1, squeeze=False, sharex=True, figsize=(3.4 * (len(panels) + 1), 3.6), layout="constrained"
        )
        names = list(dict.fromkeys(line.label for line in record.measurements))
        lines = lines_for([(name, name) for name in names], LIGHT)
        for axes, (phase, found) in zip(grid[0], panels, strict=False):
            _panel(axes, found, lines, lambda line: line.ratio)
            axes.set_title("decode, time / softmax" if phase == "decode" else f"{_spaced(phase)}, time / SDPA")
        phase, found = next((p for p in panels if p[0] == "forward+backward"), panels[0])
        _panel(grid[0, -1], found, lines, lambda line: line.peak_bytes / max(1, line.reference_peak_bytes))
        grid[0, -1].set_title(f"{_spaced(phase)}, peak memory / SDPA")
        figure.legend(
            *grid[0, -1].get_legend_handles_labels(), loc="outside lower center", ncols=min(6, len(names)), fontsize=9.5
        )
        figure.savefig(path, dpi=160, metadata={"Software": None})
        plt.close(figure)


def _panel(axes: Any, found: dict[str, list[Measurement]], lines: dict[str, Any], value: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for name, points in found.items():
        look = lines[name]
        axes.plot(
            [point.length for point in points],
            [value(point) for point in points],
            color=look.color,
            ls=look.dash,
            marker=look.marker,
            label=literal(name),
        )
    axes.axhline(1, color=LIGHT.ink, lw=1.2)
    lengths = sorted({point.length for points in found.values() for point in points})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_yticks(_RATIO_TICKS, [f"{ratio:g}x" for ratio in _RATIO_TICKS])
    axes.minorticks_off()
    ratios = [value(point) for points in found.values() for point in points]
    axes.set_ylim(min(0.9, 0.9 * min(ratios)), max(1.1, 1.1 * max(ratios)))
    axes.set_xlabel("length (tokens)")
