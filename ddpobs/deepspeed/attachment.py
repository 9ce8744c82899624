"""The telemetry of a DeepSpeed engine: the collectives of ZeRO take the place of DDP's buckets.

DeepSpeed calls the methods of its engine in each pass, and those of its backend for each collective. They are wrapped:
a wrapper forwards the call and stamps it, so the result is the same to the bit.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddpobs import config as settings
from ddpobs import telemetry, wire
from ddpobs.deepspeed.class_patches import ENGINE_MODULE, EnginePatches
from ddpobs.deepspeed.passes import OtherTransfer, Pass, Stamped, Transfer
from ddpobs.deepspeed.rows import GATHER, GATHER_AGAIN, GATHER_UPDATED, MAX_ROWS, Key, Rows
from ddpobs.errors import DdpobsError
from ddpobs.never_raises import goes_on_without, never_raises
from ddpobs.observers import UNRECORDED, ModuleObserver
from ddpobs.torch_seam.modes import unseen
from ddpobs.torch_seam.patching import skip_in_dynamo

_attachments: weakref.WeakKeyDictionary[Any, EngineAttachment] = weakref.WeakKeyDictionary()
_patches = EnginePatches(_attachments)
_GATHERS = {"forward": GATHER, "backward": GATHER_AGAIN, "optimizer": GATHER_UPDATED}
_MAX_PASSES = 1024
"""Passes that are kept until the optimizer's step, as micro-batches of one step."""
_ROOM = 256
"""Places in a pass for collectives that were not launched before."""


def is_engine(model: object) -> bool:
    """Whether this is an engine of DeepSpeed's."""
    module = sys.modules.get(ENGINE_MODULE)
    return module is not None and isinstance(model, module.DeepSpeedEngine)


def attach(engine: Any, telemetry: bool | str | settings.TelemetryConfig | None = True) -> EngineAttachment | None:
    """Record the training of a DeepSpeed engine.

    Args:
        engine: The engine that `deepspeed.initialize` returned.
        telemetry: As on `ddpobs.DistributedDataParallel`; None follows the environment.

    Returns:
        The attachment, whose `detach()` removes the telemetry; the same object if the engine is attached already. None
        with telemetry off, or where it cannot start.

    Raises:
        DdpobsError: The engine runs a pipeline, which is not recorded.
        ConfigError: A setting has an invalid value.
    """
    config = settings.resolve(telemetry, os.environ)
    if "PipelineEngine" in {kind.__name__ for kind in type(engine).__mro__}:
        raise DdpobsError("attach: DeepSpeed's PipelineEngine is not recorded: use torch's pipelines, or ZeRO alone")
    if config is None:
        return None
    return _attachments.get(engine) or _begin(engine, config)


@goes_on_without
def _begin(engine: Any, config: settings.TelemetryConfig) -> EngineAttachment | None:
    """Attach; None if telemetry cannot start."""
    skip_in_dynamo()
    group = getattr(engine, "data_parallel_group", None) or dist.distributed_c10d._get_default_group()
    facts: dict[str, wire.Scalar] = {"reducer": "deepspeed", "zero_stage": int(engine.zero_optimization_stage())}
    recorder = telemetry.join(engine, config, group, facts, type(engine.module).__name__)
    if recorder is None:
        return None
    try:
        if not _attachments:
            _patches.install()
        attachment = EngineAttachment(engine, recorder)
    except BaseException:
        telemetry.leave(recorder)
        if not _attachments:
            _patches.remove()
        raise
    return attachment


