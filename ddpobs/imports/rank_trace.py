"""What a trace says of one rank, whatever its format. Times are nanoseconds on the rank's own clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from ddpobs import wire
from ddpobs.wire import Ints

CallKind = Literal["fetch", "forward", "backward", "optimizer"]


class Call(NamedTuple):
    """A call of the training thread."""

    kind: CallKind
    began_ns: int
    ended_ns: int


class Collective(NamedTuple):
    """A collective; `size_bytes` is 0 if the trace does not tell it, `started_ns` is 0 if it is not known.

    `parameter` is the only parameter in it, empty if it is not known. `order` is its place among the buckets of its
    layout, for traces in which the order of the launches changes. `unit` and `kind` are those of `wire.Bucket`; of a
    unit it is also known when its data were ready, and since when training waits, 0 if it does not.

    `group` has the ranks of its process group; none if they are not known.
    """

    name: str
    launched_ns: int
    started_ns: int
    done_ns: int
    size_bytes: int = 0
    dtype: str = ""
    parameter: str = ""
    order: int = 0
    unit: str = ""
    kind: str = "bucket"
    ready_ns: int = 0
    waited_from_ns: int = 0
    group: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankTrace:
    """A rank's trace.

    Attributes:
        source: Name of the file.
        rank: Number of the rank; None if the file does not tell it.
        world_size: Number of ranks; None if the file does not tell it.
        host: Name of the host; empty if the file does not tell it.
        backend: Backend of the process group.
        device: Device of the rank's model.
        wall_ns: Wall clock at the time 0 of this trace's clock.
        steps: (number, begin) of the steps that the training marked itself, in order; empty without marks.
        calls: Calls of the training thread.
        collectives: In the order of their launch.
        computing_ns: Begin and end of computation, shape [intervals, 2], in order and apart.
        device_ns: Where the device runs behind the host: time at which the host launched work, and at which the device
            had done all of it that was launched until then, shape [launches, 2], in order; empty on a host.
        events: Events of its first batch.
        groups: Process groups of the rank that are a part of the world; None if the file does not tell them.
    """

    source: str
    rank: int | None
    world_size: int | None
    host: str
    backend: str
    device: str
    wall_ns: int
    steps: list[tuple[int, int]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    computing_ns: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    device_ns: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    events: list[wire.Event] = field(default_factory=list)
    groups: tuple[tuple[int, ...], ...] | None = ()

    @property
    def on_device(self) -> bool:
        """Whether a device computes what the host only launches."""
        return len(self.device_ns) > 0

    def stamp(self, host_ns: int) -> int:
        """The time at which the device reaches what the host does at `host_ns`, as an event on its stream tells it."""
        before = int(np.searchsorted(self.device_ns[:, 0], host_ns, side="right"))
        return max(host_ns, int(self.device_ns[before - 1, 1])) if before else host_ns

    def with_backwards(self) -> Iterator[tuple[Collective, int | None]]:
        """The collectives, each with the index of the backward under way or next at its launch; None after the last."""
        backwards = [index for index, call in enumerate(self.calls) if call.kind == "backward"]
        at = 0
        for one in self.collectives:
            while at < len(backwards) and self.calls[backwards[at]].ended_ns < one.launched_ns:
                at += 1
            yield one, backwards[at] if at < len(backwards) else None

    def computes_after(self, at_ns: int) -> int:
        """The first moment from `at_ns` on at which a computation begins or is under way; the end of time if none."""
        after = int(np.searchsorted(self.computing_ns[:, 1], at_ns, "right"))
        return max(at_ns, int(self.computing_ns[after, 0])) if after < len(self.computing_ns) else 2**62

    def uncovered(self, began_ns: int, ended_ns: int) -> list[tuple[int, int]]:
        """Parts of an interval in which nothing was computed."""
        begins, ends = self.computing_ns[:, 0], self.computing_ns[:, 1]
        first, last = int(np.searchsorted(ends, began_ns, "right")), int(np.searchsorted(begins, ended_ns, "left"))
        parts, at_ns = [], began_ns
        for begin, end in self.computing_ns[first:last].tolist():
            if begin > at_ns:
                parts.append((at_ns, begin))
            at_ns = max(at_ns, end)
        return [*parts, (at_ns, ended_ns)] if at_ns < ended_ns else parts


def union(intervals: Ints) -> Ints:
    """Join intervals that touch or overlap; shape [intervals, 2], the result in order."""
    if not len(intervals):
        return intervals.reshape(0, 2)
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reached = np.maximum.accumulate(intervals[:, 1])
    first = np.flatnonzero(np.append(True, intervals[1:, 0] > reached[:-1]))
    return np.stack([intervals[first, 0], np.append(reached[first[1:] - 1], reached[-1])], axis=1)


def overlap_ns(left: Ints, right: Ints) -> int:
    """Length of the intersection of two unions."""
    both = int((left[:, 1] - left[:, 0]).sum() + (right[:, 1] - right[:, 0]).sum())
    joined = union(np.concatenate([left, right]))
    return both - int((joined[:, 1] - joined[:, 0]).sum())


def exposed_ns(trace: RankTrace) -> tuple[int, int]:
    """Time of communication, and its part in which nothing was computed.

    Source: Holistic Trace Analysis, `get_comm_comp_overlap` (https://hta.readthedocs.io).
    """
    moved = np.array([(one.started_ns or one.launched_ns, one.done_ns) for one in trace.collectives], np.int64)
    communicating = union(moved.reshape(-1, 2))
    total = int((communicating[:, 1] - communicating[:, 0]).sum())
    return total, total - overlap_ns(communicating, trace.computing_ns)
