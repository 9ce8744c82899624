"""Closed steps as columns of plain numbers, in which they wait for a batch.

Steps are kept as lists of numbers, not objects. Container objects trigger Python's garbage collector: a pass over the
young objects after every 700 of them, and a pass over all objects of the process after a quarter more have survived.
The latter takes tenths of a second, at a different moment on each rank, and stalls all of them. Numbers in lists are
not counted (CPython 3.11, pycore_gc.h, the note on counting long-lived objects).

With torch imported, a pass over all objects takes 0.15 s. Kept as objects, a step left 18 containers and more, and
caused such a pass once in ten thousand steps of a small model. An entry is three places of one queue, and a closed step
becomes numbers: a step leaves 6 containers until its replay, and 0.1 from then on.
"""

# ruff: noqa: RUF009  # `_column` returns a dataclass field.

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs.clocks import Clock
from ddpobs.steps.counters import totals
from ddpobs.steps.raw_step import NO_STEP, RawStep, Segment

_Reader = Callable[[Any, Clock], Sequence[Any]]
_STEP, _SEGMENT, _BACKWARD = "step", "segment", "backward"


def _column(source: str, read: _Reader) -> Any:
    """Declare a column.

    Args:
        source: Object from which its values come: each step, each segment or each backward of a module.
        read: Returns the object's values, in any number.
    """
    return field(default_factory=list, metadata={"source": source, "read": read})


def _since_ns(step: RawStep, clock: Clock) -> Sequence[int]:
    since_ns = clock.times([*(stamp for _, stamp in step.switches), step.end])
    for hole in step.holes:  # Move the time before an interruption forward, to end where the interruption ends.
        gap_ns = since_ns[hole + 1] - since_ns[hole]
        since_ns = [at_ns + gap_ns for at_ns in since_ns[: hole + 1]] + list(since_ns[hole + 1 :])
    return since_ns


def _took_ns(record: Any, clock: Clock) -> Sequence[int]:
    took_ns = [wire.UNKNOWN] * len(record.ready_ns)
    for bucket, work in record.works.items():
        took_ns[bucket] = clock.duration_ns(work)
    return took_ns


def _waited_from_ns(record: Any, clock: Clock) -> Sequence[int]:
    return [0] * len(record.ready_ns) if record.waited_from_ns is None else clock.times(record.waited_from_ns)


def _readiness(step: RawStep, clock: Clock) -> Sequence[wire.Readiness]:
    return [
        wire.Readiness(
            step=step.number,
            module=record.module,
            revision=record.revision,
            ready_ns=np.array(clock.times(record.parameter_ready_ns), np.int64),
        )
        for segment in step.segments
        for record in segment.records
        if record.parameter_ready_ns is not None
    ]


