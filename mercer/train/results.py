"""The end of a run: its record, and its model as a folder anyone can load."""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mercer.evaluate.perplexity import Evaluation
from mercer.train import config, record
from mercer.train.checkpoint import Position, replace_text
from mercer.train.distribution import World, whole
from mercer.train.folder import curve
from mercer.train.recipe import Recipe


def make_run(
    status: record.Status,
    evaluation: Evaluation | None,
    *,
    recipe: Recipe,
    created: str,
    device: str,
    parameters: int,
    position: Position,
    rows: list[dict[str, Any]],
    measures: dict[str, Any],
) -> record.Run:
    """Put together what results.json holds of a language model."""
    return run_record(
        status,
        recipe=recipe,
        created=created,
        device=device,
        parameters=parameters,
        position=position,
        rows=rows,
        tokens=position.batches * recipe.train.batch_size * recipe.data.length,
        valid_loss=evaluation and evaluation.loss,
        bits_per_byte=evaluation and evaluation.bits_per_byte,
        perplexity=evaluation and evaluation.perplexity,
        loss_by_position=[list(bucket) for bucket in evaluation.loss_by_position] if evaluation else [],
        measures=measures,
    )


def run_record(
    status: record.Status,
    *,
    recipe: Any,
    created: str,
    device: str,
    parameters: int,
    position: Position,
    rows: list[dict[str, Any]],
    tokens: int,
    **figures: Any,
) -> record.Run:
    """Put together what every results.json holds; `figures` are what this kind of run was measured by."""
    digest = hashlib.sha256(config.write_yaml(recipe).encode()).hexdigest()[:8]
    return record.Run(
        run_id=f"{recipe.name}-{recipe.model.mixer}-s{recipe.seed}-{digest}",
        recipe=recipe.name,
        mixer=recipe.model.mixer,
        mixer_options=recipe.model.mixer_options,
        size=recipe.model.size,
        seed=recipe.seed,
        commit=record.commit(),
        created=created,
        command=record.command_line(),
        versions=record.versions(),
        device=device,
        num_threads=torch.get_num_threads(),
        parameters=parameters,
        train_tokens=tokens,
        steps=position.step,
        tokens_per_second=tokens / position.seconds if position.seconds else 0.0,
        train_seconds=position.seconds,
        peak_memory_bytes=record.peak_memory_bytes(device),
        curve=curve(rows),
        config=config.to_dict(recipe),
        status=status,
        **{"valid_loss": None, "bits_per_byte": None, "perplexity": None, "loss_by_position": []} | figures,
    )


def save_model(path: Path, model: Any, tokenizer: Any, card: str, world: World) -> None:
    """Write weights, tokenizer and card aside and rename; of a sharded model the main process writes the whole.

    Raises:
        OSError: the disk refused; the checkpoints are as they were.
    """
    weights = _gathered(model) if any(whole(p) is not p for p in model.parameters()) else None
    if not world.is_main:
        return
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside, state_dict=weights)
    tokenizer.save_pretrained(aside)
    replace_text(aside / "README.md", card)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(aside, path)


def _gathered(model: Any) -> dict[str, Tensor]:
    """Return the state of a sharded model whole; tied weights stay one tensor."""
    kept = model.state_dict(keep_vars=True)
    whole_of = {id(tensor): whole(tensor.detach()).cpu() for tensor in kept.values()}
    return {name: whole_of[id(tensor)] for name, tensor in kept.items()}


def card(run: record.Run) -> str:
    """Return the text of a model card: what it is, what it was trained on, how good it is, how to load it."""
    data = run.config["data"]
    options = ", ".join(f"{key}={value}" for key, value in run.mixer_options.items()) or "none"
    loss = f"{run.valid_loss:.4f} nats per token, {run.bits_per_byte:.4f} bits per byte"
    return f"""---
library_name: transformers
tags: [mercer, {run.mixer}]
---
# {run.run_id}

A language model of size {run.size} ({run.parameters:,} parameters), token mixer `{run.mixer}`, options: {options}.
Trained with mercer {run.versions["mercer"]} on `{data["source"]}`: {run.train_tokens:,} tokens in windows of
{data["length"]}. Validation loss: {loss}.

```python
import mercer
from transformers import AutoTokenizer

model = mercer.load("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

Written by `{run.command}`.
"""
