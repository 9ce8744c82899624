"""Steps of all ranks on one clock: phases, and each bucket's compute, queue, waiting and moving.

A bucket's all-reduce begins when it is launched and the one before it has ended. All ranks move its bytes for the same
time; the rest is the wait for the last rank. See `transfers` for the source of this split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.steps.clock_alignment import align, collectives_of, is_repeated, number_rows, step_rows
from ddpobs_server.analysis.steps.waiting import parts_ns

_INDEX_BITS = 20
Rows = tuple[wire.Ints, wire.Steps]
SpanRows = tuple[wire.Ints, wire.Spans]


@dataclass(frozen=True)
class Phases:
    """Phases of steps, all times on the lowest rank's clock; `phase` indexes `STEP_PARTS`; shape [rows]."""

    rank: wire.Ints
    phase: wire.Ints
    began_ns: wire.Ints
    ended_ns: wire.Ints


@dataclass(frozen=True)
class BucketSpans:
    """Buckets of steps, all times on the lowest rank's clock; shape [rows].

    Attributes:
        rank: Rank of the row.
        module: The DDP module.
        revision: Its layout.
        bucket: The bucket.
        all_reduce: Number of the all-reduce; equal on the ranks that took part in it.
        computing_ns: Readiness of the bucket before it, or begin of backward.
        ready_ns: Readiness of the last gradient.
        launched_ns: Hand-over to the process group.
        begun_ns: End of the queue: launched, and the all-reduce before it has ended.
        moving_ns: Begin of the movement of bytes, when the last rank has arrived.
        done_ns: Completion.
    """

    rank: wire.Ints
    module: wire.Ints
    revision: wire.Ints
    bucket: wire.Ints
    all_reduce: wire.Ints
    computing_ns: wire.Ints
    ready_ns: wire.Ints
    launched_ns: wire.Ints
    begun_ns: wire.Ints
    moving_ns: wire.Ints
    done_ns: wire.Ints

    @property
    def waiting_ns(self) -> wire.Ints:
        """Wait for the last rank; shape [rows]."""
        return self.moving_ns - self.begun_ns

    def late_rows(self) -> wire.Ints:
        """Return the row of the rank that arrived last at the all-reduce of each row; shape [rows]."""
        order = np.lexsort((self.waiting_ns, self.all_reduce))
        is_last = np.diff(self.all_reduce[order], prepend=-1) != 0
        late = np.empty(len(order), np.int64)
        late[order] = order[np.maximum.accumulate(np.where(is_last, np.arange(len(order)), 0))]
        return late


def phases_of(rows: Rows, offsets: dict[int, int]) -> Phases:
    """Return the phases of each row one after another: a step records their durations, not their starts."""
    rank, steps = rows
    durations = parts_ns(steps)
    start_ns = align(rank, offsets, steps.start_ns) if len(rank) else steps.start_ns
    ended_ns = start_ns[:, None] + np.cumsum(durations, axis=1)
    row, phase = cells = np.nonzero(durations > 0)
    return Phases(rank[row], phase, ended_ns[cells] - durations[cells], ended_ns[cells])


def bucket_spans_of(rows: Rows, spans: SpanRows, offsets: dict[int, int]) -> BucketSpans:
    """Return the spans of each bucket, in the order of `spans`.

    Args:
        rows: Ranks and columns of the steps.
        spans: Ranks and columns of the steps' spans.
        offsets: Offset in ns of each rank's clock, as `clock_alignment.offsets_ns` returns it.
    """
    rank, columns = spans
    if not len(rank):
        return BucketSpans(*(np.zeros(0, np.int64) for _ in range(11)))
    before_ns = _previous(rank, columns, columns.done_ns, columns.launched_ns)
    begun_ns = np.minimum(columns.done_ns, np.maximum(np.maximum(columns.launched_ns, columns.started_ns), before_ns))
    all_reduce = _all_reduces(rows, rank, columns)
    least_ns = np.full(len(rank), np.iinfo(np.int64).max)
    np.minimum.at(least_ns, all_reduce, columns.done_ns - begun_ns)
    moving_ns = columns.done_ns - least_ns[all_reduce]
    times = (_computing_ns(rows, rank, columns), columns.ready_ns, columns.launched_ns, begun_ns, moving_ns)
    return BucketSpans(
        rank,
        columns.module,
        columns.revision,
        columns.bucket,
        all_reduce,
        *(align(rank, offsets, values) for values in (*times, columns.done_ns)),
    )


def _previous(rank: wire.Ints, columns: wire.Spans, times_ns: wire.Ints, initial_ns: wire.Ints) -> wire.Ints:
    """Return the next lower time of the same rank and step; the lowest has its initial time. Shape [rows]."""
    order = np.lexsort((times_ns, columns.step, rank))
    is_first = (np.diff(rank[order], prepend=-1) != 0) | (np.diff(columns.step[order], prepend=-1) != 0)
    result = np.empty_like(times_ns)
    result[order] = np.where(is_first, initial_ns[order], np.append(0, times_ns[order])[:-1])
    return result


def _all_reduces(rows: Rows, rank: wire.Ints, columns: wire.Spans) -> wire.Ints:
    """Return the number of each row's all-reduce, from zero; shape [rows].

    A rank may reduce a bucket several times in a step: its n-th span belongs to the other ranks' n-th.
    """
    known = collectives_of(rows, rank, columns.step)
    collective = np.where(known < 0, -2 - columns.step, known)
    bucket = (columns.module << _INDEX_BITS | columns.revision) << _INDEX_BITS | columns.bucket
    order = np.lexsort((columns.done_ns, rank, bucket, collective))
    repeats = np.append(False, is_repeated(order, rank, bucket, collective))
    count = np.arange(len(order))
    occurrence = np.empty_like(count)
    occurrence[order] = count - np.maximum.accumulate(np.where(repeats, 0, count))
    return number_rows(collective, bucket, occurrence)


def _computing_ns(rows: Rows, rank: wire.Ints, columns: wire.Spans) -> wire.Ints:
    """Return when each bucket's computation began: the readiness before its own, or the begin of backward.

    A unit's gradients are made between waits, so their computation is not known: it is as if it took no time.
    """
    _, steps = rows
    row = step_rows(rows, rank, columns.step)
    backward_ns = np.append(steps.start_ns + steps.data_ns + steps.forward_ns, 0)[row]
    initial_ns = np.where(row < 0, columns.ready_ns, np.minimum(columns.ready_ns, backward_ns))
    before_ns = _previous(rank, columns, columns.ready_ns, initial_ns)
    return np.where(columns.waited_ns == wire.UNKNOWN, before_ns, columns.ready_ns)
