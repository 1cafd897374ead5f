"""The folder of one run: what lies where, and who may write into it."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mercer.errors import CheckpointError
from mercer.train import checkpoint, config, record
from mercer.train.classifier_recipe import ClassifierRecipe
from mercer.train.recipe import Recipe

AnyRecipe = Recipe | ClassifierRecipe

# What may change between the parts of one run without making it another run.
_FREE = {"train.eval_every", "train.eval_windows", "train.final_eval_windows", "train.checkpoint_every", "train.keep"}
_COLUMNS = {"step", "train_loss", "valid_loss", "learning_rate"}  # of a row of metrics.jsonl, for the curve


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """config.yaml, environment.json, metrics.jsonl, checkpoints/, model/, results.json."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def results(self) -> Path:
        return self.path / "results.json"

    def check(self, recipe: AnyRecipe, *, resume: bool, overwrite: bool) -> None:
        """Make sure that a run may be written here; nothing is changed yet.

        Raises:
            FileExistsError: another run lies there and neither `resume` nor `overwrite` is given.
            ValueError: it is to be resumed with another recipe than it was started with.
            CheckpointError: its config.yaml is damaged.
        """
        if self.config.exists():
            if not (resume or overwrite):
                raise FileExistsError(f"{self.path} holds a run already; add --resume, --overwrite or another --out")
            if not overwrite:
                self._same(recipe)
        elif self.path.exists() and (not self.path.is_dir() or any(map(_is_foreign, self.path.iterdir()))):
            raise FileExistsError(f"{self.path} holds something that is no run; give another --out")

    def open(self, recipe: AnyRecipe, *, overwrite: bool) -> None:
        """Make the folder ready for a run that has been checked."""
        if overwrite and self.config.exists():  # only ever delete what is a run
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        checkpoint.replace_text(self.config, config.write_yaml(recipe))

    def finished(self) -> record.Run | None:
        """Return the record of a run that is done."""
        if not self.results.exists():
            return None
        run = record.read_run(self.results)
        return run if run.status == "done" else None

    def _same(self, recipe: AnyRecipe) -> None:
        try:
            before = dict(
                _leaves(config.to_dict(config.from_dict(config.read_yaml(self.config), config.table_of(recipe))))
            )
        except ValueError as error:
            raise CheckpointError(
                f"{self.config} is damaged or of another version ({error}); train again with --overwrite"
            ) from error
        now = dict(_leaves(config.to_dict(recipe)))
        for key in sorted((before | now).keys() - _FREE):
            if before.get(key) != now.get(key):
                raise ValueError(
                    f"{self.path} was started with {key} {before.get(key)}, not {now.get(key)}; "
                    "give the same settings to resume, or another --out"
                )

    def rewind_metrics(self, step: int) -> None:
        """Drop the rows after a step: the run goes on from there."""
        if self.metrics.exists():
            rows = [row for row in self.rows() if row["step"] <= step]
            checkpoint.replace_text(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl; a last line cut off by a crash is left out.

        Raises:
            CheckpointError: another line is no row.
        """
        if not self.metrics.exists():
            return []
        rows = []
        for number, line in enumerate(self.metrics.read_bytes().split(b"\n")[:-1], start=1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or _COLUMNS - row.keys():
                raise CheckpointError(
                    f"{self.metrics} is damaged (line {number}); delete it and go on with --resume: "
                    "the run's curve is lost then, and nothing else"
                )
            rows.append(row)
        return rows


def _is_foreign(path: Path) -> bool:
    """Return whether a file is none of those that `checkpoint.replace_text` was killed over."""
    return not (path.name.startswith(".") and path.name.endswith(".partial"))


def curve(rows: list[dict[str, Any]], points: int = 200) -> list[dict[str, Any]]:
    """Thin the rows of metrics.jsonl to a curve: mean training loss between two points, every validation kept.

    >>> curve([{"step": s, "train_loss": s, "learning_rate": 0.1, "valid_loss": None} for s in (1, 2, 3, 4)], points=2)
    [{'step': 2, 'train_loss': 1.5, 'valid_loss': None, 'learning_rate': 0.1}, \
{'step': 4, 'train_loss': 3.5, 'valid_loss': None, 'learning_rate': 0.1}]
    """
    stride = max(1, len(rows) // points)
    thinned, pending = [], []
    for number, row in enumerate(rows, start=1):
        pending.append(row["train_loss"])
        if number % stride == 0 or number == len(rows) or row["valid_loss"] is not None:
            mean = sum(pending) / len(pending)
            kept = {"step": row["step"], "train_loss": mean, "valid_loss": row["valid_loss"]}
            thinned.append(kept | {"learning_rate": row["learning_rate"]})
            pending = []
    return thinned


def _leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