class EngineAttachment:
    """Telemetry on one engine, until `detach()`."""

    @unseen
    def __init__(self, engine: Any, recorder: ModuleObserver) -> None:
        self._engine, self._recorder, self._now = weakref.ref(engine), recorder, recorder.now
        names = {id(each): (place, name) for place, (name, each) in enumerate(engine.module.named_parameters())}
        self._rows = Rows(names)
        self._phase = ""
        """Phase of the engine's call under way; empty outside of them."""
        self._trains = False
        """The latest forward belongs to training."""
        self._is_after_backward = False
        """A backward has begun since the first forward of the pass."""
        self._pass: Pass | None = None
        self._earlier: list[Pass] = []
        """Passes since the last step of the optimizer."""
        self._stop_listening = recorder.on_backward_end(self._backward_ended)
        _attachments[engine] = self
        self._finalizer = weakref.finalize(engine, telemetry.forget, recorder, self._stop_listening)
        self._finalizer.atexit = False

    def detach(self) -> None:
        """Remove the telemetry completely."""
        self._stop_listening()
        self._finalizer.detach()
        if (engine := self._engine()) is not None:
            _attachments.pop(engine, None)
        telemetry.leave(self._recorder)
        if not _attachments:
            _patches.remove()

    # ------------------------------------------------------------------ called by the patched classes

    def forward(self, inputs: tuple[Any, ...], named: dict[str, Any], call: Callable[[], Any]) -> Any:
        """Record the engine's forward."""
        engine = self._engine()
        self._trains = torch.is_grad_enabled() and engine is not None and engine.training
        if self._trains and self._is_after_backward:
            self._is_after_backward = False
            self._keep()
        self._recorder.forward_began(inputs, named)
        with self._abandoning(), self._during("forward"):
            return call()

    def backward_began(self) -> None:
        """Record that the engine's backward begins."""
        self._is_after_backward = True

    def reduce(self, call: Callable[[], Any]) -> Any:
        """Record the end of the engine's backward, which reduces the gradients that are left."""
        with self._abandoning(), self._during("backward"), self._waiting("backward"):
            return call()

    def step(self, call: Callable[[], Any]) -> Any:
        """Record the optimizer's step, which ends the engine's."""
        began = self._now()
        with self._waiting("optimizer"):
            with self._abandoning(step=True), self._during("optimizer"):
                result = call()
            self._finish(began)
        return result

    @property
    def takes_collectives(self) -> bool:
        """Whether a collective that is launched now is the engine's, and not the script's."""
        return bool(self._phase) or torch._C._current_graph_task_id() >= 0

    def communicate(self, kind: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Stamp a collective of the engine's."""
        transfer = self._start(kind, arguments)
        self._recorder.waits.own = UNRECORDED
        try:
            work = call()
        finally:
            self._recorder.waits.own = None
        if transfer is None:
            return work
        if work is None:
            transfer.returned()
            return None
        return StampedWork(work, transfer, self._recorder)

    @never_raises
    def name(self, work: Any, parameters: list[Any]) -> None:
        """Record which parameters a collective gathers."""
        if isinstance(work, StampedWork) and work.row is not None:
            self._rows.name(work.row, parameters)

    # ------------------------------------------------------------------ from the stamps to a record

    @contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    @contextmanager
    def _abandoning(self, *, step: bool = False) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._abandon(step=step)
            raise

    def _backward_ended(self, raised: bool) -> None:
        # A checkpoint's backward may end inside the engine's.
        if raised and torch._C._current_graph_task_id() < 0:
            self._abandon()

    def _abandon(self, *, step: bool = False) -> None:
        """Drop the stamps of a pass that raised; earlier passes belong to the open step, unless that is over."""
        self._pass, self._is_after_backward = None, False
        if step:
            self._earlier = []

    @contextmanager
    def _waiting(self, phase: str) -> Iterator[None]:
        recorded = self._recorder.waiting_began(phase)
        try:
            yield
        finally:
            if recorded:
                self._recorder.waiting_ended()

    @never_raises
    @unseen
    def _start(self, kind: str, arguments: tuple[Any, ...]) -> Stamped | None:
        """Begin to stamp a collective, which moves its largest argument."""
        if not self._trains:
            return OtherTransfer(self._recorder)
        phase = "backward" if torch._C._current_graph_task_id() >= 0 else self._phase
        kind = _GATHERS[phase] if kind == GATHER else kind
        if self._pass is None:
            places = len(self._rows.buckets) + _ROOM if self._rows.buckets else MAX_ROWS
            self._pass = Pass(min(places, MAX_ROWS))
            self._recorder.reduction_began(self._pass.launched_ns, self._pass.done_ns)
        size_bytes, dtype = max(map(_size, arguments), default=(0, ""))
        same = phase, kind, dtype, size_bytes
        row = self._rows.of(Key(*same, ordinal=self._pass.launches[same]))
        self._pass.launches[same] += 1
        if row is None or row >= len(self._pass.launched_ns):
            return OtherTransfer(self._recorder)
        if phase == "backward" and kind != GATHER_AGAIN and not self._rows.is_named(row):
            self._rows.name(row, self._reduced())
        self._recorder.bucket_launched(row)
        return Transfer(self._pass, row, self._now)

    def _reduced(self) -> list[Any]:
        """The parameters in ZeRO's bucket of gradients, which is reduced next; none where it has no such bucket."""
        optimizer: Any = getattr(self._engine(), "optimizer", None)
        entries = [entry for bucket in getattr(optimizer, "ipg_buckets", {}).values() for entry in bucket.params]
        # Stages 1 and 2 have a group, an index in it, and a number.
        return [optimizer.bit16_groups[each[0]][each[1]] if isinstance(each, tuple) else each for each in entries]

    def _keep(self) -> None:
        """Keep the pass for the record of the step."""
        if self._pass is not None:
            self._earlier = [*self._earlier[1 - _MAX_PASSES :], self._pass]
        self._pass = None

    @never_raises
    @unseen
    def _finish(self, began: Any) -> None:
        """Record the passes since the last step of the optimizer, which began at that stamp."""
        self._keep()
        passes: list[Pass | None] = [*self._earlier]
        self._earlier = []
        if self._rows.changed:
            self._recorder.layout(list(self._rows.buckets), "deepspeed")
            self._rows.reported()
        for each in passes or [None]:
            record = self._recorder.backward(counted=each is not None)
            if record is None:
                continue
            record.parameter_ready_ns = None
            if each is None:  # A single rank launches nothing.
                record.ready_ns, record.launched_ns, record.done_ns = [], [], []
                record.last_ready = began
            else:
                rows = len(self._rows.buckets)
                for name in ("ready_ns", "launched_ns", "done_ns", "waited_from_ns"):
                    stamps = getattr(each, name)
                    setattr(record, name, stamps[:rows] + [0] * (rows - len(stamps)))
            self._recorder.finished(record)


class StampedWork:
    """A collective that DeepSpeed waits for later; the end of the wait counts as its completion.

    A callback of its future would stamp the completion itself. Scripts for DeepSpeed keep their process group until
    the exit, and with such callbacks on gloo's threads the interpreter did not end.

    Args:
        work: Torch's work.
        transfer: Takes the stamps.
        recorder: Does not record the wait as one of the script's.

    Attributes:
        row: Row of the collective; None without one.
    """

    def __init__(self, work: Any, transfer: Stamped, recorder: ModuleObserver) -> None:
        self._work, self._transfer, self._recorder = work, transfer, recorder
        self.row = transfer.row

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as the work does."""
        self._transfer.wait_began()
        self._recorder.waits.own = UNRECORDED
        try:
            return self._work.wait(*args, **kwargs)
        finally:
            self._recorder.waits.own = None
            self._transfer.wait_ended()


def _size(argument: Any) -> tuple[int, str]:
    """Bytes of a tensor, or of the tensors of a list, and their type; 0 for any other argument."""
    if isinstance(argument, torch.Tensor):
        return argument.numel() * argument.element_size(), str(argument.dtype).removeprefix("torch.")
    sizes = [_size(each) for each in argument] if isinstance(argument, (list, tuple)) else []
    return sum(size for size, _ in sizes), sizes[0][1] if sizes else ""
