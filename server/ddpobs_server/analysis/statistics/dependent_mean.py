"""Mean of a series whose values depend on each other, with its standard error.

Steps depend on their predecessors: another process on the host, a slow rank or a hot device last for many steps. The
error of a mean of independent values would be several times too small. The stationary bootstrap resamples blocks of
random length instead of values. For a mean its variance has a closed form, so that nothing is drawn at random and the
same steps always give the same answer.

Sources: D. Politis and J. Romano, "The Stationary Bootstrap", Journal of the American Statistical Association 89
(1994), equation 5 for the variance; D. Politis and H. White, "Automatic Block-Length Selection for the Dependent
Bootstrap", Econometric Reviews 23 (2004), for the block length, with the correction by A. Patton, D. Politis and
H. White, Econometric Reviews 28 (2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log10, sqrt
from statistics import NormalDist

import numpy as np

from ddpobs_server.analysis.steps.joined_steps import Floats

MIN_VALUES, MIN_BLOCKS = 40, 20
"""Minimum number of values, and minimum number of blocks, of which an error can be estimated."""
_BATCHES = 8
"""Parts of the series whose means are compared as well: a drift is longer than any block that the rule selects."""
_CLOSEST = 0.99
"""Maximum correlation of neighbours that is distinguished from a drift."""


@dataclass(frozen=True)
class DependentMean:
    """A mean and its standard error.

    Attributes:
        mean: The mean.
        error: Its standard error.
        count: Number of values.
        block_length: Number of consecutive values that depend on each other.
    """

    mean: float
    error: float
    count: int
    block_length: float

    @property
    def blocks(self) -> float:
        """Number of blocks that are about independent."""
        return self.count / self.block_length

    @property
    def is_enough(self) -> bool:
        """Whether the error is known well enough to judge by it."""
        return self.count >= MIN_VALUES and self.blocks >= MIN_BLOCKS

    def quantile(self, probability: float) -> float:
        """Return the quantile of the mean's distribution, in standard errors."""
        return _quantile(probability, min(self.blocks, _BATCHES))


def dependent_mean(values: Floats) -> DependentMean:
    """Return the mean of a series with its standard error.

    The error is the largest of three: of the stationary bootstrap, of the means of long batches, and of a series in
    which each value depends on the one before. Each is too small for some series, none is much too large.

    Args:
        values: The series in order of time, shape [steps], at least one value.
    """
    count = len(values)
    covariance = _autocovariance(values)
    worth_one = _memory(covariance)
    length = max(block_length(covariance), worth_one)
    bootstrap = _bootstrap_variance(covariance, min(length, count / 3))
    variance = max(bootstrap, _variance_of_batches(values), float(covariance[0]) * worth_one)
    return DependentMean(float(values.mean()), sqrt(variance / count), count, length)


def memory(values: Floats) -> float:
    """Return how many values are worth one independent value, at least 1, if each depends on the one before.

    Args:
        values: The series in order of time, shape [steps], at least one value.
    """
    return _memory(_autocovariance(values))


def _memory(covariance: Floats) -> float:
    """Return how many dependent values are worth one, if each value depends on the one before."""
    if len(covariance) < 2 or covariance[0] <= 0:
        return 1.0
    correlation = float(np.clip(covariance[1] / covariance[0], 0.0, _CLOSEST))
    return (1 + correlation) / (1 - correlation)


def _autocovariance(values: Floats) -> Floats:
    """Return the autocovariance at each lag from 0, shape [steps]."""
    count = len(values)
    size = 1 << (2 * count - 1).bit_length()
    spectrum = np.fft.rfft(values - values.mean(), size)
    return np.asarray(np.fft.irfft(np.abs(spectrum) ** 2, size)[:count] / count)


def block_length(covariance: Floats) -> float:
    """Return the mean block length with the least error of the bootstrap's variance, at least 1.

    Args:
        covariance: Autocovariance at each lag.
    """
    count = len(covariance)
    most = min(ceil(sqrt(count)) + max(5, ceil(log10(count))), count - 1)
    longest = min(ceil(3 * sqrt(count)), ceil(count / 3))
    if most < 1 or covariance[0] <= 0:
        return 1.0
    run = max(5, ceil(sqrt(log10(count))))
    small = np.abs(covariance[1:] / covariance[0]) < 2 * sqrt(log10(count) / count)
    lag = _first_run(small[:most], run)
    if lag is None:  # The correlation never vanishes for long: take the last lag where it counts.
        large = np.flatnonzero(~small[:most])
        lag = int(large[-1]) + 1 if len(large) else 1
    width = min(2 * max(lag, 1), most)
    lags = np.arange(1, width + 1)
    window = np.where(lags <= width / 2, 1.0, 2 * (1 - lags / width))  # The flat-top window.
    weighted = window * covariance[1 : width + 1]
    slope, density = 2 * float((lags * weighted).sum()), float(covariance[0] + 2 * weighted.sum())
    if density <= 0:
        return 1.0
    return float(np.clip((slope**2 / density**2 * count) ** (1 / 3), 1.0, longest))


def _first_run(flags: np.ndarray[tuple[int], np.dtype[np.bool_]], length: int) -> int | None:
    """Return the index at which `length` consecutive flags begin; None if they never do."""
    if len(flags) < length:
        return None
    sums = np.convolve(flags, np.ones(length, np.int64), "valid")
    begins = np.flatnonzero(sums == length)
    return int(begins[0]) if len(begins) else None


def _bootstrap_variance(covariance: Floats, length: float) -> float:
    """Return the stationary bootstrap's variance of the mean times the number of values."""
    count, stay = len(covariance), 1 - 1 / length
    lags = np.arange(1, count)
    weights = (1 - lags / count) * stay**lags + lags / count * stay ** (count - lags)
    # The blocks of one series share its mean, which takes one block's part of the variance.
    return float(covariance[0] + 2 * (weights * covariance[1:]).sum()) * count / max(1.0, count - length)


def _variance_of_batches(values: Floats) -> float:
    """Return the variance of the mean times the number of values, from means of long batches."""
    size = len(values) // _BATCHES
    if size < 2:
        return 0.0
    means = values[: size * _BATCHES].reshape(_BATCHES, size).mean(axis=1)
    return float(means.var(ddof=1)) * size


def _quantile(probability: float, blocks: float) -> float:
    """Return the quantile of Student's t with about `blocks` independent values: few blocks give a wider interval.

    Source: the expansion in M. Abramowitz and I. Stegun, "Handbook of Mathematical Functions", 26.7.5.
    """
    z, freedom = NormalDist().inv_cdf(probability), max(1.0, blocks - 1)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
