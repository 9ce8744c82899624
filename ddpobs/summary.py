"""How the stamps of many steps become the columns that travel: on the telemetry thread, all steps of a batch at once.

A hook that wants the interpreter waits for that thread, so that nothing here is done by the step or by the bucket
that can be done for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs.clocks import Clock, HostClock, Stamp
from ddpobs.phases import BACKWARD, EXPOSED_COMM, NO_STEP, OTHER, RawStep, Segment
from ddpobs.wire import Ints

_BLOCKING = [wire.COMM_KINDS.index(kind) for kind in ("buffers", "user")]
"""Kinds of communication that training waits for where they are; the unused map travels under backward."""
_PHASES = len(wire.PHASES)
_MOST_CARRIED = 2**16
_OWN = [wire.PHASES.index(phase) for phase in wire.OWN_PHASES]


class Summary(NamedTuple):
    """Steps as they travel, with their spans, other communication and sampled readiness."""

    steps: wire.Steps
    spans: wire.Spans
    comms: wire.Comms
    readiness: list[wire.Readiness]


class _Windows(NamedTuple):
    """Synchronised backward passes in order, one row each; `row` is the step's place among the summarised ones."""

    row: Ints
    ready_ns: Ints
    done_ns: Ints
    returned_ns: Ints
    clean: npt.NDArray[np.bool_]
    waited: npt.NDArray[np.bool_]


class _Timeline(NamedTuple):
    """Pieces of time, each of one phase: piece i lasts from `at_ns[i]` to `at_ns[i + 1]`, the last one for ever.

    `before_ns[i]` is the time by phase before piece i.
    """

    at_ns: Ints
    phase: Ints
    before_ns: Ints

    def between(self, begin_ns: Ints, end_ns: Ints) -> Ints:
        """Time by phase from each begin to its end, shape [begins, phases]; both lie where pieces meet."""
        end_ns = np.maximum(begin_ns, end_ns)
        taken: Ints = self.before_ns[self._place(end_ns)] - self.before_ns[self._place(begin_ns)]
        return taken[:, :_PHASES]

    def _place(self, at_ns: Ints) -> Any:
        return np.searchsorted(self.at_ns, at_ns).clip(max=len(self.at_ns) - 1)


