"""The tracks of a trace that show buckets or units: when their gradients were computed, and when each was reduced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs.shared.words import bucket_title
from ddpobs_server.analysis.steps.clock_alignment import align
from ddpobs_server.analysis.trace.events import BLOCK, FIRST_TRACK, BucketArgs, Slice, UnitArgs, name_track, rows_of

_BUCKET_BITS = 32


class BucketTracks:
    """A track of each bucket of each module on each rank, and a track of each module's gradients.

    Events of one track must not overlap in part. A backward ends when all its buckets are done, so the next backward's
    buckets, of any layout revision, can use the same tracks.

    Args:
        spans: Ranks and columns of shape [rows].
        offsets: Offset in ns of each rank's clock.
        origin_ns: The trace's zero, on the lowest rank's clock.
        layouts: The buckets of each module; the latest revision names the tracks.

    Attributes:
        rank: Shape [rows].
        spans: Shape [rows].
        track: The bucket's track, shape [rows].
        launched_ns: On the lowest rank's clock, since the origin, shape [rows].
        done_ns: On the same clock, shape [rows].
    """

    def __init__(
        self,
        spans: tuple[wire.Ints, wire.Spans],
        offsets: dict[int, int],
        origin_ns: int,
        layouts: Sequence[wire.Layout],
    ) -> None:
        self.rank, self.spans = rank, columns = spans
        keys, self._index = np.unique(columns.module << _BUCKET_BITS | columns.bucket, return_inverse=True)
        self._pairs = [(key >> _BUCKET_BITS, key & (1 << _BUCKET_BITS) - 1) for key in keys.tolist()]
        buckets = _latest(layouts)
        self._names = [_name(module, bucket, buckets.get((module, bucket))) for module, bucket in self._pairs]
        self._modules, self._module_index = np.unique(columns.module, return_inverse=True)
        self._first_bucket_track = FIRST_TRACK + len(self._modules)
        self._parameters = _parameters(buckets)
        self._units = [buckets[pair].unit if pair in buckets else "" for pair in self._pairs]
        self._is_unit = np.array(self._units, object).astype(bool)
        self.track = self._first_bucket_track + self._index
        self._ready_ns, self.launched_ns, self.done_ns = (
            align(rank, offsets, times) - origin_ns
            for times in (columns.ready_ns, columns.launched_ns, columns.done_ns)
        )

    def names(self) -> Iterator[dict[str, Any]]:
        """Iterate over the names of the tracks of every rank."""
        of_buckets = ~self._is_unit[self._index]
        for rank, index in _distinct(self.rank[of_buckets], self._module_index[of_buckets]):
            module = int(self._modules[index])
            yield name_track(rank, FIRST_TRACK + index, f"gradients {module}" if module else "gradients")
        for rank, index in _distinct(self.rank, self._index):
            parameters = self._parameters.get(self._pairs[index])
            name = f"{self._names[index]}: {parameters}" if parameters else self._names[index]
            yield name_track(rank, self._first_bucket_track + index, name)

    def gradients(self) -> Iterator[Slice]:
        """Iterate over the times from a bucket's readiness to the next one's, in which that one's gradients are made.

        The first bucket of a backward is left out, because the start of the backward is not recorded. So are
        units: their gradients are made between waits.
        """
        spans, ready_ns = self.spans, self._ready_ns
        backward = _occurrences(self.rank, spans, ready_ns)
        order = np.lexsort((ready_ns, backward, spans.module, spans.step, self.rank))
        follows = ~self._is_unit[self._index[order[1:]]]
        for column in (self.rank, spans.step, spans.module, backward):
            follows &= np.diff(column[order]) == 0
        rows, before = order[1:][follows], order[:-1][follows]
        names = [f"gradients of {name}" for name in self._names]
        return self._slices(names, rows, FIRST_TRACK + self._module_index, ready_ns[before], ready_ns[rows])

    def reductions(self) -> Iterator[Slice]:
        """Iterate over each collective, from its launch to its completion."""
        return self._slices(self._names, np.arange(len(self.rank)), self.track, self.launched_ns, self.done_ns)

    def _slices(
        self, names: list[str], rows: wire.Ints, track: wire.Ints, began_ns: wire.Ints, ended_ns: wire.Ints
    ) -> Iterator[Slice]:
        """Iterate over a slice of each of these rows, from times of the same length; `names` are by bucket."""
        spans = self.spans
        columns = (self._index, track, self.rank, spans.step, spans.bucket, spans.module)
        for begin in range(0, len(rows), BLOCK):
            block = slice(begin, begin + BLOCK)
            times = began_ns[block] / 1e3, (ended_ns[block] - began_ns[block]) / 1e3
            values = rows_of(*(column[rows[block]] for column in columns), *times)
            for index, tid, pid, step, bucket, module, began, duration in values:
                unit = self._units[index]
                args = BucketArgs(step, bucket, module) if not unit else UnitArgs(step, unit, module)
                yield Slice(names[index], pid, tid, began, duration, args)


def _distinct(rank: wire.Ints, index: wire.Ints) -> Iterator[tuple[int, int]]:
    count = int(index.max(initial=0)) + 1
    for pair in rows_of(*np.divmod(np.unique(rank * count + index), count)):
        yield pair[0], pair[1]


def _occurrences(rank: wire.Ints, spans: wire.Spans, ready_ns: wire.Ints) -> wire.Ints:
    """Return for each span which one of its step it is, by its bucket: the backward that it belongs to."""
    order = np.lexsort((ready_ns, spans.bucket, spans.module, spans.step, rank))
    is_first = np.zeros(len(order), bool)
    is_first[:1] = True
    for column in (rank, spans.step, spans.module, spans.bucket):
        is_first[1:] |= np.diff(column[order]) != 0
    position = np.arange(len(order))
    occurrence = np.empty_like(position)
    occurrence[order] = position - np.maximum.accumulate(np.where(is_first, position, 0))
    return occurrence


def _latest(layouts: Sequence[wire.Layout]) -> dict[tuple[int, int], wire.Bucket]:
    """Return the buckets of the latest layouts, by module and bucket."""
    return {
        (layout.module, index): bucket
        for layout in sorted(layouts, key=lambda layout: layout.revision)
        for index, bucket in enumerate(layout.buckets)
    }


def _name(module: int, index: int, bucket: wire.Bucket | None) -> str:
    if bucket is not None and bucket.unit:
        return bucket_title(module, index, bucket)
    return f"bucket {index}" if module == 0 else f"bucket {module}.{index}"


def _parameters(buckets: Mapping[tuple[int, int], wire.Bucket]) -> dict[tuple[int, int], str]:
    """Return the first parameter of each bucket, by module and bucket."""
    return {
        place: bucket.parameters[0].name + (" ..." if len(bucket.parameters) > 1 else "")
        for place, bucket in buckets.items()
        if bucket.parameters
    }
