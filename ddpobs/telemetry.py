"""Puts journal, recorder, statistics and exporter together: one `Telemetry` a process, shared by its DDP modules."""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import re
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

import ddpobs
from ddpobs import wire
from ddpobs.clocks import clock_for
from ddpobs.config import TelemetryConfig
from ddpobs.export.exporter import DONE, Exporter
from ddpobs.export.identity import Envelope, Identity
from ddpobs.ranks.run_identity import IdentityExchange, RunIdentity
from ddpobs.ranks.straggler_exchange import Exchange
from ddpobs.recording.collective_hooks import CollectiveHooks
from ddpobs.recording.journal import Journal, never_raises
from ddpobs.recording.loader_hooks import LoaderHooks
from ddpobs.recording.module_recorder import ModuleRecorder
from ddpobs.recording.process_hooks import ProcessHooks
from ddpobs.steps.raw_step import RawStep
from ddpobs.steps.step_columns import RawSteps
from ddpobs.steps.summary import Summariser
from ddpobs.torch_seam.collectives import backend_of

_log = logging.getLogger("ddpobs")
_LOOK_S = 0.2
_ASKING_S = 5.0
"""For so long each rank that asks which run and attempt this is gets its answer at the next look, later at a pulse."""
_RESOLUTION_NS = 1000
"""Stamps are not better than that: a callback may come tens of microseconds late."""
_STEPS_TOGETHER = 256
"""So many steps wait as one record at most, and no more than a quarter of the queue or of a batch."""
_REPEAT_HELLO = 30
"""Hello and layouts travel again every so many batches, should the batch that held them have been dropped."""

_process: Telemetry | None = None
_generation = 0
"""How many telemetries this process has had; every rank counts alike, so a stale identity is never taken for ours."""


def join(
    module: torch.nn.Module,
    config: TelemetryConfig,
    process_group: dist.ProcessGroup,
    settings: Mapping[str, wire.Scalar],
    name: str | None = None,
) -> ModuleRecorder:
    """Telemetry for one DDP module; the process's first one starts the thread and the hooks.

    So does the first one after the process has left the others and joined them anew, as another rank perhaps.

    Args:
        module: The DDP module itself, or what stands for it; held weakly.
        config: Taken from the first module of the process.
        process_group: The module's; names the backend.
        settings: The reducer's settings that matter for a diagnosis.
        name: What the module is called; None for the class of what it wraps.
    """
    global _process, _generation  # noqa: PLW0603 - one telemetry a process is the point
    if _process is not None and not _process.current:
        process, _process = _process, None
        process.close()
    if _process is None:
        _generation += 1
        settings = {**settings, "group_ranks": process_group.size()}
        device = _device(module)
        _process = Telemetry(config, device, backend_of(process_group, device), settings)
    return _process.recorder(module, name)


def leave(recorder: ModuleRecorder) -> None:
    """End a module's part; with the last one the process's telemetry ends: thread, hooks and all."""
    global _process
    if _process is not None and _process.leave(recorder):
        process, _process = _process, None
        process.close()


def forget(recorder: ModuleRecorder) -> None:
    """A module is gone; the process's telemetry goes on for those that come after it."""
    if _process is not None:
        _process.leave(recorder)


