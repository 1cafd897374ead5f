"""Bytes of what a mixer remembers while decoding, against the length of the context."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from mercer.bench.operators import NEAR, NUM_FEATURES
from mercer.bench.ops import check_sizes
from mercer.bench.record import record_text, surroundings
from mercer.errors import unknown
from mercer.mixers import MIXERS, build_mixer, map_state

DEFAULT_STATES = ("softmax", "cubit", "deltaformer", "window", "performer", "darkformer", "near_far", "linear_cubit")
DEFAULT_CONTEXTS = (1024, 4096, 16384, 65536)
STATES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in MIXERS} | {
    "near_far": ("performer", NEAR)
}


@dataclass(frozen=True)
class StateSize:
    """The state of one mixer after one context."""

    mixer: str
    length: int
    state_bytes: int


@dataclass(frozen=True)
class StateBench:
    """All sizes of one call of `bench_states`, and what they were found with."""

    measurements: list[StateSize]
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    num_features: int
    dtype: str
    device: str
    machine: str
    command: str
    commit: str | None
    created: str  # UTC, ISO 8601
    versions: dict[str, str]


def state_bytes(
    name: str,
    length: int,
    *,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> int:
    """Return the bytes of all tensors in a mixer's state after `length` tokens.

    The mixer runs without any data (PyTorch's meta device), so the longest context costs no more than the shortest.

    >>> state_bytes("softmax", 1024, heads=1, head_dim=8)  # k and v
    65536
    """
    if name not in STATES:
        raise unknown("mixer", name, STATES)
    mixer, options = STATES[name]
    kv_heads = heads if kv_heads is None else kv_heads
    hidden_size = heads * head_dim
    module = build_mixer(
        mixer, num_heads=heads, head_dim=head_dim, num_kv_heads=kv_heads, hidden_size=hidden_size, **options
    ).to("meta", dtype)
    q, k, v = (torch.empty(batch, n, length, head_dim, dtype=dtype, device="meta") for n in (heads, kv_heads, kv_heads))
    x = torch.empty(batch, length, hidden_size, dtype=dtype, device="meta")
    with torch.no_grad():
        _, state = module(q, k, v, x=x, rotate=lambda t: t)
    sizes = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel() * tensor.element_size())
        return tensor

    map_state(state, note)
    return sum(sizes)


def bench_states(
    names: Sequence[str] = DEFAULT_STATES,
    lengths: Sequence[int] = DEFAULT_CONTEXTS,
    *,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
) -> StateBench:
    """Find the bytes of the states of mixers after contexts of several lengths.

    Args:
        names: of STATES: mixers, and `near_far`, performer with a window of 64 and 4 sinks.
        lengths: tokens of the context.
        batch: sequences.
        heads: query heads.
        kv_heads: key and value heads; `heads` by default.
        head_dim: width of a head.
        dtype: of the inputs; sums stay float32 at least.

    Returns:
        The record.

    Raises:
        ValueError: a name is unknown, or a size is below 1.

    >>> bench_states(["constant"], [16, 32]).measurements[1].length
    32
    """
    kv_heads = heads if kv_heads is None else kv_heads
    check_sizes(heads=heads, kv_heads=kv_heads, head_dim=head_dim, batch=batch, length=min(lengths, default=0))
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    measurements = [
        StateSize(name, length, state_bytes(name, length, dtype=dtype, **sizes))
        for name in dict.fromkeys(names)
        for length in sorted(set(lengths))
    ]
    name = str(dtype).removeprefix("torch.")
    return StateBench(measurements, num_features=NUM_FEATURES, dtype=name, **sizes, **surroundings("cpu"))


def format_states(record: StateBench) -> Group:
    """Return the table of a record for a terminal."""
    lengths = sorted({line.length for line in record.measurements})
    table = Table(box=box.SIMPLE_HEAD, title="state while decoding, MiB", title_justify="left", padding=(0, 1))
    table.add_column("mixer", no_wrap=True)
    for length in lengths:
        table.add_column(f"T = {length:,}", justify="right", no_wrap=True)
    table.add_column("per token", justify="right", no_wrap=True)
    for name in dict.fromkeys(line.mixer for line in record.measurements):
        found = {line.length: line.state_bytes for line in record.measurements if line.mixer == name}
        table.add_row(name, *(f"{found[length] / 2**20:,.3f}" for length in lengths), _growth(found))
    head = (
        f"batch {record.batch}, {record.heads} query and {record.kv_heads} key heads of {record.head_dim}, "
        f"{record.dtype}, {record.num_features} features"
    )
    return Group(Text(head), table)


def _growth(found: dict[int, int]) -> str:
    """Say how many bytes a further token costs, "constant" where none."""
    shortest, longest = min(found), max(found)
    if shortest == longest:
        return ""
    growth = (found[longest] - found[shortest]) / (longest - shortest)
    return f"{growth:,.0f} bytes" if growth else "constant"


def run_states(
    names: Sequence[str] = DEFAULT_STATES,
    lengths: Sequence[int] = DEFAULT_CONTEXTS,
    *,
    out: str | Path | None = None,
    console: Console | None = None,
    **sizes: Any,
) -> None:
    """Find sizes with `bench_states`, print the table, and write `states.json` into a folder.

    Args:
        names: of STATES.
        lengths: tokens of the context.
        out: the folder, made where missing; None writes nothing.
        console: where to print; the terminal by default.
        **sizes: see `bench_states`.
    """
    console = console or Console()
    record = bench_states(names, lengths, **sizes)
    console.print(format_states(record))
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "states.json").write_text(record_text(record), encoding="utf-8")
        console.print(f"written: {folder / 'states.json'}", soft_wrap=True)
