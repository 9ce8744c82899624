"""Closed steps as columns of plain numbers, in which they wait for a batch.

The garbage collector counts the objects that stay and can hold others. Every 700 of them it goes over the young ones,
and whenever a quarter more have stayed it goes over all that the process has: tenths of a second, in every rank at
another moment, for which each time all ranks wait. Numbers in lists it does not count (CPython 3.11, pycore_gc.h, the
note on counting long-lived objects).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs.clocks import Clock
from ddpobs.steps.raw_step import NO_STEP, RawStep


@dataclass(slots=True)
class RawSteps:
    """Steps in order; times are host nanoseconds, 0 where a stamp was not taken.

    Attributes:
        number, samples, micro_steps: By step.
        switches, comms, segments: By step, how many it has of the following.
        phase, since_ns: By switch; a step's last one is its end.
        comm_module, comm_kind, comm_launched_ns, comm_done_ns: By communication that is no gradient bucket.
        end_ns, clean, collective, waited, backwards: By segment; the last is how many of the following it has.
        module, revision, last_ready_ns, buckets: By backward of a module; the last is how many buckets it has.
        ready_ns, launched_ns, done_ns, took_ns: By bucket; the last is how long it was moving, if somebody knows.
        readiness: Of backwards in which each parameter was stamped.
    """

    number: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    micro_steps: list[int] = field(default_factory=list)
    switches: list[int] = field(default_factory=list)
    comms: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    phase: list[int] = field(default_factory=list)
    since_ns: list[int] = field(default_factory=list)
    comm_module: list[int] = field(default_factory=list)
    comm_kind: list[int] = field(default_factory=list)
    comm_launched_ns: list[int] = field(default_factory=list)
    comm_done_ns: list[int] = field(default_factory=list)
    end_ns: list[int] = field(default_factory=list)
    clean: list[bool] = field(default_factory=list)
    collective: list[int] = field(default_factory=list)
    waited: list[bool] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)
    module: list[int] = field(default_factory=list)
    revision: list[int] = field(default_factory=list)
    last_ready_ns: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    ready_ns: list[int] = field(default_factory=list)
    launched_ns: list[int] = field(default_factory=list)
    done_ns: list[int] = field(default_factory=list)
    took_ns: list[int] = field(default_factory=list)
    readiness: list[wire.Readiness] = field(default_factory=list)

    @classmethod
    def from_steps(cls, raws: Iterable[RawStep], clock: Clock) -> RawSteps:
        """Those steps, whose stamps are of that clock."""
        steps = cls()
        for raw in raws:
            steps.add(raw, clock)
        return steps

    @property
    def records(self) -> int:
        """For how many they count in a batch."""
        return len(self.number) + len(self.comm_kind) + len(self.ready_ns) + len(self.readiness)

    def extend(self, later: RawSteps) -> None:
        """Append those of `later`."""
        for name in self.__slots__:
            getattr(self, name).extend(getattr(later, name))

    def add(self, raw: RawStep, clock: Clock) -> None:
        """Append one step, whose end the clock's device has passed; nothing of it where that fails."""
        try:
            self._add(raw, clock)
        except BaseException:
            self._forget_half_added()
            raise

    def _add(self, raw: RawStep, clock: Clock) -> None:
        phases, stamps = zip(*raw.switches, (NO_STEP, raw.end), strict=True)
        since_ns = clock.times(stamps)
        for hole in raw.holes:  # What came before an evaluation in the step's middle is told as if it came right after.
            gap_ns = since_ns[hole + 1] - since_ns[hole]
            since_ns = [at_ns + gap_ns for at_ns in since_ns[: hole + 1]] + list(since_ns[hole + 1 :])
        self.switches.append(len(phases))
        self.phase.extend(phases)
        self.since_ns.extend(since_ns)
        self.comms.append(len(raw.comms))
        if raw.comms:
            modules, kinds, launched, done = zip(*raw.comms, strict=True)
            self.comm_module.extend(modules)
            self.comm_kind.extend(kinds)
            self.comm_launched_ns.extend(clock.times(launched))
            self.comm_done_ns.extend(clock.times(done))
        self.segments.append(len(raw.segments))
        for segment in raw.segments:
            self.end_ns.extend(clock.times([segment.end]))
            self.clean.append(segment.clean)
            self.collective.append(segment.collective)
            self.waited.append(segment.waited)
            self.backwards.append(len(segment.records))
            for record in segment.records:
                self._add_backward(raw.number, record, clock)
        self.samples.append(raw.samples)
        self.micro_steps.append(raw.micro_steps)
        self.number.append(raw.number)  # The last: it is whole now.

    def _add_backward(self, step: int, record: Any, clock: Clock) -> None:
        """One `recorder.BackwardRecord`."""
        buckets = len(record.ready_ns)
        self.module.append(record.module)
        self.revision.append(record.revision)
        self.last_ready_ns.extend(clock.times([record.last_ready]))
        self.buckets.append(buckets)
        self.ready_ns.extend(clock.times(record.ready_ns))
        self.launched_ns.extend(clock.times(record.launched_ns))
        self.done_ns.extend(clock.times(record.done_ns))
        took_ns = [wire.UNKNOWN] * buckets
        for bucket, work in record.works.items():
            took_ns[bucket] = clock.duration_ns(work)
        self.took_ns.extend(took_ns)
        if record.parameter_ready_ns is not None:
            ready_ns = np.array(clock.times(record.parameter_ready_ns), np.int64)
            told = wire.Readiness(step=step, module=record.module, revision=record.revision, ready_ns=ready_ns)
            self.readiness.append(told)

    def _forget_half_added(self) -> None:
        steps = len(self.number)
        segments = sum(self.segments[:steps])
        backwards = sum(self.backwards[:segments])
        for length, columns in (
            (steps, (self.samples, self.micro_steps, self.switches, self.comms, self.segments)),
            (sum(self.switches[:steps]), (self.phase, self.since_ns)),
            (
                sum(self.comms[:steps]),
                (self.comm_module, self.comm_kind, self.comm_launched_ns, self.comm_done_ns),
            ),
            (segments, (self.end_ns, self.clean, self.collective, self.waited, self.backwards)),
            (sum(self.buckets[:backwards]), (self.ready_ns, self.launched_ns, self.done_ns, self.took_ns)),
            (backwards, (self.module, self.revision, self.last_ready_ns, self.buckets)),
        ):
            for column in columns:
                del column[length:]
        self.readiness = [told for told in self.readiness if told.step in self.number]
