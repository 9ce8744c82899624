"""The run's own link: latency and bandwidth, fitted to its transfers, and a replay of a step's buckets with them.

    time of a transfer = alpha + beta * bytes

Sources: the model is Hockney's (Parallel Computing 20, 1994, https://doi.org/10.1016/S0167-8191(06)80021-9). The slope
is a weighted median of slopes between pairs, which outliers do not move: Theil-Sen (Sen 1968,
https://doi.org/10.1080/01621459.1968.10480934). The replay of a queue follows dPRO (arXiv 2205.02473).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.communication.transfers import Transfers
from ddpobs_server.analysis.steps.joined_steps import Floats

SMALL_BYTES = 65_536
"""Messages below it are a matter of latency: at 1 Gbit/s they move in half a millisecond."""
_SEPARABLE = 2.0
"""Minimum ratio of the largest size to the smallest for which latency and bandwidth are separated."""
_MAX_SIZES = 512
"""Sizes of which all pairs are compared: evenly spaced among the distinct ones, which a client chooses."""


@dataclass(frozen=True)
class LinkModel:
    """Fitted time of a transfer.

    Attributes:
        alpha_ns: Latency of one transfer.
        beta_ns: Time of one byte.
        is_separated: Whether the sizes allow to separate the two. If not, all time counts as bytes, or as latency if
            the sizes are below `SMALL_BYTES`.
    """

    alpha_ns: float
    beta_ns: float
    is_separated: bool

    def time_ns(self, size_bytes: Floats) -> Floats:
        """Return the time of transfers of these sizes."""
        return self.alpha_ns + self.beta_ns * size_bytes


def fit_transfers(transfers: Transfers) -> LinkModel:
    """Fit the model to these transfers, so that it gives the typical step's sum.

    Transfers that overlap share their time in any proportion. Only their sum is known.
    """
    sizes = transfers.size_bytes.astype(np.float64)
    model = fit(sizes, transfers.moving_ns)
    fitted_ns = float(np.median(transfers.by_step(model.time_ns(sizes))))
    scale = float(np.median(transfers.by_step(transfers.moving_ns))) / max(1.0, fitted_ns)
    return LinkModel(model.alpha_ns * scale, model.beta_ns * scale, model.is_separated)


def fit(sizes: Floats, times_ns: Floats) -> LinkModel:
    """Fit the model to transfers.

    Args:
        sizes: Bytes, shape [transfers], at least one.
        times_ns: Their times, same shape.
    """
    distinct, index, counts = np.unique(sizes, return_inverse=True, return_counts=True)
    typical_ns = np.array([_midmean(times) for times in _grouped(times_ns, index, len(distinct))])
    mean_ns, mean_bytes = float(np.average(typical_ns, weights=counts)), float(np.average(distinct, weights=counts))
    if distinct[-1] < SMALL_BYTES:
        return LinkModel(mean_ns, 0.0, is_separated=False)
    if distinct[-1] < _SEPARABLE * distinct[0]:
        return LinkModel(0.0, mean_ns / mean_bytes, is_separated=False)
    chosen = np.unique(np.linspace(0, len(distinct) - 1, _MAX_SIZES).round().astype(np.int64))
    pairs = np.triu_indices(len(chosen), 1)
    low, high = chosen[pairs[0]], chosen[pairs[1]]
    gaps = distinct[high] - distinct[low]
    slopes = (typical_ns[high] - typical_ns[low]) / gaps
    most = float(np.median(typical_ns / distinct))
    beta_ns = min(max(0.0, _weighted_median(slopes, gaps * np.minimum(counts[low], counts[high]))), most)
    alpha_ns = max(0.0, _weighted_median(typical_ns - beta_ns * distinct, counts.astype(np.float64)))
    return LinkModel(alpha_ns, beta_ns, is_separated=True)


def exposed_ns(ready_ns: Floats, sizes: Floats, model: LinkModel) -> float:
    """Replay one step: the time from the last readiness to the last completion.

    The buckets are launched in this order, and one moves at a time.

    Args:
        ready_ns: Readiness of each bucket on its slowest rank, shape [buckets].
        sizes: Bytes, same shape.
        model: The link.
    """
    end_ns = 0.0
    for ready, took in zip(np.maximum.accumulate(ready_ns).tolist(), model.time_ns(sizes).tolist(), strict=True):
        end_ns = max(end_ns, ready) + took
    return end_ns - float(ready_ns.max())


def merge(ready_ns: Floats, sizes: Floats, cap_bytes: float) -> tuple[Floats, Floats]:
    """Merge neighbouring buckets while their sum is at most `cap_bytes`; returns readiness and sizes."""
    merged: list[list[float]] = []
    for ready, size in zip(ready_ns.tolist(), sizes.tolist(), strict=True):
        if merged and merged[-1][1] + size <= cap_bytes:
            merged[-1] = [max(merged[-1][0], ready), merged[-1][1] + size]
        else:
            merged.append([ready, size])
    return np.array([row[0] for row in merged]), np.array([row[1] for row in merged])


def typical_step(transfers: Transfers) -> tuple[Floats, Floats]:
    """Return readiness and size of each bucket of a typical step, in launch order; medians over the steps."""
    keys = np.stack([transfers.module, transfers.bucket])
    buckets, first, index = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    ready = np.array(list(map(np.median, _grouped(transfers.ready_ns, index.reshape(-1), buckets.shape[1]))))
    order = np.lexsort((buckets[1], ready)) if len(np.unique(buckets[0])) > 1 else np.arange(len(ready))
    return ready[order], transfers.size_bytes[first][order].astype(np.float64)


def _grouped(values: Floats, index: wire.Ints, count: int) -> list[Floats]:
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
