"""Readiness, launch, wait, unused parameters: the gradient reduction of one DDP module.

One backward, in order: `begin` (first gradient, or first gradient of an output), a hook per parameter that counts its
bucket down, `_launch` strictly in bucket order while autograd goes on, `_finish` as the engine's last callback.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ddpobs import buckets as bucketing
from ddpobs.buckets import Bucket
from ddpobs.comm import AllReduce, BucketComm, CommHook, GradBucket, Pending
from ddpobs.errors import ReducerError, UnusedParametersError

if TYPE_CHECKING:
    from ddpobs.recorder import Backward, ModuleRecorder


@dataclass(frozen=True)
class Settings:
    """What the module's constructor decided.

    Attributes:
        first_limits_bytes: Bucket limits before the order of gradients is known.
        rebuilt_limits_bytes: Bucket limits after.
        find_unused: Parameters may take no part in a backward.
        static_graph: The same parameters take part in every backward.
    """

    first_limits_bytes: Sequence[int]
    rebuilt_limits_bytes: Sequence[int]
    find_unused: bool
    static_graph: bool


class Reducer:
    """Reduces gradients bucket by bucket while backward goes on.

    Args:
        parameters: Those that require a gradient, in the module's order.
        names: Theirs.
        expect_sparse: Which of them get sparse gradients.
        group: The process group.
        settings: The constructor's.
        recorder: Told of each bucket, or None with telemetry off.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        expect_sparse: Sequence[bool],
        *,
        group: dist.ProcessGroup,
        settings: Settings,
        recorder: ModuleRecorder | None,
    ) -> None:
        self._parameters, self._names, self._expect_sparse = list(parameters), list(names), list(expect_sparse)
        self._group, self._settings, self._recorder = group, settings, recorder
        self._ranks = group.size()
        self._divisor: float = self._ranks
        self._comm: BucketComm = AllReduce(group)
        self._may_skip = settings.find_unused or settings.static_graph
        self._rebuilds = settings.static_graph or not settings.find_unused
        self._order: list[int] | None = [] if self._rebuilds else None
        self._active = False
        self._synchronises = True
        self._outputs: list[torch.autograd.graph.Node] = []
        self._used = bytearray(len(self._parameters))
        self._used_map: torch.Tensor | None = None
        self._used_work: dist.Work | None = None
        self._skipped: list[int] = []
        self._warned = False
        self._pending: list[Pending] = []
        self._record: Backward | None = None
        self._stamps: list[Any] | None = None
        self._forward_work: Any = None
        self._in_join = False
        self._buckets: list[Bucket] = []
        self._bucket_of: list[Bucket] = []
        self._place_in_bucket: list[int] = []
        self._lay(bucketing.assign(self._parameters, settings.first_limits_bytes, self._expect_sparse))
        # The engine knows a parameter by its AccumulateGrad node, which only lives as long as someone holds it.
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self._parameters]
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(index)) for index, p in enumerate(self._parameters)
        ]

    @property
    def bucket_bytes(self) -> list[int]:
        """Size of each bucket in launch order."""
        return [bucket.buffer.numel() * bucket.buffer.element_size() for bucket in self._buckets]

    def prepare(self, synchronises: bool) -> None:
        """A forward that can be differentiated was called; what is left of an interrupted backward is forgotten."""
        self._synchronises = synchronises
        self._outputs = []
        # Inside a backward it is checkpointing that runs the module again: that backward is not interrupted.
        if self._active and torch._C._current_graph_task_id() < 0:
            self._reset()

    def watch(self, outputs: Sequence[torch.Tensor]) -> None:
        """Begin the backward at a forward's outputs: a loss that reaches no parameter fires no parameter's hook."""
        # Nodes, not tensors, and held here: a hook that held its own node would keep the graph alive for ever.
        self._outputs = [output.grad_fn for output in outputs if output.grad_fn is not None]
        reducer = weakref.ref(self)

        def begin(_: torch.Tensor) -> None:
            alive = reducer()
            if alive is not None:
                alive.begin_at_output()

        for output in outputs:
            if output.grad_fn is not None:
                output.register_hook(begin)

    def begin_at_output(self) -> None:
        """An output got a gradient: the backward begins, unless it is one that wants no parameter's gradient."""
        if not self._active and self._synchronises and self._concerns_parameters():
            self.begin()

    def _concerns_parameters(self) -> bool:
        """Whether the running backward accumulates into parameters, or would but reaches none.

        `torch.autograd.grad` and `backward(inputs=...)` pass through the outputs too, for a gradient penalty say, and
        leave the parameters out: they are then in the graph, but not to be executed.
        """
        try:
            if any(map(torch._C._will_engine_execute_node, self._nodes)):
                return True
        except RuntimeError:  # The gradient of a parameter is asked for and not accumulated.
            return False
        if not any(parameter.requires_grad for parameter in self._parameters):
            return False  # Frozen for now, as a discriminator is while its generator trains.
        ahead = list(self._outputs)
        ours, seen = set(self._nodes), set(ahead)
        while ahead:
            node = ahead.pop()
            if node in ours:
                return False
            fresh = {following for following, _ in node.next_functions if following is not None} - seen
            seen |= fresh
            ahead.extend(fresh)
        return True

    def begin(self) -> None:
        """The first sign of a backward. Decides who will take part and starts what can be started at once."""
        if self._active or not self._synchronises:
            return
        self._active = True
        if self._order is not None:
            self._order.clear()
        Variable._execution_engine.queue_callback(self._finish)
        if self._forward_work is not None:
            self._forward_work.wait()
            self._divisor = float(self._forward_work.result()[0].item())
            self._forward_work = None
        if self._recorder is not None:
            self._record = self._recorder.backward()
            self._stamps = self._record.parameter_ready_ns
        if self._may_skip:
            self._skip_unreached()
        else:
            self._used[:] = bytes(len(self._used))

    def set_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Have the user's hook reduce the buckets from now on.

        Raises:
            RuntimeError: There is one already.
        """
        if isinstance(self._comm, CommHook):
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._comm = CommHook(state, hook)
        if self._recorder is not None:
            self._recorder.event("comm_hook_set", name=self._comm.name)
            self._tell_layout()

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """The parameter's post-accumulate hook: a few stores, and the bucket's launch when it is the last."""
        bucket_of, place_of, used = self._bucket_of, self._place_in_bucket, self._used
        large = self._parameters[index].numel() >= bucketing.LARGE and not self._expect_sparse[index]

        def gradient_ready(_: torch.Tensor) -> None:
            if not self._active:
                if not self._synchronises:
                    used[index] = 1
                    return
                self.begin()
            used[index] = 1
            if self._stamps is not None:
                self._stamp_parameter(index)
            if self._order is not None:
                self._order.append(index)
            bucket = bucket_of[index]
            if large:
                bucket.place(place_of[index], self._scale())
            bucket.pending -= 1
            if bucket.pending == 0:
                self._ready(bucket)
            elif bucket.pending < 0:
                self._ready_twice(index)

        return gradient_ready

    def _ready(self, bucket: Bucket) -> None:
        if self._record is not None:
            self._record.ready_ns[bucket.index] = self._recorder.now()  # type: ignore[union-attr]
        while len(self._pending) < len(self._buckets) and self._buckets[len(self._pending)].pending == 0:
            self._launch(self._buckets[len(self._pending)])

    def _scale(self) -> float | None:
        return 1.0 / self._divisor if self._comm.divides else None

    def _launch(self, bucket: Bucket, poisoned: bool = False) -> None:
        if bucket.sparse:
            self._scale_sparse(bucket, self._scale())
        else:
            bucket.fill(self._scale())
        if poisoned and not bucket.sparse:
            bucket.buffer[0] = float("nan")
        index = bucket.index
        record = self._record
        if record is None:
            self._pending.append(self._comm.launch(bucket, index == len(self._buckets) - 1))
            return
        now = self._recorder.now  # type: ignore[union-attr]
        record.launched_ns[index] = now()
        pending = self._comm.launch(bucket, index == len(self._buckets) - 1)
        self._pending.append(pending)
        done_ns = record.done_ns

        def done(_: object) -> None:
            done_ns[index] = now()

        pending.on_done(done)

    def _skip_unreached(self) -> None:
        """Mark the parameters that this backward will not reach as ready, and start the verdict over all ranks.

        Asks the engine, which has just worked out what it will execute: no walk over the graph, and right also for
        outputs that were computed but left out of the loss.
        """
        will_execute = torch._C._will_engine_execute_node
        self._skipped = [i for i, node in enumerate(self._nodes) if not will_execute(node)]
        used = torch.ones(len(self._parameters), dtype=torch.int32)
        absent = [index for index in self._skipped if not self._used[index]]
        used[absent] = 0
        self._used_map = used.to(self._parameters[0].device, non_blocking=True)
        self._used_launched = self._recorder.now() if self._recorder is not None else 0
        self._used_work = self._group.allreduce([self._used_map])
        for index in absent:
            # Reduced as zero; an older gradient of the user's must come through untouched where nobody used it.
            parameter, bucket = self._parameters[index], self._bucket_of[index]
            if not bucket.sparse and parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        for index in self._skipped:
            bucket = self._bucket_of[index]
            bucket.pending -= 1
            if bucket.pending == 0:
                self._ready(bucket)

    def _finish(self) -> None:
        """The engine's last callback: wait for every bucket and settle what was left out."""
        missing = [i for bucket in self._buckets if bucket.pending > 0 for i in self._missing(bucket)]
        if missing:
            self._launch_poisoned()
        for pending in self._pending:
            pending.wait()
        if not self._may_skip:
            self._check_nobody_missed(missing)
        else:
            self._settle_unused()
        record, recorder = self._record, self._recorder
        self._reset()
        self._used[:] = bytes(len(self._used))
        if recorder is not None and record is not None:
            recorder.finished(record)

    def _missing(self, bucket: Bucket) -> list[int]:
        """Which of the bucket's parameters got no gradient in this backward."""
        return [member for member in bucket.members if not self._used[member]]

    def _launch_poisoned(self) -> None:
        """This rank owes gradients that nobody allowed it to owe. Launch all the same, or the others wait for ever.

        They learn of it in-band: the first element of the last bucket, which by the order of launches cannot have
        left yet, becomes NaN, and so it is in every rank's result. The good case costs one look at one element.
        """
        for bucket in self._buckets[len(self._pending) :]:
            bucket.pending = 0
            self._launch(bucket, poisoned=bucket.index == len(self._buckets) - 1)

    def _check_nobody_missed(self, missing: list[int]) -> None:
        """Raise the same error on every rank where some rank left a parameter out.

        A hook of the user's or a sparse bucket may not carry the NaN over, and a joined rank does not look: then only
        the rank that knows raises.
        """
        if isinstance(self._comm, CommHook) or self._in_join or self._buckets[-1].sparse:
            if missing:
                raise self._fail({self._names[i]: [self._group.rank()] for i in missing})
            return
        last = self._buckets[-1]
        if not bool(torch.isnan(last.buffer[0])):
            return
        table = torch.zeros(self._ranks, len(self._parameters), dtype=torch.int32, device=last.buffer.device)
        table[self._group.rank(), missing] = 1
        self._group.allreduce([table]).wait()
        left_out = {
            self._names[index]: table[:, index].nonzero().flatten().tolist()
            for index in table.any(dim=0).nonzero().flatten().tolist()
        }
        if left_out:
            raise self._fail(left_out)

    def _fail(self, left_out: dict[str, list[int]]) -> UnusedParametersError:
        if self._recorder is not None:
            mine = self._group.rank()
            everywhere = [name for name, ranks in left_out.items() if len(ranks) == self._ranks]
            self._recorder.unused([name for name, ranks in left_out.items() if mine in ranks], everywhere)
        self._reset()
        self._used[:] = bytes(len(self._used))
        return UnusedParametersError(left_out)

    def _settle_unused(self) -> None:
        """Give `.grad` to what some rank used, and leave alone what nobody did."""
        assert self._used_work is not None
        assert self._used_map is not None
        self._used_work.wait()
        if self._recorder is not None:
            self._recorder.communicated("unused_map", self._used_launched, self._recorder.now())
        globally_used = self._used_map.cpu()
        locally = [index for index in self._skipped if not self._used[index]]
        nobody = [index for index in locally if not globally_used[index]]
        for index in locally:
            if globally_used[index]:
                self._adopt_view(index)
        if self._recorder is not None:
            self._recorder.unused([self._names[i] for i in locally], [self._names[i] for i in nobody])
        everyone_used_all = bool((globally_used == self._ranks).all())
        if everyone_used_all and self._settings.find_unused and not self._warned:
            self._warned = True
            warnings.warn(
                "find_unused_parameters=True, but every parameter took part in the backward on every rank; the flag "
                "can be left out",
                stacklevel=2,
            )

    def _adopt_view(self, index: int) -> None:
        bucket = self._bucket_of[index]
        if not bucket.sparse:
            self._parameters[index].grad = bucket.views[self._place_in_bucket[index]]

    def _scale_sparse(self, bucket: Bucket, scale: float | None) -> None:
        parameter = bucket.parameters[0]
        if parameter.grad is None:
            parameter.grad = torch.sparse_coo_tensor(
                torch.zeros((1, 0), dtype=torch.int64), parameter.new_zeros((0, *parameter.shape[1:])), parameter.shape
            )
        gradient = parameter.grad if parameter.grad.is_sparse else parameter.grad.to_sparse(1)
        parameter.grad = gradient.coalesce() * scale if scale is not None else gradient.coalesce()

    def _stamp_parameter(self, index: int) -> None:
        if self._stamps is not None and self._recorder is not None:
            self._stamps[self._place[index]] = self._recorder.now()

    def _ready_twice(self, index: int) -> None:
        raise ReducerError(
            f"parameter {self._names[index]} was ready twice in one backward: it takes part in several backward "
            "passes at once (reentrant checkpointing, or a loss used twice). Use checkpoint(..., use_reentrant=False)"
        )

    def _reset(self) -> None:
        self._active = False
        self._outputs = []
        self._record = self._stamps = None
        self._pending = []
        self._used_work = self._used_map = None
        self._skipped = []
        self._divisor = self._ranks
        for bucket in self._buckets:
            bucket.reset()

    def _lay(self, assignment: Sequence[Sequence[int]]) -> None:
        """Build the buckets; gradients that are views of older ones move over."""
        laid = bucketing.build(self._parameters, assignment, self._expect_sparse)
        of: dict[int, Bucket] = {}
        for bucket in laid:
            for place, member in enumerate(bucket.members):
                of[member] = bucket
                older = self._bucket_of[member] if self._bucket_of else None
                gradient = self._parameters[member].grad
                if older and not bucket.sparse and gradient is older.views[older.members.index(member)]:
                    bucket.views[place].copy_(gradient)
                    self._parameters[member].grad = bucket.views[place]
        self._buckets = laid
        self._bucket_of[:] = [of[index] for index in range(len(self._parameters))]
        self._place_in_bucket[:] = [of[index].members.index(index) for index in range(len(self._parameters))]
        flat = [member for bucket in laid for member in bucket.members]
        self._place = {member: place for place, member in enumerate(flat)}
        self._tell_layout()

    def _tell_layout(self) -> None:
        if self._recorder is not None:
            self._recorder.layout([bucket.describe(self._names) for bucket in self._buckets], self._comm.name)

    # ------------------------------------------------------------------ the face that torch's module code calls

    def prepare_for_forward(self) -> None:
        """Nothing to do: `prepare` is called for every forward."""

    def prepare_for_backward(self, _outputs: list[torch.Tensor]) -> None:
        """Nothing to do: backward begins with an output's or a parameter's gradient."""

    def _rebuild_buckets(self) -> bool:
        """Once, after the first backward: buckets in the order in which gradients came on rank 0."""
        order = self._order
        if order is None or len(order) < len(self._parameters) or self._active:
            return False
        self._order = None
        agreed = torch.tensor(order, dtype=torch.int64, device=self._parameters[0].device)
        self._group.broadcast(agreed, 0).wait()
        self._lay(
            bucketing.assign_in_order(
                self._parameters, agreed.tolist(), self._settings.rebuilt_limits_bytes, self._expect_sparse
            )
        )
        if self._recorder is not None:
            self._recorder.event("buckets_rebuilt", buckets=len(self._buckets))
        return True

    def _push_all_rebuilt_params(self) -> None:
        """A joined rank computes no gradients: any order will do, as rank 0's is taken."""
        if self._order is not None:
            self._order = list(range(len(self._parameters)))

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self._in_join = True
        self._forward_work = None if use_static_world_size else work

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        zeros = []
        for bucket in self._buckets:
            shadow = GradBucket(bucket, bucket.index == len(self._buckets) - 1)
            shadow.set_buffer(torch.zeros_like(bucket.buffer))
            zeros.append(shadow)
        return zeros

    def _run_comm_hook(self, shadow: GradBucket) -> Any:
        if isinstance(self._comm, CommHook):
            return self._comm.run(shadow)
        return self._group.allreduce([shadow.buffer()])

    def _get_local_used_map(self) -> torch.Tensor:
        return torch.zeros(len(self._parameters), dtype=torch.int32, device=self._parameters[0].device)

    def _delay_all_reduce(self) -> None:
        """Nothing is delayed: the engine says beforehand what will come."""

    def _set_static_graph(self) -> None:
        self._may_skip = True

    def _ddp_graph_static(self) -> bool:
        return self._settings.static_graph

    def _set_optimizer_in_backward(self) -> None:
        """Optimizers that run as gradients come are the module's own affair."""

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        torch.futures.wait_all(list(futures))

    def _remove_autograd_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _check_reducer_finalized(self) -> None:
        if self._active:
            raise ReducerError("a backward is still under way, or was interrupted by an error")

    def _reset_state(self) -> None:
        self._reset()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks, self._divisor = group, group.size(), group.size()
        if isinstance(self._comm, AllReduce):
            self._comm = AllReduce(group)

    def _set_ddp_runtime_logging_sample_rate(self, _rate: int) -> None:
        """Telemetry tells every step; there is nothing to sample."""

    def set_logger(self, _logger: object) -> None:
        """The logger is the module's own."""
