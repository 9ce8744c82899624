"""Telemetry of a process: creates and connects journal, hooks, encoder, exporter and rendezvous.

A process has at most one `Telemetry`, which its DDP modules share.

`join` starts it with the first module, and `leave` ends it with the last. A module that was garbage-collected is only
forgotten: collection happens at different times on different ranks, and telemetry goes on for the modules after it.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist

from ddpobs import wire
from ddpobs.client.client import Run
from ddpobs.clocks import clock_for
from ddpobs.config import TelemetryConfig
from ddpobs.export.batch_encoder import BatchEncoder, describe_process
from ddpobs.export.exporter import DONE, Exporter
from ddpobs.export.identity import Envelope, Identity
from ddpobs.export.spool import folder_of
from ddpobs.never_raises import never_raises
from ddpobs.ranks.rendezvous import Rendezvous
from ddpobs.ranks.run_identity import RunIdentity
from ddpobs.recording.activity import ActivityWatch
from ddpobs.recording.code_samples import FIRST_LOOKS_S, CodeSamples
from ddpobs.recording.collective_hooks import CollectiveHooks
from ddpobs.recording.counter_reader import CounterReader
from ddpobs.recording.failure import UncaughtErrors, describe, propagating, uncaught
from ddpobs.recording.interactive_session import InteractiveSession
from ddpobs.recording.journal import Journal
from ddpobs.recording.last_place import FOLDER, LastPlace, is_interrupted
from ddpobs.recording.loader_hooks import LoaderHooks
from ddpobs.recording.machine_state import MachineState
from ddpobs.recording.module_recorder import ModuleRecorder
from ddpobs.recording.nvidia_device import watch_device
from ddpobs.recording.pipeline_hooks import PipelineHooks
from ddpobs.recording.place_file import LAUNCH, PlaceIdentity, Slot, launch_was_interrupted
from ddpobs.recording.process_hooks import ProcessHooks
from ddpobs.recording.pulses import Pulses
from ddpobs.recording.start_up import compile_ns, start_up
from ddpobs.recording.termination import Termination
from ddpobs.recording.unreduced import UnreducedGradients
from ddpobs.recovery import recover
from ddpobs.steps.account import Account, Piece, Tail
from ddpobs.steps.raw_step import RawStep
from ddpobs.steps.step_columns import RawSteps
from ddpobs.steps.summary import Summary
from ddpobs.terminal.announcer import Announcer
from ddpobs.torch_seam.collectives import backend_of, ranks_of
from ddpobs.torch_seam.modes import unseen

_LOOK_S = 0.2
"""Seconds between looks for the run's identity."""
_CLOSE_S = 0.2
"""Longest time that an exit waits for a read from the store, which a stopped process may never answer."""
_PARENT_S = 0.5
"""Longest time that an exit waits until torchrun's agent, which looks every 0.1 s, has noted how a dead rank ended."""
_LAUNCH_S = 0.1
"""Longest time that SIGTERM waits until the `ddpobs run` around the launcher has noted that SIGINT is the reason."""
_STEPS_PER_RECORD = 256
"""Most steps in one record of the queue; a quarter of the queue or of a batch, if that is less."""

_process: Telemetry | None = None
_generation = 0
"""Number of telemetries that this process has had. It is equal on all ranks, so an older identity never matches."""


@unseen
def join(
    module: torch.nn.Module,
    config: TelemetryConfig,
    process_group: dist.ProcessGroup,
    settings: Mapping[str, wire.Scalar],
    name: str | None = None,
) -> ModuleRecorder:
    """Start recording one DDP module.

    The first module of a process starts the telemetry thread and installs the hooks. So does the first module after the
    process has left its process group and joined a new one, perhaps with another rank.

    Args:
        module: The DDP module itself, or its substitute; held weakly.
        config: Settings; those of the process's first module apply.
        process_group: Process group of the module, which determines the backend.
        settings: Settings of the reducer that matter for a diagnosis.
        name: Name of the module; None for the class of the wrapped module.
    """
    global _process, _generation  # noqa: PLW0603 - one telemetry per process
    if _process is not None and not _process.current:
        process, _process = _process, None
        process.close()
    if _process is None:
        _generation += 1
        settings = {**settings, "group_ranks": process_group.size()}
        device = _device(module)
        _process = Telemetry(config, device, process_group, settings)
    return _process.recorder(module, ranks_of(process_group), name)