@dataclass(slots=True)
class RawSteps:
    """Steps in order. Times are host nanoseconds, 0 where a stamp was not taken.

    A column's declaration is complete: adding, joining and truncating cover every field.
    """

    # By step; the last five count its rows in the columns below.
    number: list[int] = _column(_STEP, lambda step, _: [step.number])
    samples: list[int] = _column(_STEP, lambda step, _: [step.size.rows])
    elements: list[int] = _column(_STEP, lambda step, _: [step.size.elements])
    longest: list[int] = _column(_STEP, lambda step, _: [step.size.longest])
    micro_steps: list[int] = _column(_STEP, lambda step, _: [step.micro_steps])
    switches: list[int] = _column(_STEP, lambda step, _: [len(step.switches) + 1])
    comms: list[int] = _column(_STEP, lambda step, _: [len(step.comms)])
    segments: list[int] = _column(_STEP, lambda step, _: [len(step.segments)])

    schedules: list[int] = _column(_STEP, lambda step, _: [len(step.schedules)])
    outside: list[int] = _column(_STEP, lambda step, _: [len(step.outside)])

    # By step of a pipeline's schedule.
    schedule_began_ns: list[int] = _column(
        _STEP, lambda step, clock: clock.times([began for began, _ in step.schedules])
    )
    schedule_ended_ns: list[int] = _column(
        _STEP, lambda step, clock: clock.times([ended for _, ended in step.schedules])
    )

    # By interval outside of steps.
    outside_kind: list[int] = _column(_STEP, lambda step, _: [interval[0] for interval in step.outside])
    outside_began_ns: list[int] = _column(
        _STEP, lambda step, clock: clock.times([interval[1] for interval in step.outside])
    )
    outside_ended_ns: list[int] = _column(
        _STEP, lambda step, clock: clock.times([interval[2] for interval in step.outside])
    )

    # By switch; a step's last one is its end.
    phase: list[int] = _column(_STEP, lambda step, _: [*(phase for phase, _ in step.switches), NO_STEP])
    since_ns: list[int] = _column(_STEP, _since_ns)

    # By communication that is not a gradient bucket.
    comm_module: list[int] = _column(_STEP, lambda step, _: [comm[0] for comm in step.comms])
    comm_kind: list[int] = _column(_STEP, lambda step, _: [comm[1] for comm in step.comms])
    comm_launched_ns: list[int] = _column(_STEP, lambda step, clock: clock.times([comm[2] for comm in step.comms]))
    comm_done_ns: list[int] = _column(_STEP, lambda step, clock: clock.times([comm[3] for comm in step.comms]))

    # By segment; `backwards` counts its rows in the columns below.
    end_ns: list[int] = _column(_SEGMENT, lambda segment, clock: clock.times([segment.end]))
    clean: list[bool] = _column(_SEGMENT, lambda segment, _: [segment.clean])
    collective: list[int] = _column(_SEGMENT, lambda segment, _: [segment.collective])
    waited: list[bool] = _column(_SEGMENT, lambda segment, _: [segment.waited])
    backwards: list[int] = _column(_SEGMENT, lambda segment, _: [len(segment.records)])

    # By segment and counter: the series of the reading, then a total for each of `COUNTERS`.
    totals: list[int] = _column(_SEGMENT, lambda segment, _: totals(segment.reading))

    # By backward of a module; `buckets` counts its rows in the columns below.
    module: list[int] = _column(_BACKWARD, lambda record, _: [record.module])
    revision: list[int] = _column(_BACKWARD, lambda record, _: [record.revision])
    last_ready_ns: list[int] = _column(_BACKWARD, lambda record, clock: clock.times([record.last_ready]))
    buckets: list[int] = _column(_BACKWARD, lambda record, _: [len(record.ready_ns)])
    waits: list[bool] = _column(_BACKWARD, lambda record, _: [record.waited_from_ns is not None])

    # By bucket; `took_ns` is its time on the network, `UNKNOWN` if the backend does not report it. From
    # `waited_from_ns` on training waited for its communication, if the record has waits; 0 without one.
    ready_ns: list[int] = _column(_BACKWARD, lambda record, clock: clock.times(record.ready_ns))
    launched_ns: list[int] = _column(_BACKWARD, lambda record, clock: clock.times(record.launched_ns))
    done_ns: list[int] = _column(_BACKWARD, lambda record, clock: clock.times(record.done_ns))
    took_ns: list[int] = _column(_BACKWARD, _took_ns)
    waited_from_ns: list[int] = _column(_BACKWARD, _waited_from_ns)

    # By backward, if its parameters' readiness was sampled.
    readiness: list[wire.Readiness] = _column(_STEP, _readiness)

    @classmethod
    def from_steps(cls, raws: Iterable[RawStep], clock: Clock) -> RawSteps:
        """Build columns of these steps; `clock` took their stamps."""
        steps = cls()
        for raw in raws:
            steps.add(raw, clock)
        return steps

    @property
    def records(self) -> int:
        """Records that the steps add to a batch."""
        return len(self.number) + len(self.comm_kind) + len(self.ready_ns) + len(self.readiness)

    def extend(self, later: RawSteps) -> None:
        """Append the steps of `later`."""
        for name in self.__slots__:
            getattr(self, name).extend(getattr(later, name))

    def add(self, raw: RawStep, clock: Clock) -> None:
        """Append a step after the device has passed its end; on an error in reading its stamps, append nothing."""
        columns = [getattr(self, name) for name in self.__slots__]
        lengths = [len(column) for column in columns]
        try:
            self._append(_STEP, raw, clock)
            for segment in raw.segments:
                self._append_segment(segment, clock)
        except BaseException:
            for column, length in zip(columns, lengths, strict=True):
                del column[length:]
            raise

    def _append_segment(self, segment: Segment, clock: Clock) -> None:
        self._append(_SEGMENT, segment, clock)
        for record in segment.records:
            self._append(_BACKWARD, record, clock)

    def _append(self, source: str, values: Any, clock: Clock) -> None:
        for name, read in _READERS[source]:
            getattr(self, name).extend(read(values, clock))


_READERS: dict[str, list[tuple[str, _Reader]]] = {
    source: [
        (column.name, column.metadata["read"]) for column in fields(RawSteps) if column.metadata["source"] == source
    ]
    for source in (_STEP, _SEGMENT, _BACKWARD)
}
