"""Computation of wire columns from the stamps of many steps, on the telemetry thread, all steps of a batch at once.

A hook that needs the interpreter waits for this thread. So each operation covers all steps and buckets, not one at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs.steps.account import Piece
from ddpobs.steps.compile_time import CompilePieces, CompileTime, ReadCompilations
from ddpobs.steps.counters import COUNTERS, NOT_READ, SELDOM_READ
from ddpobs.steps.phase_timeline import PhaseTimeline, Windows, blocked, phase_timeline
from ddpobs.steps.raw_step import BACKWARD, FORWARD
from ddpobs.steps.step_columns import RawSteps
from ddpobs.wire import Ints

_SEND, _RECEIVE = (wire.COMM_KINDS.index(kind) for kind in ("send", "receive"))
_COMPUTING = [FORWARD, BACKWARD]
_PHASES = len(wire.PHASES)
_SERIES_BITS = 40
"""Bits of a total that is read seldom, which counts events of one thread."""
_MAX_CARRIED = 2**16
"""Pieces of time kept for the next step's own time."""
_OWN = [wire.PHASES.index(phase) for phase in wire.OWN_PHASES]


class Summary(NamedTuple):
    """Wire columns of steps, with their spans, other communication and sampled readiness.

    `outside` has the time outside of steps, by the index of the step that it precedes or interrupts. `compiled_ns` has
    the steps' time in torch.compile by phase.
    """

    steps: wire.Steps
    spans: wire.Spans
    comms: wire.Comms
    readiness: list[wire.Readiness]
    outside: dict[int, list[Piece]]
    compiled_ns: Ints


