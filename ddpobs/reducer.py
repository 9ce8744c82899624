"""Readiness, launch, wait: the gradient reduction of one set of parameters.

One backward, in order: `begin` (first gradient, or first gradient of an output), a hook per parameter that counts its
bucket down, `_launch` strictly in bucket order while autograd goes on, `_finish` as the engine's last callback.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from ddpobs import buckets as bucketing
from ddpobs import engine
from ddpobs.alarm import Alarm, Fault
from ddpobs.buckets import Bucket
from ddpobs.collectives import all_reduce, broadcast, time_collectives, wait
from ddpobs.comm import AllReduce, BucketComm, CommHook, Pending, Way
from ddpobs.errors import ReducerError, UnusedParametersError
from ddpobs.unused import Dynamic, Participation, Required, Static, UsedMap

if TYPE_CHECKING:
    from ddpobs.recorder import Backward, ModuleRecorder

_reducers = count()
"""Reducers made in this process; every rank makes its own in the same order, so the number names one on all ranks."""


@dataclass(frozen=True)
class Settings:
    """What the module's constructor decided.

    Attributes:
        first_limits_bytes: Bucket limits before the order of gradients is known.
        rebuilt_limits_bytes: Bucket limits after.
        find_unused: Parameters may take no part in a backward.
        skip_unused: Buckets that no rank uses are not reduced.
        static_graph: The same parameters take part in every backward.
        as_views: Gradients may be views of the buckets that the next backward writes over, as
            `gradient_as_bucket_view` allows; otherwise a gradient that someone still holds keeps its memory.
    """

    first_limits_bytes: Sequence[int]
    rebuilt_limits_bytes: Sequence[int]
    find_unused: bool = False
    skip_unused: bool = False
    static_graph: bool = False
    as_views: bool = False


class Reducer:
    """Reduces gradients bucket by bucket while backward goes on.

    Args:
        parameters: Those that require a gradient, in the module's order.
        names: Theirs.
        expect_sparse: Which of them get sparse gradients.
        group: The process group.
        way: What is done with full buckets.
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
        way: Way = AllReduce,
        settings: Settings,
        recorder: ModuleRecorder | None,
    ) -> None:
        self._parameters, self._names, self._expect_sparse = list(parameters), list(names), list(expect_sparse)
        self._group, self._settings, self._recorder = group, settings, recorder
        self._ranks = group.size()
        self._divisor: float = self._ranks
        self._way = way
        self._comm: BucketComm = way(group)
        self._tells_duration = recorder is not None and time_collectives(group, parameters[0].device)
        self._alarm_name = str(next(_reducers))
        self._alarm = Alarm(group, self._alarm_name)
        self._used_map = UsedMap(
            len(names), parameters[0].device, lambda used: all_reduce(self._group, [used]), recorder
        )
        self._participation = self._participating(static=settings.static_graph)
        self._order: list[int] | None = [] if self._rebuilds else None
        self.unused_bytes = 0
        self._expected = True
        self._active = False
        self._outputs: list[torch.autograd.graph.Node] = []
        self._used = bytearray(len(names))
        self._fired = bytearray(len(names))
        self._fault: Fault | None = None
        self._told = False
        self._held_dtype: torch.dtype | None = None
        self._aside: dict[int, torch.Tensor] = {}
        self._pending: list[Pending] = []
        self._record: Backward | None = None
        self._stamps: list[Any] | None = None
        self._buckets: list[Bucket] = []
        self._bucket_of: list[Bucket] = []
        self._place_in_bucket: list[int] = []
        self._lay(self._first_assignment())
        # The engine knows a parameter by its AccumulateGrad node, which only lives as long as someone holds it.
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self._parameters]
        self._handles: list[Any] = []
        self._add_hooks()

    def _first_assignment(self) -> list[list[int]]:
        return bucketing.assign(self._parameters, self._settings.first_limits_bytes, self._expect_sparse)

    def _add_hooks(self) -> None:
        for index, parameter in enumerate(self._parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._hook(index)))

    def be_static(self) -> None:
        """From now on the same parameters take part in every backward; known at construction as a rule."""
        if isinstance(self._participation, Static):
            return
        self._settings = replace(self._settings, static_graph=True, skip_unused=False)
        self._participation = self._participating(static=True)
        self._order = []
        self.remove_hooks()
        self._add_hooks()

    @property
    def bucket_bytes(self) -> list[int]:
        """Size of each bucket in launch order."""
        return [bucket.buffer.numel() * bucket.buffer.element_size() for bucket in self._buckets]

    @property
    def bucket_members(self) -> list[list[int]]:
        """Indices of each bucket's parameters, in launch order."""
        return [bucket.members for bucket in self._buckets]

    @property
    def _rebuilds(self) -> bool:
        return isinstance(self._participation, (Required, Static))

    def _participating(self, static: bool) -> Participation:
        if static:
            return Static(self._names, self._used_map)
        if self._settings.find_unused:
            return Dynamic(self._names, self._unreached, self._used_map, self._settings.skip_unused)
        return Required(self._names)

    # ------------------------------------------------------------------ the begin of a backward

    def prepare(self, synchronises: bool) -> None:
        """A forward that can be differentiated was called; what is left of an interrupted backward is forgotten."""
        self._alarm.look_again()
        self._expected = synchronises
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
        if not self._active and self._concerns_parameters():
            self.begin()

    def _concerns_parameters(self) -> bool:
        """Frozen for now they are not concerned, as a discriminator is while its generator trains."""
        return any(p.requires_grad for p in self._parameters) and engine.concerns(self._nodes, self._outputs)

    def begin(self) -> None:
        """The first sign of a backward. Decides who will take part and starts what can be started at once."""
        self._active = True
        engine.leave_context()
        if self._order is not None:
            self._order.clear()
        self._await_end()
        self._alarm.look_again()
        self._alarm.began()
        if self._recorder is not None:
            self._record = self._recorder.backward()
            self._stamps = self._record.parameter_ready_ns if self._record is not None else None
        if not self._settings.as_views:
            for bucket in self._buckets:
                bucket.renew()
        if self._participation.holds:
            for bucket in self._buckets:
                bucket.pending += 1
        unreached = self._participation.begin(self._used)
        self._put_aside(unreached)
        for index in unreached:
            self._fired[index] = 1
            self._count_down(self._bucket_of[index])

    def _await_end(self) -> None:
        """Have `_finish` called when the engine is done with this backward."""
        if self._outputs:
            Variable._execution_engine.queue_callback(self._finish)
        else:  # They hide in something that nobody can look into, and this may be a checkpoint's own backward.
            engine.at_end(self._finish)

    def _unreached(self) -> list[int]:
        return engine.unreached(self._nodes)

    def _put_aside(self, unreached: Sequence[int]) -> None:
        """Keep older gradients of parameters that take no part: replaced only where some rank used them."""
        for index in unreached:
            bucket, gradient = self._bucket_of[index], self._parameters[index].grad
            if gradient is not None and not self._used[index] and not bucket.sparse:
                view = bucket.views[self._place_in_bucket[index]]
                self._aside[index] = gradient.clone() if gradient is view else gradient

    # ------------------------------------------------------------------ a gradient, a bucket

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """The parameter's post-accumulate hook: a few stores, and the bucket's launch when it is the last."""
        bucket_of, place_of, used, fired = self._bucket_of, self._place_in_bucket, self._used, self._fired
        large = self._parameters[index].numel() >= bucketing.LARGE and not self._expect_sparse[index]

        def gradient_ready(_: torch.Tensor) -> None:
            if not self._active:
                if not self._expected:
                    used[index] = 1
                    return
                self.begin()
            if fired[index]:
                self._came_again(index)
                return
            fired[index] = used[index] = 1
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

        return self._hook_of_static_graph(index, gradient_ready) if self._settings.static_graph else gradient_ready

    def _hook_of_static_graph(
        self, index: int, gradient_ready: Callable[[torch.Tensor], None]
    ) -> Callable[[torch.Tensor], None]:
        """The same where a parameter may come several times: only the last time makes it ready."""
        static = self._participation
        assert isinstance(static, Static)

        def came(gradient: torch.Tensor) -> None:
            if not self._active:
                if not self._expected:
                    self._used[index] = 1
                    return
                self.begin()
            if not static.holds:
                if static.comes(index):
                    gradient_ready(gradient)
                elif static.left[index] < 0 and self._fault is None:
                    self._fault = static.changed([index])
                return
            if self._order is not None:
                self._order.append(index)
            if static.comes(index):
                self._fired[index] = self._used[index] = 1
                self._bucket_of[index].pending -= 1

        return came

    def _count_down(self, bucket: Bucket) -> None:
        bucket.pending -= 1
        if bucket.pending == 0:
            self._ready(bucket)

    def _came_again(self, index: int) -> None:
        """A second gradient in one backward, or one of a parameter that was not announced (which that policy tells)."""
        if not self._used[index]:
            self._used[index] = 1
        elif self._fault is None:
            self._fault = Fault(
                message=f"parameter {self._names[index]} was ready twice in one backward: it takes part in several "
                "reentrant checkpoints. Use checkpoint(..., use_reentrant=False), or static_graph=True"
            )

    def _ready(self, bucket: Bucket) -> None:
        if self._record is not None:
            self._record.ready_ns[bucket.index] = self._recorder.now()  # type: ignore[union-attr]
        self._launch_ready()

    def _launch_ready(self, final: bool = False) -> None:
        """Launch what is ready, strictly in order; at the end of a backward everything is."""
        while len(self._pending) < len(self._buckets):
            bucket = self._buckets[len(self._pending)]
            if bucket.pending > 0 and not final:
                return
            if self._settings.skip_unused:
                wanted = self._participation.wanted(bucket.members, final)
                if wanted is None:
                    return
                if not wanted:
                    self._leave_out(bucket)
                    continue
            self._launch(bucket)

    def _scale(self) -> float | None:
        return 1.0 / self._divisor if self._comm.divides else None

    def _launch(self, bucket: Bucket) -> None:
        engine.leave_context()
        if bucket.sparse:
            self._scale_sparse(bucket, self._scale())
        else:
            bucket.fill(self._scale())
            if self._aside:
                self._bring_back(bucket)
        index = bucket.index
        if self._fault is not None and self._in_band and index == len(self._buckets) - 1:
            self._tell_fault()
            bucket.buffer[0] = float("nan")
        record = self._record
        if record is None:
            self._pending.append(self._comm.launch(bucket, index == len(self._buckets) - 1))
            return
        now = self._recorder.now  # type: ignore[union-attr]
        record.launched_ns[index] = now()
        pending = self._comm.launch(bucket, index == len(self._buckets) - 1)
        self._pending.append(pending)
        work = getattr(pending, "work", None)
        if work is not None and self._tells_duration:
            record.works[index] = work
        done_ns = record.done_ns

        def done(_: object) -> None:
            done_ns[index] = now()

        pending.on_done(done)

    def _leave_out(self, bucket: Bucket) -> None:
        self._pending.append(_Nothing())
        if self._record is not None:
            self._record.ready_ns[bucket.index] = 0

    def _bring_back(self, bucket: Bucket) -> None:
        for member in bucket.members:
            if member in self._aside:
                self._parameters[member].grad = self._aside[member]

    # ------------------------------------------------------------------ the end of a backward

    def _finish(self) -> None:
        """The engine's last callback: wait for every bucket and settle what was left out."""
        recorder, record = self._recorder, self._record
        engine.leave_context()
        try:
            self._launch_the_rest()
            for pending in self._pending:
                pending.wait()
            self._listen(self._buckets[-1])
            self._settle()
        except UnusedParametersError as error:
            self._tell_left_out(error.parameters)
            raise
        finally:
            self._reset()
            self._used[:] = bytes(len(self._used))
        if recorder is not None and record is not None:
            recorder.finished(record)

    def _launch_the_rest(self) -> None:
        participation = self._participation
        if participation.holds:
            for bucket in self._buckets:
                bucket.pending -= 1
        missing = [i for bucket in self._buckets if bucket.pending > 0 for i in bucket.members if not self._fired[i]]
        ended = participation.end(self._used, missing)
        self._fault = self._fault or ended
        self._tell_fault()
        self._put_aside(missing)
        if self._settings.skip_unused:
            participation.share()
        self._launch_ready(final=True)
        participation.share()

    def _tell_fault(self) -> None:
        """Once, and before the last bucket goes: whoever has its sum then finds what every rank told."""
        if self._fault is not None and not self._told:
            self._told = True
            self._alarm.tell(self._fault)

    @property
    def _in_band(self) -> bool:
        """Whether the last bucket carries a NaN from one rank to all."""
        return self._comm.carries_nan and not self._buckets[-1].sparse and not self._settings.skip_unused

    def _listen(self, last: Bucket) -> None:
        """Raise the same error on every rank where some rank told of a fault."""
        if self._in_band:
            element = last.buffer[0]
        else:
            flag = last.parameters[0].new_full((1,), float("nan") if self._fault else 0.0, dtype=torch.float32)
            wait(all_reduce(self._group, [flag]))
            element = flag[0]
        if self._fault is not None:
            element.item()  # A device, too, has then heard every rank.
            self._alarm.read()
        self._alarm.look(element)

    def _settle(self) -> None:
        """Give `.grad` to what some rank used, and leave alone what nobody did."""
        found = self._participation.settle()
        if found is None:
            return
        locally, nobody = found
        self.unused_bytes = sum(self._parameters[i].numel() * self._parameters[i].element_size() for i in locally)
        for index in sorted(set(locally) - set(nobody)):
            bucket = self._bucket_of[index]
            if not bucket.sparse:
                self._parameters[index].grad = bucket.views[self._place_in_bucket[index]]
        if self._recorder is not None:
            self._recorder.unused([self._names[i] for i in locally], [self._names[i] for i in nobody])

    def _tell_left_out(self, parameters: dict[str, list[int]]) -> None:
        if self._recorder is not None:
            mine = self._group.rank()
            everywhere = [name for name, ranks in parameters.items() if len(ranks) == self._ranks]
            self._recorder.unused([name for name, ranks in parameters.items() if mine in ranks], everywhere)

    def _scale_sparse(self, bucket: Bucket, scale: float | None) -> None:
        parameter = bucket.parameters[0]
        if parameter.grad is None:
            parameter.grad = bucketing.no_rows(parameter)
        gradient = parameter.grad if parameter.grad.is_sparse else parameter.grad.to_sparse(1)
        parameter.grad = gradient.coalesce() * scale if scale is not None else gradient.coalesce()

    def _stamp_parameter(self, index: int) -> None:
        if self._stamps is not None and self._recorder is not None:
            self._stamps[self._place[index]] = self._recorder.now()

    def _reset(self) -> None:
        self._active = False
        self._outputs = []
        self._record = self._stamps = None
        self._pending = []
        self._fault, self._told = None, False
        self._aside = {}
        self._fired[:] = bytes(len(self._fired))
        self._divisor = self._ranks
        for bucket in self._buckets:
            bucket.reset()

    # ------------------------------------------------------------------ what a rank without data does

    def shadow(self) -> None:
        """Take part in another rank's backward with zeros, call for call."""
        participation = self._participation
        self._alarm.began()
        participation.abstain()
        shadows = [bucketing.shadow(bucket) for bucket in self._buckets]
        if self._settings.skip_unused:
            participation.share()
        last = shadows[-1]
        wanted = [bucket for bucket in shadows if participation.wanted(bucket.members, True)]
        pending = [self._comm.launch(bucket, bucket is last) for bucket in wanted]
        participation.share()
        for launched in pending:
            launched.wait()
        participation.settle()
        self._listen(last)
        if self._recorder is not None:
            self._recorder.shadowed()

    # ------------------------------------------------------------------ layout

    def _lay(self, assignment: Sequence[Sequence[int]]) -> None:
        """Build the buckets; gradients that are views of older ones move over."""
        laid = bucketing.build(self._parameters, assignment, self._expect_sparse, self._settings.as_views)
        of: dict[int, Bucket] = {}
        for bucket in laid:
            if self._held_dtype is not None:
                bucket.hold_in(self._held_dtype)
            for place, member in enumerate(bucket.members):
                of[member] = bucket
                older = self._bucket_of[member] if self._bucket_of else None
                gradient = self._parameters[member].grad
                if older and older.residual is not None:
                    bucket.owe(place, older, older.members.index(member))
                if older and not bucket.sparse and gradient is older.views[older.members.index(member)]:
                    bucket.views[place].copy_(gradient)
                    self._parameters[member].grad = bucket.views[place]
        self._buckets = laid
        self._bucket_of[:] = [of[index] for index in range(len(self._parameters))]
        self._place_in_bucket[:] = [of[index].members.index(index) for index in range(len(self._parameters))]
        flat = [member for bucket in laid for member in bucket.members]
        self._place = {member: place for place, member in enumerate(flat)}
        self._tell_layout()

    def rebuild(self) -> None:
        """Lay the buckets anew, in the order in which gradients came last on rank 0. Every rank calls it alike."""
        last = list(dict.fromkeys(reversed(self._order or [])))[::-1]
        rest = sorted(set(range(len(self._parameters))) - set(last))
        agreed = torch.tensor(last + rest, dtype=torch.int64, device=self._parameters[0].device)
        self._order = None
        wait(broadcast(self._group, [agreed]))
        limits = self._settings.rebuilt_limits_bytes
        self._lay(bucketing.assign_in_order(self._parameters, agreed.tolist(), limits, self._expect_sparse))
        if self._recorder is not None:
            self._recorder.event("buckets_rebuilt", buckets=len(self._buckets))

    def _tell_layout(self) -> None:
        if self._recorder is not None:
            self._recorder.layout([bucket.describe(self._names) for bucket in self._buckets], self._comm.name)

    def remove_hooks(self) -> None:
        """Let go of the parameters: their gradients are reduced no more."""
        while self._handles:
            self._handles.pop().remove()

    def set_comm(self, comm: BucketComm) -> None:
        """Have full buckets handed to `comm` from now on."""
        self._comm = comm
        self._tell_layout()

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

    def check_finished(self) -> None:
        """Raise where a backward was interrupted.

        Raises:
            ReducerError: A backward is under way, or was left by an error.
        """
        if self._active:
            raise ReducerError("a backward is still under way, or was interrupted by an error")


class _Nothing:
    """Stands where a bucket was left out."""

    def wait(self) -> None:
        """At once."""

    def on_done(self, told: Callable[[object], None]) -> None:
        """Never."""
