"""Fill buckets with gradients as torch's DDP does, and find the limits that end a backward soonest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddpobs.whatif.link import Floats, Link

MB = 2**20
"""Bytes of the MB in `bucket_cap_mb`."""


def fill(arrival_ns: Floats, sizes: Floats, caps_mb: Sequence[float]) -> tuple[Floats, Floats]:
    """Fill buckets with gradients in the given order; a bucket is closed once it has reached its limit.

    Args:
        arrival_ns: Arrival of each gradient, shape [parameters].
        sizes: Bytes, same shape.
        caps_mb: Limit of the first bucket, the second, …; the last holds for all further buckets.

    Returns:
        Readiness and size of each bucket.
    """
    limits = [cap * MB for cap in caps_mb]
    ends: list[int] = []
    size = 0.0
    for index, each in enumerate(sizes.tolist()):
        size += each
        if size >= limits[min(len(ends), len(limits) - 1)]:
            ends.append(index + 1)
            size = 0.0
    if not ends or ends[-1] < len(sizes):
        ends.append(len(sizes))
    begins = np.array([0, *ends[:-1]])
    return np.maximum.reduceat(arrival_ns, begins), np.add.reduceat(sizes, begins)


def best_split(arrival_ns: Floats, sizes: Floats, link: Link, max_wait_ns: float | None = None) -> list[float]:
    """Return the limits in MB of the buckets whose transfers end soonest, the first bucket's first.

    Buckets that would queue anyway are merged, which saves their latency. No bucket waits longer than `max_wait_ns`
    from its first gradient to its last, so that a late gradient holds up little. Among equal ends it prefers fewer
    buckets.

    The first j gradients end at the min over i of max(end of the first i, arrival of j) + alpha + beta * bytes(i..j).
    A later end of the first i is never better, so the minimum is exact for one queue without slowdown.

    Args:
        arrival_ns: Arrival of each gradient, in order, shape [parameters].
        sizes: Bytes, same shape.
        link: The link.
        max_wait_ns: None for no bound.
    """
    count = len(sizes)
    arrival = np.maximum.accumulate(arrival_ns)
    total = np.append(0.0, np.cumsum(sizes))
    end = np.zeros(count + 1)
    buckets = np.zeros(count + 1, np.int64)
    before = np.zeros(count + 1, np.int64)
    for last in range(1, count + 1):
        begin = 0 if max_wait_ns is None else int(np.searchsorted(arrival[:last], arrival[last - 1] - max_wait_ns))
        first = np.arange(min(begin, last - 1), last)
        ends = np.maximum(end[first], arrival[last - 1]) + link.time_ns(total[last] - total[first])
        best = int(np.lexsort((buckets[first], ends))[0])
        end[last], before[last], buckets[last] = ends[best], first[best], buckets[first[best]] + 1
    limits, last = [], count
    while last:
        limits.append(float(total[last] - total[before[last]]) / MB)
        last = int(before[last])
    return limits[::-1]
