"""The default strategy: a sum over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from typing_extensions import override

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.strategy import Strategy
from ddpobs.torch_seam.collectives import all_reduce, wait_for


class AllReduce:
    """One all-reduce (sum) of the flat buffer; the reducer has divided the gradients before."""

    name = "all_reduce"
    divides = True
    carries_nan = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def launch(self, bucket: Bucket, last: bool) -> _Pending:
        """Start the all-reduce."""
        if bucket.sparse:
            gradient = bucket.parameters[0].grad
            assert gradient is not None
            return _SparsePending(all_reduce(self._group, [gradient]), bucket)
        return _Pending(all_reduce(self._group, [bucket.buffer]))


class _Pending:
    __slots__ = ("work",)

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def wait(self) -> None:
        wait_for(self.work)

    def on_done(self, callback: Callable[[object], None]) -> None:
        self.work.get_future().add_done_callback(callback)


class _SparsePending(_Pending):
    __slots__ = ("_bucket",)

    def __init__(self, work: dist.Work, bucket: Bucket) -> None:
        super().__init__(work)
        self._bucket = bucket

    @override
    def wait(self) -> None:
        wait_for(self.work)
        result: torch.Tensor = self.work.get_future().value()[0]
        self._bucket.parameters[0].grad = result


STRATEGIES = (Strategy("all_reduce", AllReduce),)
