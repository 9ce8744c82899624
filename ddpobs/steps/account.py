"""Account of the process's wall time: start-up, steps by phase, and time outside of steps by kind.

The telemetry thread adds each batch's steps. A gap between two steps is time outside of steps. The tracker recorded the
intervals of which it saw the cause; the rest of the gap stays unexplained. Totals are kept since the start, with at
most `_MAX_INTERVALS` intervals of each kind. So an account's size is bounded, and a lost batch costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ddpobs import wire
from ddpobs.steps.raw_step import AFTER_CHECKPOINT, CHECKPOINT, EVALUATION, RESTING, WAITING

_MAX_INTERVALS, _MAX_NAME = 16, 256
_PRIORITY = (CHECKPOINT, WAITING, AFTER_CHECKPOINT, EVALUATION, RESTING)
"""Kinds in the order in which they claim a moment: a wait during an evaluation is a wait."""


class StartUp(NamedTuple):
    """Times of a process's start, in ns of its monotonic clock; `started_ns` is None if it is not known."""

    started_ns: int | None
    imported_ns: int
    ready_ns: int


@dataclass
class StartUpWaits:
    """Waits for other ranks before the first step: for a rank that prepares data, for example.

    Attributes:
        total_ns: Sum of their times.
        longest_ns: Time of the longest one.
        place: Its call and place in the code: `barrier at train.py:31 prepare`.
    """

    total_ns: int = 0
    longest_ns: int = 0
    place: str = ""

    def add(self, took_ns: int, place: str) -> None:
        """Add a wait."""
        self.total_ns += took_ns
        if took_ns > self.longest_ns:
            self.longest_ns, self.place = took_ns, place[:_MAX_NAME]


class Recompilation(NamedTuple):
    """A compilation of a function that had been compiled before.

    Attributes:
        began_ns: Its begin on the monotonic clock.
        place: The function: `train.py:12 forward`.
        reason: The guard that failed, as torch words it.
    """

    began_ns: int
    place: str
    reason: str


class Piece(NamedTuple):
    """Time outside of steps; `kind` indexes `wire.OUTSIDE_KINDS`."""

    kind: int
    began_ns: int
    ended_ns: int


@dataclass
class Tail:
    """The time since the last step's end.

    Attributes:
        until_ns: Its end.
        step: Number of the open step.
        began: That step has begun.
        pieces: Time outside of the step.
        finished: Training has ended.
    """

    until_ns: int
    step: int = 0
    began: bool = False
    pieces: Sequence[Piece] = ()
    finished: bool = False


@dataclass
class _Total:
    """Time of one kind."""

    total_ns: int = 0
    count: int = 0
    intervals: list[wire.OutsideInterval] = field(default_factory=list)

    def add(self, step: int, began_ns: int, ended_ns: int) -> None:
        """Add an interval before a step."""
        lasts_ns = ended_ns - began_ns
        self.total_ns += lasts_ns
        self.count += 1
        self.intervals.append(wire.OutsideInterval(max(0, step - 1), step, began_ns, ended_ns, lasts_ns))
        if len(self.intervals) > _MAX_INTERVALS:
            pairs = range(len(self.intervals) - 1)
            index = min(pairs, key=lambda i: self.intervals[i + 1].began_ns - self.intervals[i].ended_ns)
            self.intervals[index : index + 2] = [_merged(*self.intervals[index : index + 2])]

    def copy(self) -> _Total:
        """Return a total that changes by itself."""
        return _Total(self.total_ns, self.count, list(self.intervals))


