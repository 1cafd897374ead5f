"""Recipes: functions that return everything a training run depends on, as one frozen record.

A recipe's docstring gives the command, the time and what came out. Every field has a dotted name on the
command line (`--optim.lr 1e-3`, `--model.mixer-options.share true`) and the same place in `config.yaml`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

Precision = Literal["float32", "bf16"]


def need(condition: bool, key: str, value: object, requirement: str) -> None:
    if not condition:
        raise ValueError(f"{key} ({value}) {requirement}")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read, and how it becomes windows of tokens."""

    source: str = "python-docs"  # a corpus name, a path, or hf:NAME[:CONFIG]
    tokenizer: str = "byte"  # byte, bpe:VOCABULARY, or a folder with a pretrained tokenizer
    length: int = 256  # tokens in a window
    validation_fraction: float = 0.05  # share of the documents kept for validation
    max_bytes: int | None = None  # read no further once this much text is read; null: all of it

    def __post_init__(self):
        need(self.length >= 2, "data.length", self.length, "must be at least 2: one token to read, one to predict")
        inside = 0 < self.validation_fraction < 1
        need(inside, "data.validation_fraction", self.validation_fraction, "must lie between 0 and 1")
        need(self.max_bytes is None or self.max_bytes >= 1, "data.max_bytes", self.max_bytes, "must be at least 1")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A size from the table, a mixer with its options; the four widths override the size where given."""

    size: str = "tiny"
    mixer: str = "softmax"
    mixer_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    intermediate_size: int | None = None

    def __post_init__(self):
        widths = self.widths()
        for name, width in widths.items():
            need(width >= 1, f"model.{name}", width, "must be at least 1")
        if self.hidden_size is not None and self.num_heads is not None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_heads ({self.num_heads}); "
                "change --model.hidden-size or --model.num-heads"
            )

    def widths(self) -> dict[str, int]:
        """Return the widths that override those of the size."""
        names = ("hidden_size", "num_layers", "num_heads", "intermediate_size")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW with warm-up and a cosine."""

    lr: float | None = None  # the highest learning rate; null: what the size's table line says
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    warmup: float = 0.01  # share of the steps
    min_lr_ratio: float = 0.1  # where the cosine ends, as a share of lr
    clip: float = 1.0  # largest norm of the gradient

    def __post_init__(self):
        need(self.lr is None or self.lr > 0, "optim.lr", self.lr, "must be above 0")
        need(all(0 <= b < 1 for b in self.betas), "optim.betas", self.betas, "must both lie in [0, 1)")
        need(self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "must not be negative")
        need(0 <= self.warmup < 1, "optim.warmup", self.warmup, "is a share of the steps: it must lie in [0, 1)")
        need(0 <= self.min_lr_ratio <= 1, "optim.min_lr_ratio", self.min_lr_ratio, "must lie in [0, 1]")
        need(self.clip > 0, "optim.clip", self.clip, "must be above 0")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How long, how wide, how exact, and what is written on the way."""

    steps: int = 1000
    batch_size: int = 32  # windows in a batch, over all processes together
    accumulate: int = 1  # batches in a step
    precision: Precision = "float32"
    eval_every: int = 100  # steps between looks at the validation loss; 0: only at the end
    eval_windows: int = 64  # windows of such a look
    final_eval_windows: int | None = None  # windows of the last evaluation; null: every one
    checkpoint_every: int = 500  # steps between checkpoints; 0: only when interrupted
    keep: int = 2  # checkpoints kept, the newest ones
    shard: bool = False  # under torchrun: FSDP2 instead of DDP

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulate", "eval_windows", "keep"):
            need(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "must be at least 1")
        for name in ("eval_every", "checkpoint_every"):
            need(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "must not be negative")
        windows = self.final_eval_windows
        need(windows is None or windows >= 1, "train.final_eval_windows", windows, "must be at least 1")


@dataclasses.dataclass(frozen=True)
class TuneConfig:
    """Where a finetuning starts, what of the model learns, and what from."""

    folder: str | None = None  # a converted model; null: train a model of `model.size` from scratch
    parameters: Literal["all", "attention", "mixers", "lora"] = "attention"
    teacher: float = 1.0  # share of the loss that follows the model's own softmax; the rest follows the text
    mixer_lr_factor: float = 30.0  # how much faster than the rest the mixers' own parameters learn
    rank: int = 16  # of the updates of lora

    def __post_init__(self):
        need(0 <= self.teacher <= 1, "tune.teacher", self.teacher, "is a share of the loss: it must lie in [0, 1]")
        need(self.mixer_lr_factor > 0, "tune.mixer_lr_factor", self.mixer_lr_factor, "must be above 0")
        need(self.rank >= 1, "tune.rank", self.rank, "must be at least 1")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One training run, whole: two runs with equal recipes on the same machine give equal losses."""

    name: str
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    tune: TuneConfig = TuneConfig()
    seed: int = 0

    @property
    def train_tokens(self) -> int:
        """Tokens read in the whole run."""
        return self.train.steps * self.train.accumulate * self.train.batch_size * self.data.length


