"""What observes the training of a process: hooks into its code, and probes of its place and machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from threading import get_ident
from typing import Any

import torch

from ddpobs import wire
from ddpobs.config import TelemetryConfig
from ddpobs.export.exporter import Exporter
from ddpobs.export.schedule import DONE
from ddpobs.never_raises import never_raises
from ddpobs.recording.hooks.collective_hooks import CollectiveHooks
from ddpobs.recording.hooks.failure import UncaughtErrors
from ddpobs.recording.hooks.group_end import GroupEnd
from ddpobs.recording.hooks.interactive_session import InteractiveSession
from ddpobs.recording.hooks.loader_hooks import LoaderHooks
from ddpobs.recording.hooks.pipeline_hooks import PipelineHooks
from ddpobs.recording.hooks.process_hooks import ProcessHooks
from ddpobs.recording.journal import Journal
from ddpobs.recording.looks.activity import ActivityWatch, frames_of, place_of
from ddpobs.recording.looks.code_samples import LOOKS, CodeSamples
from ddpobs.recording.looks.pulses import Pulses
from ddpobs.recording.module_recorder import ModuleRecorder
from ddpobs.recording.probes.counter_reader import CounterReader
from ddpobs.recording.probes.machine_state import MachineState
from ddpobs.recording.probes.nvidia_device import watch_device
from ddpobs.recording.replicas.unreduced import UnreducedGradients

Event = Callable[[str, int, dict[str, wire.Scalar]], None]
"""Takes an event of now: its kind, the number of its step, and its detail."""


class Observation:
    """Observes the training of one process.

    Args:
        config: The settings.
        device: Device of the first module's parameters.
        journal: Takes what the hooks report.
        counters: Counters that the journal reads.
        recorders: The DDP modules of the process; the list changes.
        event: Takes the events.

    Attributes:
        pulses: Looks at the place of the training.
        unreduced: Looks for optimizer steps on gradients that were never reduced.
        pipelines: Hooks of torch's pipelines.
    """

    def __init__(  # noqa: PLR0917
        self,
        config: TelemetryConfig,
        device: torch.device,
        journal: Journal,
        counters: CounterReader,
        recorders: list[ModuleRecorder],
        event: Event,
    ) -> None:
        self._journal, self._counters, self._event, self._pulse_s = journal, counters, event, config.pulse_s
        self._hooks = ExitStack()
        self._loaders = LoaderHooks(journal, event)
        self._samples = CodeSamples(journal, config.traceback)
        if config.traceback:
            journal.waits.place = lambda: place_of(list(frames_of(get_ident())))
        self._device = watch_device(device, config.pulse_s)
        self._machine = MachineState(
            counters.quota,
            self._device.state if self._device else dict[str, Any],
            training_thread=lambda: journal.thread.ident_or_main,
        )
        self.pipelines = PipelineHooks(journal, event)
        self.unreduced = UnreducedGradients(journal, event)
        self.pulses = Pulses(
            journal,
            recorders,
            ActivityWatch(config.hang_after_s, asynchronous=device.type != "cpu"),
            event,
            self._look_at_machine,
            samples=self._samples,
            inputs=self._loaders.counts,
        )

    def schedule(self, exporter: Exporter) -> None:
        """Let the exporter's thread look for what no hook reports."""
        for seconds, enough in LOOKS:
            exporter.call_every(seconds, partial(self._look, enough))
        exporter.call_every(self._pulse_s, self._loaders.report_repeated_order)
        exporter.call_every(self._pulse_s, lambda: DONE if self.pipelines.install() else None)

    def _look(self, enough: int | None) -> object:
        return DONE if self._samples.look(enough) else None

    def install_hooks(
        self,
        fail: Callable[[BaseException], None],
        end_cell: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        """Install the hooks, outside of which training looks as without telemetry.

        Args:
            fail: Takes the error that ends the training.
            end_cell: Called when an interrupt ended a cell of a notebook.
            leave: Called before the default process group is destroyed.
        """
        session = InteractiveSession(end_cell)
        for hook in (
            session,
            UncaughtErrors(lambda: self._journal.thread.is_here, fail, session.failed),
            self.pipelines,
            CollectiveHooks(self._journal),
            ProcessHooks(self._journal, self._event),
            self._loaders,
            GroupEnd(leave),
        ):
            self._hooks.callback(hook.remove)
            hook.install()
        self._counters.install()

    def remove_hooks(self) -> None:
        """Remove the hooks in the reverse order: the loaders' wrap functions that the process's have wrapped."""
        self._hooks.close()

    def end(self, finished: bool) -> None:
        """Report what is under way at the end; without `finished` also a last pulse."""
        self._samples.end()
        if not finished:
            self.pulses.end()

    def flush(self) -> None:
        """Report what is known only when every step has been replayed."""
        self.unreduced.remove()
        self._loaders.report_repeated_order()

    def stop(self) -> None:
        """End the probes. The counters can be read until `close`."""
        self._counters.remove()
        if self._device is not None:
            self._device.stop()

    def close(self) -> None:
        """Release the counters."""
        self._counters.close()

    @never_raises
    def _look_at_machine(self) -> wire.Machine:
        self._counters.look()
        return self._machine.look()