class Summariser:
    """Turn raw steps into times, in order; keeps the pieces of time that the next step's own time needs.

    Args:
        resolution_ns: Times are rounded down to multiples of it: meaningless digits would take most of the space.
        compilations: Source of the compilations.
    """

    def __init__(self, resolution_ns: int = 1, compilations: ReadCompilations = lambda: None) -> None:
        self._resolution_ns = resolution_ns
        self._compile_time = CompileTime(compilations)
        self._compiled_ns = 0
        """Time in compilations since the last window."""
        self._origin_ns: int | None = None
        self._carried: tuple[Ints, Ints] = (_ints([]), _ints([]))
        self._totals: Ints = _ints(NOT_READ)
        """Counters at the end of the latest synchronised backward."""

    def summarise(self, raws: RawSteps) -> Summary:
        """Compute phases, spans and own time of the steps.

        Phases: the tracker's switches, overlaid with exposed communication. Exposed are every blocking collective and
        the time from a backward's last readiness to its last completion.

        Own time: time between the end of the last full synchronisation and the last readiness that is not exposed
        communication. docs/diagnostics.md explains why ranks are compared by it.
        """
        numbers = _ints(raws.number)
        switches_ns, phases = np.maximum.accumulate(self._times(raws.since_ns)), _ints(raws.phase)
        ends = np.cumsum(_ints(raws.switches)) - 1
        start_ns, end_ns = switches_ns[np.append(0, ends[:-1] + 1)], switches_ns[ends]
        comm_rows, comms = self._comms(raws, numbers)
        span_windows, spans, waited_from_ns = self._spans(raws, numbers)
        windows = self._windows(raws, span_windows, spans, (comm_rows, comms))
        pieces = self._compile_time.pieces(int(start_ns[0]), int(end_ns[-1]), windows.ready_ns)
        timeline = phase_timeline(
            np.append(self._carried[0], switches_ns),
            np.append(self._carried[1], phases),
            blocked(comms, (comm_rows, windows.row[span_windows]), (spans, waited_from_ns), (start_ns, end_ns)),
            windows,
            pieces,
        )
        compile_ns, compiled_ns = self._compiled(timeline, windows, pieces, len(numbers))
        phases_ns = timeline.between(start_ns, end_ns)
        own_ns, clean = self._own(timeline, windows, len(numbers))
        communicating = (
            np.append(windows.row[span_windows], comm_rows),
            np.append(spans.launched_ns, comms.launched_ns),
            np.append(spans.done_ns, comms.done_ns),
        )
        collective = np.full(len(numbers), wire.UNKNOWN)
        collective[windows.row] = raws.collective
        synchronised = np.zeros(len(numbers), bool)
        synchronised[windows.row] = True
        steps = wire.Steps(
            step=numbers,
            collective=collective,
            start_ns=start_ns,
            end_ns=end_ns,
            own_ns=np.where(clean, own_ns[:, _OWN].sum(axis=1), wire.UNKNOWN),
            comm_ns=_union_ns(*communicating, len(numbers)),
            micro_steps=_ints(raws.micro_steps),
            samples=_ints(raws.samples),
            elements=_ints(raws.elements),
            longest=_ints(raws.longest),
            compile_ns=compile_ns,
            flags=wire.NO_ORIGIN * ~clean + wire.SYNCHRONISED * synchronised,
            **{f"{name}_ns": phases_ns[:, index] for index, name in enumerate(wire.PHASES)},
            **{f"own_{wire.PHASES[index]}_ns": np.where(clean, own_ns[:, index], wire.UNKNOWN) for index in _OWN},
            **self._counted(raws, windows.row, len(numbers)),
            **self._pipelined(raws, timeline, len(numbers)),
            **_message_waits(comm_rows, comms, len(numbers)),
        )
        readiness = [self._readiness(sample) for sample in raws.readiness]
        return Summary(steps, spans, comms, readiness, _outside(raws), compiled_ns)

    def _times(self, times_ns: Sequence[int]) -> Ints:
        """Round nanoseconds down; a stamp that was not taken stays 0."""
        times = _ints(times_ns)
        return times - times % self._resolution_ns

    def _comms(self, raws: RawSteps, numbers: Ints) -> tuple[Ints, wire.Comms]:
        rows = _rows(raws.comms)
        return rows, wire.Comms(
            step=numbers[rows],
            module=_ints(raws.comm_module),
            kind=_ints(raws.comm_kind),
            launched_ns=self._times(raws.comm_launched_ns),
            done_ns=self._times(raws.comm_done_ns),
        )

    def _spans(self, raws: RawSteps, numbers: Ints) -> tuple[Ints, wire.Spans, Ints]:
        """Index of each span's segment, the spans with plausible times, and the begins of the waits for them (or 0).

        If a callback saw a completion late, it is cut at backward's return. A bucket that no rank used was not
        launched, and has no span.
        """
        backward = _rows(raws.buckets)
        segment = _rows(raws.backwards)[backward]
        latest_ns = self._times(raws.end_ns)[segment]
        launched_ns = self._times(raws.launched_ns)
        launched = launched_ns != 0
        ready_ns = self._times(raws.ready_ns)
        ready_ns = np.where(ready_ns == 0, launched_ns, np.minimum(ready_ns, launched_ns))
        done_ns = self._times(raws.done_ns)
        done_ns = np.where(done_ns == 0, latest_ns, np.minimum(done_ns, latest_ns))
        done_ns = np.maximum(done_ns, launched_ns)
        took_ns = _ints(raws.took_ns)
        started_ns = np.maximum(launched_ns, done_ns - took_ns)
        started_ns -= started_ns % self._resolution_ns
        first = np.cumsum(_ints(raws.buckets)) - _ints(raws.buckets)
        waited_from_ns = self._times(raws.waited_from_ns)
        waited_ns = np.where(waited_from_ns == 0, 0, np.maximum(0, done_ns - waited_from_ns))
        spans = wire.Spans(
            step=numbers[_rows(raws.segments)[segment]],
            module=_ints(raws.module)[backward],
            revision=_ints(raws.revision)[backward],
            bucket=np.arange(len(backward)) - first[backward],
            ready_ns=ready_ns,
            launched_ns=launched_ns,
            started_ns=np.where(took_ns == wire.UNKNOWN, wire.UNKNOWN, started_ns),
            done_ns=done_ns,
            waited_ns=np.where(np.array(raws.waits, bool)[backward], waited_ns, wire.UNKNOWN),
        )
        return segment[launched], wire.Spans.from_table(spans.table[:, launched]), waited_from_ns[launched]

    def _windows(
        self, raws: RawSteps, span_windows: Ints, spans: wire.Spans, other_comms: tuple[Ints, wire.Comms]
    ) -> Windows:
        """Time of the last ready gradient and of the last completed communication of each synchronised backward.

        Both cover the backward's buckets and `other_comms`: other collectives, with the row of their step.
        """
        row, returned_ns = _rows(raws.segments), self._times(raws.end_ns)
        last_ready_ns = self._times(raws.last_ready_ns)
        unseen = last_ready_ns != 0
        unseen_windows = _rows(raws.backwards)[unseen]
        ready_ns, done_ns = np.zeros_like(returned_ns), np.zeros_like(returned_ns)
        np.maximum.at(ready_ns, span_windows, spans.ready_ns)
        np.maximum.at(ready_ns, unseen_windows, last_ready_ns[unseen])
        ready_ns = np.where(ready_ns == 0, returned_ns, ready_ns)
        np.maximum.at(done_ns, span_windows, spans.done_ns)
        until_ns = _until_ns(row, returned_ns, *other_comms)
        done_ns = np.where(until_ns >= ready_ns, np.maximum(done_ns, until_ns), done_ns)
        done_ns = np.minimum(np.maximum(done_ns, ready_ns), returned_ns)
        done_ns[unseen_windows] = returned_ns[unseen_windows]
        return Windows(row, ready_ns, done_ns, returned_ns, np.array(raws.clean, bool), np.array(raws.waited, bool))

    def _own(self, timeline: PhaseTimeline, windows: Windows, steps: int) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """Own time by phase, shape [steps, phases], and a mask of the steps whose windows all have a clean origin."""
        own_ns, unclean = np.zeros((steps, _PHASES), np.int64), np.ones(steps, bool)
        if len(windows.row):
            origin_ns = windows.ready_ns[0] if self._origin_ns is None else self._origin_ns
            # Latest end of all earlier windows: with two optimizers, the reduction waited for last may end first.
            origins_ns = np.maximum.accumulate(np.append(origin_ns, windows.done_ns))
            clean = windows.clean.copy()
            clean[0] &= self._origin_ns is not None
            np.add.at(own_ns, windows.row, timeline.between(origins_ns[:-1], windows.ready_ns))
            unclean[windows.row] = False
            unclean[windows.row[~clean]] = True
            self._origin_ns = int(origins_ns[-1])
        if self._origin_ns is not None:
            since = int(np.searchsorted(timeline.at_ns, self._origin_ns))
            if len(timeline.at_ns) - since > _MAX_CARRIED:
                since, self._origin_ns = len(timeline.at_ns), None
            self._carried = timeline.at_ns[since:], timeline.phase[since:]
        return own_ns, ~unclean

    def _compiled(
        self, timeline: PhaseTimeline, windows: Windows, pieces: CompilePieces | None, steps: int
    ) -> tuple[Ints, Ints]:
        """Time in compilations of each step's own time, shape [steps], and of the steps by phase."""
        if pieces is None:
            return np.full(steps, wire.UNKNOWN), np.zeros(_PHASES, np.int64)
        phases_ns = timeline.between(pieces.begin_ns, pieces.end_ns)
        by_window = np.zeros(len(windows.row) + 1, np.int64)
        by_window[0] = self._compiled_ns
        np.add.at(by_window, pieces.window, phases_ns.sum(axis=1))
        self._compiled_ns = int(by_window[-1])
        np.add.at(compile_ns := np.zeros(steps, np.int64), windows.row, by_window[:-1])
        return self._rounded(compile_ns), phases_ns.sum(axis=0)

    def _counted(self, raws: RawSteps, row: Ints, steps: int) -> dict[str, Ints]:
        """Increase of each counter since the previous synchronised backward, by name, shape [steps].

        It is `UNKNOWN` in a step without such a backward, and if a reading is missing or of another series. A total
        that is read seldom does not increase until it is read.

        Args:
            raws: The steps; `totals` has a row for each of `row`.
            row: Index of the step of each synchronised backward.
            steps: Number of steps.
        """
        totals = np.vstack([self._totals, _ints(raws.totals).reshape(-1, 1 + len(COUNTERS))])
        # Totals of a series only rise: the highest so far stands for a total that was not read.
        base = (totals[:, :1] << _SERIES_BITS) * (totals[:, :1] >= 0)
        seldom = np.maximum.accumulate(totals[:, SELDOM_READ] + base, axis=0) - base
        totals[:, SELDOM_READ] = np.where(totals[:, :1] >= 0, seldom, wire.UNKNOWN)
        self._totals = totals[-1]
        before, after = totals[:-1], totals[1:]
        increase = after - before
        recorded = (before != wire.UNKNOWN) & (after != wire.UNKNOWN) & (increase >= 0) & (increase[:, :1] == 0)
        sums, all_known = np.zeros((steps, len(COUNTERS)), np.int64), np.zeros((steps, len(COUNTERS)), bool)
        all_known[row] = True
        np.add.at(sums, row, increase[:, 1:])
        np.logical_and.at(all_known, row, recorded[:, 1:])
        counted = np.where(all_known, sums, wire.UNKNOWN)
        rounded = self._rounded(counted)
        return {name: (rounded if name.endswith("_ns") else counted)[:, index] for index, name in enumerate(COUNTERS)}

    def _rounded(self, durations_ns: Ints) -> Ints:
        """Round nanoseconds down; an unknown time stays unknown."""
        return np.where(durations_ns < 0, durations_ns, durations_ns - durations_ns % self._resolution_ns)

    def _pipelined(self, raws: RawSteps, timeline: PhaseTimeline, steps: int) -> dict[str, Ints]:
        """Time in pipelines' schedules, and its part in forward and backward, shape [steps]; `UNKNOWN` without one."""
        row, phases_ns = _rows(raws.schedules), np.full((2, steps), wire.UNKNOWN)
        if len(row):
            began_ns, ended_ns = self._times(raws.schedule_began_ns), self._times(raws.schedule_ended_ns)
            elapsed_ns = timeline.between(began_ns, ended_ns)
            phases_ns[:, row] = 0
            np.add.at(phases_ns[0], row, elapsed_ns.sum(axis=1))
            np.add.at(phases_ns[1], row, elapsed_ns[:, _COMPUTING].sum(axis=1))
        return {"schedule_ns": phases_ns[0], "computing_ns": phases_ns[1]}

    def _readiness(self, sample: wire.Readiness) -> wire.Readiness:
        ready_ns = sample.ready_ns - sample.ready_ns % self._resolution_ns
        return msgspec.structs.replace(sample, ready_ns=np.where(ready_ns == 0, wire.UNKNOWN, ready_ns))


