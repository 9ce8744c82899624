"""Sums of buckets for steps with any buckets in any order. The general algorithm: it sorts all spans together."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.store.sums import bucket_sums

BucketSums = dict[tuple[int, int, int], bucket_sums.Table]
"""By batch, module and revision."""


def sums(spans: wire.Spans, batch: wire.Ints, step: wire.Ints, multiple: Any) -> BucketSums:
    """`rollups.sum_buckets` of some steps.

    Args:
        spans: Spans of whole steps, step by step.
        batch: Batch of each span.
        step: Step of each span, ascending.
        multiple: Whether a step of the batch may have several backwards, for each batch.
    """
    first = changes(step) | changes(spans.module) | changes(spans.revision)
    begins, part = np.flatnonzero(first), np.cumsum(first) - 1
    order = np.lexsort((spans.ready_ns, part))
    ready = spans.ready_ns[order]
    since_previous = np.diff(ready, prepend=0)
    since_previous[begins] = 0
    compute = np.empty_like(ready)
    compute[order] = since_previous
    last = ready[np.append(begins[1:], len(ready)) - 1]
    done = np.maximum.reduceat(spans.done_ns, begins)
    last = last_of_backward(step[begins], ready[begins], last, done, multiple[batch[begins]])[part]
    exposed = np.maximum(spans.done_ns - np.maximum(spans.launched_ns, last), 0)
    exposed = np.where(spans.waited_ns < 0, exposed, spans.waited_ns)
    return _tables(spans, batch, np.stack([np.ones_like(ready), compute, spans.done_ns - spans.launched_ns, exposed]))


def last_of_backward(step: wire.Ints, first: wire.Ints, last: wire.Ints, done: wire.Ints, multiple: Any) -> wire.Ints:
    """Time of the last gradient of the backward in which each module is reduced, shape [modules of all steps].

    Args:
        step: Step of each module.
        first: Its first readiness.
        last: Its last readiness.
        done: Completion of its last bucket.
        multiple: Whether its step may have several backwards. A module begins a new backward if all modules before it
            in the step are done when its first bucket becomes ready.
    """
    order = np.lexsort((first, step))
    new = changes(step[order])
    times, rank = np.unique(done[order], return_inverse=True)
    # Running maximum within each step: the step's number makes the ranks of a later step greater.
    latest = times[np.maximum.accumulate(np.cumsum(new) * len(order) + rank) % len(order)]
    new[1:] |= multiple[order][1:] & (first[order][1:] >= latest[:-1])
    result = np.empty_like(last)
    result[order] = np.maximum.reduceat(last[order], np.flatnonzero(new))[np.cumsum(new) - 1]
    return result


def changes(column: wire.Ints) -> Any:
    """True at the first row and at each row that differs from the previous row."""
    result = np.ones(len(column), bool)
    np.not_equal(column[1:], column[:-1], out=result[1:])
    return result


def _tables(spans: wire.Spans, batch: wire.Ints, values: wire.Ints) -> BucketSums:
    """Sums by batch, module, revision and bucket; `values` has shape [sums, spans]."""
    order = np.lexsort((spans.bucket, spans.revision, spans.module, batch))
    key = np.stack([batch, spans.module, spans.revision, spans.bucket])[:, order]
    begins = _changed_columns(key)
    key = key[:, begins]
    totals = np.add.reduceat(values[:, order].astype(np.float64), begins, axis=1)
    table = np.concatenate([key[-1:], totals])
    first = _changed_columns(key[:-1])
    ends = [*first[1:].tolist(), table.shape[1]]
    keys = zip(*key[:-1, first].tolist(), strict=True)
    return {layout: table[:, begin:end] for layout, begin, end in zip(keys, first.tolist(), ends, strict=True)}


def _changed_columns(rows: wire.Ints) -> wire.Ints:
    """Indices of the columns that differ from the previous column, beginning with the first."""
    return np.flatnonzero(np.append(True, (rows[:, 1:] != rows[:, :-1]).any(axis=0)))
