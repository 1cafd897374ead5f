"""Show a benchmark of peers: a table for the terminal, and the file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mercer.bench.peers import OURS, PASSES, Peer, PeerMeasurement, PeersBench, bench_peers
from mercer.bench.record import record_text
from mercer.bench.show import three


def run_peers(
    lengths: Sequence[int] = (4096,),
    *,
    heads: int = 8,
    head_dim: int = 64,
    passes: Sequence[str] = PASSES,
    repeats: int = 3,
    peers: Mapping[str, Peer] | None = None,
    out: str | Path | None = None,
    console: Console | None = None,
) -> None:
    """Measure peers with `bench_peers`, print the table, and write `peers.json` into a folder.

    Args:
        lengths: tokens.
        heads: heads.
        head_dim: width of a head.
        passes: of "forward" and "forward+backward".
        repeats: turns of which the median is taken.
        peers: by name; those of PEERS by default.
        out: the folder, made where missing; None writes nothing.
        console: where to print; the terminal by default.

    Raises:
        ModuleNotFoundError: a peer is not installed.
        ValueError: a pass is unknown, or a size is below 1.
    """
    console = console or Console()
    with console.status("starting") as status:
        record = bench_peers(
            lengths,
            heads=heads,
            head_dim=head_dim,
            passes=passes,
            repeats=repeats,
            peers=peers,
            watch=lambda what: status.update(f"measuring {what}"),
        )
    console.print(format_peers(record))
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "peers.json").write_text(record_text(record), encoding="utf-8")
        console.print(f"written: {folder / 'peers.json'}", soft_wrap=True)


def format_peers(record: PeersBench) -> Group:
    """Return the tables of a record for a terminal, one for each pass and length."""
    head = (
        f"batch {record.batch}, {record.heads} heads of {record.head_dim}, {record.num_features} features, causal, "
        f"{record.dtype}, {record.num_threads} thread, {record.device} ({record.machine}); median of {record.repeats}"
    )
    parts: list[Text | Table] = [Text(head)]
    tables: dict[tuple[str, int], list[PeerMeasurement]] = {}
    for line in record.measurements:
        tables.setdefault((line.phase, line.length), []).append(line)
    parts += [_table(phase, length, lines) for (phase, length), lines in tables.items()]
    parts.append(Text("/ performer, / darkformer: how many times that of our mixer a peer's time is"))
    return Group(*parts)


def _table(phase: str, length: int, lines: list[PeerMeasurement]) -> Table:
    title = f"{phase.replace('+', ' + ')}, T = {length:,}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1))
    table.add_column("", no_wrap=False)
    for name in ("time", "memory", *(f"/ {mixer}" for mixer in OURS)):
        table.add_column(name, justify="right", no_wrap=True)
    by_mixer = {line.mixer: line for line in lines}
    for mixer in OURS:
        line = by_mixer[mixer]
        table.add_row(f"mercer {mixer}", *_size(line.our_milliseconds, line.our_peak_bytes), *("" for _ in OURS))
    for peer, path in dict.fromkeys((line.peer, line.path) for line in lines):
        found = {line.mixer: line for line in lines if (line.peer, line.path) == (peer, path)}
        line = found[OURS[0]]
        ratios = (f"{three(found[mixer].ratio)}x" for mixer in OURS)
        way = f"by itself: {path}" if line.default else f"fastest: {path}"
        table.add_row(f"{peer} {line.version}\n({way})", *_size(line.milliseconds, line.peak_bytes), *ratios)
    return table


def _size(milliseconds: float, peak: int) -> tuple[str, str]:
    return f"{three(milliseconds)} ms", f"{three(peak / 2**20)} MiB"