class Account:
    """Sums of a process's wall time.

    Args:
        start_up: Times of the process's start.
        before: Waits before the module was ready.
        after: Waits from then on until the first step; they are added while they happen.
    """

    def __init__(
        self, start_up: StartUp, before: StartUpWaits | None = None, after: StartUpWaits | None = None
    ) -> None:
        self._start_up = start_up
        self._before, self._after = before or StartUpWaits(), after or StartUpWaits()
        self._first_step_ns: int | None = None
        self._last_step_ns: int | None = None
        self._last_step = wire.UNKNOWN
        self._steps = self._prepare_ns = self._first_batch_ns = self._between_ns = self._unrecorded_ns = 0
        self._compiled_ns = [0] * len(wire.PHASES)
        self._recompile_ns = 0
        self._warm_ns: int | None = None
        """Start of the first step in which a compilation is one in mid-run."""
        self._phases_ns = [0] * len(wire.PHASES)
        self._totals = [_Total() for _ in wire.OUTSIDE_KINDS]
        self._checkpoint_step = wire.UNKNOWN

    def add(self, steps: wire.Steps, pieces: dict[int, list[Piece]], compiled_ns: wire.Ints) -> None:
        """Add steps in order.

        Args:
            steps: The steps.
            pieces: Time outside of steps, by the index of the step that it precedes or interrupts.
            compiled_ns: Time of the steps in torch.compile, by phase.
        """
        count = len(steps)
        if not count:
            return
        previous_ns, previous = self._last_step_ns, self._last_step
        gaps = 1 + np.flatnonzero(steps.start_ns[1:] != steps.end_ns[:-1])
        for index in sorted({0, *pieces, *gaps.tolist()}):
            if index:
                previous_ns, previous = int(steps.end_ns[index - 1]), int(steps.step[index - 1])
            step, start_ns = int(steps.step[index]), int(steps.start_ns[index])
            if previous_ns is None:
                self._first_step_ns, self._first_batch_ns = start_ns, int(steps.data_ns[0])
                unexplained = pieces.get(index, [])
                self._prepare_ns = self._claim(step, self._start_up.ready_ns, start_ns, unexplained, self._totals)
            elif start_ns > previous_ns:
                around = pieces.get(index, [])
                rest_ns = self._claim(step, previous_ns, start_ns, around, self._totals)
                if step == previous + 1 or any(piece.kind == RESTING for piece in around):
                    self._between_ns += rest_ns
                else:
                    self._unrecorded_ns += rest_ns
            if any(piece.kind == CHECKPOINT for piece in pieces.get(index, [])):
                self._checkpoint_step = step
        self._steps += count
        for index, phase in enumerate(wire.PHASES):
            self._phases_ns[index] += int(getattr(steps, f"{phase}_ns").sum())
        self._add_compilations(steps, compiled_ns)
        self._last_step_ns, self._last_step = int(steps.end_ns[-1]), int(steps.step[-1])

    def _add_compilations(self, steps: wire.Steps, phases_ns: wire.Ints) -> None:
        for index, phase_ns in enumerate(phases_ns.tolist()):
            self._compiled_ns[index] += phase_ns
        later = steps.step >= wire.WARM_UP_STEPS
        if self._warm_ns is None and later.any():
            self._warm_ns = int(steps.start_ns[later][0])
        self._recompile_ns += int(np.maximum(steps.compile_ns[later], 0).sum())

    def at(self, tail: Tail, recompiled: Recompilation | None = None) -> wire.Account:
        """Return the account up to the end of `tail`, or of the last step if later steps are still on their way.

        Args:
            tail: The time since the last step's end.
            recompiled: The latest compilation for which torch gives a reason.
        """
        if recompiled is not None and (self._warm_ns is None or recompiled.began_ns < self._warm_ns):
            recompiled = None
        totals = [total.copy() for total in self._totals]
        since_ns = self._start_up.ready_ns if self._last_step_ns is None else self._last_step_ns
        open_ns, between_ns, prepare_ns = 0, self._between_ns, self._prepare_ns
        until_ns, checkpoint = since_ns, self._checkpoint_step
        if tail.until_ns > since_ns and tail.step == self._last_step + 1:
            until_ns = tail.until_ns
            rest_ns = self._claim(tail.step, since_ns, until_ns, tail.pieces, totals)
            if self._last_step_ns is None and not tail.began:
                prepare_ns = rest_ns
            elif tail.began and not tail.finished:
                open_ns = rest_ns
            elif not tail.finished:
                between_ns += rest_ns
            if any(piece.kind == AFTER_CHECKPOINT for piece in tail.pieces):
                checkpoint = tail.step
        return wire.Account(
            **self._start_up._asdict(),
            first_step_ns=self._first_step_ns,
            last_step_ns=self._last_step_ns,
            until_ns=until_ns,
            steps=self._steps,
            phases_ns=list(self._phases_ns),
            prepare_ns=prepare_ns,
            model_wait_ns=self._before.total_ns,
            prepare_wait_ns=min(prepare_ns, self._after.total_ns),
            start_wait_place=max(self._before, self._after, key=lambda waits: waits.longest_ns).place,
            first_batch_ns=self._first_batch_ns,
            compile_ns=sum(self._compiled_ns),
            compile_phases_ns=list(self._compiled_ns),
            recompile_ns=min(self._recompile_ns, sum(self._compiled_ns)),
            recompile_place=recompiled.place[:_MAX_NAME] if recompiled else "",
            recompile_reason=recompiled.reason[:_MAX_NAME] if recompiled else "",
            outside=[
                wire.Outside(kind=name, total_ns=total.total_ns, count=total.count, intervals=total.intervals)  # type: ignore[arg-type]
                for name, total in zip(wire.OUTSIDE_KINDS, totals, strict=True)
                if total.count
            ],
            between_ns=between_ns,
            unrecorded_ns=self._unrecorded_ns,
            open_step_ns=open_ns,
            finished=tail.finished,
            checkpoint_step=checkpoint,
        )

    @staticmethod
    def _claim(step: int, from_ns: int, to_ns: int, pieces: Sequence[Piece], totals: Sequence[_Total]) -> int:
        """Add the pieces of a gap, none of whose moments counts twice; return the rest of the gap."""
        rest_ns = max(0, to_ns - from_ns)
        for piece in exclusive(pieces):
            lasts_ns = min(piece.ended_ns - piece.began_ns, rest_ns)
            if lasts_ns > 0:
                totals[piece.kind].add(step, piece.began_ns, piece.began_ns + lasts_ns)
                rest_ns -= lasts_ns
        return rest_ns


def exclusive(pieces: Sequence[Piece]) -> list[Piece]:
    """Cut pieces so that each moment belongs to one kind, the first of `_PRIORITY` that claims it; in order of time."""
    if len(pieces) < 2:
        return list(pieces)
    claimed: list[Piece] = []
    for kind in _PRIORITY:
        free = [piece for piece in pieces if piece.kind == kind]
        for assigned in claimed:
            free = [part for piece in free for part in _without(piece, assigned)]
        claimed += free
    return sorted(claimed, key=lambda piece: piece.began_ns)


def _without(piece: Piece, assigned: Piece) -> list[Piece]:
    """Return the parts of a piece before and after another one."""
    first_part = Piece(piece.kind, piece.began_ns, min(piece.ended_ns, assigned.began_ns))
    last_part = Piece(piece.kind, max(piece.began_ns, assigned.ended_ns), piece.ended_ns)
    return [part for part in (first_part, last_part) if part.ended_ns > part.began_ns]


def _merged(first: wire.OutsideInterval, second: wire.OutsideInterval) -> wire.OutsideInterval:
    return wire.OutsideInterval(
        first.first_step, second.last_step, first.began_ns, second.ended_ns, first.total_ns + second.total_ns
    )
