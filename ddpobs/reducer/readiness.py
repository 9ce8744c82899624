"""Readiness: start of a backward, a hook per parameter, and a count-down per bucket.

`Readiness` does no communication. It reports to its owner, the reducer, once per bucket or once per backward.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ddpobs.buckets.bucket import Bucket
from ddpobs.buckets.layout import Layout
from ddpobs.errors import ReducerError
from ddpobs.reducer.fault_broadcast import Fault
from ddpobs.reducer.participation import Participation
from ddpobs.reducer.static_graph import StaticGraph
from ddpobs.torch_seam import autograd

Hook = Callable[[torch.Tensor], None]


class BackwardCallbacks(Protocol):
    """Methods of the owner. They run on an autograd thread, or on the thread that calls `begin`."""

    def check_backward(self) -> None:
        """Raise if this backward cannot be reduced; then it never began."""
        ...

    def start_backward(self) -> list[Callable[[int], None]]:
        """Prepare the buckets. Returns functions to call with a parameter's index as its gradient arrives."""
        ...

    def stash_old_gradients(self, unreached: Sequence[int]) -> None:
        """Keep older gradients of these parameters, which will take no part."""
        ...

    def bucket_ready(self, bucket: Bucket) -> None:
        """Every gradient of the bucket has arrived."""
        ...

    def backward_ended(self) -> None:
        """The engine has run the backward, or the front end ends it."""
        ...

    def record_fault(self, fault: Fault) -> None:
        """Something is wrong with this backward."""
        ...


