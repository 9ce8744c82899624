"""When each parameter's gradient arrives on its slowest rank, and the buckets that DDP would fill with them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.communication.transfers import late_ranks
from ddpobs_server.analysis.evidence import ColumnReader, Evidence
from ddpobs_server.analysis.steps.joined_steps import Floats

_FIRST_CAP_BYTES = 2**20
"""Torch's limit of the first bucket."""


@dataclass(frozen=True)
class Arrivals:
    """Parameters in the order of the buckets.

    Attributes:
        ready_ns: Arrival of the gradient on the slowest rank since the step's first gradient, shape [parameters].
        sizes: Bytes, shape [parameters].
        bucket: Index of the bucket, shape [parameters].
    """

    ready_ns: Floats
    sizes: Floats
    bucket: wire.Ints

    def in_order(self) -> Arrivals:
        """Return the parameters in the order of their arrival."""
        order = np.argsort(self.ready_ns, kind="stable")
        return Arrivals(self.ready_ns[order], self.sizes[order], self.bucket[order])

    def present_buckets(self) -> tuple[Floats, Floats]:
        """Return readiness and size of each present bucket; the parameters must be in the order of the buckets."""
        first = np.flatnonzero(np.diff(self.bucket, prepend=-1))
        return np.maximum.reduceat(self.ready_ns, first), np.add.reduceat(self.sizes, first)

    def buckets(self, cap_bytes: float, first_cap_bytes: float = _FIRST_CAP_BYTES) -> tuple[Floats, Floats]:
        """Fill buckets in this order, as torch does: a bucket is closed once it has reached its limit.

        Returns:
            Readiness and size of each bucket.
        """
        ready, sizes, limit = [0.0], [0.0], min(first_cap_bytes, cap_bytes)
        for at_ns, size in zip(self.ready_ns.tolist(), self.sizes.tolist(), strict=True):
            if sizes[-1] >= limit:
                ready.append(0.0)
                sizes.append(0.0)
                limit = cap_bytes
            ready[-1], sizes[-1] = max(ready[-1], at_ns), sizes[-1] + size
        return np.array(ready), np.array(sizes)


def arrivals(evidence: Evidence, columns: ColumnReader) -> Arrivals | None:
    """Return the typical arrival of each parameter of the only module; None if it was not sampled."""
    layouts = columns.layouts()
    if not layouts or len({layout.module for layout in layouts}) > 1:
        return None
    layout = max(layouts, key=lambda one: one.revision)
    ranks = late_ranks(evidence.joined.own_ns, evidence.joined.ranks)
    samples = columns.readiness(ranks, *evidence.step_range)
    index = np.repeat(np.arange(len(layout.buckets)), [len(bucket.parameters) for bucket in layout.buckets])
    times = [_since_first(sample) for _, sample in samples if _is_of(sample, layout, len(index))]
    if not times:
        return None
    ready_ns = np.median(_slowest_by_step(samples, times, layout, len(index)), axis=0)
    sizes = [
        parameter.size * bucket.size_bytes / max(1, sum(other.size for other in bucket.parameters))
        for bucket in layout.buckets
        for parameter in bucket.parameters
    ]
    return Arrivals(ready_ns, np.array(sizes), index)


def _is_of(sample: wire.Readiness, layout: wire.Layout, parameters: int) -> bool:
    same = sample.module == layout.module and sample.revision == layout.revision
    return same and len(sample.ready_ns) == parameters and bool((sample.ready_ns != wire.UNKNOWN).any())


def _since_first(sample: wire.Readiness) -> Floats:
    """Return each parameter's readiness since the first; an unused parameter is ready with the last."""
    used = sample.ready_ns != wire.UNKNOWN
    since_ns = sample.ready_ns - sample.ready_ns[used].min()
    return np.asarray(np.where(used, since_ns, since_ns[used].max()), np.float64)


def _slowest_by_step(
    samples: list[tuple[int, wire.Readiness]], times: list[Floats], layout: wire.Layout, parameters: int
) -> Floats:
    """Return the latest readiness over the ranks in each sampled step, shape [steps, parameters]."""
    by_step: dict[int, Floats] = {}
    usable = [sample for _, sample in samples if _is_of(sample, layout, parameters)]
    for sample, since_ns in zip(usable, times, strict=True):
        by_step[sample.step] = np.maximum(by_step.get(sample.step, since_ns), since_ns)
    return np.stack(list(by_step.values()))
