"""The reduction of a DDP module: follows the module's forward calls, and rebuilds the buckets once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from operator import attrgetter
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import override

from ddpobs.buckets.bucket import Bucket
from ddpobs.comm import CommFactory, CommHook, Pending
from ddpobs.errors import ReducerError
from ddpobs.observers import ModuleObserver
from ddpobs.reducer import model_check, pipeline_steps, shared_parameters, zero_participation
from ddpobs.reducer.auto_caps import AutoCaps
from ddpobs.reducer.ddp_timings import Timings
from ddpobs.reducer.fault_broadcast import Fault
from ddpobs.reducer.front_end import FrontEnd
from ddpobs.reducer.late_parameters import Frozen
from ddpobs.reducer.reducer import Reducer
from ddpobs.reducer.settings import Settings
from ddpobs.reducer.substitution import Substitution
from ddpobs.torch_seam import autograd
from ddpobs.torch_seam.collectives import wait_for

_open: weakref.WeakKeyDictionary[dist.ProcessGroup, list[weakref.ref[ModuleReducer]]] = weakref.WeakKeyDictionary()
"""By group, the reducers with a backward in progress, in the order of their start: the same order on every rank."""

_dtype = attrgetter("dtype")

_P = ParamSpec("_P")
_Reducer = TypeVar("_Reducer", bound="ModuleReducer")


def logs_errors(
    method: Callable[Concatenate[_Reducer, _P], None],
) -> Callable[Concatenate[_Reducer, _P], None]:
    """Keep the message of a method's error for `_get_ddp_logging_data`."""

    @wraps(method)
    def logged(self: _Reducer, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except RuntimeError as error:
            self.error = str(error)
            raise

    return logged


class ModuleReducer(FrontEnd):
    """The front end of a DDP module: follows the module's forward calls, and rebuilds the buckets once.

    Args:
        parameters: The parameters that require a gradient, in the module's order.
        names: Their names.
        expect_sparse: By parameter, whether its gradient is sparse.
        module: Owns the parameters.
        group: The process group.
        comm_factory: Creates the communication strategy for the group.
        settings: The constructor's choices.
        recorder: Receives the times of each bucket; None with telemetry off.
        frozen: The parameters that require no gradient now, and may do so later.

    Attributes:
        core: Launches the buckets and waits for them.
        timings: Torch's own coarse times.
        forwards: Forwards with gradients so far.
        rebuilt: The buckets have been rebuilt.
        first_bucket_bytes: Size of each bucket before.
        error: The last error's message; empty if there was none.
        gradient_order: Indices of the parameters as their gradients arrived in the last backward that was observed.
        auto_caps: Tries other buckets, once they have been rebuilt; None unless the settings ask for it.
        after_step: In a step of a pipeline's schedule, called when the buckets have arrived.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        expect_sparse: Sequence[bool],
        *,
        module: torch.nn.Module,
        group: dist.ProcessGroup,
        comm_factory: CommFactory,
        settings: Settings,
        recorder: ModuleObserver | None,
        frozen: Iterable[Frozen] = (),
    ) -> None:
        self._weak_self, self._module = weakref.ref(self), weakref.ref(module)
        self._forward_work: Any = None
        self._post_backward_futures: tuple[Any, ...] = ()
        self._thread = 0
        self.core = Reducer(
            parameters,
            names,
            expect_sparse,
            group=group,
            comm_factory=comm_factory,
            settings=settings,
            recorder=recorder,
            front_end=self,
            frozen=frozen,
        )
        self._readiness = self.core.readiness
        self._open = _open.setdefault(group, [])
        self._divisor: float = self.core.ranks
        self._dtypes = list(map(_dtype, parameters))
        # As in torch, a backward without a forward of the DDP module belongs to the user alone.
        self._readiness.expected = False
        self.timings = Timings()
        self.forwards, self._compared_comm = 0, False
        self.rebuilt, self.error = False, ""
        self.first_bucket_bytes = self.bucket_bytes
        self._substitution = Substitution(module, names[0], parameters[0])
        self.gradient_order: list[int] = []
        self.auto_caps: AutoCaps | None = None
        self._launched_in_step: list[ModuleReducer] | None = None
        self.after_step: Callable[[], object] | None = None

    @property
    def bucket_bytes(self) -> list[int]:
        """Size of each bucket in launch order."""
        return self.core.bucket_bytes

    # ------------------------------------------------------------------ forward

    @logs_errors
    def prepare(self, synchronises: bool) -> None:
        """Prepare for a forward whose outputs can be differentiated. Ends a backward that an error interrupted."""
        self._thread = get_ident()
        self.forwards += 1
        self.core.faults.poll_flags()
        self.core.look_for_late_parameters()
        self._readiness.expect(synchronises)
        self.end_interrupted()
        self.core.settings.drops.draw()
        if synchronises:
            self.timings.forward_began()

    def forward_failed(self) -> None:
        """The forward raised, so that the next backward belongs to an earlier one."""
        self._readiness.forward_failed()

    def watch(self, outputs: Sequence[torch.Tensor]) -> None:
        """Start the backward at a forward's outputs."""
        is_over = self._substitution.is_over
        self._readiness.watch(outputs, None if is_over() else is_over)

    def prepare_for_forward(self) -> None:
        """Nothing to do: `prepare` is called for every forward."""

    def prepare_for_backward(self, outputs: list[torch.Tensor]) -> None:
        """Synchronise in the next backward, even if its forward ran under `no_sync`.

        Pipeline stages, Accelerate's `trigger_sync_in_backward` and Lightning's manual optimisation call it themselves.
        """
        pipeline_steps.install()  # A script may import the schedules after the module was built.
        self._readiness.expected = True
        self.core.look_for_late_parameters()
        self.end_interrupted()
        if outputs and not self._readiness.watches:
            self.watch(outputs)

    # ------------------------------------------------------------------ backward, as the core calls it

    @override
    @logs_errors
    def check_backward(self) -> None:
        self._refuse()
        if torch.is_grad_enabled():
            autograd.warn_of_graph()
        self._divisor = self.core.ranks
        if self._forward_work is not None:  # Under `join` it counts the ranks that still have data.
            wait_for(self._forward_work)
            (ranks,) = self._forward_work.get_future().value()
            self._divisor = float(ranks.item())
            self._forward_work = None
        self._compare_comm()
        self.core.settings.drops.backward_began()
        self.timings.mark("backward_began")
        if self.auto_caps is not None:
            self.auto_caps.backward_began(self.forwards)
        if self._open:
            shared_parameters.share(self.core, [r.core for r in self._open_reducers() if not r.awaits_step_end])
        self._open.append(self._weak_self)

    def _compare_comm(self) -> None:
        """In a group's first backward, compare the ranks' strategies and the arguments of their LayerDrops.

        Raises:
            ModelsDifferError: A hook is missing on some ranks, or some are others. Raised on every rank.
        """
        if self._compared_comm:
            return
        self._compared_comm = True
        comm, drops = self.core.comm.name, str(self.core.settings.drops)
        facts = {model_check.SETTINGS: [("the communication hook or strategy", comm), ("LayerDrop", drops)]}
        model_check.check_same_everywhere(facts, None, self.core.group, self.core.layout.parameters[0].device)

    def _refuse(self) -> None:
        """Raise before anything is launched, on every rank alike.

        Raises:
            ReducerError: Autograd itself is compiled, or a parameter was converted.
        """
        autograd.refuse_compiled()
        if self.core.layout.dtype is not None:
            return
        # 0.04 µs each. A move to another device moves the whole model, so that one parameter's device is enough.
        dtypes = list(map(_dtype, self.core.layout.parameters))
        index = 0
        if dtypes != self._dtypes:
            index = next(i for i, (a, b) in enumerate(zip(dtypes, self._dtypes, strict=True)) if a != b)
        parameter, dtype = self.core.layout.parameters[index], self._dtypes[index]
        device = self.core.layout.bucket_of[index].buffer.device
        if (parameter.dtype, parameter.device) != (dtype, device):
            raise ReducerError(
                f"parameter {self.core.layout.names[index]} was {dtype} on {device} when DistributedDataParallel was "
                f"built, and is {parameter.dtype} on {parameter.device} now: convert the module first, then wrap it"
            )

    @override
    def divisor(self) -> float | None:
        return self._divisor if self.core.comm.divides else None

    @override
    def arrival_callbacks(self) -> list[Callable[[int], None]]:
        sampled: list[Callable[[int], None]] = [self.timings.ready] if self.timings.sampling else []
        return sampled if self.auto_caps is None else [*sampled, *self.auto_caps.arrival_callbacks]

    @override
    def bucket_launched(self, bucket: Bucket, pending: Pending) -> None:
        if self.auto_caps is not None:
            self.auto_caps.bucket_launched(bucket, pending)

    @override
    def first_launch(self) -> None:
        self.timings.mark("comm_began")

    @override
    @logs_errors
    def backward_ended(self) -> None:
        self.timings.mark("backward_ended")
        if self._readiness.order:
            self.gradient_order = list(self._readiness.order)
        try:
            self.core.launch_rest()
            if self._launched_in_step is None:
                self._finish()
            else:
                self._launched_in_step.append(self)
        finally:
            self._readiness.expected = False

    def _finish(self) -> None:
        """Wait for the buckets."""
        futures = self._post_backward_futures
        self.core.finish()
        self.timings.comm_ended()
        if futures:
            torch.futures.wait_all(list(futures))

    @override
    def explain(self, fault: Fault) -> Fault:
        module = self._module()
        if module is None:
            return fault
        wrapped = dict(zip(self.core.layout.names, self.core.layout.parameters, strict=True))
        present = dict(module.named_parameters())
        replaced = [name for name in fault.missing if present.get(name, wrapped[name]) is not wrapped[name]]
        if not replaced:
            return fault
        return Fault(
            message=f"{len(replaced)} parameters, {replaced[0]} first, were replaced after DistributedDataParallel was "
            "built, and the new ones are not reduced: replace them first (load_state_dict(..., assign=True) does), "
            "then wrap the module"
        )

    @override
    def write_results(self, late: Sequence[Bucket]) -> None:
        shared_parameters.write_back(self.core, (other.core for other in self._open_reducers()))

    @override
    def parameters_added(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._dtypes += map(_dtype, parameters)
        self._keep_buckets("parameters were added")

    def _keep_buckets(self, reason: str) -> None:
        if self.auto_caps is not None:
            self.auto_caps.stop(reason)

    @override
    def reset(self) -> None:
        self._post_backward_futures = ()
        if self._weak_self in self._open:
            self._open.remove(self._weak_self)

    def _open_reducers(self) -> Iterator[ModuleReducer]:
        for reference in self._open:
            if (reducer := reference()) is not None:
                yield reducer

    # ------------------------------------------------------------------ a step of a pipeline's schedule

    def enter_step(self, launched: list[ModuleReducer], /) -> None:
        """Begin a schedule's step, as `pipeline_steps.StepReducer` describes."""
        self._launched_in_step, self.core.waits_later = launched, True

    def leave_step(self) -> None:
        """End the step."""
        self._launched_in_step, self.after_step, self.core.waits_later = None, None, False

    @property
    def awaits_step_end(self) -> bool:
        """Whether the schedule's step will wait for this reducer's buckets at its end."""
        return self._launched_in_step is not None and self in self._launched_in_step

    @logs_errors
    def finish_step(self) -> None:
        """Wait for the buckets at the end of the step, outside of backward."""
        recorder, after = self.core.recorder, self.after_step
        self.after_step = None
        recorded = recorder is not None and recorder.waiting_began()
        try:
            with torch.no_grad():
                self._finish()
        finally:
            if recorder is not None and recorded:
                recorder.waiting_ended()
        if after is not None:
            after()

    # ------------------------------------------------------------------ without gradients

    def end_interrupted(self) -> None:
        """End every backward of the group that an error interrupted: one backward may run through several modules."""
        # Inside a backward, checkpointing runs a module again: that backward is not interrupted.
        if not self._open or torch._C._current_graph_task_id() >= 0:
            return
        interrupted = [reducer for reducer in self._open_reducers() if not reducer.awaits_step_end]
        if interrupted and all(reducer._thread != get_ident() for reducer in interrupted):
            return  # A backward of the training thread is in progress while another thread evaluates a model.
        self._open[:] = [reducer._weak_self for reducer in self._open_reducers() if reducer.awaits_step_end]
        endings = [zero_participation.abort(reducer.core) for reducer in interrupted]
        for _ in range(2):
            for ending in endings:
                next(ending, None)

    def participate_with_zeros(self) -> None:
        """Take part in another rank's backward, as a rank that is out of data."""
        self._compare_comm()
        self.core.settings.drops.backward_began()
        if self.auto_caps is not None:
            self.auto_caps.shadow_began()
        zero_participation.participate(self.core)

    def remove_hooks(self) -> None:
        """Release the parameters: their gradients are no longer reduced."""
        self._readiness.remove_hooks()

    def set_group(self, group: dist.ProcessGroup) -> None:
        """Reduce over this process group from now on."""
        self._keep_buckets("the process group was changed")
        self._open = _open.setdefault(group, [])
        self._compared_comm = False  # Its ranks may be others.
        self.core.set_group(group, keeps_comm=isinstance(self.core.comm, CommHook))

    # ------------------------------------------------------------------ gradients that were not reduced

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters that are reduced."""
        return self.core.layout.parameters

    @property
    def names(self) -> Sequence[str]:
        """Their names."""
        return self.core.layout.names

    @property
    def unreduced_parameters(self) -> Sequence[tuple[str, torch.nn.Parameter]]:
        """Parameters that would not be reduced if they required gradients: none."""
        return ()

    def has_local_gradients(self) -> bool:
        """Whether a gradient arrived outside of a synchronised backward, and since the last one."""
        readiness = self._readiness
        return not readiness.active and (1 in readiness.used or 1 in readiness.local)

    def local_gradients(self) -> list[int]:
        """Indices of the parameters whose gradient did."""
        readiness = self._readiness
        return [index for index, (a, b) in enumerate(zip(readiness.used, readiness.local, strict=True)) if a or b]
