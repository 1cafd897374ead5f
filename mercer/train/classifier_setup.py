"""From a classifier's recipe to what its phases work on: labelled tokens and the model."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch

from mercer.data import EncodedSplit, build_tokenizer, encode, read_labelled
from mercer.data.packages import require
from mercer.data.stream import default_cache_dir
from mercer.errors import CheckpointError
from mercer.hf import Size, from_scratch, load
from mercer.mixers import build_mixer
from mercer.train import config
from mercer.train.classifier_recipe import CLASSIFIERS, ClassifierRecipe, LabelledConfig
from mercer.train.folder import RunFolder


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledTokens:
    """Labelled texts as tokens, split by split."""

    tokenizer: Any
    classes: tuple[str, ...]
    splits: dict[str, EncodedSplit]
    note: str

    @property
    def train(self) -> EncodedSplit:
        """The texts to learn from."""
        return self.splits["train"]

    @property
    def held_out(self) -> dict[str, EncodedSplit]:
        """The texts to measure on: validation, and test where there is one."""
        return {name: split for name, split in self.splits.items() if name != "train"}


@functools.lru_cache(maxsize=2)
def load_labelled(data: LabelledConfig, seed: int, cache_dir: Path | None = None) -> LabelledTokens:
    """Read and encode the texts of a recipe; the runs of one process share them.

    Raises:
        ValueError: no such source, column or tokenizer.
        FileNotFoundError: no such file.
        DataError: the texts cannot be used.
    """
    read = read_labelled(data.source, text=data.text, pair=data.pair, label=data.label)
    texts = [*read.train.texts, *(read.train.pairs or ())]
    tokenizer = build_tokenizer(data.tokenizer, texts, cache_dir or default_cache_dir())
    splits = {name: encode(split, tokenizer, data.length, seed=seed) for name, split in read.splits.items()}
    cut, total = (sum(getattr(s, name) for s in splits.values()) for name in ("num_truncated", "num_examples"))
    notes = [read.note] if read.note else []
    notes += [f"{cut} of {total} texts are cut to {data.length} tokens"] if cut else []
    return LabelledTokens(tokenizer, read.classes, splits, "; ".join(notes))


def check_recipe(recipe: ClassifierRecipe, *, aligns: bool) -> None:
    """Check what a phase needs before anything is read or written.

    Raises:
        ValueError: an unknown mixer or option, a value the mixer refuses, directions that are redrawn, or, for a phase
            that aligns, a mixer without random features.
    """
    model = recipe.model
    with torch.device("meta"):  # the mixer itself knows which options, and which values of them, it takes
        mixer = build_mixer(
            model.mixer,
            num_heads=model.num_heads,
            head_dim=model.hidden_size // model.num_heads,
            hidden_size=model.hidden_size,
            causal=False,
            **model.mixer_options,
        )
    features = getattr(mixer, "features", None)
    if aligns and features is None:
        raise ValueError(f"mixer {model.mixer!r} has no random features to align; use --model.mixer particle")
    if features is not None and features.redraw_steps is not None:
        raise ValueError(
            f"redraw_steps ({features.redraw_steps}) would replace the particles by random directions; leave it out"
        )
    if not aligns:
        require("sklearn.metrics", extra="particles", purpose="scoring a classifier")  # not after the training


def build_classifier(recipe: ClassifierRecipe, tokens: LabelledTokens) -> Any:
    """Build the model a recipe describes, from its seed."""
    model = recipe.model
    widths = (model.hidden_size, model.num_layers, model.num_heads, model.intermediate_size)
    return from_scratch(
        Size(*widths, learning_rate=recipe.optim.lr or 0.0),
        model.mixer,
        kind="classifier",
        vocab_size=len(tokens.tokenizer),
        max_length=recipe.data.length,
        seed=recipe.seed,
        num_labels=len(tokens.classes),
        mixer_options=dict(model.mixer_options),
        projections=model.projections,
        pooling=model.pooling,
        dropout=model.dropout,
        pad_token_id=tokens.tokenizer.pad_token_id,
        bos_token_id=tokens.tokenizer.bos_token_id,
        eos_token_id=tokens.tokenizer.eos_token_id,
    )


def aligned_recipe(run: str | Path) -> ClassifierRecipe:
    """Return the recipe of a finished run of phase A.

    Raises:
        FileNotFoundError: no such run, or it has not been finished.
        ValueError: it is of another kind.
    """
    folder = RunFolder(Path(run))
    if not folder.config.is_file():
        raise FileNotFoundError(f"{run} holds no run; give the folder that `mercer align RECIPE` wrote")
    try:
        recipe = config.from_dict(config.read_yaml(folder.config), CLASSIFIERS)
    except ValueError as error:
        raise ValueError(f"{run} is no run of an aligned classifier ({error}); see mercer list recipes") from error
    if not (folder.model / "config.json").is_file():
        raise FileNotFoundError(f"{run} has no model/ yet; finish it with mercer align --resume")
    return recipe


def start_from(recipe: ClassifierRecipe) -> ClassifierRecipe:
    """Return the recipe with the tokenizer of the run it starts from, once its model is that run's.

    Raises:
        ValueError: the recipe asks for another model than the run aligned.
    """
    assert recipe.start is not None
    aligned = aligned_recipe(recipe.start)
    wanted, given = (dataclasses.asdict(r.model) | {"length": r.data.length} for r in (recipe, aligned))
    for key, value in wanted.items():
        if value != given[key]:
            raise ValueError(
                f"{recipe.start} aligned a model with {key} {given[key]}, not {value}; leave that setting out, or "
                "align again"
            )
    tokenizer = str(RunFolder(Path(recipe.start)).model)
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, tokenizer=tokenizer))


def load_aligned(recipe: ClassifierRecipe, tokens: LabelledTokens) -> Any:
    """Load the model that phase A left.

    Raises:
        CheckpointError: it is damaged.
        ValueError: it was made for another number of classes.
    """
    assert recipe.start is not None
    model = load(RunFolder(Path(recipe.start)).model)
    if model.config.num_labels != len(tokens.classes):
        raise ValueError(
            f"{recipe.start} was aligned for {model.config.num_labels} classes and {recipe.data.source} has "
            f"{len(tokens.classes)}; align again on it"
        )
    if model.config.vocab_size != len(tokens.tokenizer):
        raise CheckpointError(
            f"{recipe.start}: the model has {model.config.vocab_size} tokens, its tokenizer {len(tokens.tokenizer)}"
        )
    return model
