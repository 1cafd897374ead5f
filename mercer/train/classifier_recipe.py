"""Recipes of classifiers whose random features are learned from labels, in two phases.

Phase A, `mercer align RECIPE`: only the particles learn, everything else stays as initialised. Phase B,
`mercer finetune RECIPE`: the particles stay, everything else learns. Phase B alone is the "vanilla" classifier.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from mercer.train.recipe import OptimConfig, Precision, need

Alignment = Literal["within_class", "centered", "signed"]
Pool = Literal["mean", "first"]


@dataclasses.dataclass(frozen=True)
class LabelledConfig:
    """Which labelled texts are read, and how they become tokens."""

    source: str = "python-docstrings"  # what mercer.data.read_labelled takes
    text: str | None = None  # the column with the text; null: guessed from its name, as the next two
    pair: str | None = None
    label: str | None = None
    tokenizer: str = "bpe:8192"  # byte, bpe:VOCABULARY, or a folder with a pretrained tokenizer
    length: int = 128  # tokens of a text; what is longer is cut

    def __post_init__(self):
        need(self.length >= 2, "data.length", self.length, "must be at least 2")


@dataclasses.dataclass(frozen=True)
class ClassifierModel:
    """A BERT skeleton with a mixer; the defaults are the Coulomb paper's."""

    mixer: str = "particle"  # by default with features softplus, 256 of them; no options here: other mixers have none
    mixer_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    hidden_size: int = 128
    num_layers: int = 2
    num_heads: int = 2
    intermediate_size: int = 256
    dropout: float = 0.1
    projections: Literal["value", "all"] = "value"  # value: queries and keys are the layer's input itself
    pooling: Pool = "mean"

    def __post_init__(self):
        for name in ("hidden_size", "num_layers", "num_heads", "intermediate_size"):
            need(getattr(self, name) >= 1, f"model.{name}", getattr(self, name), "must be at least 1")
        need(0 <= self.dropout < 1, "model.dropout", self.dropout, "must lie in [0, 1)")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_heads ({self.num_heads}); "
                "change --model.hidden-size or --model.num-heads"
            )

    @property
    def size(self) -> str:
        """Return layers and width in a word."""
        return f"{self.num_layers}x{self.hidden_size}"


@dataclasses.dataclass(frozen=True)
class AlignConfig:
    """Phase A: projected Langevin steps of the particles, up the alignment and away from one another.

    The defaults are the Coulomb paper's. Measured noise-free every `check_every` steps on the first `check_batches`
    batches, the drift stops the phase when it falls to `tolerance`.
    """

    kind: Alignment = "within_class"  # centered is safer: within_class rewards collapse, see the documentation
    epochs: int = 10
    batch_size: int = 64
    step_size: float = 2e-3
    inverse_temperature: float = 50.0
    strength: float = 1e-3  # of the repulsion (lambda)
    exponent: float = 0.0  # s of the repulsion; 0: the logarithm
    clip: float = 10.0  # largest norm of the drift of a head
    radius: float = 1.5  # largest norm of a particle
    tolerance: float = 1e-6
    check_every: int = 0  # steps; 0: once an epoch
    check_batches: int = 4

    def __post_init__(self):
        need(self.batch_size >= 2, "align.batch_size", self.batch_size, "must be at least 2: alignment is over pairs")
        for name in ("epochs", "check_batches"):
            need(getattr(self, name) >= 1, f"align.{name}", getattr(self, name), "must be at least 1")
        for name in ("step_size", "inverse_temperature", "clip", "radius"):
            need(getattr(self, name) > 0, f"align.{name}", getattr(self, name), "must be above 0")
        for name in ("strength", "tolerance", "check_every"):
            need(getattr(self, name) >= 0, f"align.{name}", getattr(self, name), "must not be negative")
        need(self.exponent > -2, "align.exponent", self.exponent, "must be above -2, where the kernel repels")


@dataclasses.dataclass(frozen=True)
class FinetuneConfig:
    """Phase B: how long, how wide, how exact, and what is written on the way of either phase."""

    epochs: int = 10
    batch_size: int = 64  # texts in a batch, over all processes together
    precision: Precision = "float32"
    eval_every: int = 0  # steps between looks at the validation loss; 0: once an epoch
    checkpoint_every: int = 500  # steps between checkpoints; 0: only when interrupted
    keep: int = 2  # checkpoints kept, the newest ones
    shard: bool = False  # under torchrun: FSDP2 instead of DDP

    def __post_init__(self):
        for name in ("epochs", "batch_size", "keep"):
            need(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "must be at least 1")
        for name in ("eval_every", "checkpoint_every"):
            need(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "must not be negative")


# Learning rate, decay and warm-up: Coulomb paper, and BERT where it is silent.
OPTIM = OptimConfig(lr=2e-4, betas=(0.9, 0.999), weight_decay=0.01, warmup=0.1, min_lr_ratio=0.0, clip=1.0)


@dataclasses.dataclass(frozen=True)
class ClassifierRecipe:
    """A classifier, both of its phases: equal recipes on the same machine give equal numbers."""

    name: str
    data: LabelledConfig = LabelledConfig()
    model: ClassifierModel = ClassifierModel()
    align: AlignConfig = AlignConfig()
    optim: OptimConfig = OPTIM
    train: FinetuneConfig = FinetuneConfig()
    start: str | None = None  # of phase B: the folder of a run of phase A; null: random particles ("vanilla")
    seed: int = 0


def text_classifier() -> ClassifierRecipe:
    """Classify texts with the Coulomb paper's model: 2 layers, width 128, 256 particles a head, length 128.

    `mercer align text-classifier --data.source DATA`, then `mercer finetune text-classifier --from RUN`. The tokenizer
    is trained on the texts where the paper takes that of bert-base-uncased: `--data.tokenizer FOLDER`.
    """
    return ClassifierRecipe(name="text-classifier")


def tiny_classifier() -> ClassifierRecipe:
    """Classify texts with a model of two layers of width 32, in a minute: `mercer finetune tiny-classifier`."""
    return ClassifierRecipe(
        name="tiny-classifier",
        data=LabelledConfig(tokenizer="bpe:1024", length=32),
        model=ClassifierModel(
            hidden_size=32,
            num_heads=2,
            intermediate_size=64,
        ),
        align=AlignConfig(epochs=1, batch_size=32),
        optim=dataclasses.replace(OPTIM, lr=2e-3),
        train=FinetuneConfig(epochs=2, batch_size=32),
    )


CLASSIFIERS: dict[str, Callable[[], ClassifierRecipe]] = {
    "text-classifier": text_classifier,
    "tiny-classifier": tiny_classifier,
}