class Readiness:
    """Follows the gradients of one layout through each backward.

    Args:
        layout: The parameters and their buckets.
        nodes: The parameters' AccumulateGrad nodes, by which the engine identifies them. A node lives only as long as
            it is referenced.
        participation: Decides which parameters take part.
        callbacks: The owner.
        keeps_order: Record the order in which gradients arrive.
        ends_with_engine: Call `backward_ended` when the engine is done. Otherwise the front end ends a backward.
        wrap_hook: Wraps a parameter's hook, given its index; for gradients that are accumulated over several passes.

    Attributes:
        participation: As given; `restart` replaces it.
        active: A backward is in progress, or was interrupted by an error.
        expected: The next backward synchronises.
        watches: The outputs of the latest forward are watched.
        used: By parameter, whether it was reached since the last synchronised backward.
        local: The same as `used` for the gradients of a static graph's parameters outside of its backward passes.
        seen: By parameter, whether this backward no longer waits for it. All are set while there is no backward.
        order: Indices of the parameters as their gradients arrived, while the buckets are to be rebuilt; else None.
        waiting_nodes: AccumulateGrad nodes of parameters that the next backward is to take in.
    """

    def __init__(
        self,
        layout: Layout,
        nodes: Sequence[Node],
        participation: Participation,
        callbacks: BackwardCallbacks,
        *,
        keeps_order: bool,
        ends_with_engine: bool,
        wrap_hook: Callable[[int, Hook], Hook] | None = None,
    ) -> None:
        count = len(layout.parameters)
        self.participation = participation
        self.active = self.watches = False
        self.expected = self._previously_expected = True
        self.used, self.local = bytearray(count), bytearray(count)
        self.seen = bytearray(b"\1" * count)
        self.order: list[int] | None = [] if keeps_order else None
        self.waiting_nodes: Sequence[Node] = ()
        self._layout, self._nodes, self._callbacks = layout, nodes, callbacks
        self._ends_with_engine, self._wrap_hook = ends_with_engine, wrap_hook
        self._accumulates = False
        """A forward ran under `no_sync` since the last synchronised backward."""
        self._on_arrival: Callable[[int], None] | None = None
        """Additional work per gradient, by the parameter's index; only some backward passes have any."""
        self._handles: list[Any] = []
        # The engine runs one thread per device.
        self._lock = threading.RLock() if len({parameter.device for parameter in layout.parameters}) > 1 else None
        self._add_hooks()

    # ------------------------------------------------------------------ hooks

    def _add_hooks(self) -> None:
        first = len(self._handles)
        for index, parameter in enumerate(self._layout.parameters[first:], first):
            hook = self._hook(index)
            if self._wrap_hook is not None:
                hook = self._wrap_hook(index, hook)
            if self._lock is not None:
                hook = autograd.serialize(hook, self._lock)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        self._next_handle = RemovableHandle.next_id

    def remove_hooks(self) -> None:
        """Release the parameters: their gradients are no longer reduced."""
        while self._handles:
            self._handles.pop().remove()

    def restart(self, participation: Participation, keeps_order: bool) -> None:
        """Use another policy from the next backward on."""
        self.participation = participation
        self.order = [] if keeps_order else None
        self.remove_hooks()  # A static graph's hooks refer to its policy.
        self._add_hooks()

    def add_parameters(self, nodes: Sequence[Node], participation: Participation, keeps_order: bool) -> None:
        """Follow more parameters, which the layout has behind the others, between two backward passes.

        Args:
            nodes: All parameters' AccumulateGrad nodes.
            participation: Policy from the next backward on.
            keeps_order: As for the constructor.
        """
        self._nodes, self.participation, self.waiting_nodes = nodes, participation, ()
        self.order = [] if keeps_order else None
        added = len(nodes) - len(self.used)
        self.used.extend(bytes(added))
        self.local.extend(bytes(added))
        self.seen.extend(b"\1" * added)
        self._add_hooks()  # The others keep theirs: one that is frozen now could not get another.

    def _move_hooks_last(self) -> None:
        """Keep our hooks last, so that user hooks registered later still change the gradient before it is reduced.

        `RemovableHandle.next_id` counts all hooks of the process. If it did not change, there is no new hook.
        """
        if self._next_handle == RemovableHandle.next_id:
            return
        self._next_handle = RemovableHandle.next_id
        for parameter, handle in zip(self._layout.parameters, self._handles, strict=False):
            hooks: Any = parameter._post_accumulate_grad_hooks or {}
            if next(reversed(hooks), None) != handle.id and handle.id in hooks:
                hooks[handle.id] = hooks.pop(handle.id)

    # ------------------------------------------------------------------ start of a backward

    def expect(self, synchronises: bool) -> None:
        """A forward with differentiable outputs was called; its backward synchronises or does not."""
        self._previously_expected, self.expected = self.expected, synchronises
        self._accumulates = self._accumulates or not synchronises
        self.watches = False
        self._move_hooks_last()

    def forward_failed(self) -> None:
        """The forward raised, so that the next backward belongs to an earlier one."""
        self.expected = self._previously_expected

    def watch(self, outputs: Sequence[torch.Tensor], is_foreign: Callable[[], bool] | None = None) -> None:
        """Start the backward at a forward's outputs. A loss that reaches no parameter calls no parameter's hook.

        Args:
            outputs: Tensors of the forward's result.
            is_foreign: Whether the forward used other parameters than ours. Then only a hook of ours starts a backward.
        """
        if not self._handles:
            return
        readiness, nodes, parameters = weakref.ref(self), self._nodes, self._layout.parameters

        def begin(output: Node) -> None:
            alive = readiness()
            if is_foreign is not None and is_foreign():
                return
            if alive is not None and alive._handles:
                alive._begin_at_output(output)
            elif any(p.requires_grad for p in parameters) and autograd.concerns(nodes, output):
                raise ReducerError(
                    "the gradients of this backward cannot be reduced: its DistributedDataParallel was deleted after "
                    "the forward, or its hooks were removed. Keep it until the backward is over"
                )

        watched = autograd.watch(outputs, begin)
        self.watches = watched > 0
        self._next_handle += watched

    def _begin_at_output(self, output: Node) -> None:
        """The gradient of an output was computed: start the backward if it is to accumulate into our parameters."""
        with self._lock or nullcontext():
            if not self.active and self._concerns_parameters(output):
                self._move_hooks_last()
                self.begin()

    def _concerns_parameters(self, output: Node) -> bool:
        """False if all are frozen for now, as a discriminator's are while its generator trains."""
        trains = self.waiting_nodes or any(p.requires_grad for p in self._layout.parameters)
        return bool(trains) and autograd.concerns([*self._nodes, *self.waiting_nodes], output)

    def begin(self) -> None:
        """Start a backward at its first sign: decide which parameters take part, and launch complete buckets."""
        self._callbacks.check_backward()
        autograd.refuse_compiled()
        self.active = True
        autograd.leave_context()
        if self.order is not None:
            self.order.clear()
        if self._ends_with_engine:
            self._call_at_end()
        callbacks = self._callbacks.start_backward()
        self._on_arrival = _combined(callbacks if self.order is None else [*callbacks, self.order.append])
        self.seen[:] = bytes(len(self.seen))
        if self.participation.defers_launch:
            for bucket in self._layout.buckets:
                bucket.pending += 1
        unreached = self.participation.begin(self.used)
        self._callbacks.stash_old_gradients(unreached)
        for index in unreached:
            self.seen[index] = 1
            bucket = self._layout.bucket_of[index]
            bucket.pending -= 1
            if not bucket.pending:
                self._callbacks.bucket_ready(bucket)

    def _call_at_end(self) -> None:
        """Have `backward_ended` called when the engine is done with this backward."""
        if self.watches:
            Variable._execution_engine.queue_callback(self._callbacks.backward_ended)
        else:  # The outputs are inside an opaque object, so this may be a checkpoint's own backward.
            autograd.call_at_end(self._callbacks.backward_ended)

    # ------------------------------------------------------------------ a gradient

    def _hook(self, index: int) -> Hook:
        """The parameter's post-accumulate hook. The last hook of a bucket reports the bucket.

        A matmul between two hooks evicts all of this from the caches, so every memory location that a hook reads costs.
        """
        layout = self._layout
        bucket_of, slot_of, used, seen = layout.bucket_of, layout.index_in_bucket, self.used, self.seen
        bucket_ready = self._callbacks.bucket_ready

        def gradient_ready(parameter: torch.Tensor) -> None:
            if seen[index] and not self._starts_backward(index):
                return
            seen[index] = used[index] = 1
            if self._on_arrival is not None:
                self._on_arrival(index)
            bucket = bucket_of[index]
            if bucket.copies_on_arrival:
                bucket.copy_in(slot_of[index], parameter)
            bucket.pending -= 1
            if not bucket.pending:
                bucket_ready(bucket)

        if isinstance(self.participation, StaticGraph):
            return self._hook_of_static_graph(index, gradient_ready, self.participation)
        return gradient_ready

    def _hook_of_static_graph(self, index: int, gradient_ready: Hook, static: StaticGraph) -> Hook:
        """The hook of a parameter that may arrive several times; only the last arrival makes it ready."""

        def gradient_accumulated(gradient: torch.Tensor) -> None:
            if not self.active:
                if not self.expected:
                    # Otherwise it belongs to a backward that the user runs without the DDP module.
                    if static.defers_launch or self._accumulates:
                        self.used[index] = 1
                    self.local[index] = 1
                    return
                self.begin()
            if not static.defers_launch:
                if static.is_last_arrival(index):
                    gradient_ready(gradient)
                elif static.remaining[index] < 0 and not static.is_undefined(index, gradient):
                    self._callbacks.record_fault(static.changed([index]))
                return
            if self.order is not None:
                self.order.append(index)
            if static.is_last_arrival(index):
                self.seen[index] = self.used[index] = 1
                self._layout.bucket_of[index].pending -= 1

        return gradient_accumulated

    def _starts_backward(self, index: int) -> bool:
        """Whether a gradient that no backward waits for starts a synchronised backward."""
        if not self.active:
            if not self.expected:
                self.used[index] = 1
                return False
            self.begin()
            if not self.seen[index]:
                return True
        self._fault_on_second_arrival(index)
        return False

    def _fault_on_second_arrival(self, index: int) -> None:
        """Report a second gradient in one backward. A first one that was not announced is the policy's to report."""
        if not self.used[index]:
            self.used[index] = 1
            return
        self._callbacks.record_fault(
            Fault(
                message=f"parameter {self._layout.names[index]} was ready twice in one backward: it takes part in "
                "several reentrant checkpoints. Use checkpoint(..., use_reentrant=False), or static_graph=True"
            )
        )

    # ------------------------------------------------------------------ end of a backward

    def forget_undefined(self) -> None:
        """Count parameters that were reached without a gradient as not reached, as torch's DDP does.

        A custom function that returned None for a gradient is the cause.
        """
        for index, parameter in enumerate(self._layout.parameters):
            if self.used[index] and parameter.grad is None:
                self.used[index] = self.seen[index] = 0

    def unseen(self) -> list[int]:
        """Indices of the parameters that this backward still waits for, in the order of the buckets."""
        return [index for bucket in self._layout.buckets for index in bucket.members if not self.seen[index]]

    def reset(self) -> None:
        """Prepare for the next backward."""
        self.active = self._accumulates = self.watches = False
        self._on_arrival = None
        self.used[:] = self.local[:] = bytes(len(self.used))
        self.seen[:] = b"\1" * len(self.seen)
        self.participation.forget()
        for bucket in self._layout.buckets:
            bucket.reset()


def _combined(callbacks: Sequence[Callable[[int], None]]) -> Callable[[int], None] | None:
    """A single function that calls all of them; None if there are none."""
    if len(callbacks) < 2:
        return next(iter(callbacks), None)

    def call_each(index: int) -> None:
        for callback in callbacks:
            callback(index)

    return call_each