class Telemetry:
    """One process's telemetry.

    Args:
        config: The settings.
        device: Where the first module's parameters are.
        backend: The process group's backend.
        settings: The reducer's settings that matter for a diagnosis.
    """

    def __init__(
        self, config: TelemetryConfig, device: torch.device, backend: str, settings: Mapping[str, wire.Scalar]
    ) -> None:
        self._config = config
        self._clock = clock_for(device.type, device)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._world = weakref.ref(dist.group.WORLD)
        self._source = secrets.token_hex(8)
        self._hello = _hello(device, backend, settings)
        self._exporter = Exporter(config, self._encode, self._passed)
        self._steps = RawSteps()
        self._journal = Journal(self._clock, self._add_step, config.queue_records, self._offer_steps)
        self._hooks = ProcessHooks(self._journal, self._event)
        self._loaders = LoaderHooks(self._journal, self._event)
        self._collectives = CollectiveHooks(self._journal)
        self._summariser = Summariser(_RESOLUTION_NS)
        self._recorders: list[ModuleRecorder] = []
        self._layouts: dict[int, wire.Layout] = {}
        self._journal.evaluating = self._evaluating
        self._modules = 0
        self._batches = 0
        self._last_bucket = (wire.UNKNOWN, wire.UNKNOWN)
        self._began = time.monotonic()
        self._store: Any = None
        self._store_gone = False
        self._meeting: IdentityExchange | None = None
        self._identified = False
        self._exchange: Exchange | None = None
        self._meet_others()
        self._exporter.call_every(_LOOK_S, self._find_identity)
        self._exporter.call_every(min(config.pulse_s, config.flush_s / 2), self._journal.catch_up)
        self._exporter.call_every(config.pulse_s, self._pulse)
        # What one batch tells is met before the next, and not a whole flush later: a short run has few.
        self._exporter.call_every(config.flush_s / 2, self._compare)
        self._exporter.call_every(config.pulse_s, self._loaders.report_repeated_order)
        self._exporter.start()
        self._hooks.install()
        self._loaders.install()
        self._collectives.install()
        atexit.register(self.close)
        # A process that multiprocessing forked runs no atexit.
        self._at_exit = Finalize(None, self._close_in_child, exitpriority=0)

    @property
    def current(self) -> bool:
        """Whether the process still is the rank that it was: it may leave the others, and join them anew."""
        return self._world() is dist.group.WORLD

    def recorder(self, module: torch.nn.Module, name: str | None = None) -> ModuleRecorder:
        """A recorder for one more DDP module."""
        recorder = ModuleRecorder(
            self._modules,
            module,
            self._journal,
            name=name,
            clock=self._clock,
            offer=self._exporter.offer,
            readiness_every=self._config.readiness_every,
        )
        self._modules += 1
        self._recorders.append(recorder)
        self._journal.training_interrupted()  # Building a model, maybe after another's training, is no part of a step.
        return recorder

    def leave(self, recorder: ModuleRecorder) -> bool:
        """Forget a module; returns whether it was the last."""
        if recorder in self._recorders:
            self._recorders.remove(recorder)
            self._journal.modules -= 1
            self._journal.trained.discard(recorder.index)
        return not self._recorders

    def close(self, error: BaseException | None = None) -> None:
        """Say goodbye, or of which error the process dies; flush within `config.exit_s`, and take the hooks out.

        Never raises; more calls do nothing.
        """
        atexit.unregister(self.close)
        self._at_exit.cancel()
        self._hooks.remove()
        self._loaders.remove()
        self._collectives.remove()
        self._journal.finish()
        self._loaders.report_repeated_order()
        for recorder in self._recorders:
            recorder.batch_cut()
        error = error or _uncaught()
        told: dict[str, wire.Scalar] = {"error": type(error).__name__} if error else {}
        self._event("failed" if error else "goodbye", self._journal.number, told)
        self._exporter.close()

    def _close_in_child(self) -> None:
        """There nobody hears of an error that ends the process: it is still on its way."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):  # With a code it may tell a parent of an error that was caught.
            error = error.__context__ if error.code else None
        self.close(error)

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
        """Steps that the device has got through are numbers, and wait together; called by the journal's replay."""
        if not (self._passed(raw) and self._read(self._steps, raw)):
            self._offer_steps()
            self._exporter.offer(raw, raw.records)
            return
        together = min(_STEPS_TOGETHER, self._config.queue_records // 4)
        if len(self._steps.number) >= together or 4 * self._steps.records >= self._config.batch_spans:
            self._offer_steps()

    @never_raises
    def _offer_steps(self) -> None:
        if self._steps.number:
            steps, self._steps = self._steps, RawSteps()
            self._exporter.offer(steps, steps.records, len(steps.number))

    @never_raises
    def _read(self, steps: RawSteps, raw: RawStep) -> bool:
        """Add a step; a device that failed fails for each, and what else there is to tell goes its way."""
        steps.add(raw, self._clock)
        return True

    def _passed(self, record: object) -> bool:
        """Whether the device got to a step's end: one that hangs holds up its steps, and not the thread.

        One that failed got to all of them; reading tells.
        """
        try:
            return not isinstance(record, RawStep) or self._clock.is_ready(record.end)
        except Exception:
            return True

    @never_raises
    def _meet_others(self) -> None:
        """Ask before the first backward, which no rank ends without this one: whoever answers is still there then."""
        default: Any = dist.distributed_c10d._get_default_store()
        self._store = default.clone()
        prefix = PrefixStore(f"ddpobs/meeting/{_generation}", self._store)
        self._meeting = IdentityExchange(prefix, self._rank, self._draw)

    def _find_identity(self) -> object:
        """Take what the ranks share, once it is known here; whoever has drawn it goes on to answer for a while."""
        if self._store_gone:
            return DONE
        if self._meeting is None:  # The store was away.
            self._meet_others()
            return None
        with self._store_at_hand():
            if not self._identified:
                shared = self._meeting.poll()
                if shared is None:
                    return None
                self._identify(shared)
            self._meeting.reply_to_others()
            return None if self._meeting.is_leader and time.monotonic() - self._began < _ASKING_S else DONE
        return DONE

    def _identify(self, shared: RunIdentity) -> None:
        self._identified = True
        if self._world_size > 1:
            prefix = PrefixStore(f"ddpobs/{shared['attempt']}", self._store)
            self._exchange = Exchange(prefix, self._rank, self._world_size, self._config.peers_every)
        self._exporter.identify(
            Identity(
                run=shared["run"],
                attempt=shared["attempt"],
                source=self._source,
                rank=self._rank,
                world_size=self._world_size,
            )
        )
        if self._rank == 0:
            _log.info("ddpobs: run %s reports to %s", shared["run"], self._config.collector)

    def _draw(self) -> RunIdentity:
        run = self._config.run or _launcher_run() or _made_up_run()
        return {"run": run, "attempt": secrets.token_hex(8)}

    def _pulse(self) -> None:
        for recorder in self._recorders:
            if recorder.current is not None:
                self._last_bucket = (recorder.index, recorder.launched_last())
        pulse = wire.Pulse(
            at_ns=time.monotonic_ns(),
            phase=wire.PHASES[self._journal.phase],  # type: ignore[arg-type]
            step=self._journal.number,
            module=self._last_bucket[0],
            bucket=self._last_bucket[1],
        )
        self._exporter.offer_latest(pulse)
        with self._store_at_hand():
            if self._meeting is not None:
                self._meeting.reply_to_others()
            if self._exchange is not None:
                self._exchange.say(json.dumps([pulse.phase, pulse.step, *self._last_bucket]).encode())

    def _compare(self) -> None:
        with self._store_at_hand():
            if self._exchange is None:
                return
            self._exchange.publish()
            peers = self._exchange.gather()
            if peers is not None:
                self._exporter.offer(peers)

    @contextmanager
    def _store_at_hand(self) -> Iterator[None]:
        """The ranks' store goes with rank 0's process, and each further call would print a page on stderr."""
        try:
            yield
        except dist.DistNetworkError:
            self._store_gone, self._meeting, self._exchange = True, None, None
            _log.info("ddpobs: the ranks' store is gone, and with it the statistics over ranks")

    def _encode(self, records: Sequence[object], envelope: Envelope) -> wire.Batch:
        for recorder in tuple(self._recorders):
            recorder.batch_cut()
        raws = RawSteps()
        for record in records:
            if isinstance(record, RawSteps):
                raws.extend(record)
            elif isinstance(record, RawStep) and not self._read(raws, record):
                self._exporter.count_lost(record.records)
        summary = self._summariser.summarise(raws) if raws.number else None
        if self._exchange is not None and summary is not None:
            self._exchange.add(summary.steps)
        layouts = [record for record in records if isinstance(record, wire.Layout)]
        self._layouts.update({layout.module: layout for layout in layouts})
        repeat = self._batches % _REPEAT_HELLO == 0
        self._batches += 1
        if repeat:
            layouts = self._repeated(layouts)
        pulses = [record for record in records if isinstance(record, wire.Pulse)]
        return wire.Batch(
            version=wire.VERSION,
            run=envelope.run,
            attempt=envelope.attempt,
            source=envelope.source,
            seq=envelope.seq,
            rank=envelope.rank,
            world_size=envelope.world_size,
            emitted=envelope.emitted,
            dropped=envelope.dropped,
            anchor=envelope.anchor,
            hello=self._hello if repeat else None,
            layouts=layouts,
            steps=summary.steps if summary else None,
            spans=summary.spans if summary and len(summary.spans.step) else None,
            comms=summary.comms if summary and len(summary.comms.step) else None,
            readiness=summary.readiness if summary else [],
            unused=[record for record in records if isinstance(record, wire.Unused)],
            peers=[record for record in records if isinstance(record, wire.Peers)],
            pulse=pulses[-1] if pulses else None,
            events=[record for record in records if isinstance(record, wire.Event)],
        )

    def _repeated(self, layouts: list[wire.Layout]) -> list[wire.Layout]:
        """These and the latest of each module; that of one that is gone for the last time, or they would pile up."""
        told = {(layout.module, layout.revision) for layout in layouts}
        again = [layout for layout in self._layouts.values() if (layout.module, layout.revision) not in told]
        stay = {recorder.index for recorder in tuple(self._recorders)} | {module for module, _ in told}
        self._layouts = {module: layout for module, layout in self._layouts.items() if module in stay}
        return layouts + again


def _hello(device: torch.device, backend: str, settings: Mapping[str, wire.Scalar]) -> wire.Hello:
    return wire.Hello(
        host=socket.gethostname(),
        pid=os.getpid(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        backend=backend,
        versions={"ddpobs": ddpobs.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
        settings=dict(settings),
    )


def _uncaught() -> BaseException | None:
    """The error that nobody caught, at the exit of a script; an interactive session lives on after one."""
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def _device(module: torch.nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _launcher_run() -> str | None:
    """The launcher's run id where it is a real one: torchrun's default is the word none."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return None if run in ("", "none") else re.sub(r"[^A-Za-z0-9._-]", "-", run)[:128]


def _made_up_run() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
