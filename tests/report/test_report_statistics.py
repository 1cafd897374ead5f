"""Means, errors, gaps and verdicts against numbers done by hand and against scipy."""

import math

import pytest
from scipy import stats

from mercer.report.statistics import Estimate, estimate, gap, t_quantile


def test_mean_and_standard_error_by_hand():
    # deviations -1, 0, 1: variance 2 / 2 = 1, error 1 / sqrt 3
    found = estimate([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.mean, found.count) == (2.0, 3)
    assert found.error == pytest.approx(1 / math.sqrt(3))


def test_one_value_has_no_error_and_missing_values_do_not_count():
    assert estimate([2.5]) == Estimate(2.5, None, 1)
    assert estimate([None, math.nan, math.inf, 2.5]) == Estimate(2.5, None, 1)
    assert estimate([None]) is None
    assert estimate([]) is None


def test_t_quantile_is_scipys():
    degrees = [*range(1, 60), 100, 1000]
    assert [t_quantile(n) for n in degrees] == pytest.approx([stats.t.ppf(0.975, n) for n in degrees], abs=2e-5)
    assert t_quantile(2.9) == t_quantile(2)  # rounded down: never a narrower interval than is due


def test_paired_gap_by_hand():
    # differences -0.1, -0.2, -0.3: mean -0.2, s = 0.1, error 0.1 / sqrt 3, reach 4.30265 errors
    found = gap({0: 1.0, 1: 2.0, 2: 3.0}, {0: 1.1, 1: 2.2, 2: 3.3})
    assert found is not None
    assert found.paired
    assert found.mean == pytest.approx(-0.2)
    assert found.error == pytest.approx(0.1 / math.sqrt(3))
    assert found.low == pytest.approx(-0.2 - 4.30265 * 0.1 / math.sqrt(3), abs=1e-5)
    assert found.high == pytest.approx(-0.2 + 4.30265 * 0.1 / math.sqrt(3), abs=1e-5)
    assert found.verdict == "within noise"


def test_pairing_finds_a_gap_that_the_spread_over_seeds_hides():
    baseline = {0: 2.0, 1: 3.0, 2: 4.0}
    better = gap({seed: value - 0.1 - 0.001 * seed for seed, value in baseline.items()}, baseline)
    worse = gap({seed: value + 0.1 + 0.001 * seed for seed, value in baseline.items()}, baseline)
    assert better is not None
    assert worse is not None
    assert (better.verdict, worse.verdict) == ("better", "worse")


def test_paired_gap_is_scipys_paired_test():
    ours, theirs = {0: 2.08, 1: 2.121, 2: 2.099, 3: 2.07}, {0: 2.10, 1: 2.14, 2: 2.12, 3: 2.11}
    found = gap(ours, theirs)
    assert found is not None
    interval = stats.ttest_rel(list(ours.values()), list(theirs.values())).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=1e-6)


def test_other_seeds_are_compared_unpaired():
    found = gap({0: 1.0, 1: 1.2, 2: 1.1}, {2: 2.0, 3: 2.4, 4: 2.2})
    assert found is not None
    assert not found.paired
    welch = stats.ttest_ind([1.0, 1.2, 1.1], [2.0, 2.4, 2.2], equal_var=False)
    assert found.error == pytest.approx(found.mean / welch.statistic)
    interval = welch.confidence_interval(0.95)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= interval.low  # ours rounds the degrees of freedom down
    assert found.high >= interval.high
    assert found.verdict == "better"


def test_fewer_seeds_on_one_side_pair_where_both_have_one():
    found = gap({1: 2.0, 2: 3.0}, {0: 9.0, 1: 2.5, 2: 3.4})
    assert found is not None
    assert found.paired
    assert found.mean == pytest.approx(-0.45)
    assert found.count == 2


@pytest.mark.parametrize(("ours", "theirs"), [({0: 1.0}, {0: 2.0}), ({0: 1.0}, {1: 2.0, 2: 2.1})])
def test_one_seed_is_no_test(ours, theirs):
    found = gap(ours, theirs)
    assert found is not None
    assert (found.error, found.low, found.verdict) == (None, None, "one seed")


def test_equal_runs_are_within_noise_and_nothing_has_no_gap():
    same = gap({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert same is not None
    assert same.verdict == "within noise"
    assert gap({}, {0: 1.0}) is None
    far = gap({0: 1.0, 1: 1.0}, {2: 2.0, 3: 2.0})
    assert far is not None
    assert (far.error, far.verdict) == (0.0, "better")
