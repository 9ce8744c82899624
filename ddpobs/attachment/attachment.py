"""The same telemetry for torch's own DDP, whose C++ reducer reports nothing per bucket.

Torch's reducer receives a process group that records its collectives: each bucket's all-reduce, the map of unused
parameters, and the new order of parameters when the buckets are rebuilt. That group forwards every call to the real
group. The result is therefore the same to the bit, and `model.process_group` does not change. A post-accumulate hook on
each parameter records readiness. A user's communication hook does not use the group, and is timed itself.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BuiltinCommHookType, GradBucket
from torch.autograd import Variable
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpobs import config as settings
from ddpobs import telemetry, wire
from ddpobs.attachment import ddp_class_patches
from ddpobs.attachment.observed_group import ObservedGroup
from ddpobs.attachment.readiness import Readiness
from ddpobs.attachment.torch_layout import Reduction, TorchBuckets, current_layout, real_numbers, reducer_settings
from ddpobs.errors import DataParallelError, DdpobsError
from ddpobs.never_raises import goes_on_without, never_raises
from ddpobs.observers import ModuleObserver
from ddpobs.torch_seam import autograd
from ddpobs.torch_seam.collectives import time_collectives
from ddpobs.torch_seam.interpreter_exit import rest_at_exit, stay_in_interpreter
from ddpobs.torch_seam.modes import unseen
from ddpobs.torch_seam.patching import skip_in_dynamo

_attachments: weakref.WeakKeyDictionary[Any, Attachment] = weakref.WeakKeyDictionary()
_groups: weakref.WeakKeyDictionary[Any, list[ObservedGroup]] = weakref.WeakKeyDictionary()
"""By model. Torch may hold a group as long as the model lives, in a built-in hook for example; so must Python."""
_class_patches = ddp_class_patches.DDPClassPatches(_attachments)


def attach(
    model: DistributedDataParallel, telemetry: bool | str | settings.TelemetryConfig | None = True
) -> Attachment | None:
    """Give torch's own DDP the telemetry of ours.

    Args:
        model: Wrapped by torch. Attach before its first forward, so that no bucket is missed.
        telemetry: As on `ddpobs.DistributedDataParallel`; None follows the environment.

    Returns:
        The attachment, whose `detach()` removes the telemetry; the same object if the model is attached already. None
        with telemetry off, where it cannot start, and for ddpobs' own DDP, which takes `telemetry=` itself.

    Raises:
        DataParallelError: The model is a `torch.nn.DataParallel`.
        DdpobsError: The model is no DistributedDataParallel.
        ConfigError: A setting has an invalid value.
    """
    config = settings.resolve(telemetry, os.environ)
    if isinstance(model, DataParallel):
        raise DataParallelError
    if not isinstance(model, DistributedDataParallel):
        raise DdpobsError(
            f"attach: expected a torch DistributedDataParallel, got {type(model).__name__}: wrap it first, "
            "or apply fully_shard to it"
        )
    if config is None or any(base.__module__ == "ddpobs.ddp" for base in type(model).__mro__):
        return None
    return _attachments.get(model) or _begin(model, config)


@goes_on_without
def _begin(model: DistributedDataParallel, config: settings.TelemetryConfig) -> Attachment | None:
    """Attach; None if telemetry cannot start."""
    skip_in_dynamo()
    recorder = telemetry.join(model, config, model.process_group, reducer_settings(model))
    if recorder is None:
        return None
    if not _attachments:
        _class_patches.install()
    try:
        _attachments[model] = attachment = Attachment(model, recorder)
    except BaseException:
        telemetry.leave(recorder)
        if not _attachments:
            _class_patches.remove()
        raise
    return attachment


class Attachment:
    """Telemetry on one torch DDP module, until `detach()`.

    Attributes:
        parameters: The parameters that torch's reducer reduces.
        names: Their names.
        unreduced_parameters: Names and parameters that it does not reduce even if they require gradients later.
        forwards: Forwards with gradients so far.
    """

    @unseen
    def __init__(self, model: DistributedDataParallel, recorder: ModuleObserver) -> None:
        self._model, self._recorder = weakref.ref(model), recorder
        self.now = self._recorder.now
        rest_at_exit()
        self._works_are_timed = False
        self.parameters, self._sparse = model._build_params_for_reducer()
        names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self.names = [names[id(parameter)] for parameter in self.parameters]
        excluded = {id(parameter) for parameter in self.parameters}
        self.unreduced_parameters = [
            (name, parameter)
            for name, parameter in model.module.named_parameters()
            if id(parameter) not in excluded and name not in model.parameters_to_ignore
        ]
        self.forwards = 0
        self._readiness = Readiness(len(self.parameters), self.now)
        self._expected = self._hook_is_unseen = False
        self._forward_task = -1
        """Graph task in which the latest synchronising forward ran; -1 outside of a backward."""
        self._maps_used = model.find_unused_parameters or model.static_graph
        self._buckets = TorchBuckets(
            self.parameters,
            self.names,
            rebuilds=model.static_graph or not model.find_unused_parameters,
            # A model that delays the all-reduce of all its parameters does not have the attribute.
            skips=getattr(model, "skip_all_reduce_unused_params", False),
        )
        self._comm = "all_reduce"
        self._reduction: Reduction | None = None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._readiness.stamper(index))
            for index, parameter in enumerate(self.parameters)
        ]
        self._stop_listening = self._recorder.on_backward_end(self._backward_ended)
        self._finalizer = weakref.finalize(
            model, _detach_collected, self._handles, self._stop_listening, self._recorder
        )
        self._finalizer.atexit = False
        self._recorder.follow_gradients(self)
        self._recorder.compare_replicas(self.parameters, self.names)
        if getattr(model, "reducer", None) is not None:
            built_in = self._take_over_hook(model)
            self.observe_group(model)
            if built_in is not None:  # It keeps the group that it was registered with.
                model._register_builtin_comm_hook(built_in)
            self._buckets.rebuilds &= not model._get_ddp_logging_data().get("has_rebuilt_buckets", 0)
            self._buckets.set(current_layout(model, self.parameters, self._sparse))
            self._report_layout()

    def detach(self) -> None:
        """Remove the telemetry completely from the model, its parameters and its process group."""
        while self._handles:
            self._handles.pop().remove()
        self._stop_listening()
        self._finalizer.detach()  # It would keep this object as long as the model lives.
        model = self._model()
        if model is not None and _attachments.pop(model, None) is not None:
            for group in _groups.get(model, []):
                group.ignore()
            if getattr(model, "reducer", None) is not None:
                model.reducer._update_process_group(model.process_group)
        telemetry.leave(self._recorder)
        if not _attachments:
            _class_patches.remove()

    # ------------------------------------------------------------------ called by the group and by the patched class

    def observe_group(self, model: DistributedDataParallel) -> None:
        """Put an observed group between the model's reducer and its process group."""
        self._works_are_timed = time_collectives(model.process_group, self.parameters[0].device)
        group = ObservedGroup(model.process_group, self)
        _groups.setdefault(model, []).append(group)
        model.reducer._update_process_group(group)

    def forward_began(self, inputs: tuple[Any, ...], named: dict[str, Any], synchronises: bool) -> None:
        """Start a synchronised backward's stamps, and record the forward."""
        self.forwards += torch.is_grad_enabled()
        if synchronises:
            if self._readiness.any_arrived:
                if self._expected:
                    self._report_unused(None)  # Torch raises next: it still waits for them.
                elif self._maps_used:
                    self._readiness.keep_used()
                self._readiness.clear()
            self._expected, self._reduction = True, None
            self._forward_task = torch._C._current_graph_task_id()
        self._recorder.forward_began(inputs, named)
        if self._recorder.waits_for_forward:
            model = self._model()
            if model is not None and not model._check_sync_bufs_pre_fwd():
                self._recorder.replicas_ready()

    def participated_with_zeros(self) -> None:
        """Record that the model, out of data, took part in a backward of the other ranks."""
        counted, self._reduction = self._reduction is not None, None
        self._recorder.shadowed(counted)

    def buffers_began(self) -> Any:
        """Count the buffers' broadcast that begins, and return its stamp."""
        return self._recorder.buffers_began()

    def buffers_synced(self, began: Any) -> None:
        """Record the buffers' broadcast."""
        self._recorder.communicated("buffers", began, self.now())
        model = self._model()
        if self._recorder.waits_for_forward and model is not None:
            buffers = () if hasattr(model, "buffer_hook") else model.named_module_buffers.items()
            self._recorder.replicas_ready(buffers)

    @unseen
    def reduced(self, tensor: torch.Tensor, launched: Any, work: dist.Work) -> None:
        """Record an all-reduce: the next bucket of that size, or the map of unused parameters."""
        reduction = self._current_reduction()
        if tensor.dtype == torch.int32:
            reduction.used_map = tensor
            work.get_future().add_done_callback(self._map_stamper(launched))
            return
        size = real_numbers(tensor)
        index = reduction.launch(launched, lambda i: self._buckets.holds(i, size) and self._reduces(i))
        if index is None:
            return
        self._recorder.bucket_launched(index)
        # A work keeps its bucket alive, and torch frees the first buckets in the rebuild.
        if self._works_are_timed and not self._buckets.rebuilds:
            reduction.works[index] = work
        work.get_future().add_done_callback(reduction.stamper(index, self.now))

    @unseen
    def broadcast(self, tensor: torch.Tensor, launched: Any) -> None:
        """Record one of the two broadcasts of a rebuild."""
        self._recorder.communicated("buffers", launched, self.now())
        if self._buckets.take_broadcast(tensor.tolist()):
            self._report_layout()
            self._recorder.event("buckets_rebuilt", buckets=len(self._buckets.members))

    def time_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return the user's communication hook with its launch and completion recorded."""
        reference = weakref.ref(self)

        @wraps(hook)
        def timed_hook(state: object, bucket: GradBucket) -> Any:
            attachment = reference()
            if attachment is None or not attachment._handles:
                return hook(state, bucket)
            reduction, index, launched = attachment._current_reduction(), bucket.index(), attachment.now()
            attachment._recorder.bucket_launched(index)
            launches = reduction.launches + 1  # The hook may itself call the reducer's all-reduce.
            future = hook(state, bucket)
            if index < len(reduction.launched_ns) and launched:
                reduction.launches = launches
                reduction.launched_ns[index] = launched
                future.add_done_callback(reduction.stamper(index, attachment.now))
            return future

        return timed_hook

    def hook_registered(self, hook: Callable[..., Any]) -> None:
        """Record the user's communication hook as the strategy."""
        self._comm = getattr(hook, "__qualname__", type(hook).__name__)
        self._recorder.event("comm_hook_set", name=self._comm)
        self._report_layout()

    def has_local_gradients(self) -> bool:
        """Whether a gradient arrived that torch's reducer neither reduced nor expects to reduce."""
        return not self._expected and self._readiness.any_arrived

    def local_gradients(self) -> list[int]:
        """Indices of the parameters whose gradient did."""
        return [] if self._expected else self._readiness.arrived()

    # ------------------------------------------------------------------ from the stamps to a record

    def _take_over_hook(self, model: Any) -> Any:
        """Take over a hook that was registered before.

        Torch takes one hook per reducer, so an unused reducer is rebuilt around the timed hook.

        Returns:
            The type of a built-in hook, which the caller must register again; None without such a hook.
        """
        facts, hooks = model._get_ddp_logging_data(), list(model._comm_hooks)
        if "comm_hook" not in facts:
            return None
        built_in = getattr(BuiltinCommHookType, facts["comm_hook"].rpartition(".")[2], None)
        used = model._lazy_init_ran or facts.get("iteration", 0) > 0  # `iteration` counts from the second forward on.
        if used or (len(hooks) != 1 and built_in is None):
            self._hook_is_unseen = True
            self._recorder.event("comm_hook_unseen", reason="registered before telemetry, and training has begun")
            return None
        model.reducer._remove_autograd_hooks()
        names = model._build_debug_param_to_name_mapping(self.parameters)
        model._ddp_init_helper(self.parameters, self._sparse, names, model.static_graph)
        if model.static_graph:
            model.reducer._set_static_graph()
            model.logger._set_static_graph()
        if model.mixed_precision is not None:
            model.reducer._set_mixed_precision_param_dtype(model.mixed_precision.param_dtype)
        model._comm_hooks.clear()
        if not hooks:
            return built_in
        ((hook, state),) = hooks
        ddp_class_patches.register(model, state, hook, self)
        return None

    def _current_reduction(self) -> Reduction:
        if self._reduction is None:
            self._reduction = Reduction(len(self._buckets.members))
            self._recorder.reduction_began(self._reduction.launched_ns, self._reduction.done_ns)
            self._recorder.bucket_launched(wire.UNKNOWN)
            if torch._C._current_graph_task_id() >= 0:
                # Lightning and Accelerate prepare the reducer themselves, without a call of the forward.
                self._expected = True
            # A script may call a reference to torch's backward from before the patches, which is not recorded. Under
            # `join` a rank reduces without a backward.
            if not self._recorder.in_backward and torch._C._current_graph_task_id() >= 0:
                autograd.call_at_end(self._after_reducer)
        return self._reduction

    def _after_reducer(self) -> None:
        """Queue the end once more: the reducer queued its own after this callback, and waits there for its buckets."""
        Variable._execution_engine.queue_callback(self._finish_record)

    def _map_stamper(self, launched: Any) -> Callable[[Any], None]:
        def stamp(_: Any) -> None:
            self._recorder.communicated("unused_map", launched, self.now())
            stay_in_interpreter()

        return stamp

    def _backward_ended(self, raised: bool) -> None:
        # Tasks are numbered in order: the backward of a checkpoint inside the forward ends in a task that is later.
        if not raised and torch._C._current_graph_task_id() <= self._forward_task:
            self._finish_record()

    @never_raises
    def _finish_record(self) -> None:
        if self._expected and not self._is_complete():
            return
        reduction, self._reduction = self._reduction, None
        if not self._expected:
            return
        self._expected = False
        record = self._recorder.backward(counted=reduction is not None)
        if record is None:
            return
        if reduction is not None and any(reduction.launched_ns):
            record.ready_ns = [self._readiness.last(members) for members in self._buckets.members]
            record.launched_ns, record.done_ns, record.works = reduction.launched_ns, reduction.done_ns, reduction.works
            if record.parameter_ready_ns is not None:
                record.parameter_ready_ns = [
                    self._readiness.stamps[i] for members in self._buckets.members for i in members
                ]
        else:
            record.ready_ns, record.launched_ns, record.done_ns = [], [], []
            record.parameter_ready_ns = None
            record.last_ready = self._readiness.last(range(len(self.parameters)))
        self._report_unused(reduction)
        self._readiness.end()
        self._recorder.finished(record)

    def _is_complete(self) -> bool:
        """Whether torch has reduced all gradients; each loss of one forward may reduce a part of them."""
        if self._hook_is_unseen:
            return self._readiness.any_arrived
        expected_launches = sum(map(self._reduces, range(len(self._buckets.members))))
        return self._reduction is not None and self._reduction.launches >= expected_launches

    def _reduces(self, bucket: int) -> bool:
        """Whether torch reduces that bucket in this backward."""
        return self._buckets.is_reduced(bucket, self._readiness.is_used)

    def _report_unused(self, reduction: Reduction | None) -> None:
        """Report unused parameters, also without the flag: then torch raises nothing, and the ranks diverge."""
        locally = self._readiness.unused()
        globally: list[int] = []
        if reduction is not None and reduction.used_map is not None and reduction.used_map.device.type == "cpu":
            globally = [index for index in locally if not reduction.used_map[index]]
        elif reduction is not None and reduction.used_map is not None:
            globally = [index for index in locally if self.parameters[index].grad is None]
        self._recorder.unused([self.names[i] for i in locally], [self.names[i] for i in globally])

    @unseen
    def _report_layout(self) -> None:
        if buckets := self._buckets.describe():
            self._recorder.layout(buckets, self._comm)


def _detach_collected(handles: list[Any], stop_listening: Callable[[], None], recorder: ModuleObserver) -> None:
    """Remove the telemetry of a model that was garbage-collected while attached.

    The time and the thread differ between ranks. State that models share therefore stays, so that the ranks stay alike.
    """
    while handles:  # The wrapped module may outlive the model.
        handles.pop().remove()
    stop_listening()
    telemetry.forget(recorder)
