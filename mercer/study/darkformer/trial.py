"""One trial of the DARKFormer study: convert, calibrate, align, finetune, measure."""

import copy
import functools
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from mercer.evaluate.perplexity import evaluate, forward
from mercer.evaluate.recall import filler_of, recall
from mercer.hf import attach, calibrate
from mercer.hf.source import find_source, read_model
from mercer.mixers import mixer_options
from mercer.study.darkformer.design import METHODS, Method
from mercer.train import setup, tuning
from mercer.train.align import align
from mercer.train.loop import spaced
from mercer.train.optimiser import build_optimiser, learning_rate
from mercer.train.recipe import DataConfig, OptimConfig, TuneConfig

SPIKE = 0.5  # nats above the median of the last steps


def trial(*, seed: int, method: str, model: str, num_features: int, layers: str, **rest: Any) -> dict[str, float]:
    """Finetune a pretrained model with one method in place of its attention, and measure it on the way and after.

    Returns:
        `loss@S`, `accuracy@S` after S steps on held-out text; `spikes` of the training loss; `recall@D` over D tokens;
        `error`, `window_error` and `uniform_error`: mean over the layers, where the method was aligned.
    """
    tokenizer, data = _data(model, rest["source"], rest["length"], seed)
    chosen = METHODS[method]
    known = mixer_options(chosen.mixer)
    options = dict(chosen.options) | ({"num_features": num_features} if "num_features" in known else {})
    options |= {"seed": seed} if "seed" in known else {}
    keep = rest["keep"] if chosen.hybrid else ()
    mixed = attach(copy.deepcopy(_original(model)), chosen.mixer, layers=layers, keep=keep, **options)
    teacher = tuning.teacher_of(mixed) if chosen.teacher else None
    found = _prepare(mixed, chosen, data, rest["align_steps"], rest["windows"])
    tuning.free(mixed, rest["parameters"])
    found |= _finetune(mixed, teacher, chosen, data, rest)
    longest = max(rest["distances"])
    filler = filler_of(data.validation.sequential(4), tokenizer, 4 * longest + 64)
    answers = recall(mixed, tokenizer, filler, rest["distances"], trials=rest["questions"], seed=seed)
    return found | {f"recall@{row.distance}": row.accuracy for row in answers}


@functools.lru_cache(maxsize=1)
def _original(folder: str) -> Any:
    return read_model(find_source(folder), torch.float32)


@functools.lru_cache(maxsize=2)
def _data(folder: str, source: str, length: int, seed: int) -> tuple[Any, Any]:
    return setup.load_data(DataConfig(source=source, tokenizer=folder, length=length, max_bytes=20_000_000), seed, None)


def _prepare(mixed: Any, method: Method, data: Any, steps: int, windows: int) -> dict[str, float]:
    """Calibrate and align; return the errors of the layers afterwards, for an aligned method."""
    for mode in method.calibrate:
        calibrate(mixed, [data.train.batch(index, 1) for index in range(4)], mode=mode)
    if not method.align:
        return {}
    heldout = list(spaced(data.validation, 1, windows))
    after = align(mixed, lambda index: data.train.batch(index, 1), heldout, steps=steps).after.layers
    columns = {"error": "error", "window_error": "window", "uniform_error": "uniform"}
    return {name: statistics.fmean(getattr(row, column) for row in after) for name, column in columns.items()}


def _finetune(mixed: Any, teacher: Any, method: Method, data: Any, rest: Any) -> dict[str, float]:
    """Take the steps, looking at the held-out text evenly on the way."""
    steps, found, losses = rest["steps"], {}, []
    config = OptimConfig(lr=rest["learning_rate"], weight_decay=0.0, warmup=0.1)
    learns = any(p.requires_grad for p in mixed.parameters())
    optimiser = build_optimiser(mixed, config, TuneConfig().mixer_lr_factor) if learns else None

    def look(step: int) -> None:
        seen = evaluate(mixed, spaced(data.validation, 1, rest["windows"]))
        found.update({f"loss@{step}": seen.loss, f"accuracy@{step}": seen.accuracy})

    look(0)
    for step in range(steps):
        if optimiser is not None:
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(step, steps, config) * group["lr_factor"]
            losses.append(_step(mixed, teacher, method.teacher, data.train.batch(step, 1), optimiser))
        if (step + 1) % (steps // rest["looks"]) == 0:
            look(step + 1)
    return found | {"spikes": float(spikes(losses))}


def _step(mixed: Any, teacher: Any, share: float, batch: Any, optimiser: Any) -> float:
    mixed.train()
    logits = forward(mixed, batch)
    with torch.no_grad():
        taught = None if teacher is None else forward(teacher, batch)
    predicted = (batch.labels[:, 1:] != -100).sum()
    loss = tuning.losses(logits, taught, batch.labels, share).sum() / predicted
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(mixed.parameters(), 1.0)
    optimiser.step()
    return loss.item()


def spikes(losses: Sequence[float]) -> int:
    """Count the steps whose loss lies half a nat or more above the median of the eight before, or is not finite.

    >>> spikes([3.0] * 8 + [3.4, 3.6, 3.0, float("nan")])
    2
    """
    places = range(1, len(losses))
    return sum(not losses[i] < statistics.median(losses[max(0, i - 8) : i]) + SPIKE for i in places)