class Summariser:
    """Turns raw steps into times, in order; carries what they leave for the next one's own time.

    Args:
        clock: What the stamps are of.
        resolution_ns: Times are multiples of it, rounded down: digits that mean nothing take most of the space.
    """

    def __init__(self, clock: Clock, resolution_ns: int = 1) -> None:
        self._clock, self._resolution_ns = clock, resolution_ns
        self._origin_ns: int | None = None
        self._carried: tuple[Ints, Ints] = (_ints([]), _ints([]))

    def summarise(self, raws: Sequence[RawStep]) -> Summary:
        """The steps' phases, spans and own time.

        Phases: the tracker's switches, over which exposed communication is laid: from a backward's last readiness to
        its last completion, and every blocking collective. Own time: what was not exposed communication between the
        end of the last full synchronisation and the last readiness (domain: stragglers without a common clock).
        """
        numbers = _ints([raw.number for raw in raws])
        switches_ns, phases, ends = self._switches(raws)
        start_ns, end_ns = switches_ns[np.append(0, ends[:-1] + 1)], switches_ns[ends]
        comm_rows, comms = self._comms(raws, numbers)
        segments = [(row, segment) for row, raw in enumerate(raws) for segment in raw.segments]
        returned_ns = self._times([segment.end for _, segment in segments])
        span_windows, spans = self._spans(segments, numbers, returned_ns)
        windows = self._windows(segments, returned_ns, span_windows, spans, (comm_rows, comms))
        blocks = np.isin(comms.kind, _BLOCKING)
        within = start_ns[comm_rows[blocks]], end_ns[comm_rows[blocks]]
        blocked_ns = np.clip(comms.launched_ns[blocks], *within)
        blocked = (blocked_ns, np.clip(comms.done_ns[blocks], blocked_ns, within[1]))
        timeline = _timeline(
            np.append(self._carried[0], switches_ns), np.append(self._carried[1], phases), blocked, windows
        )
        phases_ns = timeline.between(start_ns, end_ns)
        own_ns, clean = self._own(timeline, windows, len(raws))
        communicating = (
            np.append(windows.row[span_windows], comm_rows),
            np.append(spans.launched_ns, comms.launched_ns),
            np.append(spans.done_ns, comms.done_ns),
        )
        collective = np.full(len(raws), wire.UNKNOWN)
        collective[windows.row] = _ints([segment.collective for _, segment in segments])
        synchronised = np.zeros(len(raws), bool)
        synchronised[windows.row] = True
        steps = wire.Steps(
            step=numbers,
            collective=collective,
            start_ns=start_ns,
            end_ns=end_ns,
            own_ns=np.where(clean, own_ns[:, _OWN].sum(axis=1), wire.UNKNOWN),
            comm_ns=_union_ns(*communicating, len(raws)),
            micro_steps=_ints([raw.micro_steps for raw in raws]),
            samples=_ints([raw.samples for raw in raws]),
            flags=wire.NO_ORIGIN * ~clean + wire.SYNCHRONISED * synchronised,
            **{f"{name}_ns": phases_ns[:, index] for index, name in enumerate(wire.PHASES)},
            **{f"own_{wire.PHASES[index]}_ns": np.where(clean, own_ns[:, index], wire.UNKNOWN) for index in _OWN},
        )
        return Summary(steps, spans, comms, self._readiness(raws))

    def _times(self, stamps: Sequence[Stamp]) -> Ints:
        """Nanoseconds, rounded down; a stamp that was not taken is 0."""
        if type(self._clock) is not HostClock:
            at = self._clock.nanoseconds
            stamps = [at(stamp) if stamp else 0 for stamp in stamps]
        times = _ints(stamps)
        return times - times % self._resolution_ns

    def _switches(self, raws: Sequence[RawStep]) -> tuple[Ints, Ints, Ints]:
        """Times and phases of all switches, a step's end among them, and where in these each step's end is.

        What a step did before an evaluation in its middle is told as if that had come before the step.
        """
        switches = [switch for raw in raws for switch in (*raw.switches, (NO_STEP, raw.end))]
        ends = np.cumsum([len(raw.switches) + 1 for raw in raws]) - 1
        times = self._times([stamp for _, stamp in switches])
        for raw, end in zip(raws, ends.tolist(), strict=True):
            for hole in raw.holes:
                first = end - len(raw.switches)
                times[first : first + hole + 1] += times[first + hole + 1] - times[first + hole]
        return np.maximum.accumulate(times), _ints([phase for phase, _ in switches]), ends

    def _comms(self, raws: Sequence[RawStep], numbers: Ints) -> tuple[Ints, wire.Comms]:
        found = [(row, *comm) for row, raw in enumerate(raws) for comm in raw.comms]
        rows, module, kind, launched, done = zip(*found, strict=True) if found else ((),) * 5
        return _ints(rows), wire.Comms(
            step=numbers[_ints(rows)],
            module=_ints(module),
            kind=_ints(kind),
            launched_ns=self._times(launched),
            done_ns=self._times(done),
        )

    def _spans(
        self, segments: Sequence[tuple[int, Segment]], numbers: Ints, returned_ns: Ints
    ) -> tuple[Ints, wire.Spans]:
        """Which segment each span is of, and times that make sense.

        A completion seen late by its callback is cut at backward's return. A bucket that no rank used was not launched,
        and has no span.
        """
        records = [(index, record) for index, (_, segment) in enumerate(segments) for record in segment.records]
        buckets = [len(record.ready_ns) for _, record in records]
        segment = np.repeat(_ints([index for index, _ in records]), buckets)
        latest_ns = returned_ns[segment]
        launched_ns = self._times([stamp for _, record in records for stamp in record.launched_ns])
        launched = launched_ns != 0
        ready_ns = self._times([stamp for _, record in records for stamp in record.ready_ns])
        ready_ns = np.where(ready_ns == 0, launched_ns, np.minimum(ready_ns, launched_ns))
        done_ns = self._times([stamp for _, record in records for stamp in record.done_ns])
        done_ns = np.where(done_ns == 0, latest_ns, np.minimum(done_ns, latest_ns))
        done_ns = np.maximum(done_ns, launched_ns)
        first = np.cumsum([0, *buckets])
        started_ns = np.full(len(segment), wire.UNKNOWN)
        for begin, (_, record) in zip(first, records, strict=False):
            for bucket, work in record.works.items():
                place = begin + bucket
                started_ns[place] = self._started(work, int(launched_ns[place]), int(done_ns[place]))
        spans = wire.Spans(
            step=numbers[_ints([row for row, _ in segments])[segment]],
            module=np.repeat(_ints([record.module for _, record in records]), buckets),
            revision=np.repeat(_ints([record.revision for _, record in records]), buckets),
            bucket=np.arange(len(segment)) - np.repeat(first[:-1], buckets),
            ready_ns=ready_ns,
            launched_ns=launched_ns,
            started_ns=started_ns,
            done_ns=done_ns,
        )
        return segment[launched], wire.Spans.of(spans.table[:, launched])

    def _started(self, work: Any, launched_ns: int, done_ns: int) -> int:
        """When the collective began moving: its end less its duration, which NCCL's works know (domain: spans)."""
        try:
            took_ns: int = round(work._get_duration() * 1e6)
        except (RuntimeError, AttributeError):
            return wire.UNKNOWN
        began_ns = max(launched_ns, done_ns - took_ns)
        return began_ns - began_ns % self._resolution_ns

    def _windows(
        self,
        segments: Sequence[tuple[int, Segment]],
        returned_ns: Ints,
        span_windows: Ints,
        spans: wire.Spans,
        others: tuple[Ints, wire.Comms],
    ) -> _Windows:
        """Last readiness and last completion of each synchronised backward, by buckets or `others`, told with rows."""
        row = _ints([row for row, _ in segments])
        unseen = [
            (index, record.last_ready)
            for index, (_, segment) in enumerate(segments)
            for record in segment.records
            if record.last_ready
        ]
        unseen_windows = _ints([index for index, _ in unseen])
        ready_ns, done_ns = np.zeros_like(returned_ns), np.zeros_like(returned_ns)
        np.maximum.at(ready_ns, span_windows, spans.ready_ns)
        np.maximum.at(ready_ns, unseen_windows, self._times([stamp for _, stamp in unseen]))
        ready_ns = np.where(ready_ns == 0, returned_ns, ready_ns)
        np.maximum.at(done_ns, span_windows, spans.done_ns)
        until_ns = _until_ns(row, returned_ns, *others)
        done_ns = np.where(until_ns >= ready_ns, np.maximum(done_ns, until_ns), done_ns)
        done_ns = np.minimum(np.maximum(done_ns, ready_ns), returned_ns)
        done_ns[unseen_windows] = returned_ns[unseen_windows]
        clean = np.array([segment.clean for _, segment in segments], bool)
        waited = np.array([segment.waited for _, segment in segments], bool)
        return _Windows(row, ready_ns, done_ns, returned_ns, clean, waited)

    def _own(self, timeline: _Timeline, windows: _Windows, steps: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Own time by phase, shape [steps, phases], and in which steps every window has a clean origin."""
        own_ns, unclean = np.zeros((steps, _PHASES), np.int64), np.ones(steps, bool)
        if len(windows.row):
            origin_ns = windows.ready_ns[0] if self._origin_ns is None else self._origin_ns
            origins_ns = np.append(origin_ns, windows.done_ns[:-1])
            clean = windows.clean.copy()
            clean[0] &= self._origin_ns is not None
            np.add.at(own_ns, windows.row, timeline.between(origins_ns, windows.ready_ns))
            unclean[windows.row] = False
            unclean[windows.row[~clean]] = True
            self._origin_ns = int(windows.done_ns[-1])
        if self._origin_ns is not None:
            since = int(np.searchsorted(timeline.at_ns, self._origin_ns))
            if len(timeline.at_ns) - since > _MOST_CARRIED:
                since, self._origin_ns = len(timeline.at_ns), None
            self._carried = timeline.at_ns[since:], timeline.phase[since:]
        return own_ns, ~unclean

    def _readiness(self, raws: Sequence[RawStep]) -> list[wire.Readiness]:
        found = []
        for raw in raws:
            for segment in raw.segments:
                for record in segment.records:
                    if record.parameter_ready_ns is not None:
                        times = self._times(record.parameter_ready_ns)
                        times[times == 0] = wire.UNKNOWN
                        found.append(
                            wire.Readiness(
                                step=raw.number, module=record.module, revision=record.revision, ready_ns=times
                            )
                        )
        return found


def _until_ns(row: Ints, returned_ns: Ints, comm_row: Ints, comms: wire.Comms) -> Ints:
    """When the last other communication was done that was launched before each backward's return; 0 for none."""
    until_ns = np.zeros_like(returned_ns)
    if len(row):
        window = np.searchsorted(returned_ns, comms.launched_ns, side="right").clip(max=len(row) - 1)
        inside = (row[window] == comm_row) & (comms.launched_ns < returned_ns[window])
        np.maximum.at(until_ns, window[inside], comms.done_ns[inside])
    return until_ns


def _timeline(switches_ns: Ints, phases: Ints, blocked: tuple[Ints, Ints], windows: _Windows) -> _Timeline:
    """The switches' phases with exposed communication laid over them.

    Args:
        switches_ns: When phases begin, ascending.
        phases: Which.
        blocked: Begins and ends of what training was blocked by, within steps.
        windows: The rest of a backward after its last gradient is exposed until it is done, then other.
    """
    at_ns = np.unique(np.concatenate([switches_ns, *blocked, windows.ready_ns, windows.done_ns]))
    phase = phases[np.searchsorted(switches_ns, at_ns, side="right") - 1]
    if len(windows.row):
        window = np.searchsorted(windows.returned_ns, at_ns, side="right").clip(max=len(windows.row) - 1)
        after = (phase == BACKWARD) & (at_ns >= windows.ready_ns[window]) & (at_ns < windows.returned_ns[window])
        after &= ~windows.waited[window]
        phase = np.where(after, np.where(at_ns < windows.done_ns[window], EXPOSED_COMM, OTHER), phase)
    if len(blocked[0]):
        begun = np.searchsorted(np.sort(blocked[0]), at_ns, side="right")
        ended = np.searchsorted(np.sort(blocked[1]), at_ns, side="right")
        phase = np.where((begun > ended) & (phase != NO_STEP), EXPOSED_COMM, phase)
    lasts_ns = np.zeros((len(at_ns), _PHASES + 1), np.int64)
    lasts_ns[np.arange(1, len(at_ns)), phase[:-1]] = np.diff(at_ns)
    return _Timeline(at_ns, phase, np.cumsum(lasts_ns, axis=0))


def _union_ns(row: Ints, begin_ns: Ints, end_ns: Ints, rows: int) -> Ints:
    """Time that the intervals of each row cover together."""
    covered = np.zeros(rows, np.int64)
    if not len(row):
        return covered
    base_ns = begin_ns.min()
    # Row after row on an axis of its own, so that they do not meet.
    apart_ns = row * (end_ns.max() - base_ns + 1) - base_ns
    order = np.argsort(begin_ns + apart_ns)
    row, begin_ns, end_ns = row[order], (begin_ns + apart_ns)[order], (end_ns + apart_ns)[order]
    reached_ns = np.append(0, np.maximum.accumulate(end_ns)[:-1])
    np.add.at(covered, row, np.maximum(0, end_ns - np.maximum(begin_ns, reached_ns)))
    return covered


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)
