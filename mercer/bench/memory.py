"""Peak memory of a call, counted at PyTorch's allocator and not guessed from the process.

On a CPU the resident set of the process is no measure of an operator: it holds the libraries, never shrinks, and
misses what the C library reuses. PyTorch's CPU allocator reports each allocation and release to the running
profiler, whichever operator makes it, inside custom operators and autograd functions too; their running sum is the
live memory, and its maximum the peak. Not seen is what other libraries allocate for themselves (oneDNN scratch space,
NumPy arrays). On CUDA the allocator keeps the peak itself.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(call: Callable[[], Any], device: str = "cpu") -> int:
    """Return the most bytes live at once during a call, above those live before it.

    What the call returns counts, since it is alive at its end; what existed before (inputs) does not.

    Args:
        call: run once, without warm-up; on a CPU in this thread.
        device: "cpu" or "cuda", where the call works.

    Returns:
        Bytes, exact to the allocator's rounding (none on a CPU, 512 bytes a tensor on CUDA).

    >>> peak_bytes(lambda: torch.empty(2**20, dtype=torch.uint8))
    1048576
    """
    return _cuda_peak(call) if torch.device(device).type == "cuda" else _cpu_peak(call)


def _cpu_peak(call: Callable[[], Any]) -> int:
    # The profiler without Kineto: it keeps events in order and starts at once, where torch.profiler takes seconds to
    # start and writes to stderr.
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    collecting = gc.isenabled()
    gc.disable()  # older garbage released in the middle would be taken off the peak
    _enable_profiler_legacy(config)
    try:
        result = call()
    finally:
        records = _disable_profiler_legacy()
        if collecting:
            gc.enable()
    del result
    live = peak = 0
    for thread in records:
        for event in thread:
            if event.kind() == "memory_alloc":
                live += event.cpu_memory_usage()
                peak = max(peak, live)
    return peak


def _cuda_peak(call: Callable[[], Any]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before
