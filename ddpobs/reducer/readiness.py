"""When gradients are there: what begins a backward, who takes part in it, and a hook per parameter.

`Readiness` knows nothing of communication: the reducer, which is one, is told of each bucket whose gradients have all
come (`_ready`), and that the backward is over (`_finish`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ddpobs.buckets import assignment
from ddpobs.buckets.bucket import Bucket
from ddpobs.buckets.layout import Layout
from ddpobs.clocks import Stamp
from ddpobs.errors import ReducerError
from ddpobs.reducer.fault_broadcast import Fault, FaultBroadcast
from ddpobs.reducer.observer import BackwardStamps, Observer
from ddpobs.reducer.participation import AllRequired, FindUnused, Participation, StaticGraph
from ddpobs.reducer.used_map import UsedMap
from ddpobs.torch_seam import autograd


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


class Readiness:
    """Follows the gradients of one set of parameters through each backward.

    Args:
        parameters: Those that require a gradient, in the module's order.
        names: Theirs.
        expect_sparse: Which of them get sparse gradients.
        settings: The constructor's.
        used_map: Which parameters each rank used.
        alarm: Told what is wrong with a backward.
        recorder: Told that one begins, or None with telemetry off.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        expect_sparse: Sequence[bool],
        *,
        settings: Settings,
        used_map: UsedMap,
        alarm: FaultBroadcast,
        recorder: Observer | None,
    ) -> None:
        self._parameters, self._names, self._expect_sparse = list(parameters), list(names), list(expect_sparse)
        self._settings, self._used_map, self._faults, self._recorder = settings, used_map, alarm, recorder
        self._participation = self._participating(static=settings.static_graph)
        self._order: list[int] | None = [] if self._rebuilds else None
        self._expected = self._expected_before = True
        self._accumulates = False
        """A forward under `no_sync` has come since the last synchronised backward."""
        self._active = False
        self._watches = False
        self._used = bytearray(len(names))
        self._seen = bytearray(b"\1" * len(names))
        """By parameter, whether this backward awaits it no more; none is awaited while there is no backward."""
        self._now: Callable[[], Stamp] = recorder.now if recorder is not None else int
        self._record: BackwardStamps | None = None
        self._note: Callable[[int], None] | None = None
        """What only some backward passes do with each gradient, by the parameter's index, as it comes."""
        self._layout = Layout(self._parameters, self._names, self._expect_sparse, settings.as_views)
        self._buckets, self._bucket_of = self._layout.buckets, self._layout.bucket_of
        self._index_in_bucket, self._flat_index = self._layout.index_in_bucket, self._layout.flat_index
        self._layout.build(self._first_assignment())
        # The engine knows a parameter by its AccumulateGrad node, which only lives as long as someone holds it.
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self._parameters]
        self._handles: list[Any] = []
        self._lock = threading.RLock() if len({parameter.device for parameter in self._parameters}) > 1 else None
        """Where the model is on several devices, for each of which the engine has a thread."""
        self._add_hooks()

    # ------------------------------------------------------------------ for the reducer to say

    def _ready(self, bucket: Bucket) -> None:
        """Every gradient of the bucket has come."""
        raise NotImplementedError

    def _finish(self) -> None:
        """The backward is over."""
        raise NotImplementedError

    def _divides_by(self) -> float | None:
        """What gradients are divided by on their way into a bucket; None for nothing."""
        raise NotImplementedError

    def _stash_old_gradients(self, unreached: Sequence[int]) -> None:
        """These parameters will take no part."""
        raise NotImplementedError

    # ------------------------------------------------------------------ who takes part

    def _first_assignment(self) -> list[list[int]]:
        return assignment.assign(self._parameters, self._settings.first_limits_bytes, self._expect_sparse)

    @property
    def _rebuilds(self) -> bool:
        return isinstance(self._participation, (AllRequired, StaticGraph))

    def _participating(self, static: bool) -> Participation:
        if static:
            return StaticGraph(self._names, self._used_map)
        if self._settings.find_unused:
            return FindUnused(self._names, self._unreached, self._used_map, self._settings.skip_unused)
        return AllRequired(self._names)

    def switch_to_static_graph(self) -> None:
        """From now on the same parameters take part in every backward; known at construction as a rule."""
        if isinstance(self._participation, StaticGraph):
            return
        self._settings = replace(self._settings, static_graph=True, skip_unused=False)
        self._participation = self._participating(static=True)
        self._order = []
        self.remove_hooks()
        self._add_hooks()

    def _add_hooks(self) -> None:
        for index, parameter in enumerate(self._parameters):
            hook = self._hook(index) if self._lock is None else autograd.one_at_a_time(self._hook(index), self._lock)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._next_handle = RemovableHandle.next_id

    def _move_hooks_last(self) -> None:
        """Have hooks of the user's that were registered after ours run before them, on this rank's own gradients.

        They could not change a gradient that is on its way already. Handles of all hooks are numbered, so that most
        times one number tells that there is no new one.
        """
        if self._next_handle == RemovableHandle.next_id:
            return
        self._next_handle = RemovableHandle.next_id
        for parameter, handle in zip(self._parameters, self._handles, strict=False):
            hooks: Any = parameter._post_accumulate_grad_hooks or {}
            if next(reversed(hooks), None) != handle.id and handle.id in hooks:
                hooks[handle.id] = hooks.pop(handle.id)

    def remove_hooks(self) -> None:
        """Let go of the parameters: their gradients are reduced no more."""
        while self._handles:
            self._handles.pop().remove()

    # ------------------------------------------------------------------ the begin of a backward

    def prepare(self, synchronises: bool) -> None:
        """A forward that can be differentiated was called; a backward that an error ended is brought to its end."""
        self._faults.poll_flags()
        self._expected_before, self._expected = self._expected, synchronises
        self._accumulates = self._accumulates or not synchronises
        self._watches = False
        self._move_hooks_last()
        self.end_interrupted()

    def forward_failed(self) -> None:
        """The forward raised: a backward that comes now is none of it."""
        self._expected = self._expected_before

    def expect_backward(self) -> None:
        """The next backward synchronises, whatever its forward was told."""
        self._expected = True
        self.end_interrupted()

    def end_interrupted(self) -> None:
        """Bring a backward that an error ended to its end, before anything else is said to the other ranks."""
        raise NotImplementedError

    def watch(self, outputs: Sequence[torch.Tensor]) -> None:
        """Begin the backward at a forward's outputs: a loss that reaches no parameter fires no parameter's hook."""
        if not self._handles:
            return
        reducer, nodes, parameters = weakref.ref(self), self._nodes, self._parameters

        def begin(output: Node) -> None:
            alive = reducer()
            if alive is not None and alive._handles:
                alive.begin_at_output(output)
            elif any(p.requires_grad for p in parameters) and autograd.concerns(nodes, output):
                raise ReducerError(
                    "nobody is left to reduce the gradients of this backward: its DistributedDataParallel was deleted "
                    "after the forward, or had its hooks removed. Keep it until the backward is over"
                )

        watched = autograd.watch(outputs, begin)
        self._watches = watched > 0
        self._next_handle += watched

    def begin_at_output(self, output: Node) -> None:
        """An output got a gradient: the backward begins, unless it is one that wants no parameter's gradient."""
        with self._lock or nullcontext():
            if not self._active and self._concerns_parameters(output):
                self._move_hooks_last()
                self.begin()

    def _concerns_parameters(self, output: Node) -> bool:
        """Frozen for now they are not concerned, as a discriminator is while its generator trains."""
        return any(p.requires_grad for p in self._parameters) and autograd.concerns(self._nodes, output)

    def begin(self) -> None:
        """The first sign of a backward. Decides who will take part and starts what can be started at once."""
        autograd.refuse_compiled()
        self._active = True
        autograd.leave_context()
        if self._order is not None:
            self._order.clear()
        self._await_end()
        self._faults.start_backward()
        if self._recorder is not None:
            self._record = self._recorder.backward()
        self._note = _all_of(self._notes())
        divisor = self._divides_by()
        for bucket in self._buckets:
            bucket.divisor = divisor
            if bucket.copies_on_arrival:  # The others do so when they are filled.
                bucket.memory.restore_views()
            if not self._settings.as_views:
                bucket.reallocate_if_held()
        self._seen[:] = bytes(len(self._seen))
        if self._participation.defers_launch:
            for bucket in self._buckets:
                bucket.pending += 1
        unreached = self._participation.begin(self._used)
        self._stash_old_gradients(unreached)
        for index in unreached:
            self._seen[index] = 1
            self._count_down(self._bucket_of[index])

    def _await_end(self) -> None:
        """Have `_finish` called when the engine is done with this backward."""
        if self._watches:
            Variable._execution_engine.queue_callback(self._finish)
        else:  # They hide in something that nobody can look into, and this may be a checkpoint's own backward.
            autograd.at_end(self._finish)

    def _unreached(self) -> list[int]:
        return autograd.unreached(self._nodes)

    # ------------------------------------------------------------------ a gradient

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """The parameter's post-accumulate hook, and the bucket's launch when it is the last.

        A matmul between two of them leaves nothing of this in the caches, so that every place that is looked at costs.
        """
        bucket_of, place_of, used, fired = self._bucket_of, self._index_in_bucket, self._used, self._seen

        def gradient_ready(parameter: torch.Tensor) -> None:
            if fired[index] and not self._starts_backward(index):
                return
            fired[index] = used[index] = 1
            if self._note is not None:
                self._note(index)
            bucket = bucket_of[index]
            if bucket.copies_on_arrival:
                bucket.copy_in(place_of[index], parameter)
            bucket.pending -= 1
            if not bucket.pending:
                self._ready(bucket)

        return self._hook_of_static_graph(index, gradient_ready) if self._settings.static_graph else gradient_ready

    def _hook_of_static_graph(
        self, index: int, gradient_ready: Callable[[torch.Tensor], None]
    ) -> Callable[[torch.Tensor], None]:
        """The same where a parameter may come several times: only the last time makes it ready."""
        static = self._participation
        assert isinstance(static, StaticGraph)

        def came(gradient: torch.Tensor) -> None:
            if not self._active:
                if not self._expected:
                    if static.defers_launch or self._accumulates:  # Otherwise it is of a backward of the user's own.
                        self._used[index] = 1
                    return
                self.begin()
            if not static.defers_launch:
                if static.is_last_arrival(index):
                    gradient_ready(gradient)
                elif static.remaining[index] < 0:
                    self._faults.record(static.changed([index]))
                return
            if self._order is not None:
                self._order.append(index)
            if static.is_last_arrival(index):
                self._seen[index] = self._used[index] = 1
                self._bucket_of[index].pending -= 1

        return came

    def _starts_backward(self, index: int) -> bool:
        """A gradient that no backward awaited: whether one begins with it, that synchronises."""
        if not self._active:
            if not self._expected:
                self._used[index] = 1
                return False
            self.begin()
            if not self._seen[index]:
                return True
        self._fault_on_second_arrival(index)
        return False

    def _notes(self) -> list[Callable[[int], None]]:
        """What there is to be noted of each gradient in the backward that begins: when it came, and after which."""
        notes: list[Callable[[int], None]] = []
        stamps = self._record.parameter_ready_ns if self._record is not None else None
        if stamps is not None:
            position_of, now = self._flat_index, self._now

            def stamp(index: int) -> None:
                stamps[position_of[index]] = now()

            notes.append(stamp)
        if self._order is not None:
            notes.append(self._order.append)
        return notes

    def _count_down(self, bucket: Bucket) -> None:
        bucket.pending -= 1
        if bucket.pending == 0:
            self._ready(bucket)

    def _fault_on_second_arrival(self, index: int) -> None:
        """A second gradient in one backward, or one of a parameter that was not announced (which that policy tells)."""
        if not self._used[index]:
            self._used[index] = 1
        else:
            self._faults.record(
                Fault(
                    message=f"parameter {self._names[index]} was ready twice in one backward: it takes part in several "
                    "reentrant checkpoints. Use checkpoint(..., use_reentrant=False), or static_graph=True"
                )
            )

    def _reset(self) -> None:
        self._active = self._accumulates = False
        self._watches = False
        self._record = self._note = None
        self._seen[:] = b"\1" * len(self._seen)
        self._faults.forget()
        self._participation.forget()
        for bucket in self._buckets:
            bucket.reset()

    def check_finished(self) -> None:
        """Raise where a backward was interrupted.

        Raises:
            ReducerError: A backward is under way, or was left by an error.
        """
        if self._active:
            raise ReducerError("a backward is still under way, or was interrupted by an error")


def _all_of(calls: Sequence[Callable[[int], None]]) -> Callable[[int], None] | None:
    """One call for them; None where there are none."""
    if len(calls) < 2:
        return next(iter(calls), None)

    def each(index: int) -> None:
        for call in calls:
            call(index)

    return each
