"""`mercer bench`."""

from pathlib import Path
from typing import Literal


def ops(
    *names: str,
    lengths: str = "1024,2048,4096",
    passes: str = "forward,forward+backward,decode",
    heads: int = 8,
    head_dim: int = 64,
    batch: int = 1,
    dtype: Literal["float32", "float64", "bf16"] = "float32",
    repeats: int = 5,
    device: str = "cpu",
    out: Path = Path("runs/bench"),
) -> int:
    """Time operators beside PyTorch's own attention: `mercer bench ops cubit deltaformer`.

    Times are of one thread, the median of several; memory is what a call holds above its inputs.

    **Examples**

    ```
    mercer bench ops
    mercer bench ops cubit --lengths 1024,4096 --passes forward,forward+backward
    ```

    Args:
        names: operators; by default all but local_linear, which is a hundred times slower than the others.
        lengths: tokens, separated by commas.
        passes: of forward, forward+backward and decode, separated by commas.
        heads: heads.
        head_dim: width of a head.
        batch: sequences.
        dtype: of the inputs.
        repeats: turns of which the median is taken.
        device: cpu or cuda.
        out: the folder ops.json and ops.png are written to.
    """
    counts = whole_numbers("lengths", lengths)
    import torch

    from mercer.bench import DEFAULT_OPERATORS, run_ops

    run_ops(
        list(names) or list(DEFAULT_OPERATORS),
        counts,
        heads=heads,
        head_dim=head_dim,
        batch=batch,
        dtype={"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16}[dtype],
        passes=[phase.strip() for phase in passes.split(",")],
        repeats=repeats,
        device=device,
        out=out,
    )
    return 0


def whole_numbers(option: str, text: str) -> list[int]:
    """Read numbers separated by commas.

    >>> whole_numbers("lengths", "1024,2048")
    [1024, 2048]
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"{option} ({text!r}) must be whole numbers separated by commas, as 1024,2048")
    return [int(word) for word in words]
