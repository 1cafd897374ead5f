"""Show a benchmark of peers: a table for the terminal, and the file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from mercer.bench.peers import ALLOCATORS, OURS, PASSES, Peer, PeerMeasurement, PeersBench, bench_peers
from mercer.bench.record import record_text
from mercer.bench.show import three


def run_peers(
    lengths: Sequence[int] = (4096,),
    *,
    heads: int = 8,
    head_dim: int = 64,
    passes: Sequence[str] = PASSES,
    allocators: Sequence[str] = tuple(ALLOCATORS),
    repeats: int = 3,
    peers: Mapping[str, Peer] | None = None,
    apart: bool = True,
    out: str | Path | None = None,
    console: Console | None = None,
) -> None:
    """Measure peers with `bench_peers`, print the table, and write `peers.json` into a folder.

    Args:
        lengths: tokens.
        heads: heads.
        head_dim: width of a head.
        passes: of "forward" and "forward+backward".
        allocators: of "default" and "steady"; see `bench_peers`.
        repeats: turns of which the median is taken.
        peers: by name; those of PEERS by default.
        apart: see `bench_peers`.
        out: the folder, made where missing; None writes nothing.
        console: where to print; the terminal by default.

    Raises:
        ModuleNotFoundError: a peer is not installed.
        ValueError: a pass or an allocator is unknown, or a size is below 1.
    """
    console = console or Console()
    with console.status("starting") as status:
        record = bench_peers(
            lengths,
            heads=heads,
            head_dim=head_dim,
            passes=passes,
            allocators=allocators,
            repeats=repeats,
            peers=peers,
            apart=apart,
            watch=lambda what: status.update(f"measuring {what}"),
        )
    console.print(format_peers(record))
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "peers.json").write_text(record_text(record), encoding="utf-8")
        console.print(f"written: {folder / 'peers.json'}", soft_wrap=True)


def format_peers(record: PeersBench) -> Group:
    """Return the tables of a record for a terminal, one for each allocator, length and pass."""
    head = (
        f"batch {record.batch}, {record.heads} heads of {record.head_dim}, {record.num_features} features, causal, "
        f"{record.dtype}, {record.num_threads} thread, {record.device} ({record.machine}); median of {record.repeats}"
    )
    parts: list[Text | Table] = [Text(head)]
    tables: dict[str, list[PeerMeasurement]] = {}
    for line in record.measurements:
        title = f"{line.phase.replace('+', ' + ')}, T = {line.length:,}, {line.allocator} allocator"
        tables.setdefault(title, []).append(line)
    parts += [_table(title, lines) for title, lines in tables.items()]
    parts.append(
        Text("/ performer, / darkformer: how many times that of our mixer a peer's time is, ours, and our peak memory")
    )
    parts.append(Text("default allocator: as it comes in a young process; steady: freed memory is kept"))
    return Group(*parts)


def _table(title: str, lines: list[PeerMeasurement]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", padding=(0, 1))
    table.add_column("", no_wrap=False)
    for name in ("its time", *(f"/ {mixer}" for mixer in OURS)):
        table.add_column(name, justify="right", no_wrap=True)
    for peer, path in dict.fromkeys((line.peer, line.path) for line in lines):
        found = {line.mixer: line for line in lines if (line.peer, line.path) == (peer, path)}
        line = found[OURS[0]]
        way = f"by itself: {path}" if line.default else f"fastest: {path}"
        own = _size(line.milliseconds, line.peak_bytes)
        beside = (found[mixer] for mixer in OURS)
        ratios = (f"{three(ours.ratio)}x\n{_size(ours.our_milliseconds, ours.our_peak_bytes)}" for ours in beside)
        table.add_row(f"{peer} {line.version}\n({way})", f"\n{own}", *ratios)
    return table


def _size(milliseconds: float, peak: int) -> str:
    return f"{three(milliseconds)} ms\n{three(peak / 2**20)} MiB"
