"""A link: the time that an all-reduce takes by its bytes, fitted to transfers.

    time of a transfer = alpha + beta * bytes

Sources: the model is Hockney's (Parallel Computing 20, 1994, https://doi.org/10.1016/S0167-8191(06)80021-9). The slope
is a weighted median of slopes between pairs, which outliers do not move: Theil-Sen (Sen 1968,
https://doi.org/10.1080/01621459.1968.10480934). Other world sizes: a ring all-reduce over n ranks has 2 (n - 1)
messages in turn, and sends 2 (n - 1) / n of the bytes over each link (Patarasuk and Yuan 2009,
https://doi.org/10.1016/j.jpdc.2008.09.002).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SMALL_BYTES = 65_536
"""Messages below it are a matter of latency: at 1 Gbit/s they move in half a millisecond."""
SEPARABLE = 2.0
"""Minimum ratio of the largest size to the smallest for which latency and bandwidth are separated."""
_MAX_SIZES = 512
"""Sizes of which all pairs are compared: evenly spaced among the distinct ones, which a client chooses."""


@dataclass(frozen=True)
class Link:
    """Fitted time of a transfer.

    Attributes:
        alpha_ns: Latency of one transfer.
        beta_ns: Time of one byte.
        is_separated: Whether the sizes allow to separate the two. If not, all time counts as bytes, or as latency if
            the sizes are below `SMALL_BYTES`.
        in_flight: Transfers that move at once. They overlap in their latency, and share the bandwidth.
    """

    alpha_ns: float
    beta_ns: float
    is_separated: bool
    in_flight: int = 1

    def time_ns(self, size_bytes: Floats) -> Floats:
        """Return the time of transfers of these sizes."""
        return self.alpha_ns + self.beta_ns * size_bytes

    def scaled(self, factor: float) -> Link:
        """Return a link on which every transfer takes `factor` times as long."""
        return replace(self, alpha_ns=self.alpha_ns * factor, beta_ns=self.beta_ns * factor)

    def with_rate(self, gbit_per_s: float, ranks: int) -> Link:
        """Return a link that moves so many gigabits a second; the latency stays."""
        return replace(self, beta_ns=ring_share(ranks) * 8 / gbit_per_s)

    def with_ranks(self, ranks: int, present_ranks: int) -> Link:
        """Return the same link under a ring of other ranks."""
        return replace(
            self,
            alpha_ns=self.alpha_ns * (ranks - 1) / (present_ranks - 1),
            beta_ns=self.beta_ns * ring_share(ranks) / ring_share(present_ranks),
        )


def ring_share(ranks: int) -> float:
    """Return the share of an all-reduce's bytes that a ring sends over each link: 2 (n - 1) / n."""
    return 2 * (ranks - 1) / ranks


def fit_link(sizes: Floats, times_ns: Floats) -> Link:
    """Fit the model to transfers.

    Args:
        sizes: Bytes, shape [transfers], at least one.
        times_ns: Their times, same shape.
    """
    distinct, index, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    typical_ns = np.array([_midmean(times) for times in grouped(times_ns, index, len(distinct))])
    mean_ns, mean_bytes = float(np.average(typical_ns, weights=counts)), float(np.average(distinct, weights=counts))
    if distinct[-1] < SMALL_BYTES:
        return Link(mean_ns, 0.0, is_separated=False)
    if distinct[-1] < SEPARABLE * distinct[0]:
        return Link(0.0, mean_ns / mean_bytes, is_separated=False)
    chosen = np.unique(np.linspace(0, len(distinct) - 1, _MAX_SIZES).round().astype(np.int64))
    pairs = np.triu_indices(len(chosen), 1)
    low, high = chosen[pairs[0]], chosen[pairs[1]]
    gaps = distinct[high] - distinct[low]
    slopes = (typical_ns[high] - typical_ns[low]) / gaps
    most = float(np.median(typical_ns / distinct))
    beta_ns = min(max(0.0, _weighted_median(slopes, gaps * np.minimum(counts[low], counts[high]))), most)
    alpha_ns = max(0.0, _weighted_median(typical_ns - beta_ns * distinct, counts.astype(np.float64)))
    return Link(alpha_ns, beta_ns, is_separated=True)


def grouped(values: Floats, index: Ints, count: int) -> list[Floats]:
    """Return the values of each index from 0 to `count`, exclusive, in order."""
    order = np.argsort(index, kind="stable")
    return np.split(values[order], np.searchsorted(index[order], np.arange(1, count)))


def _midmean(values: Floats) -> float:
    """Return the mean of the middle half."""
    ordered = np.sort(values)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    cumulated = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(cumulated, cumulated[-1] / 2)])
