"""What finished trials say: the file they stand in, values by seed, paired differences."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mercer.errors import DataError
from mercer.report.statistics import estimate, t_quantile


@dataclass(frozen=True)
class Trial:
    """A finished trial: what it was given, how long it took, what came out."""

    condition: dict[str, Any]
    seed: int
    seconds: float
    result: dict[str, Any]

    @property
    def key(self) -> tuple[str, int]:
        """Return what tells this trial from others."""
        return name_of(self.condition), self.seed


@dataclass(frozen=True)
class Difference:
    """A mean difference over the seeds two conditions share; `verdict` is better, worse, within noise or one seed."""

    mean: float
    error: float | None
    count: int
    verdict: str


def name_of(condition: Mapping[str, Any]) -> str:
    """Return what tells a condition from others, in any order of its keys.

    >>> name_of({"b": 1.0, "a": "x"})
    '{"a": "x", "b": 1.0}'
    """
    return json.dumps(condition, sort_keys=True)


def append(file: Path, trial: Trial) -> None:
    """Add a finished trial to a file, whole or (where the process dies) as a torn last line."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(trial)) + "\n")


def read_trials(file: Path) -> list[Trial]:
    """Return the finished trials in a file, and cut off a torn last line; none where there is no file.

    Raises:
        DataError: a line is no trial.
    """
    if not file.exists():
        return []
    text = file.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        with file.open("r+b") as torn:
            torn.truncate(len(whole))
    trials = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            trials.append(Trial(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise DataError(f"line {number} of {file} is no finished trial ({error}); delete it and go on") from error
    return trials


def by_seed(trials: Sequence[Trial], name: str, **condition: Any) -> dict[int, float]:
    """Return one result by seed, of the trials whose condition has these values; the mean where several have.

    >>> trials = [Trial({"model": "a", "size": n}, 0, 1.0, {"accuracy": n / 4}) for n in (1, 2)]
    >>> by_seed(trials, "accuracy", model="a", size=2), by_seed(trials, "accuracy", model="a")
    ({0: 0.5}, {0: 0.375})
    """
    found: dict[int, list[float]] = {}
    for trial in trials:
        if all(trial.condition.get(name) == value for name, value in condition.items()):
            found.setdefault(trial.seed, []).append(float(trial.result[name]))
    return {seed: math.fsum(values) / len(values) for seed, values in sorted(found.items())}


def difference(
    ours: Mapping[int, float], theirs: Mapping[int, float], *, higher_is_better: bool = True
) -> Difference | None:
    """Return ours - theirs, paired by seed.

    Within noise is what lies inside two standard errors or inside the 95 % interval of Student's t, whichever reaches
    further: 4.3 standard errors for three seeds, 2.3 for ten.

    Args:
        ours: values by seed.
        theirs: values by seed.
        higher_is_better: which sign is called better.

    Returns:
        The difference over the shared seeds; None where there are none.

    >>> difference({0: 0.8, 1: 0.9, 2: 0.85}, {0: 0.7, 1: 0.8, 2: 0.76}).verdict
    'better'
    """
    found = estimate([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])
    if found is None:
        return None
    if found.error is None:
        verdict = "one seed"
    elif abs(found.mean) <= max(2.0, t_quantile(found.count - 1)) * found.error:
        verdict = "within noise"
    else:
        verdict = "better" if (found.mean > 0) == higher_is_better else "worse"
    return Difference(found.mean, found.error, found.count, verdict)
