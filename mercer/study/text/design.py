"""What the text study varies: feature maps, learned or not, damage; and how large the model is.

Source: Coulomb paper (arXiv:2607.23869), sec. 3, Tables 1-3; small sizes and the sharp variant are ours.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from mercer.errors import unknown
from mercer.train.classifier_recipe import AlignConfig, Alignment

MAPS = ("softplus", "favor", "elu", "sigmoid2", "softmaxfeat", "cos2", "porf_softplus")
BASES = ("softmax", "performer")  # mixers without learned particles
VARIANTS = ("vanilla", "learned", "sharp")
PARTS = ("methods", "robustness")
DAMAGES = ("drop", "typos")


@dataclass(frozen=True)
class Size:
    """How large the model is, and how long it learns."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    num_features: int
    length: int
    tokenizer: str
    texts: int  # training texts, drawn anew for each seed; 0: all
    align_epochs: int
    epochs: int
    learning_rate: float
    batch_size: int = 64


SIZES = {
    "small": Size(64, 2, 2, 128, 64, 32, "bpe:2048", 3000, 2, 5, 2e-3),
    "paper": Size(128, 2, 2, 256, 256, 128, "bpe:8192", 0, 10, 10, 2e-4),
}


@dataclass(frozen=True)
class Settings:
    """What is varied, and what all trials share; `sharp_` settings are those of the second learned variant."""

    source: str = "python-docstrings"
    text: str | None = None
    pair: str | None = None
    label: str | None = None
    size: Size = SIZES["small"]
    maps: tuple[str, ...] = MAPS
    variants: tuple[str, ...] = VARIANTS
    parts: tuple[str, ...] = PARTS
    levels: tuple[float, ...] = (0.1, 0.2, 0.4)  # of damage to the test texts
    label_noise: tuple[float, ...] = (0.2, 0.4)  # shares of training labels that are wrong
    noise_map: str = "softplus"
    sharp_kind: str = "centered"
    sharp_inverse_temperature: float = 1e8
    sharp_step_size: float = 10.0
    sharp_strength: float = 1e-5

    def align(self, variant: str) -> dict[str, Any] | None:
        """Return how the particles of a variant learn; None: they do not."""
        if variant == "sharp":
            return {
                "kind": self.sharp_kind,
                "inverse_temperature": self.sharp_inverse_temperature,
                "step_size": self.sharp_step_size,
                "strength": self.sharp_strength,
            }
        usual = AlignConfig()
        names = ("kind", "inverse_temperature", "step_size", "strength")
        return {name: getattr(usual, name) for name in names} if variant == "learned" else None


def conditions(settings: Settings) -> list[dict[str, Any]]:
    """Return the conditions, most important first: vanilla against learned, label noise, then the sharp variant.

    >>> found = conditions(Settings(maps=("elu",), noise_map="elu"))
    >>> [(c["method"], c["variant"]) for c in found if not c["label_noise"]]
    [('softmax', 'exact'), ('performer', 'vanilla'), ('elu', 'vanilla'), ('elu', 'learned'), ('elu', 'sharp')]
    """
    read = {name: getattr(settings, name) for name in ("source", "text", "pair", "label")}
    shared = read | asdict(settings.size) | {"levels": list(settings.levels)}

    def condition(method: str, variant: str, noise: float = 0.0) -> dict[str, Any]:
        align = settings.align(variant)
        return {"method": method, "variant": variant, "label_noise": noise, "align": align, **shared}

    first = [variant for variant in settings.variants if variant != "sharp"]
    found = [condition(name, base_variant(name)) for name in BASES]
    found += [condition(name, variant) for name in settings.maps for variant in first]
    if "robustness" in settings.parts:
        noisy = [("softmax", "exact"), *((settings.noise_map, variant) for variant in first)]
        found += [condition(*case, noise) for noise in settings.label_noise for case in noisy]
    if "sharp" in settings.variants:
        found += [condition(name, "sharp") for name in settings.maps]
    return [c for place, c in enumerate(found) if c not in found[:place]]


def base_variant(method: str) -> str:
    """Return the variant of a method that has one alone."""
    return "exact" if method == "softmax" else "vanilla"


def check(settings: Settings, seeds: Sequence[int]) -> None:
    """Raise ValueError for a map, a variant or a part that is none, or a number that is out of range."""
    cases = (
        ("map", (*settings.maps, settings.noise_map), MAPS),
        ("variant", settings.variants, VARIANTS),
        ("part", settings.parts, PARTS),
        ("kind of alignment", (settings.sharp_kind,), get_args(Alignment)),
    )
    for kind, names, known in cases:
        for name in names:
            if name not in known:
                raise unknown(kind, name, known)
    for name in ("levels", "label_noise"):
        if not all(0 < value < 1 for value in getattr(settings, name)):
            raise ValueError(f"{name} ({getattr(settings, name)}) must lie above 0 and below 1; 0 is always measured")
    if "vanilla" not in settings.variants:
        raise ValueError("variants without vanilla leave learned particles nothing to be compared with; add it")
    if settings.size.texts < 0 or 0 < settings.size.texts < settings.size.batch_size:
        raise ValueError(f"texts ({settings.size.texts}) must be at least {settings.size.batch_size}, or 0 for all")
    if not seeds:
        raise ValueError("no seeds; ask for at least 3, as a standard error needs them")
    AlignConfig(
        step_size=settings.sharp_step_size,
        inverse_temperature=settings.sharp_inverse_temperature,
        strength=settings.sharp_strength,
        epochs=settings.size.align_epochs,
    )


def sized(name: str, texts: int | None = None, epochs: int | None = None) -> Size:
    """Return a size by name, with another number of texts or epochs where given.

    >>> sized("small", texts=500).texts
    500
    """
    if name not in SIZES:
        raise unknown("size", name, SIZES)
    changed = {"texts": texts, "epochs": epochs}
    return replace(SIZES[name], **{key: value for key, value in changed.items() if value is not None})
