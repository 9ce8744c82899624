"""Telemetry of one process: connects journal, hooks, encoder, exporter and rendezvous, and takes them down."""

from __future__ import annotations

import atexit
import os
import secrets
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.util import Finalize
from threading import Event, get_ident
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddpobs import wire
from ddpobs.client.client import Run
from ddpobs.clocks import clock_for
from ddpobs.config import TelemetryConfig
from ddpobs.export.batch_encoder import BatchEncoder, describe_process
from ddpobs.export.exporter import Exporter
from ddpobs.export.identity import Envelope, Identity
from ddpobs.export.schedule import DONE
from ddpobs.export.spool import folder_of
from ddpobs.never_raises import never_raises
from ddpobs.observers import ModuleObserver
from ddpobs.ranks.rendezvous import Rendezvous
from ddpobs.ranks.run_identity import RunIdentity
from ddpobs.ranks.run_name import launcher_run_name
from ddpobs.recording.hooks.failure import propagating, uncaught
from ddpobs.recording.hooks.termination import Termination
from ddpobs.recording.journal import Journal
from ddpobs.recording.looks.activity import frames_of, place_of
from ddpobs.recording.module_recorder import ModuleRecorder
from ddpobs.recording.place.last_place import FOLDER, LastPlace
from ddpobs.recording.place.place_file import LAUNCH, PlaceIdentity, Slot
from ddpobs.recording.probes.counter_reader import CounterReader
from ddpobs.recording.probes.start_up import start_up, waits_before
from ddpobs.recovery import recover
from ddpobs.steps.account import Account, StartUpWaits
from ddpobs.steps.raw_step import RawStep
from ddpobs.telemetry.ending import Ending
from ddpobs.telemetry.observation import Observation
from ddpobs.telemetry.parent_ranks import mark, parent_ranks
from ddpobs.telemetry.step_flow import StepFlow, has_passed
from ddpobs.terminal.announcer import Announcer
from ddpobs.torch_seam.collectives import backend_of, ranks_of

_LOOK_S = 0.2
"""Seconds between looks for the run's identity."""
_CLOSE_S = 0.2
"""Longest time that an exit waits for a read from the store, which a stopped process may never answer."""
_READERS_S = 1.0
"""Longest time that the rank with the ranks' store waits at its end until the others have read the run's id."""
_FAILED_READERS_S = 5.0
"""The same if the process fails: the others may be about to ask, and their errors would belong to no run."""
_PARENT_S = 0.5
"""Longest time that an exit waits until torchrun's agent, which looks every 0.1 s, has noted how a dead rank ended."""


class _Job(NamedTuple):
    """Where this process stands in its job, and the key of its batches."""

    rank: int
    world_size: int
    source: str
    host: str