def demo() -> Recipe:
    """Train a 4-layer model on the sources of Python's own standard library: real text, nothing to download.

    `mercer compare demo --jobs 2` trains softmax, deltaformer and cubit with three seeds each, in about four minutes on
    two cores. Measured, nats per token: softmax 5.724 +- 0.034, deltaformer 5.424 +- 0.028, cubit 5.237 +- 0.028.
    """
    return Recipe(
        name="demo",
        data=DataConfig(source="python-source", tokenizer="bpe:2048", length=128, validation_fraction=0.05),
        model=ModelConfig(size="tiny"),
        optim=OptimConfig(lr=2e-3, warmup=0.1),
        train=TrainConfig(
            steps=120, batch_size=16, eval_every=30, eval_windows=64, final_eval_windows=256, checkpoint_every=60
        ),
    )


def tiny() -> Recipe:
    """Train a 4 x 128 model on any text, in minutes on a laptop: `mercer train tiny --data.source my.txt`."""
    return Recipe(
        name="tiny",
        data=DataConfig(source="python-docs", tokenizer="byte", length=256),
        model=ModelConfig(size="tiny"),
        optim=OptimConfig(warmup=0.05),
        train=TrainConfig(steps=1000, batch_size=16, eval_every=100),
    )


def small() -> Recipe:
    """Train a 6 x 256 model on any text, in hours on a laptop: `mercer train small --data.source my_folder`."""
    return Recipe(
        name="small",
        data=DataConfig(source="python-source", tokenizer="bpe:4096", length=512),
        model=ModelConfig(size="small"),
        optim=OptimConfig(warmup=0.02),
        train=TrainConfig(steps=5000, batch_size=32, eval_every=250),
    )


def finetune() -> Recipe:
    """Finetune a converted model, to predict what it did with its own softmax: `mercer finetune DIR --source TEXT`."""
    return Recipe(
        name="finetune",
        data=DataConfig(source="python-docs", length=512, max_bytes=50_000_000),
        model=ModelConfig(size="pretrained"),
        optim=OptimConfig(lr=1e-4, weight_decay=0.0, warmup=0.1),
        train=TrainConfig(steps=200, batch_size=1, eval_every=50, eval_windows=4, final_eval_windows=8),
    )


def _cubit(size: str) -> Recipe:
    """The set-up of the Cubit paper: length 512, batch 32, 50 000 steps; schedule and decay of its base code.

    4 GB of text are somewhat more than the 819 million tokens of the run.
    """
    return Recipe(
        name=f"cubit-{size}",
        data=DataConfig(
            source="hf:HuggingFaceFW/fineweb-edu:sample-10BT",
            tokenizer="bpe:32768",
            length=512,
            validation_fraction=0.005,
            max_bytes=4_000_000_000,
        ),
        model=ModelConfig(size=size, mixer="cubit"),
        optim=OptimConfig(betas=(0.9, 0.95), weight_decay=0.1, warmup=0.01, min_lr_ratio=0.1, clip=1.0),
        train=TrainConfig(steps=50_000, batch_size=32, eval_every=1000, eval_windows=256, checkpoint_every=1000),
    )


def cubit_125m() -> Recipe:
    """Train the paper's 125M Cubit on FineWeb-Edu, length 512: `mercer train cubit-125m`, on a GPU.

    The paper reports 3.7110 nats per token after 50 000 steps (Transformer 3.7443, DeltaFormer 3.7242) with
    another vocabulary, so compare with `--model.mixer softmax` of your own and not with that figure.
    """
    return _cubit("125m")


def cubit_350m() -> Recipe:
    """Train the paper's 350M Cubit on FineWeb-Edu: `torchrun --nproc-per-node 8 -m mercer.cli train cubit-350m`.

    The paper reports 3.3166 nats per token at length 1024 (Transformer 3.3438, DeltaFormer 3.3284).
    """
    return _cubit("350m")


def cubit_1_3b() -> Recipe:
    """Train the paper's 1.3B Cubit, sharded: `torchrun ... -m mercer.cli train cubit-1.3b --train.shard true`.

    The paper reports 3.1849 nats per token at length 1024 (Transformer 3.2100, DeltaFormer 3.2057); it does not
    give the widths or the learning rate of this size, so those are ours.
    """
    return _cubit("1.3b")


RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo": demo,
    "tiny": tiny,
    "small": small,
    "finetune": finetune,
    "cubit-125m": cubit_125m,
    "cubit-350m": cubit_350m,
    "cubit-1.3b": cubit_1_3b,
}
