"""Intervals against values worked out by hand."""

import math

import pytest

from twofold.report import paired_difference, perplexity_increase, seed_interval
from twofold.report.statistics import t_quantile


def test_five_seeds_by_hand() -> None:
    # Mean 3, squared deviations 4 + 1 + 0 + 1 + 4, s^2 = 2.5, s / sqrt(5) = sqrt(0.5), t(4) = 2.7764.
    interval = seed_interval([1, 2, 3, 4, 5])
    assert interval.mean == 3
    assert interval.half_width == pytest.approx(2.7764 * math.sqrt(0.5), abs=1e-12)
    assert (interval.low, interval.high) == pytest.approx((1.036789, 4.963211), abs=1e-5)
    assert interval.excludes_zero


def test_two_seeds_by_hand() -> None:
    interval = seed_interval([0.0, 2.0])  # s = sqrt(2), s / sqrt(2) = 1
    assert (interval.low, interval.high) == pytest.approx((1 - 12.7062, 1 + 12.7062))
    assert not interval.excludes_zero


def test_pairing_removes_what_the_seed_does_to_both() -> None:
    baseline = [3.0, 3.4, 2.9, 3.2, 3.5]
    interval = paired_difference(
        [value + extra for value, extra in zip(baseline, [1, 2, 3, 4, 5], strict=True)], baseline
    )
    assert interval.mean == pytest.approx(3)
    assert interval.half_width == pytest.approx(2.7764 * math.sqrt(0.5))
    with pytest.raises(ValueError, match="longer"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])


def test_losses_become_percent_of_perplexity() -> None:
    increase = perplexity_increase(seed_interval([math.log(1.02), math.log(1.04)]))
    assert increase.mean == pytest.approx(100 * (math.sqrt(1.02 * 1.04) - 1))
    assert increase.low < increase.mean < increase.high
    assert increase.count == 2


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.706), (4, 2.776), (10, 2.228), (30, 2.042), (60, 2.000), (120, 1.980)]
)
def test_quantiles_are_those_of_printed_tables(degrees: int, expected: float) -> None:
    assert t_quantile(degrees) == pytest.approx(expected, abs=1.1e-3)


def test_one_seed_has_no_interval() -> None:
    with pytest.raises(ValueError, match="at least 2 values; got 1"):
        seed_interval([1.0])
