"""What a run leaves behind: one JSON record from which every table and figure is made."""

import dataclasses
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from mercer.errors import CheckpointError

SCHEMA = 1
Status = Literal["done", "interrupted", "failed"]


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run: what was asked, on what, and what came out. Losses are in nats per token."""

    run_id: str
    recipe: str
    mixer: str
    mixer_options: dict[str, Any]
    size: str
    seed: int
    commit: str | None  # of the package, where it lies in a git checkout
    created: str  # UTC, ISO 8601
    command: str
    versions: dict[str, str]
    device: str
    num_threads: int
    parameters: int
    train_tokens: int
    steps: int
    valid_loss: float | None  # null until a validation has been done
    bits_per_byte: float | None
    perplexity: float | None
    tokens_per_second: float
    train_seconds: float  # of training steps alone, without evaluation and checkpoints
    peak_memory_bytes: int
    loss_by_position: list[
        list[float | int]
    ]  # [start, end, mean loss, tokens] a bucket of the position in the document
    curve: list[dict[str, Any]]  # step, train_loss, valid_loss or null, learning_rate
    config: dict[str, Any]
    status: Status
    measures: dict[str, Any] = dataclasses.field(default_factory=dict)  # of what is no language model, by name

    def to_json(self) -> str:
        """Return the text of `results.json`."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, origin: str = "text") -> "Run":
        """Read a record back.

        Raises:
            CheckpointError: it is not JSON, of another schema version, or fields are missing; `origin` is named.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{origin} is not JSON: {error}; delete it or run the training again") from error
        if not isinstance(values, dict) or values.pop("schema", None) != SCHEMA:
            raise CheckpointError(
                f"{origin} is not a run record of schema {SCHEMA}; it needs another version of mercer"
            )
        names = {field.name for field in dataclasses.fields(cls)}
        if missing := sorted(names - {"measures"} - set(values)):  # older records have none
            raise CheckpointError(f"{origin} lacks {', '.join(missing)}; run the training again")
        return cls(**{name: value for name, value in values.items() if name in names})


def read_run(path: Path) -> Run:
    """Return the record in a `results.json`.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not text: {error}; delete it or run the training again") from error
    return Run.from_json(text, str(path))


def read_runs(folder: str | Path) -> list[Run]:
    """Return the record of every run under a folder, in the order of their paths.

    Raises:
        FileNotFoundError: there is no such folder, or no `results.json` in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"folder {folder} does not exist; give one that `mercer train` or `compare` wrote")
    paths = sorted(folder.rglob("results.json"))
    if not paths:
        raise FileNotFoundError(f"folder {folder} holds no results.json; give one that `mercer train` wrote")
    return [read_run(path) for path in paths]


def command_line() -> str:
    """Return the command this process was started with, ready to paste into a shell."""
    program = Path(sys.argv[0]).name
    words = ["python", "-m", "mercer.cli"] if program == "__main__.py" else [program or "mercer"]
    return shlex.join([*words, *sys.argv[1:]])


def resume_line(command: str) -> str:
    """Return the command that goes on with what another one began."""
    words = [word for word in shlex.split(command) if word not in ("--overwrite", "--resume")]
    return shlex.join([*words, "--resume"])


def versions() -> dict[str, str]:
    """Return the versions that decide a run's numbers."""
    import torch
    import transformers

    import mercer

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "mercer": mercer.__version__,
    }


def commit() -> str | None:
    """Return the commit of the checkout the package lies in, with `-dirty` behind it where files differ."""
    folder = Path(__file__).resolve().parent.parent
    if not (folder.parent / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(git, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def environment(device: str) -> dict[str, Any]:
    """Return what `environment.json` holds: machine, versions, commit and command."""
    import torch

    return {
        "command": command_line(),
        "commit": commit(),
        "versions": versions(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "device": device,
        "accelerator": torch.cuda.get_device_name() if device.startswith("cuda") else None,
        "num_threads": torch.get_num_threads(),
    }


def reset_peak_memory(device: str) -> None:
    """Start measuring the peak anew, so that the runs of one process do not inherit each other's."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: resets VmHWM


def peak_memory_bytes(device: str) -> int:
    """Return the most memory held since the reset: the device's, or on a CPU the whole process's resident set."""
    import torch

    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB
