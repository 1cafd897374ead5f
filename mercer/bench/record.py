"""What a benchmark of operators leaves behind, as JSON, and what is read off it."""

import dataclasses
import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mercer
from mercer.train.record import command_line, commit

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One operator, one pass, one length; beside it SDPA (for decoding: the softmax mixer), measured in turn."""

    operator: str
    phase: str  # forward, forward+backward or decode
    length: int  # tokens; for decoding, of the context before the one token
    milliseconds: float
    reference_milliseconds: float
    ratio: float  # median over the repeats of operator / reference
    ratio_low: float
    ratio_high: float
    peak_bytes: int
    reference_peak_bytes: int
    chunk_size: int | None = None  # None: the operator's default, or it has no chunks
    beside: str = ""  # another operator, measured in turn with it too
    beside_ratio: float | None = None  # median over the repeats of operator / that one

    @property
    def label(self) -> str:
        """Return the operator, with its chunk size where that was asked for."""
        return self.operator if self.chunk_size is None else f"{self.operator}, chunk {self.chunk_size}"


@dataclasses.dataclass(frozen=True)
class OpsBench:
    """All measurements of one call of `bench_ops`, and what they were made on."""

    measurements: list[Measurement]
    batch: int
    heads: int
    head_dim: int
    dtype: str
    device: str
    num_threads: int
    repeats: int
    machine: str
    command: str
    commit: str | None
    created: str  # UTC, ISO 8601
    versions: dict[str, str]

    def to_json(self) -> str:
        """Return the text of `ops.json`."""
        return record_text(self)

    @classmethod
    def from_json(cls, text: str, origin: str = "text") -> "OpsBench":
        """Read a record back.

        Raises:
            ValueError: the text is not such a record; `origin` is named.
        """
        try:
            values = json.loads(text)
            if values.pop("schema") != SCHEMA:
                raise KeyError("schema")
            measurements = [Measurement(**line) for line in values.pop("measurements")]
            return cls(measurements=measurements, **values)
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{origin} is not a benchmark record of schema {SCHEMA}; run the benchmark again"
            ) from error

    def select(self, phase: str) -> dict[str, list[Measurement]]:
        """Return the measurements of a phase by label, by length."""
        found: dict[str, list[Measurement]] = {}
        for line in sorted(self.measurements, key=lambda line: line.length):
            if line.phase == phase:
                found.setdefault(line.label, []).append(line)
        return found


def record_text(record: Any) -> str:
    """Return a record, a dataclass, as JSON."""
    return json.dumps({"schema": SCHEMA, **dataclasses.asdict(record)}, indent=1)


def crossover(lengths: Sequence[int], ratios: Sequence[float]) -> float | None:
    """Return the length from which on the ratio is at most 1, between lengths on a line in logarithms.

    Args:
        lengths: rising.
        ratios: operator / reference at these lengths.

    Returns:
        The length; the shortest one where the ratio is at most 1 everywhere, None where it is above 1 at the longest.

    >>> crossover([1024, 4096], [2.0, 0.5])
    2048.0
    """
    above = [place for place, ratio in enumerate(ratios) if ratio > 1]
    if not above:
        return float(lengths[0]) if lengths else None
    last = above[-1]
    if last == len(ratios) - 1:
        return None
    share = math.log(ratios[last]) / math.log(ratios[last] / ratios[last + 1])
    return lengths[last] * (lengths[last + 1] / lengths[last]) ** share


def surroundings(device: str) -> dict[str, Any]:
    """Return the fields of a record that say where, when and by what it was made."""
    from datetime import UTC, datetime

    return {
        "device": device,
        "machine": machine(device),
        "command": command_line(),
        "commit": commit(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "mercer": mercer.__version__},
    }


def machine(device: str) -> str:
    """Return the name of the processor or accelerator."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()
