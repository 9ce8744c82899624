"""Low-rank gradients (PowerSGD, arXiv 1905.13727), by torch's own implementation."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ddpobs.buckets import Bucket
from ddpobs.comm.all_reduce import AllReduce
from ddpobs.comm.face import Pending
from ddpobs.comm.hook import GradBucket
from ddpobs.comm.stages import Stages


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
        self._state = PowerSGDState(
            self._stages.group, matrix_approximation_rank=rank, start_powerSGD_iter=start_iteration
        )

    def launch(self, bucket: Bucket, last: bool) -> Pending:
        """Hand it to the stages' thread."""
        if bucket.sparse:
            gradient = bucket.parameters[0].grad
            assert gradient is not None
            bucket.parameters[0].grad = gradient / self._ranks
            return self._plain.launch(bucket, last)
        buffer = bucket.buffer

        def stages() -> None:
            result = powerSGD_hook(self._state, GradBucket(bucket, last)).wait()
            if result.data_ptr() != buffer.data_ptr():
                buffer.copy_(result)

        pending = self._stages.run(stages, buffer.device)
        if self._state.iter == self._state.start_powerSGD_iter:
            # Torch draws the first matrices from the global generator, which it sets for that while: a checkpoint
            # that is recomputed on the training's thread meanwhile would draw another dropout.
            pending.wait()
        return pending

    def close(self) -> None:
        """End the stages."""
        self._stages.close()
