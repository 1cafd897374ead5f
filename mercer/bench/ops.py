"""Measure operators against PyTorch's own attention: seconds and memory over lengths, and decoding."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mercer.bench.memory import peak_bytes
from mercer.bench.operators import BENCHES, Operator, Shape, sdpa
from mercer.bench.record import Measurement, OpsBench, surroundings
from mercer.bench.timing import Timing, one_thread, steady_allocator, time_together
from mercer.errors import unknown
from mercer.mixers import build_mixer

PHASES = ("forward", "forward+backward", "decode")
Call = Callable[[], Any]


def bench_ops(
    names: Sequence[str],
    lengths: Sequence[int],
    *,
    heads: int = 8,
    head_dim: int = 64,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    passes: Sequence[str] = PHASES,
    chunk_sizes: Sequence[int] = (),
    repeats: int = 5,
    device: str = "cpu",
    watch: Callable[[str], None] = lambda what: None,
) -> OpsBench:
    """Measure operators against SDPA in this process, with one thread.

    Every operator is timed in turn with its reference, and with the operator it stands beside if there is one, and
    judged by the median of the ratios, so a machine that slows down slows all. Forward passes run without gradients;
    forward + backward takes the gradients of all inputs. Peak memory is what the call holds above its inputs. Decoding
    runs the whole mixer, with the projections it brings itself, on one token after a context, against the softmax
    mixer.

    Args:
        names: operators of BENCHES.
        lengths: tokens.
        heads: heads.
        head_dim: width of a head.
        batch: sequences.
        dtype: of the inputs.
        passes: of "forward", "forward+backward" and "decode".
        chunk_sizes: operators that work in chunks are measured with each of these; none: with their default.
        repeats: turns of which the median is taken.
        device: "cpu" (processor time) or "cuda" (time between events).
        watch: told what is measured next.

    Returns:
        The record. The number of threads is put back to what it was.

    Raises:
        ValueError: a name or pass is unknown, or a size is below 1.

    >>> bench_ops(["softmax"], [16], heads=1, head_dim=8, passes=["forward"], repeats=1).measurements[0].length
    16
    """
    for name in names:
        if name not in BENCHES:
            raise unknown("operator", name, BENCHES)
    for phase in passes:
        if phase not in PHASES:
            raise unknown("pass", phase, PHASES)
    check_sizes(heads=heads, head_dim=head_dim, batch=batch, length=min(lengths, default=0))
    check_sizes(chunk_size=min(chunk_sizes, default=1))
    measurements = []
    with one_thread(), steady_allocator():
        for length in sorted(set(lengths)):
            shape = Shape(batch, heads, length, head_dim, dtype, device)
            for phase in passes:
                for name, chunk_size in _variants(names, phase, chunk_sizes):
                    watch(f"{name}, {phase}, {length:,} tokens")
                    measurements.append(_measure(name, chunk_size, phase, shape, repeats))
    return OpsBench(
        measurements=measurements,
        batch=batch,
        heads=heads,
        head_dim=head_dim,
        dtype=str(dtype).removeprefix("torch."),
        num_threads=1,
        repeats=repeats,
        **surroundings(device),
    )


def check_sizes(**sizes: int) -> None:
    """Refuse sizes below 1."""
    for size, value in sizes.items():
        if value < 1:
            raise ValueError(f"{size} ({value}) must be at least 1")


def _variants(names: Sequence[str], phase: str, chunk_sizes: Sequence[int]) -> list[tuple[str, int | None]]:
    """Return what a phase measures: an operator, or an operator with a chunk size."""
    if phase == "decode":  # one token is a chunk of its own
        return [(name, None) for name in dict.fromkeys(names) if BENCHES[name].mixer]
    sizes = dict.fromkeys(chunk_sizes)
    chunks = {name: sizes if BENCHES[name].chunked and sizes else {None: None} for name in names}
    return [(name, size) for name, sizes in chunks.items() for size in sizes]


def _measure(name: str, chunk_size: int | None, phase: str, shape: Shape, repeats: int) -> Measurement:
    operator, plain = BENCHES[name], replace(BENCHES["softmax"], call=sdpa)
    call, reference = _call(operator, chunk_size, phase, shape), _call(plain, None, phase, shape)
    beside = [_call(BENCHES[operator.beside], None, phase, shape)] if operator.beside else []
    theirs, ours, *rest = time_together([reference, call, *beside], repeats=repeats, device=shape.device)
    timing = Timing.of(ours, theirs)
    return Measurement(
        operator=name,
        phase=phase,
        length=shape.length,
        milliseconds=timing.seconds * 1e3,
        reference_milliseconds=timing.reference_seconds * 1e3,
        ratio=timing.ratio,
        ratio_low=timing.ratio_low,
        ratio_high=timing.ratio_high,
        peak_bytes=peak_bytes(call, shape.device),
        reference_peak_bytes=peak_bytes(reference, shape.device),
        chunk_size=chunk_size,
        beside=operator.beside,
        beside_ratio=Timing.of(ours, rest[0]).ratio if rest else None,
    )


def _call(operator: Operator, chunk_size: int | None, phase: str, shape: Shape) -> Call:
    """Return what is timed of an operator."""
    if phase == "decode":
        return decode_call(operator.mixer, shape, **operator.options)
    call = operator.call if chunk_size is None else partial(operator.call, chunk_size=chunk_size)
    return (forward_call if phase == "forward" else backward_call)(call, operator.make(shape))


def forward_call(operator: Callable[..., Tensor], inputs: dict[str, Tensor]) -> Call:
    """Return a call of the operator without gradients."""

    def call() -> Tensor:
        with torch.no_grad():
            return operator(**inputs)

    return call


def backward_call(operator: Callable[..., Tensor], inputs: dict[str, Tensor]) -> Call:
    """Return a call of the operator and of the gradients of all its inputs, for a fixed gradient of its output."""
    leaves = [tensor for tensor in inputs.values() if tensor.requires_grad]
    generator = torch.Generator().manual_seed(99)
    upstream = torch.randn(inputs["v"].shape, generator=generator).to(inputs["v"])

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(operator(**inputs), leaves, upstream)

    return call


def decode_call(mixer: str, shape: Shape, **options: Any) -> Call:
    """Return a call that mixes one token after a context of `length`; the state is not advanced, so it repeats."""
    hidden_size = shape.heads * shape.head_dim
    module = build_mixer(mixer, num_heads=shape.heads, head_dim=shape.head_dim, hidden_size=hidden_size, **options)
    module = module.to(shape.device, shape.dtype)

    def tokens(length: int) -> dict[str, Tensor]:
        one = Shape(shape.batch, shape.heads, length, shape.head_dim, shape.dtype, shape.device)
        q, k, v = (one.tensor(seed).detach() for seed in range(3))
        return {"q": q, "k": k, "v": v, "x": one.tensor(3).detach().transpose(1, 2).flatten(2)}

    with torch.no_grad():
        _, state = module(**tokens(shape.length), rotate=lambda t: t)
    one = tokens(1)

    def call() -> Tensor:
        with torch.no_grad():
            return module(**one, rotate=lambda t: t, state=state)[0]

    return call
