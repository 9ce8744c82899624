"""The telemetry of a model that torch's FSDP2 shards: its units' collectives take the place of DDP's buckets.

Torch calls a unit to gather its parameters, to use them, and to reduce their gradients. These methods are wrapped.
During the call the unit's communication object is wrapped too, as `set_custom_all_gather` would replace it: it forwards
the call and stamps it. So the result is the same to the bit, and a communication object of the user's is kept.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ddpobs import config as settings
from ddpobs import telemetry, wire
from ddpobs.errors import DdpobsError
from ddpobs.fsdp.class_patches import UnitPatches
from ddpobs.fsdp.passes import AllReduceWait, OtherTransfer, Pass, Stamped, Transfer
from ddpobs.fsdp.units import GATHER, GATHER_AGAIN, REDUCE, SCATTER, UnitLayout
from ddpobs.never_raises import goes_on_without, never_raises
from ddpobs.observers import UNRECORDED, ModuleObserver
from ddpobs.torch_seam import fully_shard
from ddpobs.torch_seam.interpreter_exit import rest_at_exit, stay_in_interpreter
from ddpobs.torch_seam.modes import unseen
from ddpobs.torch_seam.patching import skip_in_dynamo

_by_root: weakref.WeakKeyDictionary[Any, FullyShardedAttachment] = weakref.WeakKeyDictionary()
_by_unit: weakref.WeakKeyDictionary[Any, FullyShardedAttachment] = weakref.WeakKeyDictionary()
_patches = UnitPatches(_by_root, _by_unit)
_MAX_PASSES = 1024
"""Passes without a reduction that are kept, as micro-batches of one step. Not every forward has a backward."""
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
        self._recorder, self._now = recorder, recorder.now
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
        self._layout: UnitLayout | None = None
        self._blocks = units[0].device.type == "cpu"
        """A collective without a work blocks the thread that launches it; on a device only its stream."""
        self._pass: Pass | None = None
        self._earlier: list[Pass] = []
        """Passes since the last reduction, such as micro-batches whose gradients are not reduced."""
        self._last_ready: Any = 0
        """Stamp of the latest gradients that torch reduces in the backward under way; 0 before the first ones."""
        self._scattered: int | None = None
        """Row of the reduce-scatter launched last on a device, which the next unit's waits for."""
        self._stop_listening = recorder.on_backward_end(self._backward_ended)
        _by_root[fully_shard.state_of(model)] = self
        _by_unit.update(dict.fromkeys(units, self))
        self._finalizer = weakref.finalize(model, telemetry.forget, recorder, self._stop_listening)
        self._finalizer.atexit = False

    def detach(self) -> None:
        """Remove the telemetry completely."""
        self._stop_listening()
        self._finalizer.detach()
        for registry, held in ((_by_unit, self._units), (_by_root, [self._state])):
            for each in held:
                if (key := each()) is not None:  # The model may be garbage-collected.
                    registry.pop(key, None)
        telemetry.leave(self._recorder)
        if not _by_root:
            _patches.remove()

    # ------------------------------------------------------------------ called by the patched classes

    def forward_began(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Record that the root's forward was called."""
        if self._layout is None:
            self._report_layout()
        self._trains = torch.is_grad_enabled()
        self.forwards += self._trains
        self._recorder.forward_began(inputs, named)
        if self._recorder.waits_for_forward:
            self._recorder.replicas_ready()

    def gather(self, unit: Any, call: Callable[[], Any]) -> Any:
        """Stamp the unit's all-gather, if torch launches one."""
        if fully_shard.is_gathered(unit):
            return call()
        comm, kind = unit._all_gather_comm, _gather_kind()
        is_trained = kind == GATHER_AGAIN or self._is_trained()
        unit._all_gather_comm = _Stamped(
            comm, lambda: self._start(unit, kind) if is_trained else OtherTransfer(self._recorder)
        )
        self._recorder.own_wait(UNRECORDED)
        try:
            return call()
        finally:
            self._recorder.own_wait(None)
            unit._all_gather_comm = comm

    def _is_trained(self) -> bool:
        """Whether a forward has gradients; a reentrant checkpoint disables them within the root's forward."""
        state = self._state()
        return torch.is_grad_enabled() or (self._trains and state is not None and fully_shard.is_in_forward(state))

    def use(self, unit: Any, call: Callable[[], Any]) -> Any:
        """Stamp the wait for the unit's all-gather, if there is one."""
        if not fully_shard.is_gathering(unit):
            return call()
        self._wait_for_gather(unit)
        self._recorder.own_wait(UNRECORDED)
        try:
            return call()
        finally:
            self._recorder.own_wait(None)

    def reduce(self, unit: Any, call: Callable[[], Any]) -> Any:
        """Stamp the unit's reduce-scatter and its all-reduce over replicas, if torch launches them."""
        ready, comm = self._now(), unit._reduce_scatter_comm
        if fully_shard.reduces(unit):
            self._last_ready = ready
        reduction = AllReduceWait(lambda: self._start(unit, REDUCE))
        # The all-reduce over replicas follows the reduce-scatter.
        unit._reduce_scatter_comm = _Stamped(
            comm, lambda: self._start(unit, SCATTER, ready), lambda: self._recorder.own_wait(reduction)
        )
        self._recorder.own_wait(UNRECORDED if fully_shard.shards(unit) else reduction)
        try:
            return call()
        finally:
            self._recorder.own_wait(None)
            unit._reduce_scatter_comm = comm

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

    @never_raises
    def _start(self, unit: Any, kind: str, ready: Any = 0) -> Stamped | None:
        """Begin to stamp a collective; None before torch knows the units' names.

        Training may let units reshard after the layout was reported. Their all-gathers in backward have no row.
        """
        if self._layout is None:
            self._report_layout()
        if self._layout is None:
            return None
        row = self._layout.rows.get((id(unit), kind))
        if row is None:
            return OtherTransfer(self._recorder)
        current = self._current(row)
        if ready:
            self._wait_for_scatter(current, row, ready)
        transfer = Transfer(current, row, self._now, self._blocks)
        self._recorder.bucket_launched(row)
        transfer.began()
        return transfer

    def _current(self, row: int) -> Pass:
        """The pass under way; a new one if this collective was launched in it before."""
        if self._pass is not None and self._pass.has(row):
            self._keep()
        if self._pass is None:
            assert self._layout is not None
            self._pass = Pass(len(self._layout.buckets))
            self._recorder.reduction_began(self._pass.launched_ns, self._pass.done_ns)
        return self._pass

    def _keep(self) -> None:
        """Keep the pass for the record of the step, and begin another one."""
        if self._pass is not None:
            self._earlier = [*self._earlier[1 - _MAX_PASSES :], self._pass]
        self._pass, self._scattered = None, None

    def _wait_for_scatter(self, current: Pass, row: int, ready: Any) -> None:
        """On a device a unit's gradients wait until those of the unit before it are reduced."""
        current.ready_ns[row] = ready
        if not self._blocks:
            if self._scattered is not None:
                current.waited_from_ns[self._scattered] = ready
            self._scattered = row

    @never_raises
    def _wait_for_gather(self, unit: Any) -> None:
        current, layout = self._pass, self._layout
        if current is None or layout is None:
            return
        row = layout.rows.get((id(unit), _gather_kind()))
        if row is not None and current.has(row) and not current.waited_from_ns[row]:
            current.waited_from_ns[row] = self._now()

    def _backward_ended(self, raised: bool) -> None:
        if torch._C._current_graph_task_id() >= 0:  # A checkpoint's backward inside the model's has ended.
            return
        if raised:
            self._abandon()
        else:
            self._finish()

    def _abandon(self) -> None:
        """Drop the stamps of a backward that raised, and of its forward. Earlier passes belong to the open step."""
        self._pass, self._scattered, self._last_ready = None, None, 0

    @never_raises
    def _finish(self) -> None:
        """Record the passes since the last reduction, if this backward reduced gradients."""
        last_ready, self._last_ready = self._last_ready, 0
        self._keep()
        if not last_ready:
            return
        passes: list[Pass | None] = [*self._earlier]
        self._earlier = []
        for each in passes or [None]:
            record = self._recorder.backward(counted=each is not None)
            if record is None:
                continue
            record.parameter_ready_ns = None
            if each is not None:
                record.ready_ns, record.launched_ns, record.done_ns = each.ready_ns, each.launched_ns, each.done_ns
                record.waited_from_ns = each.waited_from_ns
            else:  # A single rank launches nothing.
                record.last_ready = last_ready
            self._recorder.finished(record)

    @never_raises
    @unseen
    def _report_layout(self) -> None:
        """Report the units once torch knows their names and types."""
        state = self._state()
        if state is not None and fully_shard.is_initialised(state):
            self._layout = UnitLayout([unit for each in self._units if (unit := each()) is not None])
            self._recorder.layout(self._layout.buckets, "fully_shard")
            self._follow_gradients()

    def _follow_gradients(self) -> None:
        """Let optimizer steps be looked at that use gradients of parameters outside of every unit."""
        model = self._model()
        held = {id(shard) for each in self._units if (unit := each()) for shard in fully_shard.shards_of(unit)}
        for name, parameter in [] if model is None else model.named_parameters():
            if id(parameter) in held:
                self.parameters.append(parameter)
                self.names.append(name)
            else:
                self.unreduced_parameters.append((name, parameter))
        self._recorder.follow_gradients(self)
        units = [unit for each in self._units if (unit := each()) is not None]
        if (ranks := fully_shard.replica_ranks(units)) is not None:
            self._recorder.compare_replicas(self.parameters, self.names, ranks)


def _gather_kind() -> str:
    """Kind of an all-gather that is launched or waited for now: in a backward parameters are gathered again."""
    return GATHER_AGAIN if torch._C._current_graph_task_id() >= 0 else GATHER


class _Stamped:
    """A unit's communication object with its call stamped; memory is that of the inner one.

    Args:
        inner: Torch's object or the user's.
        start: Begins to stamp the collective; None if it is not recorded.
        after: Called after it.
    """

    def __init__(
        self, inner: Any, start: Callable[[], Stamped | None], after: Callable[[], object] = lambda: None
    ) -> None:
        self._inner, self._start, self._after = inner, start, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        transfer, is_async = self._start(), kwargs.get("async_op", False)
        if transfer is not None and is_async:
            transfer.goes_on()
        work = self._inner(*args, **kwargs)
        self._after()
        if transfer is None:
            return work
        if work is None or not is_async:
            transfer.ended()
        else:
            _follow(work, transfer)
        return work


@never_raises
def _follow(work: Any, transfer: Stamped) -> None:
    """Stamp the completion of a work; not every backend's, nor every user's, has a future."""
    work.get_future().add_done_callback(_ending(transfer))


def _ending(transfer: Stamped) -> Callable[[Any], None]:
    def stamp(_: Any) -> None:
        transfer.ended()
        stay_in_interpreter()

    return stamp
