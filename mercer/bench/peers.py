"""Other packages' causal linear attention on the CPU beside ours: same inputs, same sizes, same process, one thread."""

import contextlib
import io
import itertools
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from mercer.bench.memory import peak_bytes
from mercer.bench.operators import NUM_FEATURES, Shape
from mercer.bench.ops import Call, check_sizes
from mercer.bench.record import surroundings
from mercer.bench.timing import Timing, one_thread, steady_allocator, time_together
from mercer.errors import unknown
from mercer.mixers import build_mixer

OURS = ("performer", "darkformer")
PASSES = ("forward", "forward+backward")
# What becomes of memory that is freed: what the C library does with it by itself, or it stays in the process.
ALLOCATORS = {"default": contextlib.nullcontext, "steady": steady_allocator}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Peer:
    """Another package's attention.

    Attributes:
        paths: for heads, head_dim and length, its ways to compute causal attention on a CPU: by name, the module whose
            parameters are learned and the function of q, k, v. The first is what the package does by itself.
        package: whose version is recorded, "" where it is none.
    """

    paths: Callable[[int, int, int], Mapping[str, tuple[nn.Module, Attention]]]
    package: str = ""


def _performer_pytorch(heads: int, head_dim: int, length: int) -> dict[str, tuple[nn.Module, Attention]]:
    """FastAttention without its CUDA kernel cuts a sequence into 128 pieces; pieces of 8 tokens fit the cache."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():  # it says that it found no CUDA kernel
        warnings.simplefilter("ignore")
        package = import_module("performer_pytorch")
        causal = import_module("performer_pytorch.performer_pytorch").causal_linear_attention_noncuda
        found = {}
        for pieces in dict.fromkeys((128, max(1, length // 8))):
            module = package.FastAttention(head_dim, nb_features=NUM_FEATURES, causal=True)
            module.causal_linear_fn = partial(causal, chunk_size=pieces)
            found[f"non-CUDA, {pieces} pieces"] = (module, module)
    return found


def _darkformer_pytorch(heads: int, head_dim: int, length: int) -> dict[str, tuple[nn.Module, Attention]]:
    """The linear mode takes a chunk size, 256 by default."""
    attention = import_module("darkformer_pytorch").DarkformerKernelAttention
    found = {}
    for size in (256, 128, 64):
        module = attention(
            head_dim, heads, num_features=NUM_FEATURES, causal=True, causal_chunk_size=size, projection_seed=0
        )
        found[f"linear, chunks of {size}"] = (module, module)
    return found


PEERS: dict[str, Peer] = {
    "darkformer-pytorch": Peer(_darkformer_pytorch, "darkformer-pytorch"),
    "performer-pytorch": Peer(_performer_pytorch, "performer-pytorch"),
}


@dataclass(frozen=True)
class PeerMeasurement:
    """One peer beside one mixer of ours, one pass, one length, one of `ALLOCATORS`."""

    peer: str
    version: str
    path: str  # of its ways to compute causal attention
    default: bool  # whether that is what the package does by itself
    mixer: str
    phase: str
    length: int
    allocator: str
    milliseconds: float
    our_milliseconds: float
    ratio: float  # median over the turns of peer / ours
    ratio_low: float
    ratio_high: float
    peak_bytes: int
    our_peak_bytes: int


@dataclass(frozen=True)
class PeersBench:
    """All measurements of one call of `bench_peers`, and what they were made on."""

    measurements: list[PeerMeasurement]
    batch: int
    heads: int
    head_dim: int
    num_features: int
    dtype: str
    device: str
    num_threads: int
    repeats: int
    machine: str
    command: str
    commit: str | None
    created: str  # UTC, ISO 8601
    versions: dict[str, str]


def bench_peers(
    lengths: Sequence[int] = (4096,),
    *,
    heads: int = 8,
    head_dim: int = 64,
    passes: Sequence[str] = PASSES,
    allocators: Sequence[str] = tuple(ALLOCATORS),
    repeats: int = 3,
    peers: Mapping[str, Peer] | None = None,
    apart: bool = True,
    watch: Callable[[str], None] = lambda what: None,
) -> PeersBench:
    """Measure other packages' causal linear attention beside performer and darkformer of ours, on one CPU thread.

    All take the same q, k, v (batch 1, float32, 256 features) and include their features. In every turn the peer and
    each mixer runs once, so a machine that slows down slows all; a ratio is the median over the turns of peer / ours.
    Forward passes run without gradients; forward + backward takes the gradients of q, k, v and of what is learned.
    Of the ways in which a peer can do it, two are measured: what it does by itself, and what was fastest in one turn.

    With the allocator "default" they run as in a young process, where glibc gives large blocks back to the system, and
    fetching them again page by page can cost as much as the work. What it keeps depends on all that a process did
    before, so every measurement has a process of its own. "steady" keeps freed memory: what is left is the arithmetic.

    Args:
        lengths: tokens.
        heads: heads.
        head_dim: width of a head.
        passes: of "forward" and "forward+backward".
        allocators: of "default" and "steady".
        repeats: turns of which the median is taken.
        peers: by name; those of PEERS by default.
        apart: whether each measurement has a process of its own, to which a peer must go by pickle; else they are made
            in this one, whose allocator stays changed after "steady".
        watch: told what is measured next.

    Returns:
        The record.

    Raises:
        ModuleNotFoundError: a peer is not installed.
        ValueError: a pass or an allocator is unknown, or a size is below 1.
    """
    peers = PEERS if peers is None else peers
    for kind, given, known in (("pass", passes, PASSES), ("allocator", allocators, tuple(ALLOCATORS))):
        for name in given:
            if name not in known:
                raise unknown(kind, name, known)
    check_sizes(heads=heads, head_dim=head_dim, length=min(lengths, default=0))
    for peer in peers.values():
        peer.paths(heads, head_dim, 1)  # what is missing is said before anything is measured
    measurements: list[PeerMeasurement] = []
    with _processes() if apart else contextlib.nullcontext(_here) as work:
        for phase, length, allocator, name in itertools.product(passes, sorted(set(lengths)), allocators, peers):
            watch(f"{name}, {phase}, {length:,} tokens, {allocator} allocator")
            shape = Shape(1, heads, length, head_dim, torch.float32, "cpu")
            measurements += work(_measure, name, peers[name], phase, shape, allocator, repeats)
    return PeersBench(
        measurements, 1, heads, head_dim, NUM_FEATURES, "float32", num_threads=1, repeats=repeats, **surroundings("cpu")
    )


def _here(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@contextlib.contextmanager
def _processes() -> Iterator[Callable[..., Any]]:
    """Give a function that calls another in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context, max_tasks_per_child=1) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _ours(name: str, shape: Shape) -> tuple[nn.Module, Attention]:
    mixer = build_mixer(name, num_heads=shape.heads, head_dim=shape.head_dim, num_features=NUM_FEATURES)
    return mixer, lambda q, k, v: mixer(q, k, v)[0]


