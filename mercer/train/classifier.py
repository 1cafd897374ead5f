"""The two phases of a classifier with learned random features: particles from labels, then all the rest."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from mercer.data import EncodedSplit, LabelledBatch
from mercer.evaluate.classification import classification_scores
from mercer.hf.install import attached
from mercer.train import record, results
from mercer.train.classifier_recipe import ClassifierRecipe
from mercer.train.classifier_setup import (
    build_classifier,
    check_recipe,
    load_aligned,
    load_labelled,
    start_from,
)
from mercer.train.distribution import distribute, join
from mercer.train.optimiser import build_optimiser
from mercer.train.particles import Aligned, ParticleSystem
from mercer.train.phase import Phase, carry_out


def align_classifier(
    recipe: ClassifierRecipe,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    should_stop: Callable[[int], bool] | None = None,
) -> record.Run:
    """Carry out phase A of a recipe: only the particles learn, from the labels of the training texts.

    Args:
        recipe: everything that decides the numbers.
        out: the run's folder; the aligned model is in `model/`, the history in `metrics.jsonl`.
        resume: go on from the newest checkpoint.
        overwrite: delete the run that lies there.
        console: where progress is shown; the terminal by default.
        should_stop: asked after each step whether to stop, as Ctrl-C does.

    Returns:
        The record; `measures` holds energies before and after on fixed training batches, and the alignment on the
        validation texts.

    Raises:
        ValueError: the recipe cannot be, or several processes were started.
        FileExistsError: a run lies there, and neither `resume` nor `overwrite` is given.
        DataError: the texts cannot be used.
        FloatingPointError: the alignment is no longer finite.
    """
    check_recipe(recipe, aligns=True)
    world = join()
    if world.size > 1 or recipe.train.shard:
        raise ValueError(
            f"aligning runs in one process, not {world.size} (train.shard {recipe.train.shard}): the pairs of a batch "
            "would be torn apart; start mercer align without torchrun"
        )
    return carry_out(
        recipe,
        out,
        lambda *place: AlignPhase(recipe, *place, overwrite=overwrite),
        resume=resume,
        overwrite=overwrite,
        console=console,
        should_stop=should_stop,
    )


def finetune_classifier(
    recipe: ClassifierRecipe,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    should_stop: Callable[[int], bool] | None = None,
) -> record.Run:
    """Carry out phase B of a recipe: the particles stay bit for bit, all the rest learns by cross-entropy.

    With `recipe.start` the particles are those of that run of phase A, else random ones ("vanilla"). Arguments, returns
    and errors are those of `align_classifier`; several processes share a batch. `measures` holds the scores of the
    validation texts and of the test texts.
    """
    check_recipe(recipe, aligns=False)
    if recipe.start is not None:
        recipe = start_from(recipe)
    return carry_out(
        recipe,
        out,
        lambda *place: FinetunePhase(recipe, *place, overwrite=overwrite),
        resume=resume,
        overwrite=overwrite,
        console=console,
        should_stop=should_stop,
    )


class ClassifierPhase(Phase):
    """What both phases of a classifier share: their data, their batches, their record."""

    recipe: ClassifierRecipe
    epochs: int
    batch_size: int
    phase: str

    @property
    def steps(self) -> int:
        return self.epochs * self.tokens.train.num_batches(self.batch_size)

    def read(self) -> None:
        self.tokens = load_labelled(self.recipe.data, self.recipe.seed)
        self.tokenizer, self.note = self.tokens.tokenizer, self.tokens.note

    def is_due(self, every: int) -> bool:
        """Return whether something is due after this step: every so many steps, 0: every epoch; and at the end."""
        step = self.position.step
        return step % (every or self.tokens.train.num_batches(self.batch_size)) == 0 or step == self.steps

    def tokens_read(self) -> int:
        """Return how many real tokens the run has read."""
        train = self.tokens.train
        return round(self.position.batches * self.batch_size / train.num_examples * train.num_tokens)

    def make_run(self, status: record.Status, evaluation: Any) -> record.Run:
        measures = {"phase": self.phase, "classes": list(self.tokens.classes), **(evaluation or {})}
        return results.run_record(
            status,
            recipe=self.recipe,
            created=self.created,
            device=self.world.device.type,
            parameters=self.parameters,
            position=self.position,
            rows=self.folder.rows() if self.world.is_main else [],
            tokens=self.tokens_read(),
            valid_loss=evaluation and evaluation.get("validation", {}).get("log_loss", {}).get("value"),
            measures=measures,
        )

    def card(self, run: record.Run) -> str:
        return classifier_card(run)


class AlignPhase(ClassifierPhase):
    """Phase A in progress."""

    phase, quantity = "align", "energy"
    remedy = "lower --align.step-size or raise --align.strength"

    def __init__(self, recipe: ClassifierRecipe, *place: Any, overwrite: bool):
        self.epochs, self.batch_size = recipe.align.epochs, recipe.align.batch_size
        self.label = f"align {_features(recipe)} seed {recipe.seed}"
        self.converged = False
        super().__init__(recipe, *place, overwrite=overwrite)

    def build(self) -> Any:
        return build_classifier(self.recipe, self.tokens).to(self.world.device)

    def prepare(self) -> None:
        align, train = self.recipe.align, self.tokens.train
        self.check = [train.batch(i, self.batch_size) for i in range(min(align.check_batches, self.steps))]
        self.system = ParticleSystem(self.model, align, pooling=self.recipe.model.pooling, seed=self.recipe.seed)
        with self.system:
            self.before = self._look()

    def run(self, should_stop: Callable[[int], bool]) -> record.Run:
        self.system.steps = self.position.step
        with self.system:
            return super().run(should_stop)

    def finished_early(self) -> bool:
        return self.converged

    def take_step(self) -> dict[str, Any]:
        start = time.perf_counter()
        batch = self.tokens.train.batch(self.position.batches, self.batch_size)
        state = self.system.step(batch)
        self.check_finite(state.step, f"the energy is {state.energy}", state.energy)
        seconds = time.perf_counter() - start
        self.advance(1, seconds)
        checked = self.system.measure(self.check) if self.is_due(self.recipe.align.check_every) else None
        self.converged = checked is not None and checked.drift <= self.recipe.align.tolerance
        return {
            "step": state.step,
            "train_loss": state.energy,
            "learning_rate": self.recipe.align.step_size,
            "alignment": state.alignment,
            "repulsion": state.repulsion,
            "least_distance": state.least_distance,
            "drift": state.drift,
            "checked": checked and dataclasses.asdict(checked),
            "tokens": self.tokens_read(),
            "tokens_per_second": batch.attention_mask.sum().item() / seconds,
            "valid_loss": checked and checked.energy,
        }

    def evaluate(self) -> dict[str, Any]:
        (before, held_out_before), (after, held_out_after) = self.before, self._look()
        return {
            "before": dataclasses.asdict(before),
            "after": dataclasses.asdict(after),
            "validation_alignment": {"before": held_out_before, "after": held_out_after},
            "converged": self.converged,
        }

    def _look(self) -> tuple[Aligned, float]:
        """Return the state on the fixed training batches, and the alignment on the validation texts."""
        split, size = self.tokens.splits["validation"], self.batch_size  # shuffled: a file may be sorted by class
        held_out = (split.batch(i, size) for i in range(split.num_batches(size)))
        return self.system.measure(self.check), self.system.alignment_of(held_out)


class FinetunePhase(ClassifierPhase):
    """Phase B in progress."""

    phase = "finetune"

    def __init__(self, recipe: ClassifierRecipe, *place: Any, overwrite: bool):
        self.epochs, self.batch_size = recipe.train.epochs, recipe.train.batch_size
        self.label = f"{_features(recipe)} {'aligned' if recipe.start else 'vanilla'} seed {recipe.seed}"
        super().__init__(recipe, *place, overwrite=overwrite)

    def build(self) -> Any:
        build = build_classifier if self.recipe.start is None else load_aligned
        return build(self.recipe, self.tokens).to(self.world.device).train()

    def prepare(self) -> torch.optim.Optimizer:
        freeze_particles(self.model)
        self.wrapped = distribute(self.model, self.world, shard=self.recipe.train.shard)
        return build_optimiser(self.model, self.recipe.optim)

    def take_step(self) -> dict[str, Any]:
        before = self.tokens_read()
        row = self.descend(self._gradients, batches=1)
        look = self.scores("validation", resamples=0) if self.is_due(self.recipe.train.eval_every) else None
        return row | {
            "tokens": self.tokens_read(),
            "tokens_per_second": (self.tokens_read() - before) / row.pop("seconds"),
            "valid_loss": look and look["log_loss"]["value"],
            "valid_accuracy": look and look["accuracy"]["value"],
        }

    def evaluate(self) -> dict[str, Any]:
        return {name: self.scores(name) for name in self.tokens.held_out}

    def scores(self, split: str, *, resamples: int = 1000) -> dict[str, Any]:
        """Return accuracy, MCC, log loss, Brier, calibration error and AUC of a split, with intervals over texts."""
        with self._autocast():  # every process reads every text: a few, and the same forward calls when sharded
            logits, labels = predict(self.wrapped, self.tokens.splits[split], self.batch_size)
        probabilities = logits.double().softmax(-1).numpy()
        return _finite(dataclasses.asdict(classification_scores(probabilities, labels.numpy(), resamples=resamples)))

    def _gradients(self) -> float:
        world = self.world
        batch = self.tokens.train.batch(
            self.position.batches, self.batch_size, rank=world.rank, world_size=world.size
        ).to(world.device)
        with self._autocast():
            logits = self.wrapped(**batch.inputs()).logits
        loss = F.cross_entropy(logits.float(), batch.labels, reduction="sum") / self.batch_size
        (loss * world.size).backward()  # DDP and FSDP average over processes; this is a sum
        total = loss.detach().double().cpu()
        world.sum(total)
        return total.item()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        bf16 = self.recipe.train.precision == "bf16"
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=bf16)


def freeze_particles(model: Any) -> None:
    """Let the optimiser leave the directions of all features alone, where they are parameters."""
    for _, layer in attached(model):
        omega = getattr(getattr(layer.mixer, "features", None), "omega", None)
        if isinstance(omega, torch.nn.Parameter):
            omega.requires_grad_(False)


@torch.no_grad()
def predict(model: Any, split: EncodedSplit, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return the logits [n, C] of all texts of a split, in evaluation mode, and their labels [n], on the CPU."""
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        batches: list[LabelledBatch] = list(split.sequential(batch_size))
        logits = [model(**batch.to(device).inputs()).logits.float().cpu() for batch in batches]
    finally:
        model.train(was_training)
    return torch.cat(logits), torch.cat([batch.labels for batch in batches])


