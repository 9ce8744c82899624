"""A step as the tracker closes it: stamps only. `summary.Summariser` computes durations later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ddpobs.clocks import Stamp
from ddpobs.steps.backward_record import BackwardRecord
from ddpobs.steps.counters import Reading
from ddpobs.wire import COMM_KINDS, OUTSIDE_KINDS, PHASES

DATA, FORWARD, BACKWARD, EXPOSED_COMM, OPTIMIZER, OTHER = range(len(PHASES))
NO_STEP = -1
"""Pseudo-phase of time between steps."""
EVALUATION, CHECKPOINT, AFTER_CHECKPOINT, WAITING, RESTING = range(len(OUTSIDE_KINDS))
_USER = COMM_KINDS.index("user")
_MAX_OUTSIDE = 10_000
"""Intervals outside of steps that are kept before one step; later ones count as time between steps."""


class InputSize(NamedTuple):
    """Size of the tensors among a forward's inputs.

    Attributes:
        rows: First dimension of the first tensor that has rows.
        elements: Elements of all tensors; 0 if there are none, or too many to count.
        longest: Largest dimension of any tensor without its first dimension; 0 without one.
    """

    rows: int = 0
    elements: int = 0
    longest: int = 0

    def plus(self, other: InputSize) -> InputSize:
        """Return the size of both inputs together."""
        return InputSize(self.rows + other.rows, self.elements + other.elements, max(self.longest, other.longest))

    def without(self, other: InputSize) -> InputSize:
        """Return the size without a part of the inputs; the longest dimension stays."""
        return InputSize(self.rows - other.rows, self.elements - other.elements, self.longest)


NO_INPUT = InputSize()


class Position(NamedTuple):
    """Numbers of switches, collectives and calls of backward, and size of the inputs, in a step at one moment."""

    switches: int
    comms: int
    size: InputSize
    micro_steps: int


@dataclass(slots=True)
class Segment:
    """One synchronisation of gradients: a call of backward, or a separate wait.

    Attributes:
        end: Stamp of the call's return.
        records: Records of the DDP modules in it (`backward_record.BackwardRecord`).
        clean: Whether own time may be measured from the previous synchronisation on.
        collective: Sequence number of the synchronised backward in this process.
        waited: Whether training waited in a separate call, which the phases show, instead of inside backward.
        reading: Counters at the end; None if they were not read.
    """

    end: Stamp
    records: list[BackwardRecord]
    clean: bool
    collective: int
    waited: bool = False
    reading: Reading | None = None


@dataclass(slots=True)
class RawStep:
    """A step in stamps.

    Attributes:
        number: Counts from 0.
        switches: (phase, stamp) in order; the first stamp is the step's start.
        end: Stamp of the step's end.
        segments: Its synchronised backward passes.
        comms: (module, kind, launched, done) of communication that is not a gradient bucket.
        size: Size of the inputs, over its micro-steps.
        no_grad_size: That of forwards without gradients, if no nested pass has run the same rows since.
        micro_steps: Calls of backward.
        holes: Indexes into `switches` at which time outside of the step began; the next switch ended it.
        schedules: (began, ended) of steps of a pipeline's schedule.
        outside: (kind, began, ended) of time before and inside of the step that is no part of it; `kind` indexes
            `wire.OUTSIDE_KINDS`.
    """

    number: int
    switches: list[tuple[int, Stamp]]
    end: Stamp = 0
    segments: list[Segment] = field(default_factory=list)
    comms: list[tuple[int, int, Stamp, Stamp]] = field(default_factory=list)
    size: InputSize = NO_INPUT
    no_grad_size: InputSize = NO_INPUT
    micro_steps: int = 0
    holes: list[int] = field(default_factory=list)
    schedules: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    outside: list[tuple[int, Stamp, Stamp]] = field(default_factory=list)

    @property
    def records(self) -> int:
        """Records that the step adds to a batch: itself, bucket spans, other communication, sampled readiness."""
        backwards = [record for segment in self.segments for record in segment.records]
        sampled = sum(record.parameter_ready_ns is not None for record in backwards)
        return 1 + len(self.comms) + sum(len(record.ready_ns) for record in backwards) + sampled

    @property
    def position(self) -> Position:
        """Current numbers of switches, collectives and calls of backward, and size of the inputs."""
        return Position(len(self.switches), len(self.comms), self.size, self.micro_steps)

    def restart(self, stamp: Stamp) -> None:
        """Begin at `stamp` instead, without the content so far."""
        self._drop_comms(0)
        self.switches, self.holes, self.size, self.no_grad_size = [(OTHER, stamp)], [], NO_INPUT, NO_INPUT

    def drop_before(self, position: Position) -> None:
        """Begin at an earlier position instead, without the content before it."""
        following = self.comms[position.comms :]
        self._drop_comms(0, position.comms)
        self.comms = following
        del self.switches[: position.switches]
        self.holes = [hole - position.switches for hole in self.holes if hole >= position.switches]
        self.size = self.size.without(position.size)

    def add_outside(self, kind: int, began: Stamp, ended: Stamp) -> None:
        """Add time outside of the step; an interval that continues the previous one extends it."""
        if self.outside and self.outside[-1][0] == kind and self.outside[-1][2] == began:
            self.outside[-1] = (kind, self.outside[-1][1], ended)
        elif len(self.outside) < _MAX_OUTSIDE:
            self.outside.append((kind, began, ended))

    def cut(self, began: Stamp) -> None:
        """Begin time outside of the step, which the next switch ends."""
        self.holes.append(len(self.switches))
        self.switches.append((NO_STEP, began))

    def open_hole(self, position: Position, stamp: Stamp) -> None:
        """Insert the start of an evaluation, at `stamp`, into the switches at an earlier position."""
        self.holes = [hole + (hole >= position.switches) for hole in self.holes]
        self.holes.append(position.switches)
        self.switches.insert(position.switches, (NO_STEP, stamp))

    def close_hole(self, position: Position, stamp: Stamp) -> None:
        """Remove the content since the start of the hole at that position, and end the hole at `stamp`."""
        self.holes = [hole for hole in self.holes if hole <= position.switches]
        del self.switches[position.switches + 1 :]
        self._drop_comms(position.comms)
        self.size = position.size
        self.switches.append((OTHER, stamp))

    def _drop_comms(self, first: int, last: int | None = None) -> None:
        """Remove communication from the step; its waits for the user's collectives are time outside of the step."""
        for _, kind, began, ended in self.comms[first:last]:
            if kind == _USER:
                self.add_outside(WAITING, began, ended)
        del self.comms[first:last]