def _measure(name: str, peer: Peer, phase: str, shape: Shape, allocator: str, repeats: int) -> list[PeerMeasurement]:
    """Measure one pass of one peer at one length."""
    with one_thread(), ALLOCATORS[allocator]():
        calls = {mixer: _call(*_ours(mixer, shape), phase, shape) for mixer in OURS}
        ways = peer.paths(shape.heads, shape.head_dim, shape.length)
        tried = {path: _call(*attention, phase, shape) for path, attention in ways.items()}
        default = next(iter(ways))
        trials = time_together(list(tried.values()), repeats=1)
        _, fastest = min(zip(trials, tried, strict=True))
        calls |= {path: tried[path] for path in (default, fastest)}
        seconds = dict(zip(calls, time_together(list(calls.values()), repeats=repeats), strict=True))
        peaks = {key: peak_bytes(call) for key, call in calls.items()}
    lines = []
    for path, mixer in itertools.product(dict.fromkeys((default, fastest)), OURS):
        timing = Timing.of(seconds[path], seconds[mixer])
        lines.append(
            PeerMeasurement(
                peer=name,
                version=version(peer.package) if peer.package else "",
                path=path,
                default=path == default,
                mixer=mixer,
                phase=phase,
                length=shape.length,
                allocator=allocator,
                milliseconds=timing.seconds * 1e3,
                our_milliseconds=timing.reference_seconds * 1e3,
                ratio=timing.ratio,
                ratio_low=timing.ratio_low,
                ratio_high=timing.ratio_high,
                peak_bytes=peaks[path],
                our_peak_bytes=peaks[mixer],
            )
        )
    return lines


def _call(module: nn.Module, attention: Attention, phase: str, shape: Shape) -> Call:
    """Return a call on the inputs that all share: without gradients, or with those of q, k, v and the parameters."""
    q, k, v = (shape.tensor(seed) for seed in range(3))
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    upstream = shape.tensor(99).detach()

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(q, k, v)

    def backward() -> tuple[Any, ...]:
        return torch.autograd.grad(attention(q, k, v), [q, k, v, *learned], upstream)

    return forward if phase == "forward" else backward