def _outside(raws: RawSteps) -> dict[int, list[Piece]]:
    outside: dict[int, list[Piece]] = {}
    columns = (raws.outside_kind, raws.outside_began_ns, raws.outside_ended_ns)
    for row, piece in zip(_rows(raws.outside).tolist(), map(Piece, *columns), strict=True):
        outside.setdefault(row, []).append(piece)
    return outside


def _rows(counts: Sequence[int]) -> Ints:
    """Index of the parent of each row, from the number of rows per parent: [2, 0, 1] gives [0, 0, 2]."""
    return np.repeat(np.arange(len(counts)), _ints(counts))


def _message_waits(row: Ints, comms: wire.Comms, steps: int) -> dict[str, Ints]:
    """Time in waits for sends and for receives, shape [steps]; one thread waits, so they do not overlap."""
    waits_ns = {}
    for name, kind in (("send_wait_ns", _SEND), ("receive_wait_ns", _RECEIVE)):
        of_kind = comms.kind == kind
        waits_ns[name] = np.zeros(steps, np.int64)
        np.add.at(waits_ns[name], row[of_kind], (comms.done_ns - comms.launched_ns)[of_kind])
    return waits_ns


def _until_ns(row: Ints, returned_ns: Ints, comm_row: Ints, comms: wire.Comms) -> Ints:
    """Completion of the last other communication launched before each backward's return, within its step; 0 if none.

    Messages between two ranks are left out: they do not synchronise the ranks of the backward.
    """
    until_ns = np.zeros_like(returned_ns)
    collective = ~np.isin(comms.kind, (_SEND, _RECEIVE))
    comm_row, comms = comm_row[collective], comms.select(collective)
    if len(row):
        window = np.searchsorted(returned_ns, comms.launched_ns, side="right").clip(max=len(row) - 1)
        inside = (row[window] == comm_row) & (comms.launched_ns < returned_ns[window])
        np.maximum.at(until_ns, window[inside], comms.done_ns[inside])
    return until_ns


def _union_ns(row: Ints, begin_ns: Ints, end_ns: Ints, rows: int) -> Ints:
    """Length of the union of each row's intervals."""
    covered = np.zeros(rows, np.int64)
    if not len(row):
        return covered
    base_ns = begin_ns.min()
    # Shift the rows along one axis, so that intervals of different rows do not overlap.
    shift_ns = row * (end_ns.max() - base_ns + 1) - base_ns
    order = np.argsort(begin_ns + shift_ns)
    row, begin_ns, end_ns = row[order], (begin_ns + shift_ns)[order], (end_ns + shift_ns)[order]
    reached_ns = np.append(0, np.maximum.accumulate(end_ns)[:-1])
    np.add.at(covered, row, np.maximum(0, end_ns - np.maximum(begin_ns, reached_ns)))
    return covered


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, np.int64)
