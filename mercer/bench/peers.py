"""Other packages' causal linear attention on the CPU beside ours: same inputs, same sizes, one process, one thread."""

import contextlib
import io
import itertools
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from mercer.bench.timing import call_seconds, one_thread, steady_allocator, time_together
from mercer.errors import unknown
from mercer.mixers import build_mixer

OURS = ("performer", "darkformer")
PASSES = ("forward", "forward+backward")
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
    """One peer beside one mixer of ours, one pass, one length."""

    peer: str
    version: str
    path: str  # of its ways to compute causal attention
    default: bool  # whether that is what the package does by itself
    mixer: str
    phase: str
    length: int
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
    repeats: int = 3,
    peers: Mapping[str, Peer] | None = None,
    watch: Callable[[str], None] = lambda what: None,
) -> PeersBench:
    """Measure other packages' causal linear attention beside performer and darkformer of ours, on one CPU thread.

    All take the same q, k, v (batch 1, float32, 256 features) and include their features. In every turn each peer and
    each mixer runs once, so a machine that slows down slows all; a ratio is the median over the turns of peer / ours.
    Forward passes run without gradients; forward + backward takes the gradients of q, k, v and of what is learned.
    Of the ways in which a peer can do it, two are measured: what it does by itself, and what was fastest in one trial.

    Args:
        lengths: tokens.
        heads: heads.
        head_dim: width of a head.
        passes: of "forward" and "forward+backward".
        repeats: turns of which the median is taken.
        peers: by name; those of PEERS by default.
        watch: told what is measured next.

    Returns:
        The record. The number of threads is put back to what it was.

    Raises:
        ModuleNotFoundError: a peer is not installed.
        ValueError: a pass is unknown, or a size is below 1.
    """
    peers = PEERS if peers is None else peers
    for phase in passes:
        if phase not in PASSES:
            raise unknown("pass", phase, PASSES)
    check_sizes(heads=heads, head_dim=head_dim, length=min(lengths, default=0))
    measurements = []
    with one_thread(), steady_allocator():
        for length in sorted(set(lengths)):
            shape = Shape(1, heads, length, head_dim, torch.float32, "cpu")
            ours = {name: _ours(name, shape) for name in OURS}
            theirs = {name: peer.paths(heads, head_dim, length) for name, peer in peers.items()}
            for phase in passes:
                watch(f"{phase}, {length:,} tokens")
                measurements += _measure(peers, theirs, ours, phase, shape, repeats)
    return PeersBench(
        measurements, 1, heads, head_dim, NUM_FEATURES, "float32", num_threads=1, repeats=repeats, **surroundings("cpu")
    )


def _ours(name: str, shape: Shape) -> tuple[nn.Module, Attention]:
    mixer = build_mixer(name, num_heads=shape.heads, head_dim=shape.head_dim, num_features=NUM_FEATURES)
    return mixer, lambda q, k, v: mixer(q, k, v)[0]


def _measure(
    peers: Mapping[str, Peer],
    theirs: Mapping[str, Mapping[str, tuple[nn.Module, Attention]]],
    ours: Mapping[str, tuple[nn.Module, Attention]],
    phase: str,
    shape: Shape,
    repeats: int,
) -> list[PeerMeasurement]:
    """Measure one pass at one length."""
    calls = {(name, ""): _call(*attention, phase, shape) for name, attention in ours.items()}
    for peer, ways in theirs.items():
        tried = {path: _call(*attention, phase, shape) for path, attention in ways.items()}
        fastest = min(tried, key=lambda path, tried=tried: call_seconds(tried[path]))
        calls |= {(peer, path): tried[path] for path in (next(iter(ways)), fastest)}
    seconds = dict(zip(calls, time_together(list(calls.values()), repeats=repeats), strict=True))
    peaks = {key: peak_bytes(call) for key, call in calls.items()}
    lines = []
    for (peer, path), mixer in itertools.product([key for key in calls if key[1]], ours):
        taken, own = seconds[peer, path], seconds[mixer, ""]
        ratios = [other / mine for other, mine in zip(taken, own, strict=True)]
        lines.append(
            PeerMeasurement(
                peer=peer,
                version=version(peers[peer].package) if peers[peer].package else "",
                path=path,
                default=path == next(iter(theirs[peer])),
                mixer=mixer,
                phase=phase,
                length=shape.length,
                milliseconds=statistics.median(taken) * 1e3,
                our_milliseconds=statistics.median(own) * 1e3,
                ratio=statistics.median(ratios),
                ratio_low=min(ratios),
                ratio_high=max(ratios),
                peak_bytes=peaks[peer, path],
                our_peak_bytes=peaks[mixer, ""],
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
