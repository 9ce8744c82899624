"""Hooks on the steps of torch's pipeline schedules, for our DDP and torch's own alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from ddpobs import wire
from ddpobs.never_raises import never_raises
from ddpobs.recording.journal import Journal
from ddpobs.torch_seam import pipelining
from ddpobs.torch_seam.patching import Patches


class PipelineHooks:
    """Report each step of a schedule to the journal, and each schedule as an event, while installed.

    Args:
        journal: Records the steps.
        event: Records an event of a kind in a step, with details.
    """

    def __init__(self, journal: Journal, event: Callable[[str, int, dict[str, wire.Scalar]], None]) -> None:
        self._journal, self._event = journal, event
        self._patches = Patches()
        self._installed = self._removed = False
        self._reported: pipelining.Pipeline | None = None
        self._latest: weakref.ref[Any] | None = None
        """The schedule that was compared with the reported one last."""

    def install(self) -> bool:
        """Install the hooks, if the script has imported torch's schedules; return whether no more calls are needed."""
        if not (self._installed or self._removed):
            for schedule in pipelining.schedule_classes():
                self._patches.put(schedule, "step", self._step)
                self._installed = True
        return self._installed or self._removed

    def remove(self) -> None:
        """Remove the hooks."""
        self._removed = True
        self._patches.undo()

    def _step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        journal = self._journal

        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            # Another wrapper may keep this one alive after its removal.
            if self._removed or not (pipelining.trains(schedule) and journal.schedule_began()):
                return original(schedule, *args, **kwargs)
            try:
                return original(schedule, *args, **kwargs)
            finally:
                journal.schedule_ended()
                self._report(schedule)

        return step

    @never_raises
    def _report(self, schedule: Any) -> None:
        """Record a schedule that differs from the one before."""
        if self._latest is not None and self._latest() is schedule:
            return
        self._latest = weakref.ref(schedule)
        pipeline = pipelining.describe(schedule)
        if pipeline == self._reported:
            return
        self._reported = pipeline
        detail: dict[str, wire.Scalar] = {
            "schedule": pipeline.schedule,
            "stages": pipeline.stages,
            "held": ",".join(map(str, pipeline.held)),
            "micro_batches": pipeline.micro_batches,
            "first_rank": min(pipeline.ranks),
        }
        self._event("pipeline", self._journal.number, detail)
