"""Stamps of one unit's collectives, taken around torch's methods that launch and await them.

A step has hundreds of these calls, after each of which the caches hold the training's data: each function that is
called here costs 3 microseconds. So they are few.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from ddpobs.clocks import Stamp
from ddpobs.fsdp.passes import Pass, Passes
from ddpobs.fsdp.transfers import AllReduceWait, OtherTransfer, Stamped, Transfer
from ddpobs.fsdp.units import GATHER, GATHER_AGAIN, REDUCE, SCATTER
from ddpobs.never_raises import never_raises
from ddpobs.observers import UNRECORDED, ModuleObserver, OwnWait
from ddpobs.torch_seam import fully_shard
from ddpobs.torch_seam.interpreter_exit import stay_in_interpreter


class ShardedModel(Protocol):
    """The model that the unit belongs to."""

    def is_trained(self) -> bool:
        """Whether a forward has gradients."""
        ...

    def report_layout(self) -> None:
        """Give the units their rows, once torch knows their names."""
        ...


class UnitCollectives:
    """Stamps the collectives that torch launches for a unit.

    During torch's call the unit's communication object is wrapped, as `set_custom_all_gather` would replace it.

    Args:
        unit: The unit; not kept.
        model: Its model.
        passes: Take the stamps.
        recorder: Takes the collectives without a row.

    Attributes:
        rows: The row of each of its collectives in the layout, by kind; None before the layout is known. Training may
            let the unit reshard afterwards: its all-gathers in backward have no row.
    """

    def __init__(self, unit: Any, model: ShardedModel, passes: Passes, recorder: ModuleObserver) -> None:
        self._model, self._passes, self._recorder = model, passes, recorder
        self._now, self._waits = recorder.now, recorder.waits
        self._is_sharded = fully_shard.shards(unit)
        self._blocks = unit.device.type == "cpu"
        """A collective without a work blocks the thread that launches it; on a device only its stream."""
        self.rows: dict[str, int] | None = None

    def gather(self, unit: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stamp the unit's all-gather, if torch launches one."""
        if fully_shard.is_gathered(unit):
            return call(unit, *args, **kwargs)
        comm, kind = unit._all_gather_comm, GATHER
        if torch._C._current_graph_task_id() >= 0:
            kind = GATHER_AGAIN
        elif not self._model.is_trained():
            kind = ""
        unit._all_gather_comm = _StampedComm(comm, self, kind)
        self._waits.own = UNRECORDED
        try:
            return call(unit, *args, **kwargs)
        finally:
            self._waits.own = None
            unit._all_gather_comm = comm

    def use(self, unit: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stamp the wait for the unit's all-gather, if there is one."""
        if not fully_shard.is_gathering(unit):
            return call(unit, *args, **kwargs)
        self._gather_awaited()
        self._waits.own = UNRECORDED
        try:
            return call(unit, *args, **kwargs)
        finally:
            self._waits.own = None

    def reduce(self, unit: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Stamp the unit's reduce-scatter and its all-reduce over replicas, if torch launches them."""
        ready, comm = self._now(), unit._reduce_scatter_comm
        if fully_shard.reduces(unit):
            self._passes.last_ready = ready
        # The all-reduce over replicas follows the reduce-scatter.
        reduction = AllReduceWait(lambda: self.launched(REDUCE))
        unit._reduce_scatter_comm = _StampedComm(comm, self, SCATTER, ready, reduction)
        self._waits.own = UNRECORDED if self._is_sharded else reduction
        try:
            return call(unit, *args, **kwargs)
        finally:
            self._waits.own = None
            unit._reduce_scatter_comm = comm

    @never_raises
    def launched(self, kind: str, ready: Stamp = 0) -> Stamped | None:
        """Begin to stamp a collective; None before torch knows the units' names.

        Args:
            kind: Its kind; empty for one that has no row.
            ready: Stamp of the gradients that it sends; 0 for what was there before.
        """
        if self.rows is None:
            self._model.report_layout()
            if self.rows is None:
                return None
        row = self.rows.get(kind)
        if row is None:
            return OtherTransfer(self._recorder)
        passes = self._passes
        current = passes.current
        if current is None or current.launched_ns[row]:
            current = passes.begin()
        if ready:
            self._ready(current, row, ready)
        self._recorder.bucket_launched(row)
        return Transfer(current, row, self._now, self._blocks)

    def launched_all_reduces(self, wait: OwnWait) -> None:
        """Let a wait take the collectives that follow in torch's call."""
        self._waits.own = wait

    def _ready(self, current: Pass, row: int, ready: Stamp) -> None:
        """On a device a unit's gradients wait until those of the unit before it are reduced."""
        current.ready_ns[row] = ready
        if not self._blocks:
            if self._passes.scattered is not None:
                current.waited_from_ns[self._passes.scattered] = ready
            self._passes.scattered = row

    def _gather_awaited(self) -> None:
        current = self._passes.current
        if current is None or self.rows is None:
            return
        row = self.rows.get(GATHER_AGAIN if torch._C._current_graph_task_id() >= 0 else GATHER)
        if row is not None and current.launched_ns[row] and not current.waited_from_ns[row]:
            current.waited_from_ns[row] = self._now()


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
        transfer = self._unit.launched(self._kind, self._ready)
        is_async = kwargs.get("async_op", False)
        if transfer is not None and is_async:
            transfer.goes_on()
        work = self._inner(*args, **kwargs)
        if self._after is not UNRECORDED:
            self._unit.launched_all_reduces(self._after)
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
