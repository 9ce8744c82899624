"""The reducer of an optimizer: gradients are accumulated over several passes, and reduced before its step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import CommFactory, Pending
from ddpobs.errors import StepOrderError
from ddpobs.horovod import timeline
from ddpobs.observers import ModuleObserver
from ddpobs.reducer import zero_participation
from ddpobs.reducer.front_end import FrontEnd
from ddpobs.reducer.late_parameters import Frozen
from ddpobs.reducer.readiness import Hook
from ddpobs.reducer.reducer import Reducer
from ddpobs.reducer.settings import Settings
from ddpobs.torch_seam import autograd
from ddpobs.torch_seam.collectives import name_of, ranks_of


class OptimizerReducer(FrontEnd):
    """The front end of an optimizer: buckets start in the last of several passes, and end in `synchronize`.

    Args:
        parameters: The parameters that require a gradient, in the optimizer's order.
        names: Their names.
        expect_sparse: By parameter, whether its gradient is sparse.
        group: The process group.
        comm_factory: Creates the communication strategy for the group.
        settings: Bucket limits.
        recorder: Receives the times of each bucket; None with telemetry off.
        passes: Backward passes before gradients are reduced.
        pre_divisor: Divisor of the gradients before the sum; None for no division.
        post_factor: Factor of the sum; None for none.
        groups: Indices of the parameters that share a bucket; a parameter of no group has its own. None to fill buckets
            by size.

        frozen: The optimizer's parameters that require no gradient now, and may do so later.

    Attributes:
        core: Launches the buckets and waits for them.
        parameters: The reduced parameters.
        names: Their names.
        synchronised: Number of reductions so far.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        expect_sparse: Sequence[bool],
        *,
        group: dist.ProcessGroup,
        comm_factory: CommFactory,
        settings: Settings,
        recorder: ModuleObserver | None,
        passes: int,
        pre_divisor: float | None,
        post_factor: float | None,
        groups: Sequence[Sequence[int]] | None,
        frozen: Iterable[Frozen] = (),
    ) -> None:
        self.parameters, self.names = list(parameters), list(names)
        self._passes, self._pre_divisor, self._post_factor = passes, pre_divisor, post_factor
        self._passes_left = [passes] * len(parameters)
        self._made_dense: set[int] = set()
        """Parameters whose gradient arrived sparse, and is reduced as a dense one."""
        self._timed: timeline.Reduction | None = None
        self.synchronised = 0
        self.core = Reducer(
            parameters,
            names,
            expect_sparse,
            group=group,
            comm_factory=comm_factory,
            settings=replace(
                settings,
                assignment=None if groups is None else _assign(parameters, groups),
                missing_as_zero=True,
                # A script may do much between a backward and `synchronize`, and no fault has to be reported.
                ends_with_engine=False,
            ),
            recorder=recorder,
            front_end=self,
            frozen=frozen,
            wrap_hook=self._wrap_hook,
        )
        self._readiness = self.core.readiness
        self._stream = f"optimizer/{name_of(group)}"

    @property
    def under_way(self) -> bool:
        """Whether gradients have arrived that are not synchronised yet."""
        return self._readiness.active or any(left != self._passes for left in self._passes_left)

    def set_passes(self, passes: int) -> None:
        """Reduce after this many backward passes from now on."""
        self._passes = passes
        self._passes_left[:] = [passes] * len(self._passes_left)

    def synchronize(self) -> None:
        """Start every bucket that is not under way yet, with zeros for missing gradients, and wait for all."""
        recorder = self.core.recorder
        self.core.faults.poll_flags()
        recorded = recorder is not None and recorder.waiting_began()
        try:
            if not self._readiness.active:
                self._readiness.begin()
            self._densify_leftovers()
            self.core.launch_rest()
            self.core.finish()
            self._rebuild_once()
        finally:
            if self._readiness.active:  # As with Horovod, the user handles the state that an error left.
                self.core.end()
            self._passes_left[:] = [self._passes] * len(self._passes_left)
            if recorder is not None and recorded:
                recorder.waiting_ended()

    def participate_with_zeros(self) -> None:
        """Take part in the other ranks' synchronisation, as a rank that is out of data."""
        zero_participation.participate(self.core)
        if (current := timeline.current()) is not None:
            current.add(self._new_timing(), self._stream)  # It stays empty: the ranks have to count alike.
        if (device := self.parameters[0].device).type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # Or `join` runs ahead of the ranks that train.
        self.synchronised += 1
        self._rebuild_once()

    def _rebuild_once(self) -> None:
        if self._readiness.order is not None:
            self.core.rebuild()

    def remove_hooks(self) -> None:
        """Release the parameters: their gradients are no longer reduced."""
        self._readiness.remove_hooks()

    # ------------------------------------------------------------------ a reduction, as the core calls it

    def _wrap_hook(self, index: int, ready: Hook) -> Hook:
        """The hook of a parameter whose gradient is ready after several passes."""
        passes_left, made_dense = self._passes_left, self._made_dense

        def accumulated(parameter: torch.Tensor) -> None:
            autograd.refuse_graph("DistributedOptimizer")
            if not passes_left[index]:
                raise StepOrderError(
                    f"{self.names[index]} got a gradient in more than backward_passes_per_step={self._passes} "
                    "backward passes without a step: raise backward_passes_per_step, or call step() or synchronize()"
                )
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                self._make_dense(index)
            elif made_dense and passes_left[index] == self._passes:
                made_dense.discard(index)
            passes_left[index] -= 1
            if passes_left[index]:
                return
            ready_ns = time.time_ns() if timeline.current() is not None else 0
            ready(parameter)
            if self._timed is not None:
                self._timed.ready[index] = ready_ns

        return accumulated

    @override
    def check_backward(self) -> None:
        self.core.look_for_late_parameters()
        if timeline.current() is not None:
            self._timed = self._new_timing()

    @override
    def divisor(self) -> float | None:
        return self._pre_divisor

    @override
    def bucket_launched(self, bucket: Bucket, pending: Pending) -> None:
        timed = self._timed
        if timed is None:
            return
        index = bucket.index
        timed.launched[index] = time.time_ns()

        def done(_: object) -> None:
            timed.done[index] = time.time_ns()

        pending.on_done(done)

    @override
    def write_results(self, late: Sequence[Bucket]) -> None:
        self.synchronised += 1
        for bucket in (*self.core.buckets, *late):
            if self._post_factor is not None:
                bucket.buffer.mul_(self._post_factor)
            bucket.memory.restore_views()  # A tensor that a script assigned since backward is not reduced.
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view
        if self._timed is not None:
            current, timed = timeline.current(), self._timed
            self._timed = None
            if current is not None:
                current.add(timed, self._stream)

    @override
    def parameters_added(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters[:], self.names[:] = self.core.layout.parameters, self.core.layout.names
        self._passes_left += [self._passes] * len(parameters)

    def _new_timing(self) -> timeline.Reduction:
        members = [bucket.members for bucket in self.core.buckets]
        ranks = ranks_of(self.core.group)
        return timeline.Reduction(self.names, self.parameters, members, self.core.group.name(), ranks)

    # ------------------------------------------------------------------ sparse gradients

    def _densify_leftovers(self) -> None:
        """Convert older gradients that count in this reduction; `sparse_again` may have left them sparse."""
        for index in self._readiness.unseen():
            gradient = self.parameters[index].grad
            if gradient is not None and gradient.is_sparse:
                self._make_dense(index)

    def _make_dense(self, index: int) -> None:
        self._made_dense.add(index)
        self.parameters[index].grad = self.parameters[index].grad.to_dense()  # type: ignore[union-attr]

    def sparse_again(self) -> None:
        """Return gradients that arrived sparse to that form."""
        for index in self._made_dense:
            gradient = self.parameters[index].grad
            assert gradient is not None
            self.parameters[index].grad = gradient.to_sparse(1)


def _assign(parameters: Sequence[torch.nn.Parameter], groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """A bucket per group, dtype and device, and one per parameter without a group."""
    grouped = {index for group in groups for index in group}
    buckets = [[index] for index in range(len(parameters)) if index not in grouped]
    for group in groups:
        kinds: dict[Any, list[int]] = {}
        for index in group:
            kinds.setdefault((parameters[index].dtype, parameters[index].device), []).append(index)
        buckets += kinds.values()
    # Gradients arrive from the last parameter to the first.
    return sorted(buckets, key=min, reverse=True)
