"""Low-rank gradients (PowerSGD, arXiv 1905.13727), by torch's own implementation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm.all_reduce import AllReduce
from ddpobs.comm.base import Pending
from ddpobs.comm.multi_stage import Stages
from ddpobs.comm.user_hook import GradBucket


class _Matrices(GradBucket):
    """What torch's hook can look at: it asks for each gradient's first dimension, and how long the rest is."""

    def gradients(self) -> list[torch.Tensor]:
        """A single number as a vector of one, and nothing that is empty."""
        return [part if part.dim() else part.view(1) for part in super().gradients() if part.numel()]


class PowerSGD:
    """Runs torch's hook on one bucket after the other.

    Registered as a hook it starts each bucket's later all-reduces when the earlier ones complete: over several buckets
    their order is then chance, and on gloo they crash or mix. Here a bucket's are through before the next one's begin.

    Args:
        group: The process group.
        rank: Of the matrices that stand for a gradient's matrix.
        start_iteration: From which on to compress; the plain mean before. Torch's default is 1,000; its documentation
            advises a tenth of the training.
    """

    divides = False
    carries_nan = False

    def __init__(self, group: dist.ProcessGroup, rank: int = 1, start_iteration: int = 10) -> None:
        self.name = f"powersgd:{rank}"
        self._ranks = group.size()
        self._plain = AllReduce(group)
        self._stages = Stages(group)
        self._state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start_iteration)
        self._iteration, self._latest = 0, -1

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Hand it to the stages' thread."""
        if bucket.sparse:
            gradient = bucket.parameters[0].grad
            assert gradient is not None
            bucket.parameters[0].grad = gradient / self._ranks
            return self._plain.launch(bucket, last)
        buffer = bucket.buffer
        if not buffer.is_floating_point():
            buffer.div_(self._ranks)
            return self._plain.launch(bucket, last)
        # Counted here: torch counts last buckets, of which a group among several in turn may see none.
        self._iteration += bucket.index <= self._latest
        self._latest, iteration = bucket.index, self._iteration

        def stages(own: dist.ProcessGroup) -> None:
            self._state.process_group, self._state.iter = own, iteration
            result = powerSGD_hook(self._state, _Matrices(bucket, last)).wait()
            if result.data_ptr() != buffer.data_ptr():
                buffer.copy_(result)
            if iteration >= self._state.start_powerSGD_iter:
                self._forget_overflow(bucket.index)

        pending = self._stages.run(stages, buffer.device)
        if iteration == self._state.start_powerSGD_iter:
            # Torch draws the first matrices from the global generator, which it sets for that while: a checkpoint
            # that is recomputed on the training's thread meanwhile would draw another dropout.
            pending.wait()
        return pending

    def _forget_overflow(self, index: int) -> None:
        """Keep what is not finite out of the next steps: of what is owed, and of the matrices projected on."""
        state = self._state
        state.error_dict[index].nan_to_num_(0, 0, 0)
        matrices = state.q_memory_dict[index]
        finite = matrices.isfinite()
        if not finite.all():  # On every rank alike, as they come from an all-reduce.
            drawn = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
            fresh = torch.randn(matrices.shape, generator=drawn).to(matrices)
            matrices.copy_(torch.where(finite, matrices, fresh))
