"""Training that is not a run of its own, as attention transfer: how far it has come, kept and taken up again."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mercer.errors import CheckpointError
from mercer.train import checkpoint
from mercer.train.state import put_back, tensors_of

Parts = Sequence[tuple[nn.Module, Optimizer]]


class Keeper:
    """Keeps modules and their optimisers in a folder while they learn.

    Args:
        folder: of the checkpoints, beside settings.json; it is made with the first one.
        settings: what must be the same when the training is taken up again.
        every: seconds between two checkpoints.
        resume: whether to go on with what the folder holds.
        overwrite: whether to forget it.

    Raises:
        FileExistsError: the folder holds something, and neither resume nor overwrite is given.
        ValueError: it was begun with other settings.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        *,
        every: float = 60.0,
        resume: bool = False,
        overwrite: bool = False,
    ):
        self.folder, self.settings, self.every, self._last = folder, dict(settings), every, time.monotonic()
        if overwrite:
            self.forget()
        known = folder / "settings.json"
        if not known.is_file():
            return
        if not resume:
            raise FileExistsError(
                f"{folder.parent} holds a training that was stopped; go on with --resume, "
                "or begin anew with --overwrite"
            )
        begun = json.loads(known.read_text(encoding="utf-8"))
        for name, value in self.settings.items():
            if begun.get(name) != value:
                raise ValueError(
                    f"{name} ({value}) was {begun.get(name)} when this training began; go on with that, or --overwrite"
                )

    def restore(self, parts: Parts) -> int:
        """Put the newest checkpoint back; return the number of its step, 0 if there is none."""
        path, _ = checkpoint.newest(self.folder)
        if path is None:
            return 0
        position, files = checkpoint.load(path)
        if len(files) != len(parts):
            raise CheckpointError(f"checkpoint {path} holds {len(files)} modules, not {len(parts)}; use --overwrite")
        for number, (module, optimiser) in enumerate(parts):
            put_back(path, module, optimiser, files[f"part-{number}"])
        return position.step

    def save(self, step: int, parts: Parts) -> None:
        """Write a checkpoint."""
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoint.replace_text(self.folder / "settings.json", json.dumps(self.settings))
        files = {f"part-{number}": tensors_of(*part) for number, part in enumerate(parts)}
        checkpoint.save(self.folder, checkpoint.Position(step=step), files, keep=1)
        self._last = time.monotonic()

    def save_if_due(self, step: int, parts: Parts) -> None:
        """Write a checkpoint if the last one is old."""
        if time.monotonic() - self._last >= self.every:
            self.save(step, parts)

    def forget(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
