"""The plain way: sum over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ddpobs.buckets import Bucket


class AllReduce:
    """One all-reduce (sum) of the flat buffer; gradients were divided before."""

    name = "all_reduce"
    divides = True
    carries_nan = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def launch(self, bucket: Bucket, last: bool) -> _Pending:
        """Start the all-reduce."""
        # The group's own method: the wrapper in torch.distributed costs more than a small bucket's communication.
        if bucket.sparse:
            gradient = bucket.parameters[0].grad
            assert gradient is not None
            return _PendingSparse(self._group.allreduce([gradient]), bucket)
        return _Pending(self._group.allreduce([bucket.buffer]))


class _Pending:
    __slots__ = ("work",)

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def wait(self) -> None:
        self.work.wait()

    def on_done(self, told: Callable[[object], None]) -> None:
        self.work.get_future().add_done_callback(told)


class _PendingSparse(_Pending):
    __slots__ = ("_bucket",)

    def __init__(self, work: dist.Work, bucket: Bucket) -> None:
        super().__init__(work)
        self._bucket = bucket

    def wait(self) -> None:
        self.work.wait()
        result: torch.Tensor = self.work.get_future().value()[0]
        self._bucket.parameters[0].grad = result
