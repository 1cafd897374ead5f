"""The training loop: batches in, a run folder out."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from mercer.data import Batch, PackedSplit
from mercer.evaluate.perplexity import Evaluation, evaluate, forward, token_losses
from mercer.features import redraw
from mercer.train import checkpoint, record, results, setup, state
from mercer.train.checkpoint import Position
from mercer.train.distribution import World, check, distribute, gradients_shared, join, whole
from mercer.train.folder import RunFolder
from mercer.train.interrupt import Interruption
from mercer.train.optimiser import build_optimiser, learning_rate
from mercer.train.progress import Display
from mercer.train.recipe import Recipe


def train(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    cache_dir: Path | None = None,
    console: Console | None = None,
    should_stop: Callable[[int], bool] | None = None,
) -> record.Run:
    """Train a model by a recipe, and leave config, metrics, checkpoints, model and record in a folder.

    Args:
        recipe: everything that decides the numbers.
        out: the run's folder.
        resume: go on from the newest complete checkpoint in it; the losses are those of a run without a break. A
            finished run is returned as it is.
        overwrite: delete a run that lies there.
        cache_dir: where the tokenizer and the packed data are kept between runs.
        console: where progress is shown; the terminal by default.
        should_stop: asked after each step (with the number of steps done) whether to stop, as Ctrl-C does.

    Returns:
        The record; `status` is "interrupted" where it was stopped: a checkpoint has been written then.

    Raises:
        ValueError: the recipe is wrong, or not the one that is to be resumed.
        FileExistsError: a run lies there, and neither `resume` nor `overwrite` is given.
        DataError: the text cannot be used.
        CheckpointError: no complete checkpoint is left to resume from.
        FloatingPointError: the loss or the gradient is no longer finite.
        KeyboardInterrupt: it was stopped before its first step, with nothing to save.
        OSError: the disk refused a file; the last checkpoint is as it was.
    """
    recipe = setup.resolve(recipe)
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
        session = Session(recipe, folder, world, console, cache_dir, overwrite=overwrite)
    with Interruption() as interruption:
        return session.run(lambda step: interruption.requested or stop(step))


class Session:
    """One run in progress: model, optimiser, data and the position in all of them."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        world: World,
        console: Console,
        cache_dir: Path | None,
        *,
        overwrite: bool,
    ):
        self.recipe, self.folder, self.world, self.console = recipe, folder, world, console
        if world.is_main:  # the others find the tokens ready
            setup.load_data(recipe.data, recipe.seed, cache_dir)
        world.wait()
        self.tokenizer, self.data = setup.load_data(recipe.data, recipe.seed, cache_dir)
        if world.is_main:  # only now: a text that cannot be used leaves no folder behind
            folder.open(recipe, overwrite=overwrite)
        world.wait()
        torch.manual_seed(recipe.seed)
        record.reset_peak_memory(world.device.type)
        self.model = setup.build_model(recipe, self.tokenizer, world.device).train()
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.wrapped = distribute(self.model, world, shard=recipe.train.shard)
        self.optimiser = build_optimiser(self.model, recipe.optim)
        self.position = Position(world_size=world.size, sharded=recipe.train.shard)
        self.created = datetime.now(UTC).isoformat(timespec="seconds")
        self._restore()
        if world.is_main:
            if self.data.note:
                self._tell(self.data.note)
            environment = record.environment(world.device.type) | {"created": self.created}
            checkpoint.replace_text(folder.environment, json.dumps(environment, indent=1))

    def _restore(self) -> None:
        path, passed_over = checkpoint.newest(self.folder.checkpoints)
        for line in passed_over if self.world.is_main else []:
            self._tell(f"{line.partition('; ')[0]}; going on from an older one")
        if path is not None:
            sharded = self.recipe.train.shard
            self.position = state.load_run(path, self.model, self.optimiser, self.world, sharded=sharded)
        if self.world.is_main:
            self.folder.rewind_metrics(self.position.step)
        self.world.wait()

    def _tell(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def run(self, should_stop: Callable[[int], bool]) -> record.Run:
        """Take the remaining steps, then evaluate and write the results."""
        train, label = self.recipe.train, f"{self.recipe.model.mixer} seed {self.recipe.seed}"
        try:
            with (
                Display(self.console, label, train.steps, self.position.step, visible=self.world.is_main) as display,
                self.folder.metrics.open("a", encoding="utf-8") as metrics,
            ):
                while self.position.step < train.steps:
                    row = self._step()
                    if self.world.is_main:
                        metrics.write(json.dumps(row) + "\n")
                        metrics.flush()
                    display.step(row["step"], row["train_loss"], row["tokens_per_second"], row["valid_loss"])
                    if self.world.any(should_stop(self.position.step)) and self.position.step < train.steps:
                        self._save()
                        return self._finish("interrupted", None)
                    self._save_if_due()
        except FloatingPointError:
            self._finish("failed", None)
            raise
        return self._finish("done", self._evaluate(train.final_eval_windows))

    def _step(self) -> dict[str, Any]:
        """Take one step of the optimiser and return its row for metrics.jsonl."""
        recipe, start = self.recipe, time.perf_counter()
        rate = learning_rate(self.position.step, recipe.train.steps, recipe.optim)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        loss = self._gradients()
        norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), recipe.optim.clip)).item()
        step = self.position.step + 1
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise FloatingPointError(self._divergence(step, loss, norm))
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        redraw(self.model, step)
        seconds = time.perf_counter() - start
        position = self.position
        self.position = dataclasses.replace(
            position,
            step=step,
            batches=position.batches + recipe.train.accumulate,
            seconds=position.seconds + seconds,
        )
        look = recipe.train.eval_every and step % recipe.train.eval_every == 0
        tokens = recipe.train.accumulate * recipe.train.batch_size * recipe.data.length
        return {
            "step": step,
            "train_loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
            "tokens": tokens * step,
            "tokens_per_second": tokens / seconds,
            "valid_loss": self._evaluate(recipe.train.eval_windows).loss if look else None,
        }

    def _gradients(self) -> float:
        """Add up the gradient of the mean loss over all tokens of a step, batches and processes; return that mean."""
        train = self.recipe.train
        first = self.position.batches
        share = {"rank": self.world.rank, "world_size": self.world.size}
        batches = [self.data.train.batch(first + i, train.batch_size, **share) for i in range(train.accumulate)]
        predicted = torch.tensor(float(sum((batch.labels[:, 1:] != -100).sum() for batch in batches)))
        self.world.sum(predicted)
        total = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(batches, start=1):
            with gradients_shared(self.wrapped, last=number == len(batches)):
                with self._autocast():
                    logits = forward(self.wrapped, batch)
                loss = token_losses(logits, batch.labels.to(logits.device)).sum() / predicted.item()
                (loss * self.world.size).backward()  # DDP and FSDP average over processes; this is a sum
            total += loss.detach().cpu()
        self.world.sum(total)
        return total.item()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        bf16 = self.recipe.train.precision == "bf16"
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=bf16)

    def _evaluate(self, windows: int | None) -> Evaluation:
        batches = spaced(self.data.validation, self.recipe.train.batch_size, windows, self.world)
        with self._autocast():
            return evaluate(self.wrapped, batches, reduce=self.world.sum)

    def _save_if_due(self) -> None:
        step, train = self.position.step, self.recipe.train
        if train.checkpoint_every and (step % train.checkpoint_every == 0 or step == train.steps):
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

    def _divergence(self, step: int, loss: float, norm: float) -> str:
        return (
            f"the loss is {loss} and the gradient's norm {norm} at step {step}; {self._last()}; "
            "lower --optim.lr or --optim.clip, or use --train.precision float32, with --overwrite or another --out"
        )

    def _finish(self, status: record.Status, evaluation: Evaluation | None) -> record.Run:
        """Write the model (of a finished run) and the record."""
        run = results.make_run(
            status,
            evaluation,
            recipe=self.recipe,
            created=self.created,
            device=self.world.device.type,
            parameters=self.parameters,
            position=self.position,
            rows=self.folder.rows() if self.world.is_main else [],
        )
        if status == "done":
            try:
                results.save_model(self.folder.model, self.model, self.tokenizer, run, self.world)
            except OSError as error:
                raise OSError(
                    f"cannot save the model in {self.folder.model}: {error.strerror or error}; {self._last()}; "
                    "make room and go on with --resume"
                ) from error
        if self.world.is_main:
            checkpoint.replace_text(self.folder.results, run.to_json())
        self.world.wait()
        return run


def spaced(split: PackedSplit, batch_size: int, windows: int | None, world: World | None = None) -> Iterator[Batch]:
    """Return about `windows` windows of a split in batches, evenly spaced and always the same; all of them for None."""
    total = math.ceil(split.num_windows / batch_size)
    wanted = total if windows is None else min(total, math.ceil(windows / batch_size))
    chosen = {i * total // wanted for i in range(wanted)}
    share = {} if world is None else {"rank": world.rank, "world_size": world.size}
    return (batch for i, batch in enumerate(split.sequential(batch_size, **share)) if i in chosen)
