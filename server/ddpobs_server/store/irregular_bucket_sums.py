"""Sums of buckets where every step may have others: sorted and added up as a whole, however many there are."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.store import bucket_sums

BucketSums = dict[tuple[int, int, int], bucket_sums.Table]
"""By batch, module and revision."""


def sums(spans: wire.Spans, batch: wire.Ints, step: wire.Ints, several: Any) -> BucketSums:
    """`rollups.bucket_sums` of some steps.

    Args:
        spans: Of whole steps, step by step.
        batch: Which one each span is of.
        step: Which of the steps each span is of, rising.
        several: Of each batch, whether a step of it may have several backwards.
    """
    first = changes(step) | changes(spans.module) | changes(spans.revision)
    begins, part = np.flatnonzero(first), np.cumsum(first) - 1
    order = np.lexsort((spans.ready_ns, part))
    ready = spans.ready_ns[order]
    since_last = np.diff(ready, prepend=0)
    since_last[begins] = 0
    compute = np.empty_like(ready)
    compute[order] = since_last
    last = ready[np.append(begins[1:], len(ready)) - 1]
    done = np.maximum.reduceat(spans.done_ns, begins)
    last = last_of_backward(step[begins], ready[begins], last, done, several[batch[begins]])[part]
    exposed = np.maximum(spans.done_ns - np.maximum(spans.launched_ns, last), 0)
    return _tables(spans, batch, np.stack([np.ones_like(ready), compute, spans.done_ns - spans.launched_ns, exposed]))


def last_of_backward(step: wire.Ints, first: wire.Ints, last: wire.Ints, done: wire.Ints, several: Any) -> wire.Ints:
    """When the last gradient came of the backward that each module is reduced in, shape [modules of all steps].

    Args:
        step: Which step each is of.
        first: Each module's first readiness.
        last: Its last one.
        done: When its last bucket was done.
        several: Where there may be several: one begins with a module that begins when all before it are done.
    """
    order = np.lexsort((first, step))
    new = changes(step[order])
    times, rank = np.unique(done[order], return_inverse=True)
    # The greatest so far of each step: those of a later one are greater by its number.
    latest = times[np.maximum.accumulate(np.cumsum(new) * len(order) + rank) % len(order)]
    new[1:] |= several[order][1:] & (first[order][1:] >= latest[:-1])
    found = np.empty_like(last)
    found[order] = np.maximum.reduceat(last[order], np.flatnonzero(new))[np.cumsum(new) - 1]
    return found


def changes(column: wire.Ints) -> Any:
    """True at the first row and where a row differs from the one before it."""
    found = np.ones(len(column), bool)
    np.not_equal(column[1:], column[:-1], out=found[1:])
    return found


def _tables(spans: wire.Spans, batch: wire.Ints, values: wire.Ints) -> BucketSums:
    """Added up by batch, module, revision and bucket; values have shape [sums, spans]."""
    order = np.lexsort((spans.bucket, spans.revision, spans.module, batch))
    key = np.stack([batch, spans.module, spans.revision, spans.bucket])[:, order]
    begins = _changes_of_any(key)
    key = key[:, begins]
    added = np.add.reduceat(values[:, order].astype(np.float64), begins, axis=1)
    table = np.concatenate([key[-1:], added])
    first = _changes_of_any(key[:-1])
    ends = [*first[1:].tolist(), table.shape[1]]
    keys = zip(*key[:-1, first].tolist(), strict=True)
    return {of: table[:, begin:end] for of, begin, end in zip(keys, first.tolist(), ends, strict=True)}


def _changes_of_any(rows: wire.Ints) -> wire.Ints:
    """Indices of the columns that differ from the one before them, the first among them."""
    return np.flatnonzero(np.append(True, (rows[:, 1:] != rows[:, :-1]).any(axis=0)))
