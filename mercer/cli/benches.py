"""`mercer bench`."""

from pathlib import Path
from typing import Any, Literal


def ops(
    *names: str,
    lengths: str = "1024,2048,4096",
    passes: str = "forward,forward+backward,decode",
    chunk_sizes: str = "",
    heads: int = 8,
    head_dim: int = 64,
    batch: int = 1,
    dtype: Literal["float32", "float64", "bf16"] = "float32",
    repeats: int = 5,
    device: str = "cpu",
    out: Path = Path("runs/bench"),
) -> int:
    """Time operators beside PyTorch's own attention: `mercer bench ops cubit deltaformer`.

    Times are of one thread, the median of several; memory is what a call holds above its inputs. `linear`, `near_far`
    and `linear_cubit` include their features (256 a head); beside `linear`, the other two are compared with it too.
    Decoding mixes one token after a context: in linear time it costs the same after any.

    **Examples**

    ```
    mercer bench ops
    mercer bench ops cubit --lengths 1024,4096 --passes forward,forward+backward
    mercer bench ops linear near_far linear_cubit --lengths 4096,8192,16384 --repeats 3
    mercer bench ops linear --passes forward --chunk-sizes 64,128,256
    mercer bench ops linear near_far --passes decode --lengths 1024,4096,16384
    ```

    Args:
        names: operators; by default all but kernel_solve, half of cubit, and local_linear, which is a hundred times
            slower than the others.
        lengths: tokens, separated by commas.
        passes: of forward, forward+backward and decode, separated by commas.
        chunk_sizes: tokens that linear works together, separated by commas, each measured; 128 by default. A CPU never
            takes more than 256.
        heads: heads.
        head_dim: width of a head.
        batch: sequences.
        dtype: of the inputs.
        repeats: turns of which the median is taken.
        device: cpu or cuda.
        out: the folder ops.json and ops.png are written to.
    """
    counts = whole_numbers("lengths", lengths)
    chunks = whole_numbers("chunk_sizes", chunk_sizes) if chunk_sizes else []
    from mercer.bench import DEFAULT_OPERATORS, run_ops

    run_ops(
        list(names) or list(DEFAULT_OPERATORS),
        counts,
        heads=heads,
        head_dim=head_dim,
        batch=batch,
        dtype=_dtype(dtype),
        passes=[phase.strip() for phase in passes.split(",")],
        chunk_sizes=chunks,
        repeats=repeats,
        device=device,
        out=out,
    )
    return 0


def state(
    *names: str,
    lengths: str = "1024,4096,16384,65536",
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    batch: int = 1,
    dtype: Literal["float32", "float64", "bf16"] = "float32",
    out: Path = Path("runs/bench"),
) -> int:
    """Show what mixers remember while decoding, in bytes, against the length of the context: `mercer bench state`.

    Nothing is computed, so it takes no time: the sizes are those of the tensors a mixer would return.

    **Examples**

    ```
    mercer bench state
    mercer bench state softmax cubit performer --kv-heads 2 --dtype bf16 --lengths 1024,1048576
    ```

    Args:
        names: mixers, or near_far, performer with a window of 64 and 4 first tokens; by default the main ones.
        lengths: tokens of the context, separated by commas.
        heads: query heads.
        kv_heads: key and value heads; as many as query heads by default.
        head_dim: width of a head.
        batch: sequences.
        dtype: of the inputs; sums over the past stay float32 at least.
        out: the folder states.json is written to.
    """
    counts = whole_numbers("lengths", lengths)
    from mercer.bench import DEFAULT_STATES, run_states

    run_states(
        list(names) or DEFAULT_STATES,
        counts,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        batch=batch,
        dtype=_dtype(dtype),
        out=out,
    )
    return 0


def peers(
    *,
    lengths: str = "4096",
    passes: str = "forward,forward+backward",
    allocators: str = "default,steady",
    heads: int = 8,
    head_dim: int = 64,
    repeats: int = 3,
    out: Path = Path("runs/bench"),
) -> int:
    """Time other packages' causal linear attention beside ours on a CPU: `mercer bench peers`.

    darkformer-pytorch and performer-pytorch (`pip install 'mercer[peers]'`) beside our darkformer and performer, on the
    same inputs, features included (256 a head), on one thread: how many times as long they take. Of the ways in which
    one can compute causal attention on a CPU, what it does by itself and the fastest are measured; each in a process
    of its own, with the allocator as it comes and with freed memory kept, which leaves the arithmetic alone. Some ten
    minutes at 4096 tokens.

    **Examples**

    ```
    mercer bench peers
    mercer bench peers --lengths 1024,4096 --passes forward --allocators default
    ```

    Args:
        lengths: tokens, separated by commas.
        passes: of forward and forward+backward, separated by commas.
        allocators: of default and steady (freed memory stays in the process), separated by commas.
        heads: heads.
        head_dim: width of a head.
        repeats: turns of which the median is taken.
        out: the folder peers.json is written to.
    """
    counts = whole_numbers("lengths", lengths)
    from mercer.bench import run_peers

    run_peers(
        counts,
        heads=heads,
        head_dim=head_dim,
        passes=[phase.strip() for phase in passes.split(",")],
        allocators=[allocator.strip() for allocator in allocators.split(",")],
        repeats=repeats,
        out=out,
    )
    return 0


def _dtype(name: str) -> Any:
    import torch

    return {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16}[name]


def whole_numbers(option: str, text: str) -> list[int]:
    """Read numbers separated by commas.

    >>> whole_numbers("lengths", "1024,2048")
    [1024, 2048]
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"{option} ({text!r}) must be whole numbers separated by commas, as 1024,2048")
    return [int(word) for word in words]
