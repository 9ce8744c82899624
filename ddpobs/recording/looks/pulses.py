"""Pulses of this rank: the telemetry thread's looks at the training thread, as records for the wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ddpobs import wire
from ddpobs.recording.hooks.input_counts import InputCounts
from ddpobs.recording.journal import Journal
from ddpobs.recording.looks.activity import Activity, ActivityWatch, other_stacks
from ddpobs.recording.looks.code_samples import CodeSamples
from ddpobs.recording.module_recorder import ModuleRecorder

_MAX_OTHER_WAITS = 16
_MAX_NAME = 256
_MAX_PROCESSES = 64


class Pulses:
    """Makes a pulse at each look.

    Args:
        journal: Facts of the training thread.
        recorders: Recorders of the process's DDP modules; the list may change.
        watch: Follows the training thread.
        event: Records an event, given its kind, step and details.
        machine: Reads the state of the host and the device.
        samples: Looks at the training thread's code.
        inputs: Use of torch's loaders.

    Attributes:
        is_stuck: Whether the rank was stuck at the last look.
        is_urgent: Whether the rank became stuck, or its stack changed: the last pulse must be sent at once.
    """

    def __init__(
        self,
        journal: Journal,
        recorders: Sequence[ModuleRecorder],
        watch: ActivityWatch,
        event: Callable[[str, int, dict[str, wire.Scalar]], None],
        machine: Callable[[], wire.Machine | None] = lambda: None,
        *,
        samples: CodeSamples | None = None,
        inputs: InputCounts | None = None,
    ) -> None:
        self._samples, self._inputs = samples or CodeSamples(journal), inputs or InputCounts()
        self._journal, self._recorders, self._watch, self._event = journal, recorders, watch, event
        self._machine = machine
        self._bucket = (wire.UNKNOWN, wire.UNKNOWN)
        self._last_appearance: object = None
        self._stuck: wire.Pulse | None = None
        self._stuck_since_ns = 0
        self.is_stuck = self.is_urgent = False

    def look(self, processes: Mapping[int, str]) -> wire.Pulse:
        """Look at the training thread.

        Args:
            processes: State of this host's processes that no longer run, by rank.
        """
        journal = self._journal
        self._samples.look()
        now_ns, phase, step = time.monotonic_ns(), wire.PHASES[journal.phase], journal.number
        activity = self._activity(phase, step)
        self.is_stuck = activity.is_stuck
        appearance = (activity.kind, activity.waits_in, activity.lines) if self.is_stuck else None
        self.is_urgent = self.is_stuck and appearance != self._last_appearance
        self._last_appearance = appearance
        pulse = wire.Pulse(
            at_ns=now_ns,
            phase=phase,  # type: ignore[arg-type]
            step=step,
            module=self._bucket[0],
            bucket=self._bucket[1],
            idle_ns=activity.idle_ns,
            patience_ns=activity.patience_ns,
            activity=activity.kind,
            waits_in=activity.waits_in[:_MAX_NAME],
            synchronised=journal.synchronised,
            collectives=journal.waits.collectives,
            buffer_broadcasts=journal.buffer_broadcasts,
            place=activity.place[:_MAX_NAME],
            stack=activity.stack if self.is_stuck else [],
            threads=other_stacks(journal.thread.ident_or_main) if self.is_stuck else {},
            machine=self._machine(),
            processes={str(rank): state for rank, state in list(processes.items())[:_MAX_PROCESSES]},
            looks=self._samples.count,
            effective_looks=self._samples.effective_count,
            code=self._samples.places(),
            input=self._inputs.record(),
            other_waits=[wait[:_MAX_NAME] for wait in journal.waits.elsewhere[:_MAX_OTHER_WAITS]],
        )
        self._follow(pulse)
        return pulse

    def _activity(self, phase: str, step: int) -> Activity:
        journal = self._journal
        if journal.thread.paused:  # While a graph is captured, a device may not be queried, and nothing is recorded.
            self._watch.rest()
            return Activity(patience_ns=1)
        return self._watch.look(
            journal.thread.ident_or_main,
            entries=journal.entries.replayed,
            step=step,
            phase=phase,
            bucket_pending=self._find_bucket(),
            waits_in=journal.waits.name,
            evaluating=bool(journal.evaluation.covers_all()),
            last_event_ns=journal.entries.last_event_ns,
        )

    def _find_bucket(self) -> bool:
        """Find the bucket that training waits for, else the one that was launched last; return whether it waits."""
        reducing = [recorder for recorder in self._recorders if recorder.reduces]
        for recorder in reducing:
            pending = recorder.pending_bucket()
            if pending != wire.UNKNOWN:
                self._bucket = recorder.index, pending
                return True
        if reducing:
            self._bucket = reducing[-1].index, reducing[-1].launched_last()
        return False

    def end(self) -> None:
        """Record the length of a hang in which the rank is terminated or interrupted, or fails."""
        if self._stuck is not None:
            self._record_stuck(time.monotonic_ns(), "ended")

    def _follow(self, pulse: wire.Pulse) -> None:
        """Record the length of a hang once the rank goes on: the history of hangs."""
        if self.is_stuck:
            self._stuck, self._stuck_since_ns = pulse, pulse.at_ns - pulse.idle_ns
        elif self._stuck is not None:
            self._record_stuck(pulse.at_ns - pulse.idle_ns, "went on")

    def _record_stuck(self, until_ns: int, outcome: str) -> None:
        stuck, self._stuck = self._stuck, None
        if stuck is not None:
            detail: dict[str, wire.Scalar] = {
                "idle_ns": until_ns - self._stuck_since_ns,
                "outcome": outcome,
                "activity": stuck.activity,
                "waits_in": stuck.waits_in,
                "place": stuck.place,
                "synchronised": stuck.synchronised,
                "patience_ns": stuck.patience_ns,
                "wall_ns": time.time_ns() - time.monotonic_ns() + until_ns,
            }
            self._event("stuck", stuck.step, detail)
