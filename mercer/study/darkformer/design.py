"""What the DARKFormer study varies: methods, parts, conditions.

Source: DARKFormer (arXiv:2603.04127), sec. 5; sizes, near field and the taught method are ours.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mercer.errors import unknown

NEAR = {"window": 64, "sinks": 4}


@dataclass(frozen=True)
class Method:
    """A mixer, and what is done before and while the model is finetuned."""

    mixer: str
    options: dict[str, Any] = field(default_factory=dict)
    calibrate: tuple[str, ...] = ()  # modes of mercer.calibrate, in order
    align: bool = False  # attention transfer first
    teacher: float = 0.0  # share of the loss that follows the model with its softmax
    hybrid: bool = False  # some layers keep their softmax


METHODS = {
    "softmax": Method("softmax"),
    "darkformer, near, taught": Method("darkformer", {**NEAR, "center": True}, ("center",), align=True, teacher=1.0),
    "darkformer, hybrid, taught": Method(
        "darkformer", {**NEAR, "center": True}, ("center",), align=True, teacher=1.0, hybrid=True
    ),
    "window, hybrid, taught": Method("window", NEAR, teacher=1.0, hybrid=True),
    "window": Method("window", NEAR),
    "window, taught": Method("window", NEAR, teacher=1.0),
    "darkformer, near": Method("darkformer", {**NEAR, "center": True}, ("center",)),
    "darkformer": Method("darkformer"),
    "darkformer, whitened": Method("darkformer", calibrate=("whiten",)),
    "performer": Method("performer"),
    "lfk": Method("lfk"),
    "constant": Method("constant"),
    "random": Method("random"),
}
LOOKS = {  # each is drawn as a mixer of the house style
    "softmax": "softmax",
    "darkformer, near, taught": "cubit",
    "darkformer, hybrid, taught": "particle",
    "window, hybrid, taught": "window",
    "window": "window",
    "window, taught": "local_linear",
    "darkformer, near": "linear_cubit",
    "darkformer": "darkformer",
    "darkformer, whitened": "deltaformer",
    "performer": "performer",
    "lfk": "lfk",
    "constant": "constant",
    "random": "random",
}
BASE = "softmax"
PARTS = ("methods", "full", "features", "rates")
COMPARED = ("darkformer", "performer")  # in the parts on features and learning rates


@dataclass(frozen=True)
class Settings:
    """What is varied, and what all trials share."""

    model: str  # a folder of transformers, with its tokenizer
    source: str = "python-docs"
    layers: str = "all"
    keep: tuple[int, ...] = ()  # layers that keep their softmax in the hybrid methods
    methods: tuple[str, ...] | None = None  # None: all, the hybrid ones only with `keep`
    parts: tuple[str, ...] = PARTS
    steps: int = 24
    length: int = 256
    learning_rate: float = 1e-4
    num_features: int = 128
    features: tuple[int, ...] = (64, 128, 256)
    rates: tuple[float, ...] = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    align_steps: int = 24
    windows: int = 4
    looks: int = 4  # evaluations on the way, the one before the first step not counted
    distances: tuple[int, ...] = (32, 192)
    questions: int = 8

    @property
    def compared(self) -> tuple[str, ...]:
        """The methods that meet."""
        if self.methods is not None:
            return self.methods
        return tuple(name for name, method in METHODS.items() if self.keep or not method.hybrid)

    def shared(self) -> dict[str, Any]:
        """Return what every condition holds."""
        varied = ("methods", "parts", "features", "rates", "num_features", "learning_rate")
        return {key: value for key, value in asdict(self).items() if key not in varied}


def conditions(settings: Settings) -> list[dict[str, Any]]:
    """Return the conditions of the parts asked for, in the order of the parts, each once.

    >>> found = conditions(Settings("model", methods=("softmax", "darkformer"), parts=("methods", "features")))
    >>> [(c["method"], c["parameters"], c["num_features"]) for c in found][:3]
    [('softmax', 'attention', 128), ('darkformer', 'attention', 128), ('darkformer', 'attention', 64)]
    """
    usual = {
        "parameters": "attention",
        "num_features": settings.num_features,
        "learning_rate": settings.learning_rate,
        **settings.shared(),
    }
    methods = settings.compared
    compared = [name for name in methods if name in COMPARED]
    found = {
        "methods": [usual | {"method": name} for name in methods],
        "full": [usual | {"method": name, "parameters": "all"} for name in methods],
        "features": [usual | {"method": name, "num_features": m} for m in settings.features for name in compared],
        "rates": [
            usual | {"method": name, "parameters": "all", "learning_rate": rate}
            for rate in settings.rates
            for name in compared
        ],
    }
    unique: list[dict[str, Any]] = []
    for part in PARTS:
        unique += [c for c in found[part] if part in settings.parts and c not in unique]
    return unique


def check(settings: Settings, seeds: Sequence[int]) -> None:
    """Raise ValueError for a method or part that is none, or a number that is out of range."""
    for kind, names, known in (("method", settings.compared, METHODS), ("part", settings.parts, PARTS)):
        for name in names:
            if name not in known:
                raise unknown(kind, name, known)
    hybrid = [name for name in settings.compared if METHODS[name].hybrid]
    if hybrid and not settings.keep:
        raise ValueError(f"{hybrid[0]!r} keeps the softmax of some layers; say of which with keep (--keep 18,20,23)")
    for name in ("steps", "align_steps", "windows", "looks", "questions"):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} ({getattr(settings, name)}) must be at least 1")
    if settings.steps % settings.looks:
        raise ValueError(f"steps ({settings.steps}) must be a multiple of looks ({settings.looks})")
    if not seeds:
        raise ValueError("no trials; ask for at least one, and for 3 if a standard error is wanted")
