"""How the training of a process ends, and the one event that says so: finished, failed, interrupted or terminated."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ddpobs import wire
from ddpobs.config import TelemetryConfig
from ddpobs.export.exporter import Exporter
from ddpobs.export.spool import folder_of
from ddpobs.never_raises import never_raises
from ddpobs.recording.error_text import describe
from ddpobs.recording.journal import Journal
from ddpobs.recording.looks.pulses import Pulses
from ddpobs.recording.place.last_place import FOLDER, LastPlace, is_interrupted
from ddpobs.recording.place.place_file import Slot, launch_was_interrupted

_LAUNCH_S = 0.1
"""Longest time that SIGTERM waits until the `ddpobs run` around the launcher has noted that SIGINT is the reason."""


class Ending:
    """The end of the process's training, reported once; an interrupted cell of a notebook may be trained again.

    Args:
        config: The settings.
        journal: The training thread's events.
        place: The process's place, which keeps an interrupt.
        exporter: Takes the events.
        pulses: Says whether the process hangs.
        finish: Flushes the process's telemetry, with the kind of the last event, which is empty after SIGTERM, and a
            deadline on `time.monotonic`'s clock.

    Attributes:
        outcome: `finished`, `interrupted` or `failed`; empty while the process runs. The last pulse publishes it.
    """

    def __init__(  # noqa: PLR0917
        self,
        config: TelemetryConfig,
        journal: Journal,
        place: LastPlace,
        exporter: Exporter,
        pulses: Pulses,
        finish: Callable[[str, float], None],
    ) -> None:
        self._config, self._journal, self._place, self._finish = config, journal, place, finish
        self._exporter, self._pulses = exporter, pulses
        self._failed = self._interrupted = False
        self._cell_ended = False
        """An interrupt has ended the training of a notebook's cell, and no later cell trains yet."""
        self._ending = threading.RLock()
        self.outcome = ""

    def event(self, kind: str, step: int, detail: dict[str, wire.Scalar]) -> None:
        """Report an event of now."""
        self._exporter.offer(wire.Event(kind=kind, at_ns=time.monotonic_ns(), step=step, detail=detail), weight=1)

    @never_raises
    def fail(self, error: BaseException) -> None:
        """Report the error that ends the training, once, with the place before the open step is closed.

        An error after SIGINT is a consequence of it.
        """
        if self._failed or self.outcome:
            return
        if isinstance(error, KeyboardInterrupt):
            self._place.note_interrupt(time.monotonic_ns())
        detail = describe(error, self._config.traceback)
        if is_interrupted(self._place.slots):
            self._report_interrupt(detail)
        else:
            self._failed, step = True, self._journal.number
            self.event("failed", step, {**detail, "wall_ns": time.time_ns(), "step": step, **self._place.summary()})
        self._exporter.flush_soon()

    def interrupt(self) -> None:
        """Note SIGINT; a hang in which it arrives is reported now, because the process may have to be killed."""
        self._place.note_interrupt(time.monotonic_ns())
        if self._pulses.is_stuck and not self.outcome:
            self._pulses.end()
            self._exporter.flush_soon()

    def end_cell(self) -> None:
        """Report that an interrupt ended a cell's training; a later cell may train again."""
        if self._journal.thread.is_here and not (self.outcome or self._interrupted):
            self._place.note_interrupt(time.monotonic_ns())
            self._report_interrupt({"error": "KeyboardInterrupt"})
            self._cell_ended = True
            self._journal.waits.training_interrupted()
            self._exporter.flush_soon()

    def step_closed(self, number: int) -> None:
        """Report that training goes on if this step came after the interrupt of a cell."""
        slots = self._place.slots
        if self._cell_ended and not self.outcome and number > slots[Slot.INTERRUPTED_STEP]:
            self._cell_ended = self._interrupted = False
            slots[Slot.INTERRUPTED_NS] = 0
            self.event("resumed", number, {"wall_ns": time.time_ns()})

    def terminate(self) -> None:
        """Flush after SIGTERM, on another thread than training, which may go on; the process ends next.

        A launcher that is interrupted sends it too; the `ddpobs run` around the launcher got SIGINT then.
        """
        with self._ending:
            if self.outcome:
                return
            if launch_was_interrupted(folder_of(self._config.spool) / FOLDER, _LAUNCH_S):
                self._place.note_interrupt(time.monotonic_ns())
            if not is_interrupted(self._place.slots):
                detail = {"signal": "SIGTERM", "wall_ns": time.time_ns(), **self._place.summary()}
                self.event("terminated", self._journal.number, detail)
            self.end("")

    def end(self, kind: str = "goodbye") -> None:
        """Decide the outcome, and flush, once."""
        with self._ending:
            if self.outcome:
                return
            deadline = time.monotonic() + self._config.exit_s
            if not self._failed and not self._interrupted and is_interrupted(self._place.slots):
                self._report_interrupt({})
            if self._interrupted:
                self.outcome = "interrupted"
            else:
                self.outcome = "finished" if kind and not self._failed else "failed"
            self._finish(kind, deadline)

    def _report_interrupt(self, detail: dict[str, wire.Scalar]) -> None:
        """Report that SIGINT ends the training, at the time of its arrival."""
        self._interrupted = True
        at_ns, step = self._place.slots[Slot.INTERRUPTED_NS], self._journal.number
        wall_ns = time.time_ns() - (time.monotonic_ns() - at_ns)
        detail = {"signal": "SIGINT", **detail, "wall_ns": wall_ns, "step": step, **self._place.summary()}
        self._exporter.offer(wire.Event(kind="interrupted", at_ns=at_ns, step=step, detail=detail), weight=1)
