"""The training loop of language models: batches in, a run folder out."""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mercer.data import Batch, PackedSplit
from mercer.evaluate.perplexity import Evaluation, evaluate, forward
from mercer.train import record, results, setup, tuning
from mercer.train.distribution import World, distribute, gradients_shared
from mercer.train.folder import RunFolder
from mercer.train.optimiser import build_optimiser
from mercer.train.phase import Phase, carry_out
from mercer.train.progress import Display
from mercer.train.recipe import Recipe

__all__ = ["Display", "Session", "spaced", "train"]


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
    return carry_out(
        recipe,
        out,
        lambda folder, world, console: Session(recipe, folder, world, console, cache_dir, overwrite=overwrite),
        resume=resume,
        overwrite=overwrite,
        console=console,
        should_stop=should_stop,
    )


class Session(Phase):
    """The training of a language model in progress."""

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
        self.cache_dir, self.measures = cache_dir, {}
        self.label = f"{recipe.model.mixer} seed {recipe.seed}"
        super().__init__(recipe, folder, world, console, overwrite=overwrite)

    @property
    def steps(self) -> int:
        return self.recipe.train.steps

    def read(self) -> None:
        self.tokenizer, self.data = setup.load_data(self.recipe.data, self.recipe.seed, self.cache_dir)
        self.note = self.data.note

    def build(self) -> Any:
        tune, self.teacher = self.recipe.tune, None
        if tune.folder is not None:
            model = tuning.start(tune, self.world.device)
            self.teacher = tuning.teacher_of(model) if tune.teacher > 0 else None
            return model.train()
        return setup.build_model(self.recipe, self.tokenizer, self.world.device).train()

    def prepare(self) -> torch.optim.Optimizer:
        self.wrapped = distribute(self.model, self.world, shard=self.recipe.train.shard)
        tune = self.recipe.tune
        return build_optimiser(self.model, self.recipe.optim, tune.mixer_lr_factor if tune.folder else 1.0)

    def take_step(self) -> dict[str, Any]:
        train = self.recipe.train
        row = self.descend(self._gradients, batches=train.accumulate)
        look = train.eval_every and row["step"] % train.eval_every == 0
        tokens = train.accumulate * train.batch_size * self.recipe.data.length
        return row | {
            "tokens": tokens * row["step"],
            "tokens_per_second": tokens / row.pop("seconds"),
            "valid_loss": self._evaluate(train.eval_windows).loss if look else None,
        }

    def evaluate(self) -> Evaluation:
        windows = self.recipe.train.final_eval_windows
        if self.recipe.tune.folder is not None:
            tuning.merge(self.model)
            self.measures = tuning.beside(self.recipe.tune, self.world.device, lambda m: self._evaluate(windows, m))
        return self._evaluate(windows)

    def make_run(self, status: record.Status, evaluation: Evaluation | None) -> record.Run:
        return results.make_run(
            status,
            evaluation,
            recipe=self.recipe,
            created=self.created,
            device=self.world.device.type,
            parameters=self.parameters,
            position=self.position,
            rows=self.folder.rows() if self.world.is_main else [],
            measures=self.measures,
        )

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
                    taught = self._taught(batch)
                labels = batch.labels.to(logits.device)
                share = 0.0 if self.teacher is None else self.recipe.tune.teacher
                loss = tuning.losses(logits, taught, labels, share).sum() / predicted.item()
                (loss * self.world.size).backward()  # DDP and FSDP average over processes; this is a sum
            total += loss.detach().cpu()
        self.world.sum(total)
        return total.item()

    @torch.no_grad()
    def _taught(self, batch: Batch) -> torch.Tensor | None:
        return None if self.teacher is None else forward(self.teacher, batch)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        bf16 = self.recipe.train.precision == "bf16"
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=bf16)

    def _evaluate(self, windows: int | None, model: Any = None) -> Evaluation:
        batches = spaced(self.data.validation, self.recipe.train.batch_size, windows, self.world)
        with self._autocast():
            return evaluate(self.wrapped if model is None else model, batches, reduce=self.world.sum)


def spaced(split: PackedSplit, batch_size: int, windows: int | None, world: World | None = None) -> Iterator[Batch]:
    """Return about `windows` windows of a split in batches, evenly spaced and always the same; all of them for None."""
    total = math.ceil(split.num_windows / batch_size)
    wanted = total if windows is None else min(total, math.ceil(windows / batch_size))
    chosen = {i * total // wanted for i in range(wanted)}
    share = {} if world is None else {"rank": world.rank, "world_size": world.size}
    return (batch for i, batch in enumerate(split.sequential(batch_size, **share)) if i in chosen)
