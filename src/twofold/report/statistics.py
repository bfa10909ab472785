"""How sure a mean over few seeds is: Student's t, and differences paired by seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Student's t at 97.5 %, for 1 to 30 degrees of freedom. The normal 1.96 would make five seeds look surer than they are.
_T_QUANTILES = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
_Z = 1.959964


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float
    """Mean over the seeds."""
    low: float
    """Lower end."""
    high: float
    """Upper end."""
    count: int
    """Number of seeds."""

    @property
    def half_width(self) -> float:
        """Half the length of the interval, the figure after "±"."""
        return (self.high - self.low) / 2

    @property
    def excludes_zero(self) -> bool:
        """True when the seeds can tell the mean from zero."""
        return self.low > 0 or self.high < 0


def t_quantile(degrees_of_freedom: int) -> float:
    """Student's t at 97.5 %, for two-sided 95 % intervals."""
    if degrees_of_freedom < 1:
        raise ValueError(f"an interval needs at least 2 values; got {degrees_of_freedom + 1}")
    if degrees_of_freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[degrees_of_freedom - 1]
    return _Z + (_Z**3 + _Z) / (4 * degrees_of_freedom)  # first term of its expansion; right to 0.001 from here on


def seed_interval(values: Sequence[float]) -> Interval:
    """The 95 % t-interval of the mean: mean ± t s / sqrt(n), with s the sample standard deviation.

    Args:
        values: One figure a seed, at least two.
    """
    count = len(values)
    quantile = t_quantile(count - 1)
    mean = math.fsum(values) / count
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half_width = quantile * math.sqrt(variance / count)
    return Interval(mean=mean, low=mean - half_width, high=mean + half_width, count=count)


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """The 95 % t-interval of the mean of `values - baseline`, seed by seed.

    A seed fixes the order of the data for both, so what it does to both cancels.

    Args:
        values: One figure a seed.
        baseline: The other variant's figures for the same seeds, in the same order.
    """
    return seed_interval([value - other for value, other in zip(values, baseline, strict=True)])


def perplexity_increase(loss_difference: Interval) -> Interval:
    """A difference of losses in nats as an increase of perplexity in percent: 100 (exp(d) - 1), ends included."""
    mean, low, high = (
        100 * math.expm1(value) for value in (loss_difference.mean, loss_difference.low, loss_difference.high)
    )
    return Interval(mean=mean, low=low, high=high, count=loss_difference.count)
