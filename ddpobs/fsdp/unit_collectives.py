"""Stamps of one unit's collectives.

Torch's method is called with the unit's communication object wrapped, as `set_custom_all_gather` would replace it. A
step has dozens of these calls, and finds the caches full of the training's data: each function that is called on the
way takes microseconds. So the usual way, of a collective that is complete when its call returns, has few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ddpobs.clocks import Stamp
from ddpobs.fsdp.passes import Pass, Passes
from ddpobs.fsdp.transfers import OtherTransfer, Stamped, Transfer
from ddpobs.fsdp.units import GATHER, GATHER_AGAIN, REDUCE, SCATTER
from ddpobs.never_raises import never_raises
from ddpobs.observers import UNRECORDED, ModuleObserver, OwnWait
from ddpobs.torch_seam import fully_shard
from ddpobs.torch_seam.interpreter_exit import stay_in_interpreter


class ShardedModel(Protocol):
    """The model that a unit belongs to."""

    def is_trained(self) -> bool:
        """Whether a forward without gradients belongs to one that has some."""
        ...

    def report_layout(self) -> None:
        """Give the units their rows, once torch knows their names."""
        ...


class UnitCollectives:
    """Stamps the collectives that torch launches for a unit.

    Args:
        unit: The unit; not kept.
        model: Its model.
        passes: Take the stamps.
        recorder: Takes the collectives without a row.

    Attributes:
        rows: The row of each of its collectives in the layout, by kind; empty before the layout is known. Training may
            let the unit reshard afterwards: its all-gathers in backward have no row.
        now: Takes a stamp.
        waits: The waits of the process.
    """

    def __init__(self, unit: Any, model: ShardedModel, passes: Passes, recorder: ModuleObserver) -> None:
        self._model, self._passes, self._recorder = model, passes, recorder
        self.now, self.waits = recorder.now, recorder.waits
        self._is_sharded = fully_shard.shards(unit)
        self._blocks = unit.device.type == "cpu"
        """A collective without a work blocks the thread that launches it; on a device only its stream."""
        self.rows: dict[str, int] = {}

    def gather(self, unit: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stamp the unit's all-gather, which torch launches in this call."""
        comm, kind = unit._all_gather_comm, GATHER
        if torch._C._current_graph_task_id() >= 0:
            kind = GATHER_AGAIN
        elif not (torch.is_grad_enabled() or self._model.is_trained()):
            kind = ""
        unit._all_gather_comm = _StampedComm(comm, self, kind)
        self.waits.own = UNRECORDED
        try:
            return call(unit, *args, **kwargs)
        finally:
            self.waits.own = None
            unit._all_gather_comm = comm

    def use(self, unit: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stamp the wait for the unit's all-gather, which torch awaits in this call."""
        current = self._passes.current
        if current is not None:
            row = self.rows.get(GATHER_AGAIN if torch._C._current_graph_task_id() >= 0 else GATHER)
            if row is not None and current.launched_ns[row] and not current.waited_from_ns[row]:
                current.waited_from_ns[row] = self.now()
        self.waits.own = UNRECORDED
        try:
            return call(unit, *args, **kwargs)
        finally:
            self.waits.own = None

    def reduce(self, unit: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stamp the unit's reduce-scatter and its all-reduce over replicas, if torch launches them in this call."""
        ready, comm = self.now(), unit._reduce_scatter_comm
        if fully_shard.reduces(unit):
            self._passes.last_ready = ready
        # The all-reduce over replicas follows the reduce-scatter.
        reduction = _AllReduceWait(self)
        unit._reduce_scatter_comm = _StampedComm(comm, self, SCATTER, ready, reduction)
        self.waits.own = UNRECORDED if self._is_sharded else reduction
        try:
            return call(unit, *args, **kwargs)
        finally:
            self.waits.own = None
            unit._reduce_scatter_comm = comm

    @never_raises
    def launch(self, row: int, ready: Stamp = 0) -> Pass:
        """Stamp the launch of a collective.

        Args:
            row: Its row.
            ready: Stamp of the gradients that it sends; 0 for what was there before.

        Returns:
            The pass that it belongs to.
        """
        passes = self._passes
        current = passes.current
        if current is None or current.launched_ns[row]:
            current = passes.begin()
        # On a device a unit's gradients wait until those of the unit before it are reduced.
        if ready and not self._blocks:
            if passes.scattered is not None:
                current.waited_from_ns[passes.scattered] = ready
            passes.scattered = row
        self._recorder.bucket_launched(row)
        launched = current.launched_ns[row] = self.now()
        current.ready_ns[row] = ready or launched
        if self._blocks:
            current.waited_from_ns[row] = launched
        return current

    @never_raises
    def transfer(self, kind: str, ready: Stamp = 0) -> Stamped | None:
        """Stamp the launch of a collective that may have no row, or may go on when its call returns.

        Returns:
            Takes the rest; None before torch knows the units' names.
        """
        if not self.rows:
            self._model.report_layout()
            if not self.rows:
                return None
        row = self.rows.get(kind)
        if row is None:
            return OtherTransfer(self._recorder)
        current = self.launch(row, ready)
        return None if current is None else Transfer(current, row, self.now)


class _StampedComm:
    """A unit's communication object with its call stamped; memory is that of the inner one.

    Args:
        inner: Torch's object or the user's.
        unit: Stamps its collective.
        kind: Kind of the collective; empty for one that has no row.
        ready: Stamp of the gradients that it sends; 0 for what was there before.
        after: Takes the waits of the collectives that follow in torch's call.
    """

    def __init__(
        self, inner: Any, unit: UnitCollectives, kind: str, ready: Stamp = 0, after: OwnWait = UNRECORDED
    ) -> None:
        self._inner, self._unit, self._kind, self._ready, self._after = inner, unit, kind, ready, after
        self.allocate = inner.allocate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self._unit
        row = unit.rows.get(self._kind)
        if row is None or kwargs.get("async_op", False):
            return self._call_with(unit.transfer(self._kind, self._ready), *args, **kwargs)
        current = unit.launch(row, self._ready)
        work = self._inner(*args, **kwargs)
        if current is not None:
            current.done_ns[row] = unit.now()
        unit.waits.own = self._after
        return work

    def _call_with(self, transfer: Stamped | None, *args: Any, **kwargs: Any) -> Any:
        is_async = kwargs.get("async_op", False)
        if transfer is not None and is_async:
            transfer.goes_on()
        work = self._inner(*args, **kwargs)
        self._unit.waits.own = self._after
        if transfer is None:
            return work
        if work is None or not is_async:
            transfer.ended()
        else:
            _follow(work, transfer)
        return work


class _AllReduceWait:
    """Stamps an all-reduce over replicas, of which only the wait is visible."""

    def __init__(self, unit: UnitCollectives) -> None:
        self._unit = unit
        self._transfer: Stamped | None = None

    def wait_began(self) -> None:
        """Stamp the launch; the call of torch's function may wait, and the work that it returns."""
        if self._transfer is None:
            self._transfer = self._unit.transfer(REDUCE)

    def wait_ended(self) -> None:
        """Stamp the completion."""
        if self._transfer is not None:
            self._transfer.ended()


@never_raises
def _follow(work: Any, transfer: Stamped) -> None:
    """Stamp the completion of a work; not every backend's, nor every user's, has a future."""
    work.get_future().add_done_callback(_ending(transfer))


def _ending(transfer: Stamped) -> Callable[[Any], None]:
    def stamp(_: Any) -> None:
        transfer.ended()
        stay_in_interpreter()

    return stamp