class Telemetry:
    """Telemetry of one process.

    Args:
        config: The settings.
        device: Device of the first module's parameters.
        group: Process group of the first module.
        settings: Settings of the reducer that matter for a diagnosis.
        generation: Number of this telemetry in the process, from 1.
    """

    def __init__(
        self,
        config: TelemetryConfig,
        device: torch.device,
        group: dist.ProcessGroup,
        settings: Mapping[str, wire.Scalar],
        generation: int,
    ) -> None:
        self._config = config
        self._clock = clock_for(device.type, device)
        rank, world_size, source = dist.get_rank(), dist.get_world_size(), secrets.token_hex(8)
        self._world = weakref.ref(dist.group.WORLD)
        self._recorders: list[ModuleRecorder] = []
        self._modules = 0
        self._run = ""
        self._awake = Event()
        self._exporter = Exporter(config, self._encode, partial(has_passed, self._clock), self._settle, self._awake)
        self._rendezvous = Rendezvous(
            config,
            rank,
            world_size,
            generation,
            self._identify,
            buckets=self._bucket,
            compared=ranks_of(group),
            parents=partial(parent_ranks, folder_of(config.spool) / FOLDER),
        )
        self._announcer = Announcer(config, rank, world_size, lambda: self._exporter.first_response)
        wrapped_at = place_of(list(frames_of(get_ident()))) if config.traceback else ""
        texts = {"tags": ",".join(config.tags), "note": config.note, "wrapped_at": wrapped_at}
        labels = {name: text for name, text in texts.items() if text}
        hello = describe_process(device, backend_of(group, device), {**settings, **labels})
        self._job = _Job(rank, world_size, source, hello.host)
        is_first = generation == 1
        self._start_up_waits = StartUpWaits()
        account = Account(start_up(is_first), waits_before(is_first, config.traceback), self._start_up_waits)
        self._flow = StepFlow(config, self._clock, self._exporter.offer, account)
        self._encoder = BatchEncoder(
            hello,
            self._flow.read,
            self._rendezvous.add_steps,
            self._exporter.count_lost,
            self._flow.account_with,
            compilations=self._flow.compilations.read,
        )
        with ExitStack() as undo:
            self._place = LastPlace(folder_of(config.spool) / FOLDER, source)
            undo.callback(self._place.close)
            self._place_seen_ns = 0
            self._observe(device, undo)
            self._start(undo)
            mark(os.environ, self._place.slots, config.run or launcher_run_name(os.environ) or "")
            undo.pop_all()

    def _observe(self, device: torch.device, undo: ExitStack) -> None:
        """Create what observes the training."""
        config, counters = self._config, CounterReader()
        undo.callback(counters.close)
        self._journal = Journal(
            self._clock,
            self._step_closed,
            config.queue_records,
            self._flow.caught_up,
            self._place.slots,
            counters=counters,
        )
        self._journal.waits.start_up = self._start_up_waits
        self._journal.resting.measure(self._flow.own_cost, counters, self._awake)
        self._journal.evaluation.covers_all = self._evaluating
        self._observation = Observation(config, device, self._journal, counters, self._recorders, self._event)
        undo.callback(self._observation.stop)
        pulses = self._observation.pulses
        self._ending = Ending(config, self._journal, self._place, self._exporter, pulses, self._finish)
        self._termination = Termination(self._ending.terminate, self._ending.interrupt)

    def _start(self, undo: ExitStack) -> None:
        """Start the threads, then install the hooks; `undo` takes what ends them if a later one fails."""
        self._rendezvous.open()
        self._schedule()
        undo.callback(self._exporter.close, _CLOSE_S)
        self._exporter.start()
        undo.callback(self._observation.remove_hooks)
        self._observation.install_hooks(self._ending.fail, self._ending.end_cell, self._leave)
        undo.callback(self._observation.unreduced.remove)
        self._observation.unreduced.install()
        undo.callback(self._termination.remove)
        self._termination.install()
        self._announcer.start()
        atexit.register(self.close)
        undo.callback(atexit.unregister, self.close)
        # A process that multiprocessing forked does not run atexit.
        self._at_exit = Finalize(None, self._close_in_child, exitpriority=0)
        undo.callback(self._at_exit.cancel)

    def _schedule(self) -> None:
        """Let the exporter's thread look at everything from time to time."""
        flush_s, pulse_s = self._config.flush_s, self._config.pulse_s
        self._exporter.call_every(_LOOK_S, self._find_identity)
        self._exporter.call_every(min(pulse_s, flush_s / 2), self._journal.entries.catch_up)
        self._exporter.call_every(pulse_s, self._pulse)
        self._exporter.call_every(pulse_s, self._recover_if_stuck)
        # Twice per flush: a batch's steps are compared before the next batch, since a short run has few batches.
        self._exporter.call_every(flush_s / 2, self._compare)
        self._exporter.call_every(pulse_s, self._flush_fingerprints)
        self._exporter.call_every(pulse_s, lambda: DONE if self._announcer.look() else None)
        self._observation.schedule(self._exporter)

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
        self._observation.pipelines.install()
        recorder = ModuleRecorder(
            _module_number(self._modules, group_ranks, self._job.world_size),
            module,
            self._journal,
            name=name,
            clock=self._clock,
            offer=self._exporter.offer,
            readiness_every=self._config.readiness_every,
            # Ranks of separate groups may hold different parts of a model.
            fingerprint_every=self._config.fingerprint_every if 1 < ranks == self._job.world_size else 0,
            unreduced=self._observation.unreduced if ranks > 1 else None,
        )
        self._modules += 1
        self._recorders.append(recorder)
        self._journal.waits.training_interrupted()  # Building a model is no part of a step.
        return recorder

    def leave(self, observer: ModuleObserver) -> bool:
        """Remove a module; returns whether it was the last one."""
        for recorder in [recorder for recorder in self._recorders if recorder is observer]:
            self._flush_fingerprints()
            self._recorders.remove(recorder)
            self._journal.modules -= 1
            self._journal.trained.discard(recorder.index)
        return not self._recorders

    def fetch_began(self, source: int) -> bool:
        """Record that the training thread requests a batch; False if it is not recorded."""
        return self._journal.fetch_began(source)

    def fetch_ended(self) -> None:
        """Record the end of a fetch."""
        self._journal.fetch_ended()

    def close(self, error: BaseException | None = None) -> None:
        """Report the end of the process, flush within `config.exit_s`, and remove the hooks.

        Never raises. Further calls do nothing.

        Args:
            error: Error that ends the process; None for the interpreter's last uncaught error, if any.
        """
        atexit.unregister(self.close)
        self._at_exit.cancel()
        error = error or uncaught()
        if error is None:
            never_raises(self._rendezvous.await_readers)(_READERS_S)
        else:
            never_raises(self._rendezvous.await_readers)(_FAILED_READERS_S, self._job.world_size)
        self._observation.remove_hooks()
        if error is not None:
            self._ending.fail(error)
        self._ending.end()
        self._observation.close()
        self._termination.remove()
        if self._run:
            mark(os.environ, self._place.slots, self._run)

    def _leave(self) -> None:
        self._rendezvous.leave(_READERS_S)

    def _close_in_child(self) -> None:
        """Close in a forked process, in which the error that ends it is still propagating."""
        self.close(propagating())

    def _finish(self, kind: str, deadline: float) -> None:
        """Flush: steps, the last event, unless it was sent or `kind` is empty, and the places of other processes."""
        self._flow.finished = finished = self._ending.outcome == "finished"
        self._observation.end(finished)
        self._journal.finish()
        self._observation.flush()
        self._flush_fingerprints()
        for recorder in self._recorders:
            recorder.unused_names.batch_cut()
        if finished:
            self._event(kind, self._journal.number, {})
        self._recover(_PARENT_S if "TORCHELASTIC_RUN_ID" in os.environ else 0.0)
        self._exporter.close()
        if kind:
            self._announce_end(deadline)
        self._rendezvous.close(_CLOSE_S)
        self._place.close()
        self._observation.stop()

    @never_raises
    def _announce_end(self, deadline: float) -> None:
        self._announcer.end(deadline - time.monotonic(), delivered=self._exporter.all_delivered)

    @never_raises
    def _recover(self, parent_s: float = 0.0) -> None:
        """Send the places and the spooled batches of this run's dead processes; `parent_s` as for `recover`."""
        if self._run and self._place.is_shared:
            launch = os.environ.get(LAUNCH, "")
            sources = recover(
                folder_of(self._config.spool), int(self._config.spool_mb * 1e6), self._run, parent_s, launch
            )
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
        self._ending.event(kind, step, detail)

    def _step_closed(self, raw: RawStep) -> None:
        self._ending.step_closed(raw.number)
        self._flow.add(raw)

    def _encode(self, records: Sequence[object], envelope: Envelope) -> wire.Batch:
        recorders = tuple(self._recorders)
        for recorder in recorders:
            recorder.unused_names.batch_cut()
        self._place.batch_built(envelope.seq, envelope.emitted, envelope.dropped)
        return self._encoder.encode(records, envelope, {recorder.index for recorder in recorders})

    def _find_identity(self) -> object:
        return DONE if self._rendezvous.find_identity() else None

    def _settle(self) -> None:
        self._rendezvous.settle()

    def _identify(self, shared: RunIdentity) -> None:
        rank, world_size, source, host = self._job
        run, attempt = shared["run"], shared["attempt"]
        if "parent" in shared:
            self._encoder.add_settings({"parent_run": shared["parent"]})
        self._exporter.identify(Identity(run, attempt, source, rank, world_size))
        self._place.identify(PlaceIdentity(run, attempt, source, rank, world_size, host))
        self._run = run
        self._recover()
        self._announcer.identify(self._run)

    def _bucket(self, module: int, index: int) -> wire.Bucket | None:
        """A module's bucket; None if it is not known."""
        return next((recorder.bucket(index) for recorder in self._recorders if recorder.index == module), None)

    def _pulse(self) -> None:
        pulses = self._observation.pulses
        pulse = pulses.look(self._rendezvous.processes)
        self._exporter.offer_latest(pulse, urgent=pulses.is_urgent)
        self._rendezvous.publish_pulse(pulse, self._ending.outcome)

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
