"""From a recipe to what a run works on: the tokenizer, the packed data and the model."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from mercer.data import build_tokenizer, prepare, read_documents
from mercer.data.stream import default_cache_dir
from mercer.errors import unknown
from mercer.hf import SIZES, from_scratch
from mercer.mixers import build_mixer
from mercer.train.recipe import DataConfig, ModelConfig, Recipe


def resolve(recipe: Recipe) -> Recipe:
    """Check the names a recipe uses, and fill in the size's learning rate where it gives none.

    Raises:
        ValueError: an unknown size, mixer or mixer option, a value the mixer refuses, or widths that do not divide.
    """
    model = recipe.model
    if recipe.tune.folder is not None:  # the folder decides the model
        if recipe.optim.lr is None:
            raise ValueError("optim.lr (null) has no default in a finetuning; give a number, as --optim.lr 1e-4")
        if recipe.tune.parameters == "lora" and recipe.train.shard:
            raise ValueError("train.shard (true) and tune.parameters (lora): sharded updates cannot be merged; use DDP")
        return recipe
    if recipe.name == "finetune":
        raise ValueError("tune.folder is not set; give the converted model: mercer finetune DIR")
    if model.size not in SIZES:
        raise unknown("size", model.size, SIZES)
    size = model_size(model)
    if size.hidden_size % size.num_heads:
        raise ValueError(
            f"hidden_size ({size.hidden_size}) must be a multiple of num_heads ({size.num_heads}); "
            "change --model.hidden-size or --model.num-heads"
        )
    with torch.device("meta"):  # the mixer itself knows which options, and which values of them, it takes
        head_dim = size.hidden_size // size.num_heads
        build_mixer(
            model.mixer,
            num_heads=size.num_heads,
            head_dim=head_dim,
            hidden_size=size.hidden_size,
            **model.mixer_options,
        )
    if recipe.optim.lr is None:
        return dataclasses.replace(recipe, optim=dataclasses.replace(recipe.optim, lr=size.learning_rate))
    return recipe


def model_size(model: ModelConfig) -> Any:
    """Return the table's size with the recipe's own widths in it."""
    return dataclasses.replace(SIZES[model.size], **model.widths())


@functools.lru_cache(maxsize=2)
def load_data(config: DataConfig, seed: int, cache_dir: Path | None) -> tuple[Any, Any]:
    """Return the tokenizer and the packed data; the runs of one process share them.

    Raises:
        FileNotFoundError: the source does not exist.
        DataError: it is empty, binary or shorter than a window.
    """
    cache_dir = cache_dir or default_cache_dir()
    tokenizer = build_tokenizer(config.tokenizer, read_documents(config.source), cache_dir)
    return tokenizer, pack(config, tokenizer, seed, cache_dir)


def pack(config: DataConfig, tokenizer: Any, seed: int, cache_dir: Path | None) -> Any:
    """Return the packed data under a tokenizer at hand; errors are those of `load_data`."""
    return prepare(
        config.source,
        tokenizer,
        length=config.length,
        validation_fraction=config.validation_fraction,
        seed=seed,
        cache_dir=cache_dir or default_cache_dir(),
        max_bytes=config.max_bytes,
    )


def build_model(recipe: Recipe, tokenizer: Any, device: torch.device) -> Any:
    """Build the model a recipe describes, from its seed, on the device."""
    model = from_scratch(
        model_size(recipe.model) if recipe.model.widths() else recipe.model.size,
        recipe.model.mixer,
        vocab_size=len(tokenizer),
        max_length=recipe.data.length,
        seed=recipe.seed,
        mixer_options=dict(recipe.model.mixer_options),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return model.to(device)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """As much of a tokenizer as a model's shape depends on."""

    size: int
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __len__(self) -> int:
        return self.size


def vocabulary(config: DataConfig) -> Any:
    """Return the vocabulary of a tokenizer without reading the text a BPE would be trained on."""
    kind, _, size = config.tokenizer.partition(":")
    if kind == "bpe" and size.isdecimal():
        return Vocabulary(int(size))
    return build_tokenizer(config.tokenizer, [], None)
