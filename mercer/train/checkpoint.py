"""Checkpoints: folders that are either whole or not there.

A checkpoint is written aside, flushed to the disk, described by a manifest of sizes and SHA-256 sums, and only then
given its name by one rename. Tensors are safetensors files and everything else is JSON: reading one never runs code.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mercer.errors import CheckpointError

SCHEMA = 1
_NAME = re.compile(r"step-(\d{8})")
Tensors = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a run stands: the scalars of a checkpoint."""

    step: int = 0
    batches: int = 0  # drawn so far: the position in the data
    seconds: float = 0.0  # spent in training steps
    world_size: int = 1
    sharded: bool = False


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return checkpoints / f"step-{step:08d}"


def save_tensors(path: Path, tensors: Tensors) -> None:
    """Write one safetensors file; a full disk is an OSError, as everywhere in Python."""
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error).removeprefix("Error while serializing: I/O error: ")) from error


def replace_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all: aside, flushed, renamed."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def save(checkpoints: Path, position: Position, files: Mapping[str, Tensors], *, keep: int = 2) -> Path:
    """Write a checkpoint and drop the oldest beyond `keep`.

    Args:
        checkpoints: the folder that holds a run's checkpoints.
        position: the step and what else is scalar.
        files: for each file name (without suffix) its tensors by name.
        keep: how many checkpoints stay.

    Raises:
        OSError: the disk refused; what had been saved before is as it was.
    """

    def write(aside: Path) -> None:
        for name, tensors in files.items():
            save_tensors(aside / f"{name}.safetensors", tensors)

    return publish(checkpoints, position, write, keep=keep)


def publish(checkpoints: Path, position: Position, write: Callable[[Path], None], *, keep: int) -> Path:
    """Let `write` fill a folder aside, then describe it, flush it and give it its name."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    final = checkpoint_folder(checkpoints, position.step)
    aside = checkpoints / f".{final.name}.partial"
    for left_over in checkpoints.glob(".step-*.partial"):  # of a process that was killed while saving
        shutil.rmtree(left_over)
    aside.mkdir()
    try:
        write(aside)
        (aside / "state.json").write_text(json.dumps(dataclasses.asdict(position)), encoding="utf-8")
        files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in _files(aside)}
        (aside / "manifest.json").write_text(json.dumps({"schema": SCHEMA, "files": files}, indent=1), encoding="utf-8")
        for path in _files(aside):
            _flush(path)
        _flush(aside)
        if final.exists():  # resumed from it, or damaged: either way the new one is at least as good
            shutil.rmtree(final)
        os.replace(aside, final)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    _flush(checkpoints)
    for old in _steps(checkpoints)[keep:]:
        shutil.rmtree(old)
    return final


def newest(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, and one line about each newer one that had to be passed over.

    Raises:
        CheckpointError: there are checkpoints, and all of them are damaged.
    """
    passed_over = []
    for path in _steps(checkpoints):
        try:
            verify(path)
        except CheckpointError as error:
            passed_over.append(str(error))
        else:
            return path, passed_over
    if passed_over:
        raise CheckpointError(f"{passed_over[0]}; no other is left: train again with --overwrite")
    return None, []


def verify(path: Path) -> None:
    """Check a checkpoint against its manifest.

    Raises:
        CheckpointError: a file is missing, of another size, or of other content.
    """
    for name, (told, checksum) in _manifest(path).items():
        file = path / name
        size = file.stat().st_size if file.is_file() else 0
        if size != told:
            raise _damaged(path, f"{name} has {size} of {told} bytes")
        if _sha256(file) != checksum:
            raise _damaged(path, f"the content of {name} has changed")


def load(path: Path) -> tuple[Position, dict[str, Tensors]]:
    """Read a checkpoint back, after checking it.

    Raises:
        CheckpointError: it is damaged, or of another version.
    """
    verify(path)
    tensors = {file.stem: load_file(file) for file in _files(path) if file.suffix == ".safetensors"}
    return load_position(path), tensors


def load_position(path: Path) -> Position:
    """Read the scalars of a checkpoint."""
    try:
        return Position(**json.loads((path / "state.json").read_text(encoding="utf-8")))
    except (ValueError, TypeError, OSError) as error:
        raise _damaged(path, "state.json cannot be read") from error


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"checkpoint {path} is damaged ({what}); delete it and resume from an older one")


def _manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Return the size and the SHA-256 sum of every file of a checkpoint."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if manifest["schema"] != SCHEMA:
            raise _damaged(path, f"schema {manifest['schema']}, this version reads {SCHEMA}")
        return {name: (told["bytes"], told["sha256"]) for name, told in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise _damaged(path, "manifest.json is missing or cannot be read") from error


def _steps(checkpoints: Path) -> list[Path]:
    found = [path for path in checkpoints.glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(found, reverse=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
