"""One trial of the text study: a classifier from a seed, its particles learned or not, and how good it is."""

import functools
import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mercer.data import Labelled, LabelledSplit, build_tokenizer, encode, read_labelled
from mercer.data.stream import default_cache_dir
from mercer.errors import NumericalWarning
from mercer.evaluate import classification_scores, flip_labels, reliability, robustness_curve
from mercer.study.text.design import BASES, DAMAGES
from mercer.train.classifier import freeze_particles, predict
from mercer.train.classifier_recipe import (
    OPTIM,
    AlignConfig,
    ClassifierModel,
    ClassifierRecipe,
    FinetuneConfig,
    LabelledConfig,
)
from mercer.train.classifier_setup import LabelledTokens, build_classifier
from mercer.train.optimiser import build_optimiser, learning_rate
from mercer.train.particles import Aligned, align_particles, particles

SCORES = ("accuracy", "matthews", "log_loss", "brier", "calibration_error", "auc")


def trial(
    *, seed: int, method: str, variant: str, label_noise: float, align: dict[str, Any] | None, **rest: Any
) -> dict[str, Any]:
    """Train one classifier and measure it on the test texts (the validation texts, where a source has no test).

    Everything but the particles is the same for all variants of a method under one seed: weights, training texts, their
    order, dropout, damage.

    Returns:
        `SCORES`; `calibration_low`, `calibration_high` (bootstrap over texts) and `calibrated_error`; `drop@L`,
        `typos@L`: accuracy on damaged texts; `validation_log_loss`, `majority`; `bins`: examples, mean confidence and
        accuracy of each bin of confidence; for a variant that aligns what `_align` returns.
    """
    read, tokenizer = _data(rest["source"], rest["text"], rest["pair"], rest["label"], rest["tokenizer"])
    chosen = np.random.default_rng(seed).permutation(len(read.train))[: rest["texts"] or None]
    train = read.train.take(chosen)
    if label_noise:
        train = train.with_labels(flip_labels(train.labels, label_noise, read.num_classes, seed))
    splits = {"train": encode(train, tokenizer, rest["length"], seed=seed)}
    recipe = _recipe(method, seed, align, rest)
    model = build_classifier(recipe, LabelledTokens(tokenizer, read.classes, splits, ""))
    found = {} if align is None else _align(model, splits["train"], recipe)
    _finetune(model, splits["train"], recipe)

    def probabilities(split: LabelledSplit) -> np.ndarray:
        logits, _ = predict(model, encode(split, tokenizer, rest["length"]), 2 * rest["batch_size"])
        return logits.double().softmax(-1).numpy()

    test = read.splits.get("test", read.validation)
    found |= _scores(probabilities(test), test.labels)
    found["majority"] = read.majority("test" if "test" in read.splits else "validation")
    validation = classification_scores(probabilities(read.validation), read.validation.labels, resamples=0)
    found["validation_log_loss"] = validation.log_loss.value
    for kind in DAMAGES if rest["levels"] else ():
        rows = robustness_curve(probabilities, test, kind, rest["levels"], seed)
        found |= {f"{kind}@{row.level:g}": row.accuracy for row in rows}
    return found


@functools.lru_cache(maxsize=1)
def _data(source: str, text: str | None, pair: str | None, label: str | None, tokenizer: str) -> tuple[Labelled, Any]:
    read = read_labelled(source, text=text, pair=pair, label=label)
    return read, build_tokenizer(tokenizer, [*read.train.texts, *(read.train.pairs or ())], default_cache_dir())


def _recipe(method: str, seed: int, align: dict[str, Any] | None, rest: dict[str, Any]) -> ClassifierRecipe:
    if method in BASES:
        mixer, options = method, {} if method == "softmax" else {"num_features": rest["num_features"]}
    else:
        mixer, options = "particle", {"features": method, "num_features": rest["num_features"]}
    widths = ("hidden_size", "num_layers", "num_heads", "intermediate_size")
    return ClassifierRecipe(
        "text-study",
        data=LabelledConfig(source=rest["source"], length=rest["length"]),
        model=ClassifierModel(mixer=mixer, mixer_options=options, **{name: rest[name] for name in widths}),
        align=AlignConfig(epochs=rest["align_epochs"], batch_size=rest["batch_size"], **(align or {})),
        optim=replace(OPTIM, lr=rest["learning_rate"]),
        train=FinetuneConfig(epochs=rest["epochs"], batch_size=rest["batch_size"]),
        seed=seed,
    )


def _align(model: Any, train: Any, recipe: ClassifierRecipe) -> dict[str, float]:
    """Let the particles learn; return how far drift and noise move them, and what it does to the alignment.

    Returns:
        `alignment_before`, `alignment_after`; `drift_step`, `noise_step`: root mean square move of a particle in a
        step, by the drift of its batch and by noise; `moved`: between start and end; `outside`: share of the particles
        that lie beyond the radius at the start.
    """
    config, seen = recipe.align, list[Aligned]()
    starts = [omega.clone() for omega in particles(model)]
    norms = torch.cat([omega.norm(dim=-1).flatten() for omega in starts])
    check = [train.batch(index, config.batch_size) for index in range(config.check_batches)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)  # the table of phase A says it
        history = align_particles(
            model,
            lambda index: train.batch(index, config.batch_size),
            steps=config.epochs * train.num_batches(config.batch_size),
            config=config,
            check=check,
            seed=recipe.seed,
            report=seen.append,
        )
    moves = [(omega - start).square().sum(-1) for omega, start in zip(particles(model), starts, strict=True)]
    drifts = [config.step_size * state.drift for state in seen]
    return {
        "alignment_before": history[0].alignment,
        "alignment_after": history[-1].alignment,
        "drift_step": sum(drifts) / len(drifts),
        "noise_step": math.sqrt(2 * config.step_size / config.inverse_temperature * starts[0].shape[-1]),
        "moved": torch.cat([move.flatten() for move in moves]).mean().sqrt().item(),
        "outside": (norms > config.radius).float().mean().item(),
    }


def _finetune(model: Any, train: Any, recipe: ClassifierRecipe) -> None:
    """Let everything but the particles learn by cross-entropy."""
    freeze_particles(model)
    torch.manual_seed(recipe.seed)  # of the dropout
    model.train()
    epochs, size = recipe.train.epochs, recipe.train.batch_size
    steps, optimiser = epochs * train.num_batches(size), build_optimiser(model, recipe.optim)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, steps, recipe.optim) * group["lr_factor"]
        batch = train.batch(step, size)
        loss = F.cross_entropy(model(**batch.inputs()).logits.float(), batch.labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.clip)
        optimiser.step()


def _scores(p: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    scores, bins = classification_scores(p, labels), reliability(p, labels)
    found: dict[str, Any] = {name: getattr(scores, name).value for name in SCORES}
    ece = scores.calibration_error
    found |= {"calibration_low": ece.low, "calibration_high": ece.high}
    found["calibrated_error"] = scores.calibrated_error.value
    columns = (bins.count.tolist(), np.nan_to_num(bins.confidence).tolist(), np.nan_to_num(bins.accuracy).tolist())
    return found | {"bins": [list(row) for row in zip(*columns, strict=True)]}
