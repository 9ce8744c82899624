"""The telemetry of a model that torch's FSDP2 shards: its units' collectives take the place of DDP's buckets.

Torch calls a unit to gather its parameters, to use them, and to reduce their gradients. These methods are wrapped, and
forward each call to torch: the result is the same to the bit, and a communication object of the user's is kept.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from ddpobs import config as settings
from ddpobs import telemetry, wire
from ddpobs.errors import DdpobsError
from ddpobs.fsdp.class_patches import UnitPatches
from ddpobs.fsdp.passes import Pass, Passes
from ddpobs.fsdp.unit_collectives import UnitCollectives
from ddpobs.fsdp.units import UnitLayout
from ddpobs.never_raises import goes_on_without, never_raises
from ddpobs.observers import ModuleObserver
from ddpobs.torch_seam import fully_shard
from ddpobs.torch_seam.interpreter_exit import rest_at_exit
from ddpobs.torch_seam.modes import unseen
from ddpobs.torch_seam.patching import skip_in_dynamo

_by_root: weakref.WeakKeyDictionary[Any, FullyShardedAttachment] = weakref.WeakKeyDictionary()
_by_unit: dict[int, UnitCollectives] = {}
_patches = UnitPatches(_by_root, _by_unit)
_SETTINGS: dict[str, wire.Scalar] = {"reducer": "fully_shard"}


def attach(
    model: torch.nn.Module, telemetry: bool | str | settings.TelemetryConfig | None = True
) -> FullyShardedAttachment | None:
    """Record the training of a model that `fully_shard` was applied to.

    Args:
        model: The root: the module whose forward training calls.
        telemetry: As on `ddpobs.DistributedDataParallel`; None follows the environment.

    Returns:
        The attachment, whose `detach()` removes the telemetry; the same object if the model is attached already. None
        with telemetry off, or where it cannot start.

    Raises:
        DdpobsError: `fully_shard` was not applied to the module itself.
        ConfigError: A setting has an invalid value.
    """
    config = settings.resolve(telemetry, os.environ)
    if not fully_shard.is_fully_sharded(model):
        raise DdpobsError(
            f"attach: expected a module that fully_shard was applied to, got {type(model).__name__}: call fully_shard "
            "on the root module too"
        )
    if config is None:
        return None
    return _by_root.get(fully_shard.state_of(model)) or _begin(model, config)


@goes_on_without
def _begin(model: torch.nn.Module, config: settings.TelemetryConfig) -> FullyShardedAttachment | None:
    """Attach; None if telemetry cannot start."""
    skip_in_dynamo()
    group = fully_shard.data_parallel_group(fully_shard.units_of(model)[0])
    recorder = telemetry.join(model, config, group, _SETTINGS, type(model).__name__.removeprefix("FSDP"))
    if recorder is None:
        return None
    if not _by_root:
        _patches.install()
    try:
        attachment = FullyShardedAttachment(model, recorder)
    except BaseException:
        telemetry.leave(recorder)
        if not _by_root:
            _patches.remove()
        raise
    return attachment


class FullyShardedAttachment:
    """Telemetry on one fully sharded model, until `detach()`.

    Attributes:
        parameters: This rank's shards of the units' parameters.
        names: Their names.
        unreduced_parameters: Names and parameters that no unit holds.
        forwards: Forwards of the root with gradients so far.
    """

    @unseen
    def __init__(self, model: torch.nn.Module, recorder: ModuleObserver) -> None:
        self._recorder, self._passes = recorder, Passes(recorder)
        rest_at_exit()
        self._state = weakref.ref(fully_shard.state_of(model))
        units = fully_shard.units_of(model)
        self._units = [weakref.ref(unit) for unit in units]
        self._model = weakref.ref(model)
        self.parameters: list[torch.nn.Parameter] = []
        self.names: list[str] = []
        self.unreduced_parameters: list[tuple[str, torch.nn.Parameter]] = []
        self.forwards = 0
        self._trains = False
        """Whether the root's latest forward has gradients."""
        self._has_layout = False
        self._stop_listening = recorder.on_backward_end(self._backward_ended)
        _by_root[fully_shard.state_of(model)] = self
        self._collectives = {id(unit): UnitCollectives(unit, self, self._passes, recorder) for unit in units}
        _by_unit.update(self._collectives)
        for unit in units:
            weakref.finalize(unit, _by_unit.pop, id(unit), None).atexit = False
        self._finalizer = weakref.finalize(model, telemetry.forget, recorder, self._stop_listening)
        self._finalizer.atexit = False

    def detach(self) -> None:
        """Remove the telemetry completely."""
        self._stop_listening()
        self._finalizer.detach()
        for unit in self._living_units():
            _by_unit.pop(id(unit), None)
        if (state := self._state()) is not None:  # The model may be garbage-collected.
            _by_root.pop(state, None)
        telemetry.leave(self._recorder)
        if not _by_root:
            _patches.remove()

    # ------------------------------------------------------------------ called by the patched classes

    def forward_began(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Record that the root's forward was called."""
        if not self._has_layout:
            self.report_layout()
        self._trains = torch.is_grad_enabled()
        self.forwards += self._trains
        self._recorder.forward_began(inputs, named)
        if self._recorder.waits_for_forward:
            self._recorder.replicas_ready()

    def is_trained(self) -> bool:
        """Whether a forward without gradients belongs to one that has some, as that of a reentrant checkpoint."""
        state = self._state()
        return self._trains and state is not None and fully_shard.is_in_forward(state)

    @never_raises
    @unseen
    def report_layout(self) -> None:
        """Report the units and give them their rows, once torch knows their names and types."""
        state = self._state()
        if state is None or not fully_shard.is_initialised(state):
            return
        units = self._living_units()
        layout = UnitLayout(units)
        self._has_layout, self._passes.rows = True, len(layout.buckets)
        self._recorder.layout(layout.buckets, "fully_shard")
        for unit, rows in zip(units, layout.rows, strict=True):
            self._collectives[id(unit)].rows = rows
        self._follow_gradients(units)

    def backward_ended(self) -> None:
        """Close the pass of a backward that was not called by torch's function."""
        if not self._recorder.in_backward:
            self._finish()

    def has_local_gradients(self) -> bool:
        """No shard's gradient is local: torch writes it after the reduction."""
        return False

    def local_gradients(self) -> list[int]:
        """No shard."""
        return []

    # ------------------------------------------------------------------ from the stamps to a record

    def _living_units(self) -> list[Any]:
        return [unit for each in self._units if (unit := each()) is not None]

    def _backward_ended(self, raised: bool) -> None:
        if torch._C._current_graph_task_id() >= 0:  # A checkpoint's backward inside the model's has ended.
            return
        if raised:
            self._passes.abandon()
        else:
            self._finish()

    @never_raises
    def _finish(self) -> None:
        """Record the passes since the last reduction, if this backward reduced gradients."""
        passes, last_ready = self._passes.end()
        if not last_ready:
            return
        taken: list[Pass | None] = [*passes] or [None]  # A single rank launches nothing.
        for each in taken:
            record = self._recorder.backward(counted=each is not None)
            if record is None:
                continue
            record.parameter_ready_ns = None
            if each is None:
                record.last_ready = last_ready
            else:
                record.ready_ns, record.launched_ns, record.done_ns = each.ready_ns, each.launched_ns, each.done_ns
                record.waited_from_ns = each.waited_from_ns
            self._recorder.finished(record)

    def _follow_gradients(self, units: list[Any]) -> None:
        """Let optimizer steps be looked at that use gradients of parameters outside of every unit."""
        model = self._model()
        held = {id(shard) for unit in units for shard in fully_shard.shards_of(unit)}
        for name, parameter in [] if model is None else model.named_parameters():
            if id(parameter) in held:
                self.parameters.append(parameter)
                self.names.append(name)
            else:
                self.unreduced_parameters.append((name, parameter))
        self._recorder.follow_gradients(self)
        if (ranks := fully_shard.replica_ranks(units)) is not None:
            self._recorder.compare_replicas(self.parameters, self.names, ranks)
