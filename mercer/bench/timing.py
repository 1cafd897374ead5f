"""Time a call beside a reference, so that what slows the machine down slows both."""

import ctypes
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_SHORTEST_SECONDS = 0.02  # a shorter call is repeated until it takes this long: the clock and the caches settle


@dataclass(frozen=True)
class Timing:
    """Medians over the repeats; `ratio` is the median of the ratios of neighbours, low and high their extremes."""

    seconds: float
    reference_seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Timing":
        """Compare the seconds of two calls that were timed in turn."""
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        return cls(
            statistics.median(ours), statistics.median(theirs), statistics.median(ratios), min(ratios), max(ratios)
        )


@contextmanager
def one_thread() -> Iterator[None]:
    """Work with a single thread, and give the threads back afterwards, whatever happens."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def steady_allocator() -> Iterator[None]:
    """Keep freed memory in the process while measuring, where the C library is glibc; elsewhere do nothing.

    glibc gives large blocks back to the system or keeps them, depending on what happens to lie above them in the
    heap; fetching them again page by page then costs more than the work. One decoding step of plain attention after
    4096 tokens was seen to take 3 ms or 12 ms, for minutes on end, for this reason alone.
    """
    library = ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
    if library is None:
        yield
        return
    library.mallopt(_M_MMAP_MAX, 0)
    library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    try:
        yield
    finally:
        # A threshold once set stays fixed; these are where glibc's own adjustment ends in a process of large blocks.
        library.mallopt(_M_MMAP_MAX, 65536)
        library.mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
        library.mallopt(_M_TRIM_THRESHOLD, 64 * 2**20)
        library.malloc_trim(0)


def call_seconds(call: Callable[[], Any], device: str = "cpu", count: int = 1) -> float:
    """Return the seconds of one of `count` calls: processor time on a CPU, time between events on CUDA.

    Processor time leaves out what other processes take. It adds up all threads, so measure under `one_thread`.
    """
    if torch.device(device).type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(count):
            call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000 / count
    begin = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - begin) / count


def time_together(calls: Sequence[Callable[[], Any]], *, repeats: int = 5, device: str = "cpu") -> list[list[float]]:
    """Time calls in turn (first, second, ..., first, second, ...) after one warm-up of each.

    Args:
        calls: what is measured.
        repeats: turns.
        device: "cpu" or "cuda", where the calls work.

    Returns:
        Of each call, the seconds it took in every turn.

    Raises:
        ValueError: `repeats` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats ({repeats}) must be at least 1")
    counts = []
    for warm in calls:
        first = call_seconds(warm, device)
        counts.append(1 if first >= _SHORTEST_SECONDS else max(1, round(_SHORTEST_SECONDS / max(first, 1e-6))))
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, count, seconds in zip(calls, counts, taken, strict=True):
            seconds.append(call_seconds(call, device, count))
    return taken
