"""The pieces of time of steps, each of one phase: the tracker's switches, overlaid with exposed communication."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs.steps.compile_time import CompilePieces
from ddpobs.steps.distinct import distinct
from ddpobs.steps.raw_step import BACKWARD, EXPOSED_COMM, NO_STEP, OTHER
from ddpobs.wire import Ints

_BLOCKING = [wire.COMM_KINDS.index(kind) for kind in ("buffers", "user", "send", "receive")]
"""Kinds of communication that block training; the unused map travels under backward."""
_PHASES = len(wire.PHASES)


class Windows(NamedTuple):
    """Synchronised backward passes in order, one row each; `row` is the index of its step in the summary."""

    row: Ints
    ready_ns: Ints
    done_ns: Ints
    returned_ns: Ints
    clean: npt.NDArray[np.bool_]
    waited: npt.NDArray[np.bool_]


class PhaseTimeline(NamedTuple):
    """Pieces of time, each of one phase.

    Piece i lasts from `at_ns[i]` to `at_ns[i + 1]`; the last piece has no end. `before_ns[i]` is the time by phase
    before piece i.
    """

    at_ns: Ints
    phase: Ints
    before_ns: Ints

    def between(self, begin_ns: Ints, end_ns: Ints) -> Ints:
        """Time by phase from each begin to its end, shape [begins, phases]; both must be piece boundaries."""
        end_ns = np.maximum(begin_ns, end_ns)
        elapsed: Ints = self.before_ns[self._piece(end_ns)] - self.before_ns[self._piece(begin_ns)]
        return elapsed[:, :_PHASES]

    def _piece(self, at_ns: Ints) -> Any:
        return np.searchsorted(self.at_ns, at_ns).clip(max=len(self.at_ns) - 1)


def blocked(
    comms: wire.Comms, rows: tuple[Ints, Ints], waited: tuple[wire.Spans, Ints], steps: tuple[Ints, Ints]
) -> tuple[Ints, Ints]:
    """Begins and ends of blocking collectives and of waits for spans, cut at the start and the end of their steps.

    Args:
        comms: Other collectives.
        rows: Index of the step of each of them, and of each span.
        waited: The spans, and the begins of the waits for them; 0 without one.
        steps: Begins and ends of the steps.
    """
    blocks, (spans, waited_from_ns) = np.isin(comms.kind, _BLOCKING), waited
    waits = waited_from_ns != 0
    row = np.append(rows[0][blocks], rows[1][waits])
    start_ns, end_ns = steps[0][row], steps[1][row]
    begin_ns = np.clip(np.append(comms.launched_ns[blocks], waited_from_ns[waits]), start_ns, end_ns)
    return begin_ns, np.clip(np.append(comms.done_ns[blocks], spans.done_ns[waits]), begin_ns, end_ns)


def phase_timeline(
    switches_ns: Ints, phases: Ints, blocked: tuple[Ints, Ints], windows: Windows, pieces: CompilePieces | None
) -> PhaseTimeline:
    """Overlay the switches' phases with exposed communication.

    Args:
        switches_ns: Begins of phases, ascending.
        phases: Phase from each of them on.
        blocked: Begins and ends of blocking collectives, within steps.
        windows: After its last gradient, a backward is exposed communication until it is done, then `other`.
        pieces: Pieces of compilations, whose bounds are piece boundaries too; None for none.
    """
    compiled = pieces[:2] if pieces else ()
    at_ns = distinct(np.concatenate([switches_ns, *blocked, windows.ready_ns, windows.done_ns, *compiled]))
    phase = phases[np.searchsorted(switches_ns, at_ns, side="right") - 1]
    if len(windows.row):
        window = np.searchsorted(windows.returned_ns, at_ns, side="right").clip(max=len(windows.row) - 1)
        tail = (phase == BACKWARD) & (at_ns >= windows.ready_ns[window]) & (at_ns < windows.returned_ns[window])
        tail &= ~windows.waited[window]
        phase = np.where(tail, np.where(at_ns < windows.done_ns[window], EXPOSED_COMM, OTHER), phase)
    if len(blocked[0]):
        begins = np.searchsorted(np.sort(blocked[0]), at_ns, side="right")
        ends = np.searchsorted(np.sort(blocked[1]), at_ns, side="right")
        phase = np.where((begins > ends) & (phase != NO_STEP), EXPOSED_COMM, phase)
    lasts_ns = np.zeros((len(at_ns), _PHASES + 1), np.int64)
    lasts_ns[np.arange(1, len(at_ns)), phase[:-1]] = np.diff(at_ns)
    return PhaseTimeline(at_ns, phase, np.cumsum(lasts_ns, axis=0))
