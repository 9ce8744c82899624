"""The reducer that torch's DDP module code sees, with the members of torch's C++ reducer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import AllReduce, CommHook, GradBucket
from ddpobs.errors import ReducerError
from ddpobs.reducer import zero_participation
from ddpobs.reducer.auto_caps import AutoCaps
from ddpobs.reducer.module_reducer import ModuleReducer, logs_errors
from ddpobs.torch_seam.collectives import all_reduce


class TorchReducer(ModuleReducer):
    """A DDP module's reducer. Torch's module code calls the private members."""

    # ------------------------------------------------------------------ communication hooks

    @logs_errors
    def set_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce the buckets with the user's hook from now on.

        Raises:
            RuntimeError: A hook is registered already.
            ReducerError: The constructor's `comm` names another strategy.
        """
        comm = self.core.comm
        if isinstance(comm, CommHook):
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if type(comm) is not AllReduce:
            raise ReducerError(
                f"a communication hook was registered (mixed_precision registers one of its own) on a module whose "
                f"buckets are handled by comm={comm.name!r}: leave out one of the two"
            )
        comm_hook = CommHook(state, hook)
        self.core.set_comm(comm_hook)
        if self.core.recorder is not None:
            self.core.recorder.event("comm_hook_set", name=comm_hook.name)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        """The plain sum, for torch's hooks that wrap it."""
        return all_reduce(self.core.group, [bucket.buffer()]).get_future()

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Communicate a full bucket. Without a user's hook, the future that is returned is complete."""
        if isinstance(self.core.comm, CommHook):
            return self.core.comm.run(bucket)
        future = torch.futures.Future[Any]()
        self.core.comm.launch(bucket.bucket, bucket.is_last()).wait()
        future.set_result(_result_of(bucket.bucket))
        return future

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        """The buckets in launch order, with zeros in them and without the parameters' gradients."""
        zeros = zero_participation.zero_buckets(self.core)
        return [GradBucket(bucket, bucket is zeros[-1]) for bucket in zeros]

    # ------------------------------------------------------------------ further members of torch's reducer

    def _rebuild_buckets(self) -> bool:
        """Rebuild the buckets after the first backward."""
        if not self._readiness.order or self._readiness.active:
            return False
        self.rebuilt = self.core.rebuild()
        if self.rebuilt and self.core.settings.tunes_buckets:
            self.auto_caps = AutoCaps(self.core)
        return self.rebuilt

    def _push_all_rebuilt_params(self) -> None:
        """Use any order on a joined rank, which computes no gradients: rank 0's order decides."""
        if self._readiness.order is not None:
            self._readiness.order = list(range(len(self.core.layout.parameters)))

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self._forward_work = None if use_static_world_size else work

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks used each parameter in the last backward that compared them; int32, shape [parameters]."""
        return self.core.used_map.users()

    def get_backward_stats(self) -> list[int]:
        """By parameter, ns from the first gradient to its own, in the last sampled iteration."""
        return [self.timings.ready_after_ns.get(index, 0) for index in range(len(self.core.layout.parameters))]

    def _autograd_hook(self, _index: int) -> None:
        """Nothing to do: torch's mixed precision reports each gradient, and our own hooks have done so already."""

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        self.core.layout.set_dtype(dtype)

    def _set_sparse_metadata(self, _global_unique_ids: Mapping[str, torch.Tensor]) -> None:
        """Nothing to do: it would only save traffic. A sparse all-reduce has the same sum."""

    def _delay_all_reduce(self) -> None:
        """Nothing to do: a static graph's first backward launches its buckets at its end anyway."""

    @logs_errors
    def _set_static_graph(self) -> None:
        if self.timings.iteration:
            raise RuntimeError(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed."
            )
        self.core.switch_to_static_graph()

    def _ddp_graph_static(self) -> bool:
        return self.core.unused.graph_static

    def _set_optimizer_in_backward(self) -> None:
        """Nothing to do: the communication hook runs such optimizers."""

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        self._post_backward_futures += tuple(futures)

    def _remove_autograd_hooks(self) -> None:
        self.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        if self._readiness.active:
            raise ReducerError("a backward is still under way, or was interrupted by an error")

    def _reset_state(self) -> None:
        self.core.end()
        self._readiness.expected, self.rebuilt = False, False
        self.core.restart_participation()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self.set_group(group)

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.timings.every = rate

    def set_logger(self, _logger: object) -> None:
        """Nothing to do: the logger belongs to the module."""


def _result_of(bucket: Bucket) -> Any:
    return bucket.parameters[0].grad if bucket.sparse else bucket.buffer
