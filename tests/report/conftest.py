"""Run records made by formula, so that every mean in a test can be done by hand."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from mercer.train.record import Run


def build_run(mixer: str = "softmax", seed: int = 0, loss: float | None = 2.0, **changes: Any) -> Run:
    """Return a finished run whose validation loss is `loss` in every place."""
    config = {
        "name": "demo",
        "data": {"source": "python-source", "length": 256},
        "model": {"size": "tiny", "mixer": mixer, "mixer_options": changes.get("mixer_options", {})},
        "train": {"steps": 200},
        "seed": seed,
    }
    value = math.nan if loss is None else loss
    run = Run(
        run_id=f"demo-{mixer}-s{seed}",
        recipe="demo",
        mixer=mixer,
        mixer_options={},
        size="tiny",
        seed=seed,
        commit="0123abc",
        created=f"2026-01-0{seed % 9 + 1}T00:00:00+00:00",
        command=f"mercer compare demo --mixers softmax,{mixer} --seeds 3",
        versions={"python": "3.11.7", "torch": "2.13.0+cpu", "mercer": "0.1.0"},
        device="cpu",
        num_threads=2,
        parameters=1_053_184,
        train_tokens=819_200,
        steps=200,
        valid_loss=loss,
        bits_per_byte=None if loss is None else value / math.log(2),
        perplexity=None if loss is None else math.exp(value),
        tokens_per_second=20_000.0,
        train_seconds=41.0,
        peak_memory_bytes=600 * 2**20,
        loss_by_position=[[2.0**n - 1, 2.0 ** (n + 1) - 1, value + 1 / (n + 1), 1000.0 * 2**n] for n in range(8)],
        curve=[
            {
                "step": s,
                "train_loss": value + 30 / s,
                "valid_loss": value + 40 / s if s % 50 == 0 else None,
                "learning_rate": 1e-3,
            }
            for s in range(10, 201, 10)
        ],
        config=config,
        status="done",
    )
    return dataclasses.replace(run, **changes)


@pytest.fixture
def make_run() -> Callable[..., Run]:
    return build_run


@pytest.fixture
def three_mixers() -> list[Run]:
    """Softmax, a mixer that is better at every seed by about 0.02, and one that is level."""
    losses = {
        "softmax": (2.10, 2.14, 2.12),
        "cubit": (2.08, 2.121, 2.099),
        "deltaformer": (2.12, 2.11, 2.13),
    }
    return [build_run(mixer, seed, loss) for mixer, row in losses.items() for seed, loss in enumerate(row)]
