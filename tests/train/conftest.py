"""A text of many small documents and a recipe that trains on it in a second."""

import json
import random

import pytest

from mercer.train.recipe import DataConfig, ModelConfig, OptimConfig, Recipe, TrainConfig

WORDS = ("the", "a", "cat", "dog", "sees", "hears", "runs", "sleeps", "under", "over", "near", "house", "tree", "river")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Return the path of 60 documents, the same in every session."""
    draw = random.Random(0)
    file = tmp_path_factory.mktemp("text") / "documents.jsonl"
    texts = (" ".join(draw.choices(WORDS, k=draw.randrange(5, 60))) for _ in range(60))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Keep tokens out of the user's cache."""
    monkeypatch.setenv("MERCER_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def recipe(corpus):
    """Return a recipe of six steps."""
    return Recipe(
        name="tiny",
        data=DataConfig(source=str(corpus), tokenizer="byte", length=32, validation_fraction=0.2),
        model=ModelConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64),
        optim=OptimConfig(lr=1e-2, warmup=0.2),
        train=TrainConfig(steps=6, batch_size=4, eval_every=2, eval_windows=8, checkpoint_every=3),
    )
