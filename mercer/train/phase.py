"""A phase of training: steps, checkpoints, progress and the run's folder, whatever a step of it is.

Pretraining (`loop`), aligning particles with labels and finetuning a classifier are phases.
"""

import abc
import dataclasses
import json
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from mercer.features import redraw
from mercer.train import checkpoint, record, results, state
from mercer.train.checkpoint import Position
from mercer.train.distribution import World, check, join, whole
from mercer.train.folder import RunFolder
from mercer.train.interrupt import Interruption
from mercer.train.optimiser import learning_rate
from mercer.train.progress import Display


class Phase(abc.ABC):
    """One run in progress: model, optimiser, data and the position in all of them.

    Args:
        recipe: a frozen record with `seed` and `train`.
        folder: where the run is written; checked already.
        world: this process among its peers.
        console: where progress is shown.
        overwrite: delete the run that lies there.
    """

    remedy = "lower --optim.lr or --optim.clip, or use --train.precision float32"  # of numbers that are not finite
    label: str  # what the display calls the run
    quantity = "loss"  # what goes down
    note = ""  # what was unusual about the data, in a sentence
    tokenizer: Any

    def __init__(self, recipe: Any, folder: RunFolder, world: World, console: Console, *, overwrite: bool):
        self.recipe, self.folder, self.world, self.console = recipe, folder, world, console
        if world.is_main:  # the others find the tokens ready
            self.read()
        world.wait()
        self.read()
        if world.is_main:  # only now: a text that cannot be used leaves no folder behind
            folder.open(recipe, overwrite=overwrite)
        world.wait()
        torch.manual_seed(recipe.seed)
        record.reset_peak_memory(world.device.type)
        self.model = self.build()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.optimiser = self.prepare()
        self.position = Position(world_size=world.size, sharded=recipe.train.shard)
        self.created = datetime.now(UTC).isoformat(timespec="seconds")
        self._restore()
        if world.is_main:
            if self.note:
                self.tell(self.note)
            environment = record.environment(world.device.type) | {"created": self.created}
            checkpoint.replace_text(folder.environment, json.dumps(environment, indent=1))

    @property
    @abc.abstractmethod
    def steps(self) -> int:
        """Steps of the whole run."""

    @abc.abstractmethod
    def read(self) -> None:
        """Read the data and the tokenizer; called twice in the main process."""

    @abc.abstractmethod
    def build(self) -> Any:
        """Return the model, on the device."""

    @abc.abstractmethod
    def prepare(self) -> Optimizer | None:
        """Make the model ready to train; return the optimiser, None for a phase without."""

    @abc.abstractmethod
    def take_step(self) -> dict[str, Any]:
        """Take one step, move the position on, and return the step's row of metrics.jsonl."""

    @abc.abstractmethod
    def evaluate(self) -> Any:
        """Measure the model at the end."""

    @abc.abstractmethod
    def make_run(self, status: record.Status, evaluation: Any) -> record.Run:
        """Return the record; `evaluation` is None unless the run is done."""

    def card(self, run: record.Run) -> str:
        """Return the text of the model card."""
        return results.card(run)

    def finished_early(self) -> bool:
        """Return whether there is nothing left to do before the last step."""
        return False

    def tell(self, line: str) -> None:
        """Print a line beside the progress."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def run(self, should_stop: Callable[[int], bool]) -> record.Run:
        """Take the remaining steps, then evaluate and write the results."""
        try:
            with (
                self._display() as display,
                self.folder.metrics.open("a", encoding="utf-8") as metrics,
            ):
                while self.position.step < self.steps and not self.finished_early():
                    row = self.take_step()
                    if self.world.is_main:
                        metrics.write(json.dumps(row) + "\n")
                        metrics.flush()
                    display.step(row["step"], row["train_loss"], row["tokens_per_second"], row["valid_loss"])
                    if self.world.any(should_stop(self.position.step)) and self.position.step < self.steps:
                        self._save()
                        return self._finish("interrupted", None)
                    self._save_if_due()
        except FloatingPointError:
            self._finish("failed", None)
            raise
        return self._finish("done", self.evaluate())

    def _display(self) -> Display:
        visible, done = self.world.is_main, self.position.step
        return Display(self.console, self.label, self.steps, done, visible=visible, quantity=self.quantity)

    def descend(self, gradients: Callable[[], float], *, batches: int) -> dict[str, Any]:
        """Take one step of the optimiser; return what every row of metrics.jsonl has, and the seconds it took.

        Args:
            gradients: adds up the gradient of the step's loss and returns that loss.
            batches: how many batches it draws.
        """
        optimiser, optim, start = self.optimiser, self.recipe.optim, time.perf_counter()
        assert optimiser is not None
        rate = learning_rate(self.position.step, self.steps, optim)
        for group in optimiser.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)
        loss = gradients()
        norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), optim.clip)).item()
        step = self.position.step + 1
        self.check_finite(step, f"the loss is {loss} and the gradient's norm {norm}", loss, norm)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        redraw(self.model, step)
        seconds = time.perf_counter() - start
        self.advance(batches, seconds)
        return {"step": step, "train_loss": loss, "learning_rate": rate, "gradient_norm": norm, "seconds": seconds}

    def advance(self, batches: int, seconds: float) -> None:
        """Move the position to the end of a step."""
        at = self.position
        self.position = dataclasses.replace(
            at, step=at.step + 1, batches=at.batches + batches, seconds=at.seconds + seconds
        )

    def check_finite(self, step: int, found: str, *numbers: float) -> None:
        """Raise FloatingPointError, with what was found and what to do, unless all numbers are finite."""
        if not all(map(math.isfinite, numbers)):
            raise FloatingPointError(
                f"{found} at step {step}; {self._last()}; {self.remedy}, with --overwrite or another --out"
            )

    def _restore(self) -> None:
        path, passed_over = checkpoint.newest(self.folder.checkpoints)
        for line in passed_over if self.world.is_main else []:
            self.tell(f"{line.partition('; ')[0]}; going on from an older one")
        if path is not None:
            sharded = self.recipe.train.shard
            self.position = state.load_run(path, self.model, self.optimiser, self.world, sharded=sharded)
        if self.world.is_main:
            self.folder.rewind_metrics(self.position.step)
        self.world.wait()

    def _save_if_due(self) -> None:
        step, train = self.position.step, self.recipe.train
        if train.checkpoint_every and (step % train.checkpoint_every == 0 or step == self.steps):
            self._save()

    def _save(self) -> None:
        train = self.recipe.train
        try:
            state.save_run(
                self.folder.checkpoints, self.position, self.model, self.optimiser, self.world, keep=train.keep
            )
        except OSError as error:
            raise OSError(
                f"cannot save the checkpoint of step {self.position.step}: {error.strerror or error}; "
                f"{self._last()}; make room and go on with --resume"
            ) from error

    def _last(self) -> str:
        kept = sorted(self.folder.checkpoints.glob("step-*"))
        return f"the last good checkpoint is {kept[-1]}" if kept else "there is no earlier checkpoint"

    def _finish(self, status: record.Status, evaluation: Any) -> record.Run:
        """Write the model (of a finished run) and the record."""
        run = self.make_run(status, evaluation)
        if status == "done":
            try:
                results.save_model(self.folder.model, self.model, self.tokenizer, self.card(run), self.world)
            except OSError as error:
                raise OSError(
                    f"cannot save the model in {self.folder.model}: {error.strerror or error}; {self._last()}; "
                    "make room and go on with --resume"
                ) from error
        if self.world.is_main:
            checkpoint.replace_text(self.folder.results, run.to_json())
        self.world.wait()
        return run


Build = Callable[[RunFolder, World, Console], Phase]


def carry_out(
    recipe: Any,
    out: Path,
    build: Build,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    should_stop: Callable[[int], bool] | None = None,
) -> record.Run:
    """Check the run's folder, build the phase and run it; a finished run is returned as it is when resumed.

    Arguments, returns and errors are those of `mercer.train.loop.train`.
    """
    console = console or Console(stderr=True)
    world = join()
    check(world, batch_size=recipe.train.batch_size, shard=recipe.train.shard)
    folder = RunFolder(out)
    if world.is_main:
        folder.check(recipe, resume=resume, overwrite=overwrite)
    world.wait()  # none may begin to write before the check
    if resume and (finished := folder.finished()):
        return finished
    stop = should_stop or (lambda _: False)
    with Interruption(at_once=True):  # reading a large text takes hours
        phase = build(folder, world, console)
    with Interruption() as interruption:
        return phase.run(lambda step: interruption.requested or stop(step))
