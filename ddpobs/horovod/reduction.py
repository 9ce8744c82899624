"""The reducer of an optimizer: gradients are accumulated over some passes, and waited for before its step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddpobs.buckets.bucket import Bucket
from ddpobs.errors import StepOrderError
from ddpobs.horovod import timeline
from ddpobs.reducer.participation import MissingAsZero, Participation
from ddpobs.reducer.reducer import Reducer
from ddpobs.torch_seam import autograd


class OptimizerReducer(Reducer):
    """Buckets that start in the last of some backward passes, and end in `synchronize`.

    Args:
        *args: As the reducer's.
        passes: Backward passes before gradients are reduced.
        before: What gradients are divided by before the sum, None for nothing.
        after: What the sum is multiplied by.
        groups: Numbers of the parameters that share a bucket, those of no group having one each; None to fill buckets
            by size.
        **kwargs: As the reducer's.
    """

    def __init__(
        self,
        *args: Any,
        passes: int,
        before: float | None,
        after: float | None,
        groups: Sequence[Sequence[int]] | None,
        **kwargs: Any,
    ) -> None:
        self._passes, self._before, self._after, self._groups = passes, before, after, groups
        self._left = [passes] * len(args[0])
        self._came_sparse: set[int] = set()
        self._timed: timeline.Reduction | None = None
        self.synchronised = 0
        super().__init__(*args, **kwargs)

    defers_last_bucket = False  # Between a backward and `synchronize` a script may do much, and nothing can be wrong.

    @property
    def under_way(self) -> bool:
        """Whether gradients have come that were not synchronised yet."""
        return self._active or any(left != self._passes for left in self._left)

    def set_passes(self, passes: int) -> None:
        """Reduce after so many backward passes from now on."""
        self._passes = passes
        self._left[:] = [passes] * len(self._left)

    def synchronize(self) -> None:
        """Start what is not under way yet, zeros where no gradient came, and wait for all of it."""
        self._faults.poll_flags()
        noted = self._recorder is not None and self._recorder.waiting_began()
        try:
            if not self._active:
                self.begin()
            self._finish()
            self._rebuild_once()
        finally:
            if self._active:  # Whatever an error left is Horovod's users' own affair.
                self._end()
            self._left[:] = [self._passes] * len(self._left)
            if noted:
                self._recorder.waiting_ended()  # type: ignore[union-attr]

    def participate_with_zeros(self) -> None:
        """As the reducer's."""
        super().participate_with_zeros()
        if (shown := timeline.current()) is not None:
            shown.add(self._to_be_timed())  # Which stays empty: the ranks count alike.
        if (device := self._parameters[0].device).type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # Or `join` runs ahead of the ranks that train.
        self.synchronised += 1
        self._rebuild_once()

    def begin(self) -> None:
        """As the reducer's."""
        if timeline.current() is not None:
            self._timed = self._to_be_timed()
        super().begin()

    def _to_be_timed(self) -> timeline.Reduction:
        activity = f"{self._group.name().upper()}_ALLREDUCE"
        return timeline.Reduction(self._names, self._parameters, self.bucket_members, activity)

    def _rebuild_once(self) -> None:
        if self._order is not None:
            self.rebuild()

    @property
    def _rebuilds(self) -> bool:
        return self._groups is None

    def _participating(self, static: bool) -> Participation:
        return MissingAsZero()

    def _first_assignment(self) -> list[list[int]]:
        if self._groups is None:
            return super()._first_assignment()
        grouped = {index for group in self._groups for index in group}
        alone = [[index] for index in range(len(self._parameters)) if index not in grouped]
        alike: list[list[int]] = []
        for group in self._groups:
            kinds: dict[Any, list[int]] = {}
            for index in group:
                kinds.setdefault((self._parameters[index].dtype, self._parameters[index].device), []).append(index)
            alike += kinds.values()
        # Gradients come from the last parameter to the first.
        return sorted(alike + alone, key=min, reverse=True)

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        ready, left, came_sparse = super()._hook(index), self._left, self._came_sparse

        def accumulated(parameter: torch.Tensor) -> None:
            autograd.refuse_graph("DistributedOptimizer")
            if not left[index]:
                raise StepOrderError(
                    f"{self._names[index]} got a gradient in more than backward_passes_per_step={self._passes} "
                    "backward passes without a step: raise backward_passes_per_step, or call step() or synchronize()"
                )
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                self._make_dense(index)
            elif came_sparse and left[index] == self._passes:
                came_sparse.discard(index)
            left[index] -= 1
            if left[index]:
                return
            came = time.time_ns() if timeline.current() is not None else 0
            ready(parameter)
            if self._timed is not None:
                self._timed.ready[index] = came

        return accumulated

    def _await_end(self) -> None:
        """`synchronize` is the end, not the engine."""

    def _divides_by(self) -> float | None:
        return self._before

    def _stash_old_gradients(self, unreached: Sequence[int]) -> None:
        """Older gradients count, as whatever else is in `.grad`; `sparse_again` may have left them sparse."""
        for index in unreached:
            gradient = self._parameters[index].grad
            if gradient is not None and gradient.is_sparse:
                self._make_dense(index)

    def _make_dense(self, index: int) -> None:
        self._came_sparse.add(index)
        self._parameters[index].grad = self._parameters[index].grad.to_dense()  # type: ignore[union-attr]

    def _launch(self, bucket: Bucket) -> None:
        super()._launch(bucket)
        timed = self._timed
        if timed is None:
            return
        index = bucket.index
        timed.launched[index] = time.time_ns()

        def done(_: object) -> None:
            timed.done[index] = time.time_ns()

        self._pending[-1].on_done(done)

    def _resolve_unused(self) -> None:
        """Every parameter has a gradient then, the same on all ranks."""
        self.synchronised += 1
        for bucket in self._buckets:
            if self._after is not None:
                bucket.buffer.mul_(self._after)
            bucket.memory.restore_views()  # What a script put in a gradient's place since backward is reduced nowhere.
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if parameter.grad is not view:
                    parameter.grad = view
        if self._timed is not None:
            shown, timed = timeline.current(), self._timed
            self._timed = None
            if shown is not None:
                shown.add(timed)

    def sparse_again(self) -> None:
        """Gradients that came sparse travelled dense; give them back as they came."""
        for index in self._came_sparse:
            gradient = self._parameters[index].grad
            assert gradient is not None
            self._parameters[index].grad = gradient.to_sparse(1)
