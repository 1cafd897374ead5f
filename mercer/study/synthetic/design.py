"""What the synthetic study varies: settings, conditions, and one trial.

Source: Coulomb paper F.1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mercer.errors import unknown

NOISE_LEVELS = tuple(10 ** (-5 + 10 * place / 9) for place in range(10))
LEARNED, UNTRAINED, CEILING = "particles", "particles, untrained", "sign of the signal"
METHODS = (
    LEARNED,
    UNTRAINED,
    "fixed",
    "fixed, chosen width",
    "importance",
    "importance, wide",
    "multiple kernels",
    "rbf-svm",
    "logistic",
    "majority",
)
PARTS = ("noise", "retention", "ablation", "time")
ON_BUDGETS = (LEARNED, UNTRAINED, "fixed", "importance, wide")  # those that have a number of features
USUAL = {"num_samples": 400, "num_features": 200, "strength": 0.1}
CHANCE = 50.0  # per cent
FRESH = 4000
LINE = 0.9  # of the accuracy above chance, to be kept by 64 features
BANDS = (("low", 0.0, 1e-2), ("moderate", 1e-2, 1.0), ("high", 1.0, math.inf))


@dataclass(frozen=True)
class Settings:
    """What is varied; the paper's values, but for the samples of the run times."""

    methods: tuple[str, ...] = METHODS
    noise_levels: tuple[float, ...] = NOISE_LEVELS
    budgets: tuple[int, ...] = (16, 32, 64, 128, 256)
    strengths: tuple[float, ...] = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    samples: tuple[int, ...] = (200, 400, 800, 1600)
    parts: tuple[str, ...] = PARTS


def trial(*, seed: int, method: str, sigma: float, **options: Any) -> dict[str, float]:
    """Fit one method to one draw of the task; accuracies on the paper's test half and on 4000 fresh samples."""
    from mercer.particles.synthetic import fresh_samples, measure, synthetic_task

    task = synthetic_task(sigma, seed, num_samples=options["num_samples"])
    if method == CEILING:
        return {"accuracy": task.bayes, "fresh_accuracy": fresh_samples(task, sigma, seed, count=FRESH)[2]}
    record = measure(
        method,
        task,
        sigma=sigma,
        trial=seed,
        num_features=options["num_features"],
        strength=options["strength"],
        fresh=FRESH,
    )
    return {
        "accuracy": record.accuracy,
        "fresh_accuracy": record.fresh_accuracy,
        "fit_seconds": record.fit_seconds,
    }


def conditions(settings: Settings) -> list[dict[str, Any]]:
    """Return the conditions of the parts asked for, noise first.

    >>> len(conditions(Settings(methods=("logistic", "majority"), noise_levels=(1.0, 10.0), parts=("noise",))))
    6
    """
    quiet = {"sigma": min(settings.noise_levels)} | USUAL
    on_budgets = [name for name in settings.methods if name in ON_BUDGETS]
    found = {
        "noise": [
            {"method": method, "sigma": sigma} | USUAL
            for sigma in settings.noise_levels
            for method in (*settings.methods, CEILING)
        ],
        "retention": [
            quiet | {"method": name, "num_features": size} for size in settings.budgets for name in on_budgets
        ],
        "ablation": [quiet | {"method": LEARNED, "strength": strength} for strength in settings.strengths],
        "time": [quiet | {"method": name, "num_samples": n} for n in settings.samples for name in settings.methods],
    }
    return [condition for part in PARTS if part in settings.parts for condition in found[part]]


def check(settings: Settings, seeds: Sequence[int]) -> None:
    """Raise ValueError for a method or part that is none, or a number that is not positive."""
    from mercer.particles import synthetic

    for kind, names, known in (("method", settings.methods, synthetic.METHODS), ("part", settings.parts, PARTS)):
        for name in names:
            if name not in known:
                raise unknown(kind, name, known)
    for name in ("noise_levels", "budgets", "samples", "strengths"):
        least, values = 0, getattr(settings, name)
        if not values or not all(value > least or (name == "strengths" and value == 0) for value in values):
            raise ValueError(f"{name} ({values}) must be positive numbers, at least one")
    if not seeds:
        raise ValueError("no trials; ask for at least 3, as a standard error needs them")
