"""Low-rank gradients (PowerSGD, arXiv 1905.13727), computed by torch's own implementation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from typing_extensions import override

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.base import Pending
from ddpobs.comm.dense_only import DenseOnly
from ddpobs.comm.multi_stage import Stages
from ddpobs.comm.strategy import Argument, Strategy
from ddpobs.comm.user_hook import GradBucket


class _Matrices(GradBucket):
    """A bucket in the form of torch's hook, which reads each gradient's first dimension and the size of the rest."""

    @override
    def gradients(self) -> list[torch.Tensor]:
        """Scalars as vectors of one element; empty gradients are left out."""
        return [part if part.dim() else part.view(1) for part in super().gradients() if part.numel()]


class PowerSGD(DenseOnly):
    """Torch's PowerSGD hook, run on one bucket after the other.

    Torch starts a bucket's later all-reduces when the earlier ones complete. Over several buckets their order is then
    random, and on gloo they crash or mix. Here a bucket's collectives end before the next bucket's begin.

    Args:
        group: The process group.
        rank: Rank of the matrices that approximate a gradient's matrix.
        start_iteration: First iteration with compression; the plain mean before. Torch's default is 1,000; its
            documentation recommends a tenth of the training.
    """

    divides = False
    carries_nan = False

    def __init__(self, group: dist.ProcessGroup, rank: int = 1, start_iteration: int = 10) -> None:
        super().__init__(group)
        self.name = f"powersgd:{rank}"
        self._stages = Stages(group)
        self._state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start_iteration)
        self._iteration, self._latest_index = 0, -1

    @override
    def launch_dense(self, bucket: Bucket, last: bool) -> Pending:
        # Iterations are counted here. Torch counts last buckets, and a round-robin group may never receive one.
        self._iteration += bucket.index <= self._latest_index
        self._latest_index, iteration = bucket.index, self._iteration
        buffer = bucket.buffer

        def stages(stage_group: dist.ProcessGroup) -> None:
            self._state.process_group, self._state.iter = stage_group, iteration
            result = powerSGD_hook(self._state, _Matrices(bucket, last)).wait()
            if result.data_ptr() != buffer.data_ptr():
                buffer.copy_(result)
            if iteration >= self._state.start_powerSGD_iter:
                self._forget_overflow(bucket.index)

        pending = self._stages.run(stages, buffer.device)
        if iteration == self._state.start_powerSGD_iter:
            # Torch draws the first matrices from the global generator, and seeds it for that time. A checkpoint that
            # the training's thread recomputes meanwhile would draw another dropout.
            pending.wait()
        return pending

    def _forget_overflow(self, index: int) -> None:
        """Remove infinities and NaN from the bucket's residual and projection matrices, for the next steps."""
        state = self._state
        state.error_dict[index].nan_to_num_(0, 0, 0)
        matrices = state.q_memory_dict[index]
        finite = matrices.isfinite()
        if not finite.all():  # The same on every rank: the matrices come from an all-reduce.
            generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
            fresh = torch.randn(matrices.shape, generator=generator).to(matrices)
            matrices.copy_(torch.where(finite, matrices, fresh))


STRATEGIES = (Strategy("powersgd", PowerSGD, Argument("rank", int, lambda rank: rank >= 1, "at least 1")),)