def leave(recorder: ModuleRecorder) -> None:
    """Stop recording a module; with the last module the process's telemetry ends, thread and hooks included."""
    global _process
    if _process is not None and _process.leave(recorder):
        process, _process = _process, None
        process.close()


def forget(recorder: ModuleRecorder) -> None:
    """Stop recording a deleted module; the process's telemetry continues for later modules."""
    if _process is not None:
        _process.leave(recorder)


def current_run() -> Run | None:
    """Return this process's run at its collector; None without telemetry, or before the ranks agree on the run."""
    return None if _process is None else _process.run


class Telemetry:
    """Telemetry of one process.

    Args:
        config: The settings.
        device: Device of the first module's parameters.
        group: Process group of the first module.
        settings: Settings of the reducer that matter for a diagnosis.
    """

    _cell_ended = False
    """An interrupt has ended the training of a notebook's cell, and no later cell trains yet."""

    def __init__(
        self,
        config: TelemetryConfig,
        device: torch.device,
        group: dist.ProcessGroup,
        settings: Mapping[str, wire.Scalar],
    ) -> None:
        self._config = config
        self._clock = clock_for(device.type, device)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._world = weakref.ref(dist.group.WORLD)
        self._source = secrets.token_hex(8)
        self._exporter = Exporter(config, self._encode, self._passed)
        self._rendezvous = Rendezvous(
            config,
            self._rank,
            self._world_size,
            _generation,
            self._identify,
            parameters=self._parameters,
            compared=ranks_of(group),
        )
        self._announcer = Announcer(config, self._rank, self._world_size, lambda: self._exporter.first_answer)
        labels = {"tags": ",".join(config.tags), "note": config.note}
        hello = describe_process(
            device, backend_of(group, device), {**settings, **{name: text for name, text in labels.items() if text}}
        )
        self._host = hello.host
        self._account = Account(start_up(is_first=_generation == 1))
        self._tail = Tail(time.monotonic_ns())
        self._encoder = BatchEncoder(
            hello, self._read, self._rendezvous.add_steps, self._exporter.count_lost, self._account_with
        )
        self._steps = RawSteps()
        self._spool = folder_of(config.spool)
        self._place = LastPlace(self._spool / FOLDER, self._source)
        self._place_seen_ns = 0
        self._counters = CounterReader()
        self._journal = Journal(
            self._clock,
            self._add_step,
            config.queue_records,
            self._caught_up,
            self._place.slots,
            counters=self._counters,
        )
        self._hooks = ProcessHooks(self._journal, self._event)
        self._loaders = LoaderHooks(self._journal, self._event)
        self._samples = CodeSamples(self._journal, config.traceback)
        self._collectives = CollectiveHooks(self._journal)
        self._pipelines = PipelineHooks(self._journal, self._event)
        self._session = InteractiveSession(self._end_cell)
        self._errors = UncaughtErrors(lambda: self._journal.trains_here, self._fail, self._session.failed)
        self._termination = Termination(self._terminate, self._interrupt)
        self._failed = self._interrupted = False
        self._ended = ""
        """`finished`, `interrupted` or `failed`; empty while the process runs. The last pulse publishes it."""
        self._ending = threading.RLock()
        self._unreduced = UnreducedGradients(self._journal, self._event)
        self._recorders: list[ModuleRecorder] = []
        self._modules = 0
        watch = ActivityWatch(config.hang_after_s, asynchronous=device.type != "cpu")
        self._device = watch_device(device, config.pulse_s)
        device_state = self._device.state if self._device else dict[str, Any]
        self._machine = MachineState(self._counters.quota, device_state)
        self._pulses = Pulses(
            self._journal,
            self._recorders,
            watch,
            self._event,
            self._look_at_machine,
            samples=self._samples,
            inputs=self._loaders.counts,
        )
        self._run = ""
        self._journal.evaluating = self._evaluating
        self._start()

    def _start(self) -> None:
        never_raises(self._rendezvous.open)()
        flush_s, pulse_s = self._config.flush_s, self._config.pulse_s
        self._exporter.call_every(_LOOK_S, self._find_identity)
        self._exporter.call_every(min(pulse_s, flush_s / 2), self._journal.catch_up)
        self._exporter.call_every(pulse_s, self._pulse)
        self._exporter.call_every(FIRST_LOOKS_S, lambda: DONE if self._samples.look() else None)
        self._exporter.call_every(pulse_s, self._recover_if_stuck)
        # Twice per flush: a batch's steps are compared before the next batch, since a short run has few batches.
        self._exporter.call_every(flush_s / 2, self._compare)
        self._exporter.call_every(pulse_s, self._loaders.report_repeated_order)
        self._exporter.call_every(pulse_s, self._flush_fingerprints)
        self._exporter.call_every(pulse_s, lambda: DONE if self._announcer.look() else None)
        self._exporter.call_every(pulse_s, lambda: DONE if self._pipelines.install() else None)
        self._announcer.start()
        self._exporter.start()
        self._hooks.install()
        self._loaders.install()
        self._collectives.install()
        self._counters.install()
        self._errors.install()
        self._session.install()
        self._termination.install()
        self._unreduced.install()
        atexit.register(self.close)
        # A process that multiprocessing forked does not run atexit.
        self._at_exit = Finalize(None, self._close_in_child, exitpriority=0)

    @property
    def current(self) -> bool:
        """Whether the process group is still the same; a process may leave it and join a new one."""
        return self._world() is dist.group.WORLD

    @property
    def run(self) -> Run | None:
        """The run at the collector; None before the ranks agree on it."""
        return Run(self._config, self._run) if self._run else None

    def recorder(self, module: torch.nn.Module, group_ranks: Sequence[int], name: str | None = None) -> ModuleRecorder:
        """Create a recorder for one more DDP module, over these ranks."""
        ranks = len(group_ranks)
        self._pipelines.install()
        recorder = ModuleRecorder(
            _module_number(self._modules, group_ranks, self._world_size),
            module,
            self._journal,
            name=name,
            clock=self._clock,
            offer=self._exporter.offer,
            readiness_every=self._config.readiness_every,
            # Ranks of separate groups may hold different parts of a model.
            fingerprint_every=self._config.fingerprint_every if 1 < ranks == self._world_size else 0,
            unreduced=self._unreduced if ranks > 1 else None,
        )
        self._modules += 1
        self._recorders.append(recorder)
        self._journal.training_interrupted()  # Building a model is no part of a step.
        return recorder

    def leave(self, recorder: ModuleRecorder) -> bool:
        """Remove a module; returns whether it was the last one."""
        if recorder in self._recorders:
            self._flush_fingerprints()
            self._recorders.remove(recorder)
            self._journal.modules -= 1
            self._journal.trained.discard(recorder.index)
        return not self._recorders

    def close(self, error: BaseException | None = None) -> None:
        """Report the end of the process, flush within `config.exit_s`, and remove the hooks.

        Never raises. Further calls do nothing.

        Args:
            error: Error that ends the process; None for the interpreter's last uncaught error, if any.
        """
        atexit.unregister(self.close)
        self._at_exit.cancel()
        self._loaders.remove()  # It wraps functions that the hooks have wrapped before.
        self._hooks.remove()
        self._collectives.remove()
        self._pipelines.remove()
        self._errors.remove()
        self._session.remove()
        error = error or uncaught()
        if error is not None:
            self._fail(error)
        self._end()
        self._counters.close()
        self._termination.remove()

    def _close_in_child(self) -> None:
        """Close in a forked process, in which the error that ends it is still propagating."""
        self.close(propagating())

    @never_raises
    def _fail(self, error: BaseException) -> None:
        """Report the error that ends the training, once, with the place before the open step is closed.

        An error after SIGINT is a consequence of it.
        """
        if self._failed or self._ended:
            return
        if isinstance(error, KeyboardInterrupt):
            self._place.note_interrupt(time.monotonic_ns())
        detail = describe(error, self._config.traceback)
        if is_interrupted(self._place.slots):
            self._report_interrupt(detail)
        else:
            self._failed, step = True, self._journal.number
            self._event("failed", step, {**detail, "wall_ns": time.time_ns(), "step": step, **self._place.summary()})
        self._exporter.flush_soon()

    def _interrupt(self) -> None:
        """Note SIGINT; a hang in which it arrives is reported now, because the process may have to be killed."""
        self._place.note_interrupt(time.monotonic_ns())
        if self._pulses.is_stuck and not self._ended:
            self._pulses.end()
            self._exporter.flush_soon()

    def _report_interrupt(self, detail: dict[str, wire.Scalar]) -> None:
        """Report that SIGINT ends the training, at the time of its arrival."""
        self._interrupted = True
        at_ns, step = self._place.slots[Slot.INTERRUPTED_NS], self._journal.number
        wall_ns = time.time_ns() - (time.monotonic_ns() - at_ns)
        detail = {"signal": "SIGINT", **detail, "wall_ns": wall_ns, "step": step, **self._place.summary()}
        self._exporter.offer(wire.Event(kind="interrupted", at_ns=at_ns, step=step, detail=detail), weight=1)

    def _end_cell(self) -> None:
        """Report that an interrupt ended a cell's training; a later cell may train again."""
        if self._journal.trains_here and not (self._ended or self._interrupted):
            self._place.note_interrupt(time.monotonic_ns())
            self._report_interrupt({"error": "KeyboardInterrupt"})
            self._cell_ended = True
            self._journal.training_interrupted()
            self._exporter.flush_soon()

    def _train_again(self, step: int) -> None:
        """Report that training goes on after the interrupt of a cell."""
        slots = self._place.slots
        if not self._ended and step > slots[Slot.INTERRUPTED_STEP]:
            self._cell_ended = self._interrupted = False
            slots[Slot.INTERRUPTED_NS] = 0
            self._event("resumed", step, {"wall_ns": time.time_ns()})

    def _terminate(self) -> None:
        """Flush after SIGTERM, on another thread than training, which may go on; the process ends next.

        A launcher that is interrupted sends it too; the `ddpobs run` around the launcher got SIGINT then.
        """
        with self._ending:
            if self._ended:
                return
            if launch_was_interrupted(self._spool / FOLDER, _LAUNCH_S):
                self._place.note_interrupt(time.monotonic_ns())
            if not is_interrupted(self._place.slots):
                detail = {"signal": "SIGTERM", "wall_ns": time.time_ns(), **self._place.summary()}
                self._event("terminated", self._journal.number, detail)
            self._end("")

    def _end(self, kind: str = "goodbye") -> None:
        """Flush, once: steps, the last event unless it was sent, and the places of other processes."""
        with self._ending:
            if self._ended:
                return
            deadline = time.monotonic() + self._config.exit_s
            if not self._failed and not self._interrupted and is_interrupted(self._place.slots):
                self._report_interrupt({})
            if self._interrupted:
                self._ended = "interrupted"
            else:
                self._ended = "finished" if kind and not self._failed else "failed"
            self._samples.end()
            if self._ended != "finished":
                self._pulses.end()
            self._journal.finish()
            self._unreduced.remove()
            self._flush_fingerprints()
            self._loaders.report_repeated_order()
            for recorder in self._recorders:
                recorder.batch_cut()
            if self._ended == "finished":
                self._event(kind, self._journal.number, {})
            self._recover(_PARENT_S if "TORCHELASTIC_RUN_ID" in os.environ else 0.0)
            self._exporter.close()
            if kind:
                self._announce_end(deadline)
            self._rendezvous.close(_CLOSE_S)
            self._place.close()
            self._counters.remove()
            if self._device is not None:
                self._device.stop()

    @never_raises
    def _announce_end(self, deadline: float) -> None:
        self._announcer.end(deadline - time.monotonic(), delivered=self._exporter.all_delivered)

    @never_raises
    def _recover(self, parent_s: float = 0.0) -> None:
        """Send the places and the spooled batches of this run's dead processes; `parent_s` as for `recover`."""
        if self._run and self._place.is_shared:
            launch = os.environ.get(LAUNCH, "")
            sources = recover(self._spool, int(self._config.spool_mb * 1e6), self._run, parent_s, launch)
            if sources:
                self._exporter.adopt(sources)

    @never_raises
    def _evaluating(self) -> bool:
        evaluates = False
        for recorder in self._recorders:
            training = recorder.training
            if training:
                return False
            evaluates = evaluates or training is False
        return evaluates

    def _event(self, kind: str, step: int, detail: dict[str, wire.Scalar]) -> None:
        self._exporter.offer(wire.Event(kind=kind, at_ns=time.monotonic_ns(), step=step, detail=detail), weight=1)

    def _add_step(self, raw: RawStep) -> None:
        """Collect a step as numbers if the device has finished it, else queue it; the journal's replay calls this."""
        if self._cell_ended:
            self._train_again(raw.number)
        if not (self._passed(raw) and self._read(self._steps, raw)):
            self._offer_steps()
            self._exporter.offer(raw, raw.records)
            return
        limit = min(_STEPS_PER_RECORD, self._config.queue_records // 4)
        if len(self._steps.number) >= limit or 4 * self._steps.records >= self._config.batch_spans:
            self._offer_steps()

    @never_raises
    def _offer_steps(self) -> None:
        if self._steps.number:
            steps, self._steps = self._steps, RawSteps()
            self._exporter.offer(steps, steps.records, len(steps.number))

    def _caught_up(self) -> None:
        self._offer_steps()
        self._look_at_tail()

    @never_raises
    def _look_at_tail(self) -> None:
        """Keep the time since the last step, for the account of the next batch."""
        step, began, outside = self._journal.tail()
        now_ns, ready = time.monotonic_ns(), self._clock.is_ready
        pieces = [
            Piece(kind, self._clock.times([begins])[0], self._clock.times([ends])[0] if ends else now_ns)
            for kind, begins, ends in outside
            if ready(begins) and (not ends or ready(ends))
        ]
        self._tail = Tail(now_ns, step, began, pieces, self._ended == "finished")

    @never_raises
    def _account_with(self, summary: Summary | None) -> wire.Account | None:
        """Return the account up to now, after these steps were added."""
        if summary is not None:
            self._account.add(summary.steps, summary.outside)
        return self._account.at(self._tail, compile_ns())

    @never_raises
    def _read(self, steps: RawSteps, raw: RawStep) -> bool:
        """Add a step to columns. A failed device fails for each step; other records still travel."""
        steps.add(raw, self._clock)
        return True

    def _passed(self, record: object) -> bool:
        """Whether the device has reached a step's end. A hanging device delays its steps, but not the thread.

        A failed device counts as having reached it; reading the step then raises.
        """
        try:
            return not isinstance(record, RawStep) or self._clock.is_ready(record.end)
        except Exception:
            return True

    def _encode(self, records: Sequence[object], envelope: Envelope) -> wire.Batch:
        recorders = tuple(self._recorders)
        for recorder in recorders:
            recorder.batch_cut()
        self._place.batch_built(envelope.seq, envelope.emitted, envelope.dropped)
        return self._encoder.encode(records, envelope, {recorder.index for recorder in recorders})

    def _find_identity(self) -> object:
        return DONE if self._rendezvous.find_identity() else None

    def _identify(self, shared: RunIdentity) -> None:
        self._exporter.identify(Identity(**shared, source=self._source, rank=self._rank, world_size=self._world_size))
        self._run, rank, size = shared["run"], self._rank, self._world_size
        self._place.identify(PlaceIdentity(**shared, source=self._source, rank=rank, world_size=size, host=self._host))
        self._recover()
        self._announcer.identify(self._run)

    def _parameters(self, module: int, bucket: int) -> list[str]:
        """Names of the parameters of a module's bucket."""
        return [
            name for recorder in self._recorders if recorder.index == module for name in recorder.parameters(bucket)
        ]

    def _pulse(self) -> None:
        pulse = self._pulses.look(self._rendezvous.processes)
        self._exporter.offer_latest(pulse, urgent=self._pulses.is_urgent)
        self._rendezvous.publish_pulse(pulse, self._ended)

    @never_raises
    def _look_at_machine(self) -> wire.Machine:
        self._counters.look()
        return self._machine.look()

    def _recover_if_stuck(self) -> None:
        """Look for dead processes of this host if training recorded nothing since the last look."""
        at_ns, self._place_seen_ns = self._place_seen_ns, self._place.slots[Slot.AT_NS]
        if at_ns == self._place_seen_ns:
            self._recover()

    @never_raises
    def _flush_fingerprints(self) -> None:
        for recorder in tuple(self._recorders):
            if recorder.fingerprints is not None:
                recorder.fingerprints.flush()

    def _compare(self) -> None:
        peers = self._rendezvous.compare()
        if peers is not None:
            self._exporter.offer(peers)


def _module_number(index: int, group_ranks: Sequence[int], world_size: int) -> int:
    """Return the module's number, which differs between the modules of different process groups.

    Stages of a pipeline are different modules. Over the whole world the number is the index in the process.

    Args:
        index: Modules that this process built before.
        group_ranks: Ranks of the module's process group.
        world_size: Number of ranks.
    """
    return index if len(group_ranks) == world_size else index * world_size + min(group_ranks)


def _device(module: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