def classifier_card(run: record.Run) -> str:
    """Return the text of a classifier's model card: what it is, what it was trained on, how good it is."""
    data, scores = run.config["data"], run.measures.get("validation")
    said = "Its particles are aligned with the labels; nothing else has been trained yet."
    if scores:
        figures = (("accuracy", "accuracy"), ("matthews", "MCC"), ("log_loss", "log loss"), ("brier", "Brier score"))
        said = "Validation: " + ", ".join(f"{word} {scores[name]['value']:.4f}" for name, word in figures) + "."
    options = ", ".join(f"{key}={value}" for key, value in run.mixer_options.items()) or "none"
    start = run.config["start"]
    return f"""---
library_name: transformers
tags: [mercer, {run.mixer}, text-classification]
---
# {run.run_id}

A classifier of texts ({", ".join(run.measures["classes"])}), {run.size}, {run.parameters:,} parameters, token mixer
`{run.mixer}`, options: {options}; particles {"aligned" if start or not scores else "random"}.
Trained with mercer {run.versions["mercer"]} on `{data["source"]}`, at most {data["length"]} tokens a text. {said}

```python
import mercer
from transformers import AutoTokenizer

model = mercer.load("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

Written by `{run.command}`.
"""


def _features(recipe: ClassifierRecipe) -> str:
    return str(recipe.model.mixer_options.get("features", recipe.model.mixer))


def _finite(values: Any) -> Any:
    """Put null where JSON has no number."""
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    return None if isinstance(values, float) and not math.isfinite(values) else values
