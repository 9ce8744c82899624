"""The run's own link, fitted to its transfers, and a replay of a step's buckets with it.

Source: the replay of a queue follows dPRO (arXiv 2205.02473).
"""

from __future__ import annotations

import numpy as np

from ddpobs.whatif.link import Link, fit_link, grouped
from ddpobs_server.analysis.communication.transfers import Transfers
from ddpobs_server.analysis.steps.joined_steps import Floats


def fit_transfers(transfers: Transfers) -> Link:
    """Fit the model to these transfers, so that it gives the typical step's sum.

    Transfers that overlap share their time in any proportion. Only their sum is known.
    """
    sizes = transfers.size_bytes.astype(np.float64)
    model = fit_link(sizes, transfers.moving_ns)
    fitted_ns = float(np.median(transfers.by_step(model.time_ns(sizes))))
    return model.scaled(float(np.median(transfers.by_step(transfers.moving_ns))) / max(1.0, fitted_ns))


def exposed_ns(ready_ns: Floats, sizes: Floats, model: Link) -> float:
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
    ready = np.array(list(map(np.median, grouped(transfers.ready_ns, index.reshape(-1), buckets.shape[1]))))
    order = np.lexsort((buckets[1], ready)) if len(np.unique(buckets[0])) > 1 else np.arange(len(ready))
    return ready[order], transfers.size_bytes[first][order].astype(np.float64)
