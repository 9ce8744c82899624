"""Waiting in a trace: parts of each all-reduce, arrows from the late rank, and counters of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs_server.analysis.communication.transfers import Transfers
from ddpobs_server.analysis.trace.buckets import BucketTracks
from ddpobs_server.analysis.trace.events import ArrowEnd, ArrowStart, MovingArgs, Slice, StepArgs, counter, rows_of

_MIN_WAIT_NS = 1_000
"""A shorter wait is below the noise of the clocks' alignment, and too short to see."""
_MIN_ARROW_SHARE = 0.25
"""Minimum share of a step's longest wait that has an arrow."""
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Waits:
    """The parts of all-reduces that every rank recorded.

    Attributes:
        tracks: The spans, and their tracks.
        transfers: The all-reduces.
        waited_ns: Start of the wait for the last rank, since the trace's origin, shape [transfers, ranks].
        moved_ns: Start of the movement of bytes, shape [transfers, ranks].
        late: Index of the rank that arrived last, shape [transfers].
    """

    tracks: BucketTracks
    transfers: Transfers
    waited_ns: wire.Ints
    moved_ns: wire.Ints
    late: wire.Ints

    @classmethod
    def of(cls, tracks: BucketTracks, transfers: Transfers) -> Waits:
        """Return the parts of these all-reduces."""
        launched_ns, row = tracks.launched_ns[transfers.row], transfers.row
        moved_ns = np.maximum(tracks.done_ns[row] - transfers.moving_ns[:, None].astype(np.int64), launched_ns)
        waited_ns = np.maximum(moved_ns - transfers.waiting_ns.astype(np.int64), launched_ns)
        return cls(tracks, transfers, waited_ns, moved_ns, (moved_ns - waited_ns).argmin(axis=1))

    def slices(self) -> Iterator[Slice]:
        """Iterate over waiting and moving, each inside the slice of its all-reduce."""
        transfers, done_ns = self.transfers, self.tracks.done_ns[self.transfers.row]
        waits = self.moved_ns - self.waited_ns >= _MIN_WAIT_NS
        for pid, tid, step, late, began, ended in self._cells(
            waits, self._late_values(self.tracks.rank), self.waited_ns, self.moved_ns
        ):
            yield Slice(f"waiting for rank {late}", pid, tid, began / 1e3, (ended - began) / 1e3, StepArgs(step))
        bytes_per_ns = transfers.size_bytes / np.maximum(1.0, transfers.moving_ns)
        for pid, tid, step, size, bandwidth, began, ended in self._cells(
            done_ns > self.moved_ns, transfers.size_bytes, bytes_per_ns, self.moved_ns, done_ns
        ):
            args = MovingArgs(step, size, round(bandwidth, 3))
            yield Slice("moving", pid, tid, began / 1e3, (ended - began) / 1e3, args)

    def arrows(self) -> Iterator[ArrowStart | ArrowEnd]:
        """Iterate over the ends of arrows, from the last rank to each that waited for it, at each step's longest wait.

        It begins at the late rank's arrival, and ends where bytes begin to move on the other rank.
        """
        waiting_ns = self.moved_ns - self.waited_ns
        longest_ns = waiting_ns.max(axis=1, initial=0)
        by_length = np.lexsort((-longest_ns, self.transfers.step))
        chosen = by_length[np.flatnonzero(np.diff(self.transfers.step[by_length], prepend=wire.UNKNOWN))]
        mask = np.zeros(waiting_ns.shape, bool)
        least_ns = np.maximum(_MIN_WAIT_NS, longest_ns[chosen] * _MIN_ARROW_SHARE)
        mask[chosen] = waiting_ns[chosen] >= least_ns[:, None]
        arrived_ns = np.take_along_axis(self.waited_ns, self.late[:, None], axis=1)
        cells = self._cells(
            mask, self._late_values(self.tracks.rank), self._late_values(self.tracks.track), arrived_ns, self.moved_ns
        )
        for number, (pid, tid, _, late, late_track, arrived, moved) in enumerate(cells):
            yield ArrowStart("late", "ddpobs", number, late, late_track, arrived / 1e3)
            yield ArrowEnd("late", "ddpobs", number, pid, tid, moved / 1e3)

    def counters(self) -> Iterator[dict[str, Any]]:
        """Iterate over the bandwidth of all-reduces, in GB/s, and the number of ranks that wait for a late rank."""
        transfers = self.transfers
        ended_ns = self.tracks.done_ns[transfers.row[:, :1]].reshape(-1)
        bytes_per_ns = transfers.size_bytes / np.maximum(1.0, transfers.moving_ns)
        waits = self.moved_ns - self.waited_ns >= _MIN_WAIT_NS
        one = np.ones(int(waits.sum()))
        yield from changes(("bandwidth", "GB/s"), self.moved_ns[:, :1].reshape(-1), ended_ns, bytes_per_ns)
        yield from changes(("ranks", "waiting"), self.waited_ns[waits], self.moved_ns[waits], one)

    def _late_values(self, values: wire.Ints) -> wire.Ints:
        """Return a column's value of the late rank of each transfer, shape [transfers]."""
        return np.asarray(values[self.transfers.row[np.arange(len(self.transfers)), self.late]], np.int64)

    def _cells(self, mask: npt.NDArray[np.bool_], *values: npt.NDArray[Any]) -> Iterator[tuple[Any, ...]]:
        """Iterate over rank, track, step and these values of the selected cells of [transfers, ranks]."""
        row = self.transfers.row
        selected = row[mask]
        columns = [self.tracks.rank[selected], self.tracks.track[selected], self.tracks.spans.step[selected]]
        columns += [np.broadcast_to(v if v.ndim == 2 else v[:, None], row.shape)[mask] for v in values]
        return rows_of(*columns)


def changes(
    name: tuple[str, str], began_ns: wire.Ints, ended_ns: wire.Ints, values: npt.NDArray[Any]
) -> Iterator[dict[str, Any]]:
    """Iterate over the changes of a counter that sums these values, each from its start to its end.

    Args:
        name: The counter's name and unit.
        began_ns: Since the trace's origin, shape [values].
        ended_ns: Same shape.
        values: Same shape.
    """
    at_ns, index = np.unique(np.concatenate([began_ns, ended_ns]), return_inverse=True)
    level = np.cumsum(np.bincount(index, np.concatenate([values, -values]), len(at_ns)))
    changed = np.flatnonzero(np.abs(np.diff(level, prepend=0.0)) > _ROUNDING)
    for at, value in rows_of(at_ns[changed], level[changed]):
        yield counter(*name, at / 1e3, round(value, 3))
