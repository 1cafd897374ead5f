"""Means over seeds, gaps to a baseline, and whether a gap is more than noise.

A gap is judged by its two-sided 95 % interval under Student's t distribution, because three to five seeds are few:
with three paired seeds the interval is 4.3 standard errors to each side, not 1.96. Intervals are not widened for
the number of mixers compared; of twenty mixers without any effect, one is expected to be called better or worse.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Two-sided 95 % points of Student's t for 1 to 10 degrees of freedom; beyond, the expansion in t_quantile is exact
# to four decimals.
_T_975 = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814)
_Z_975 = 1.9599639845


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; `error` is its standard error, None for a single value."""

    mean: float
    error: float | None
    count: int


@dataclass(frozen=True)
class Gap:
    """A difference of means, candidate - baseline; `low`, `high` its 95 % interval where one can be had."""

    mean: float
    error: float | None
    low: float | None
    high: float | None
    paired: bool
    count: int

    @property
    def verdict(self) -> str:
        """Return "better", "worse", "within noise" or "one seed"; lower values are better."""
        if self.low is None or self.high is None:
            return "one seed"
        if self.low <= 0 <= self.high:
            return "within noise"
        return "better" if self.mean < 0 else "worse"


def usable(value: float | int | None) -> bool:
    """Return whether a recorded figure is there and finite."""
    return value is not None and math.isfinite(value)


def estimate(values: Sequence[float | int | None]) -> Estimate | None:
    """Return mean and standard error s / sqrt(n), s with n - 1, of the values that are there and finite.

    >>> estimate([1.0, 3.0, None])
    Estimate(mean=2.0, error=1.0, count=2)
    """
    found = [float(value) for value in values if value is not None and math.isfinite(value)]
    if not found:
        return None
    mean = math.fsum(found) / len(found)
    if len(found) == 1:
        return Estimate(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in found) / (len(found) - 1)
    return Estimate(mean, math.sqrt(variance / len(found)), len(found))


def t_quantile(degrees: float | int) -> float:
    """Return the 97.5 % point of Student's t, fractional degrees of freedom rounded down (the wider interval).

    >>> round(t_quantile(2), 3), round(t_quantile(30), 3)
    (4.303, 2.042)
    """
    whole = max(1, math.floor(degrees))
    if whole <= len(_T_975):
        return _T_975[whole - 1]
    z, n = _Z_975, whole
    # Cornish-Fisher: the normal quantile and its first four corrections in 1 / n (Abramowitz and Stegun 26.7.5).
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


def gap(candidate: Mapping[int, float], baseline: Mapping[int, float]) -> Gap | None:
    """Return candidate - baseline of values by seed.

    Where the seeds of one are among those of the other the differences are taken seed by seed (same data order, same
    start weights of the shared parts): d_s = candidate_s - baseline_s, error s_d / sqrt(n), n - 1 degrees of freedom.
    Where they are not, the means are compared with Welch's error sqrt(e_c^2 + e_b^2) and degrees of freedom.

    Args:
        candidate: finite values by seed.
        baseline: finite values by seed.

    Returns:
        The gap, without error and interval where a side has one seed; None where a side has none.

    >>> gap({0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.6}).paired
    True
    """
    ours, theirs = estimate(list(candidate.values())), estimate(list(baseline.values()))
    if ours is None or theirs is None:
        return None
    paired = candidate.keys() <= baseline.keys() or baseline.keys() <= candidate.keys()
    if paired:
        shared = sorted(candidate.keys() & baseline.keys())
        difference = estimate([candidate[seed] - baseline[seed] for seed in shared])
        assert difference is not None
        mean, error, degrees = difference.mean, difference.error, difference.count - 1.0
    else:
        mean = ours.mean - theirs.mean
        error, degrees = _welch(ours, theirs)
    count = min(ours.count, theirs.count)
    if error is None:
        return Gap(mean, None, None, None, paired, count)
    reach = t_quantile(degrees) * error
    return Gap(mean, error, mean - reach, mean + reach, paired, count)


def _welch(a: Estimate, b: Estimate) -> tuple[float | None, float]:
    """Return the standard error of a - b and its Welch-Satterthwaite degrees of freedom."""
    if a.error is None or b.error is None:
        return None, 1.0
    total = a.error**2 + b.error**2
    if total == 0:
        return 0.0, a.count + b.count - 2.0
    return math.sqrt(total), total**2 / (a.error**4 / (a.count - 1) + b.error**4 / (b.count - 1))
