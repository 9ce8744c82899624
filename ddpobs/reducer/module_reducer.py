"""What torch's module code asks of its reducer and its logger, answered by ours."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import AllReduce, CommHook, GradBucket
from ddpobs.errors import ReducerError
from ddpobs.reducer.ddp_timings import Timings
from ddpobs.reducer.fault_broadcast import Fault, FaultBroadcast
from ddpobs.reducer.reducer import Reducer
from ddpobs.torch_seam import autograd
from ddpobs.torch_seam.collectives import all_reduce, wait_for

_begun: weakref.WeakKeyDictionary[dist.ProcessGroup, list[weakref.ref[ModuleReducer]]] = weakref.WeakKeyDictionary()
"""Each group's reducers with a backward under way, in the order in which those began, and end on every rank."""

_dtype = attrgetter("dtype")
_SHARED = (
    "two DistributedDataParallel modules reduce parameter {} in one backward, and its gradient is sparse, or one of "
    "them gives outputs that nobody can look into: wrap both modules in one"
)


class ModuleReducer(Reducer):
    """The reducer of a DDP module: waits for the module's forward, and rebuilds its buckets once.

    Args:
        *args: As the reducer's.
        module: Whose parameters these are.
        **kwargs: As the reducer's.
    """

    _forward_work: Any = None
    _waits: tuple[Any, ...] = ()
    _thread = 0

    def __init__(self, *args: Any, module: torch.nn.Module, **kwargs: Any) -> None:
        self._itself, self._module = weakref.ref(self), weakref.ref(module)
        super().__init__(*args, **kwargs)
        self._dtypes = list(map(_dtype, self._parameters))
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        # As torch's: a backward that no forward of the DDP module came before is the user's own affair.
        self._expected = False
        self.timings = Timings()
        self.rebuilt = False
        self.first_bucket_bytes = self.bucket_bytes
        self.gradient_order: list[int] = []

    def _reduce_over(self, group: dist.ProcessGroup) -> None:
        super()._reduce_over(group)
        self._begun = _begun.setdefault(group, [])

    def prepare(self, synchronises: bool) -> None:
        """As the reducer's."""
        self._thread = get_ident()
        super().prepare(synchronises)
        if synchronises:
            self.timings.forward_began()

    def begin(self) -> None:
        """As the reducer's; under `join` with the ranks counted that still have data.

        Raises:
            ReducerError: Gradients of gradients are asked for, or the parameters are no longer what they were.
        """
        self._refuse()
        if self._forward_work is not None:
            wait_for(self._forward_work)
            (ranks,) = self._forward_work.get_future().value()
            self._divisor = float(ranks.item())
            self._forward_work = None
        self.timings.mark("backward_began")
        if self._begun:
            self._share()
        self._begun.append(self._itself)
        super().begin()

    def _share(self) -> None:
        """Whose gradient a module with a backward under way reduces too stays autograd's own until both have it."""
        for other in filter(None, (itself() for itself in self._begun)):
            for shared in self._index_of.keys() & other._index_of.keys():
                index = self._index_of[shared]
                if not other._lend(other._index_of[shared]):
                    self._faults.record(Fault(message=_SHARED.format(self._names[index])))
                self._bucket_of[index].keep_grads_separate()

    def _lend(self, index: int) -> bool:
        """Leave a parameter's gradient to another module too; False where it is too late."""
        bucket = self._bucket_of[index]
        launched = bucket.index < len(self._pending)
        if not launched:
            bucket.keep_grads_separate()
        return not bucket.sparse and not (
            self._used[index] and (launched or bucket.copied[self._index_in_bucket[index]])
        )

    def _notes(self) -> list[Callable[[int], None]]:
        return super()._notes() + ([self.timings.ready] if self.timings.sampling else [])

    def _reset(self) -> None:
        super()._reset()
        self._waits = ()
        if self._itself in self._begun:
            self._begun.remove(self._itself)

    def end_interrupted(self) -> None:
        """As the reducer's, with all others of the group: one backward may go through several modules."""
        # Inside a backward it is checkpointing that runs a module again: that backward is not interrupted.
        if not self._begun or torch._C._current_graph_task_id() >= 0:
            return
        interrupted = [reducer for itself in self._begun if (reducer := itself()) is not None]
        if interrupted and all(reducer._thread != get_ident() for reducer in interrupted):
            return  # Nor is one that goes on in the thread that trains, beside others that ask a model.
        self._begun.clear()
        endings = [reducer.abort_backward() for reducer in interrupted]
        for _ in range(2):
            for ending in endings:
                next(ending, None)

    def _refuse(self) -> None:
        """On every rank alike, before anything is launched."""
        autograd.refuse_compiled()
        autograd.refuse_graph("DistributedDataParallel")
        if self._layout.dtype is not None:
            return
        dtypes = list(map(_dtype, self._parameters))  # 0.04 µs each; the whole model moves to a device, if any does.
        index = 0
        if dtypes != self._dtypes:
            index = next(i for i, (a, b) in enumerate(zip(dtypes, self._dtypes, strict=True)) if a != b)
        now, was, device = self._parameters[index], self._dtypes[index], self._bucket_of[index].buffer.device
        if (now.dtype, now.device) != (was, device):
            raise ReducerError(
                f"parameter {self._names[index]} was {was} on {device} when DistributedDataParallel was built, "
                f"and is {now.dtype} on {now.device} now: convert the module first, then wrap it"
            )

    def _explained(self, fault: Fault | None) -> Fault | None:
        module = self._module()
        if fault is None or module is None:
            return fault
        ours, theirs = dict(zip(self._names, self._parameters, strict=True)), dict(module.named_parameters())
        replaced = [name for name in fault.missing if theirs.get(name, ours[name]) is not ours[name]]
        if not replaced:
            return fault
        return Fault(
            message=f"{len(replaced)} parameters, {replaced[0]} first, were replaced after DistributedDataParallel was "
            "built, and nobody reduces the new ones: replace them first (load_state_dict(..., assign=True) does), "
            "then wrap the module"
        )

    def _launch(self, bucket: Bucket) -> None:
        if not self._pending:
            self.timings.mark("comm_began")
        super()._launch(bucket)

    def _resolve_unused(self) -> None:
        lent = [bucket for bucket in self._buckets if not (bucket.grads_are_views or bucket.casts)]
        if lent:
            for other in filter(None, (itself() for itself in self._begun)):
                other._take_in()
        for bucket in lent:
            bucket.write_back(bucket.buffer, self._stashed)
        super()._resolve_unused()

    def _take_in(self) -> None:
        """Another module is about to write its result where gradients are that this one has yet to reduce."""
        for bucket in self._buckets[len(self._pending) :]:
            if not (bucket.grads_are_views or bucket.casts):
                bucket.fill(self._used)
                bucket.copied[:] = b"\1" * len(bucket.copied)

    def _finish(self) -> None:
        self.timings.mark("backward_ended")
        if self._order:
            self.gradient_order = list(self._order)
        waits = self._waits
        try:
            super()._finish()
            self.timings.comm_ended()
        finally:
            self._expected = False
        if waits:
            torch.futures.wait_all(list(waits))

    def prepare_for_forward(self) -> None:
        """Nothing to do: `prepare` is called for every forward."""

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """Have the next backward synchronise, also one whose forward ran under `no_sync`, or ended in it.

        Pipeline stages, Accelerate's `trigger_sync_in_backward` and Lightning's manual optimisation call it themselves.
        """
        self.expect_backward()
        if outputs and not self._watches:
            self.watch(outputs)

    def _rebuild_buckets(self) -> bool:
        """Once, after the first backward."""
        if not self._order or self._active:
            return False
        self.rebuilt = self.rebuild()
        return self.rebuilt

    def _push_all_rebuilt_params(self) -> None:
        """A joined rank computes no gradients: any order will do, as rank 0's is taken."""
        if self._order is not None:
            self._order = list(range(len(self._parameters)))

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self._forward_work = None if use_static_world_size else work

    def set_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Have the user's hook reduce the buckets from now on.

        Raises:
            RuntimeError: There is one already.
            ReducerError: The constructor's `comm` says what is done with a full bucket.
        """
        if isinstance(self._comm, CommHook):
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if type(self._comm) is not AllReduce:
            raise ReducerError(
                f"a communication hook was registered (mixed_precision registers one of its own) on a module whose "
                f"buckets are handled by comm={self._comm.name!r}: leave out one of the two"
            )
        self.set_comm(CommHook(state, hook))
        if self._recorder is not None:
            self._recorder.event("comm_hook_set", name=self._comm.name)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Any:
        """The plain sum, for torch's hooks that wrap it."""
        return all_reduce(self._group, [bucket.buffer()]).get_future()

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """What is done with a full bucket; without a hook it has been done when the future is given."""
        if isinstance(self._comm, CommHook):
            return self._comm.run(bucket)
        reduced, done = bucket.bucket, torch.futures.Future[Any]()
        self._comm.launch(reduced, bucket.is_last()).wait()
        done.set_result(reduced.parameters[0].grad if reduced.sparse else reduced.buffer)
        return done

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        """The buckets in launch order, with zeros in them and without the parameters' gradients."""
        shadows = self._zero_buckets()
        return [GradBucket(bucket, bucket is shadows[-1]) for bucket in shadows]

    def _get_local_used_map(self) -> torch.Tensor:
        """How many ranks used each parameter in the last backward that looked; int32, shape [parameters]."""
        return self._used_map.users()

    def get_backward_stats(self) -> list[int]:
        """By parameter, when its gradient came, in ns since the first one did, of the last sampled iteration."""
        return [self.timings.ready_after_ns.get(index, 0) for index in range(len(self._parameters))]

    def _autograd_hook(self, _index: int) -> None:
        """Under mixed precision torch's module tells of each gradient; our own hooks know already."""

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        self._layout.set_dtype(dtype)

    def _set_sparse_metadata(self, _global_unique_ids: Mapping[str, torch.Tensor]) -> None:
        """Only ever saves traffic: a sparse all-reduce has the same sum."""

    def _delay_all_reduce(self) -> None:
        """Nothing to start: a static graph's first backward waits for its end by itself."""

    def _set_static_graph(self) -> None:
        if self.timings.iteration:
            raise RuntimeError(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed."
            )
        self.switch_to_static_graph()

    def _ddp_graph_static(self) -> bool:
        return self.graph_static

    def _set_optimizer_in_backward(self) -> None:
        """Optimizers that run as gradients come are the communication hook's affair."""

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        self._waits += tuple(futures)

    def _remove_autograd_hooks(self) -> None:
        self.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        self.check_finished()

    def _reset_state(self) -> None:
        self._end()
        self._expected, self.rebuilt = False, False
        self._participation = self._participating(static=self._settings.static_graph)
        self._order = [] if self._rebuilds else None
        self.remove_hooks()  # A static graph's ask the participation.
        self._add_hooks()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self._reduce_over(group)
        self._faults = FaultBroadcast(group)
        if not isinstance(self._comm, CommHook):
            self.set_comm(self._comm_factory(group))

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self.timings.every = rate

    def set_logger(self, _logger: object) -> None:
        """The logger is the module's own."""
