"""The same telemetry for torch's own DDP, whose reducer is C++ and tells nothing per bucket.

Torch's reducer alone is given a process group that notes what passes through it: each bucket's all-reduce, the map of
unused parameters, the new order of parameters when the buckets are rebuilt. It hands everything on to the real group,
so not a bit of the result changes and `model.process_group` stays what it was. A post-accumulate hook on each
parameter gives readiness. A communication hook of the user's own goes past the group and is timed itself.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from itertools import count
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
from ddpobs.buckets import assignment
from ddpobs.buckets import bucket as bucketing
from ddpobs.errors import DataParallelError, DdpobsError
from ddpobs.recording.journal import never_raises
from ddpobs.recording.module_recorder import ModuleRecorder
from ddpobs.torch_seam import autograd
from ddpobs.torch_seam.collectives import time_collectives
from ddpobs.torch_seam.interpreter_exit import rest_at_exit, stay_in_interpreter
from ddpobs.torch_seam.patching import skip_in_dynamo

_attachments: weakref.WeakKeyDictionary[Any, Attachment] = weakref.WeakKeyDictionary()
_groups: weakref.WeakKeyDictionary[Any, list[ObservedGroup]] = weakref.WeakKeyDictionary()
"""Torch may hold a group, in a built-in hook say, for as long as the model lives: so must Python."""
_class = ddp_class_patches.TorchClass(_attachments)


def attach(
    model: DistributedDataParallel, telemetry: bool | str | settings.TelemetryConfig | None = True
) -> Attachment | None:
    """Give torch's own DDP the telemetry of ours.

    Args:
        model: Built by torch; best before its first forward, so that no bucket is missed.
        telemetry: As on `ddpobs.DistributedDataParallel`; None takes what the environment says.

    Returns:
        What takes it off again (`detach()`), the same one for a model that has it already; None with telemetry off,
        and for ddpobs' own DDP, which takes `telemetry=` itself.

    Raises:
        DataParallelError: The model is a `torch.nn.DataParallel`.
        DdpobsError: The model is no DistributedDataParallel.
        ConfigError: A setting holds a value that it cannot have.
    """
    config = settings.resolve(telemetry, os.environ)
    if isinstance(model, DataParallel):
        raise DataParallelError
    if not isinstance(model, DistributedDataParallel):
        raise DdpobsError(
            f"attach: expected a torch DistributedDataParallel, got {type(model).__name__}: wrap it first"
        )
    if config is None or any(base.__module__ == "ddpobs.ddp" for base in type(model).__mro__):
        return None
    if model not in _attachments:
        if not _attachments:
            skip_in_dynamo()
            _class.install()
        _attachments[model] = Attachment(model, config)
    return _attachments[model]


class _Pass:
    """One synchronised backward as it passes by; completions may come after it is over."""

    def __init__(self, buckets: int) -> None:
        self.launched_ns: list[Any] = [0] * buckets
        self.done_ns: list[Any] = [0] * buckets
        self.works: dict[int, Any] = {}
        self.launches = 0
        """Also of buckets that cannot be told apart, as their reduction has another size than they."""
        self.next = 0
        self.used_map: torch.Tensor | None = None


class Attachment:
    """Telemetry on one torch DDP module, until `detach()`."""

    def __init__(self, model: DistributedDataParallel, config: settings.TelemetryConfig) -> None:
        self._model = weakref.ref(model)
        self._recorder: ModuleRecorder = telemetry.join(model, config, model.process_group, _reducer_settings(model))
        self.now = self._recorder.now
        rest_at_exit()
        self._tells_duration = False
        self._parameters, self._sparse = model._build_params_for_reducer()
        names = {id(parameter): name for name, parameter in model.module.named_parameters()}
        self._names = [names[id(parameter)] for parameter in self._parameters]
        self._ready: list[Any] = [0] * len(self._parameters)
        self._turns = [0] * len(self._parameters)
        """In which order they were ready: a device's stamps do not compare."""
        self._turn = count(1)
        self._used_before: set[int] = set()
        """Under `no_sync`, which torch's map of used parameters counts."""
        self._expected = False
        self._unseen = False
        self._maps_used = model.find_unused_parameters or model.static_graph
        self._skips = getattr(model, "skip_all_reduce_unused_params", False)  # Not there where all are delayed.
        self._rebuilds = model.static_graph or not model.find_unused_parameters
        """Torch lays its buckets anew before the second forward."""
        self._comm = "all_reduce"
        self._pass: _Pass | None = None
        self._members: list[list[int]] = []
        self._elements: list[int] = []
        self._order: list[int] | None = None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._stamper_of(index))
            for index, parameter in enumerate(self._parameters)
        ]
        self._stop_listening = self._recorder.on_backward_end(self._backward_ended)
        self._gone = weakref.finalize(model, _gone, self._handles, self._stop_listening, self._recorder)
        self._gone.atexit = False
        if getattr(model, "reducer", None) is not None:
            built_in = self._take_over_hook(model)
            self.observe(model)
            if built_in is not None:  # It keeps the group that it found.
                model._register_builtin_comm_hook(built_in)
            self._rebuilds &= not model._get_ddp_logging_data().get("has_rebuilt_buckets", 0)
            self._lay(_current_layout(model, self._parameters, self._sparse))

    def detach(self) -> None:
        """Take the telemetry off; nothing of it is left on the model, its parameters or its process group."""
        while self._handles:
            self._handles.pop().remove()
        self._stop_listening()
        self._gone.detach()  # It would keep all of this for as long as the model lives.
        model = self._model()
        if model is not None and _attachments.pop(model, None) is not None:
            for group in _groups.get(model, []):
                group.ignore()
            if getattr(model, "reducer", None) is not None:
                model.reducer._update_process_group(model.process_group)
        telemetry.leave(self._recorder)
        if not _attachments:
            _class.remove()

    # ------------------------------------------------------------------ told by the group and by the instrumented class

    def observe(self, model: DistributedDataParallel) -> None:
        """Stand between the model's reducer and its process group."""
        self._tells_duration = time_collectives(model.process_group, self._parameters[0].device)
        group = ObservedGroup(model.process_group, self)
        _groups.setdefault(model, []).append(group)
        model.reducer._update_process_group(group)

    def forward_began(self, inputs: tuple[Any, ...], named: dict[str, Any], synchronises: bool) -> None:
        """The model's forward was called."""
        if synchronises:
            if any(self._ready):
                if self._expected:
                    self._tell_unused(None)  # Torch raises next: it still waits for them.
                elif self._maps_used:
                    self._used_before.update(index for index, ready in enumerate(self._ready) if ready)
                self._ready[:] = [0] * len(self._ready)
            self._expected, self._pass = True, None
        self._recorder.forward_began(inputs, named)

    def shadowed(self) -> None:
        """The model, out of data, took part in a backward of the other ranks."""
        self._pass = None
        self._recorder.shadowed()

    def buffers_synced(self, began: Any) -> None:
        """The buffers' broadcast has ended."""
        self._recorder.communicated("buffers", began, self.now())

    def reduced(self, tensor: torch.Tensor, launched: Any, work: dist.Work) -> None:
        """An all-reduce was launched: the next bucket of that size, or the map."""
        seen = self._of_this_pass()
        if tensor.dtype == torch.int32:
            seen.used_map = tensor
            work.get_future().add_done_callback(self._map_noted(launched))
            return
        seen.launches += 1
        size = _reals(tensor)
        left = range(seen.next, len(self._elements))
        index = next((i for i in left if self._elements[i] == size and self._reduces(i)), None)
        if index is None:
            return
        seen.next = index + 1
        seen.launched_ns[index] = launched
        if self._tells_duration and not self._rebuilds:  # It keeps the bucket: not one that torch is about to let go.
            seen.works[index] = work
        work.get_future().add_done_callback(_stamper(seen.done_ns, index, self.now))

    def broadcast(self, tensor: torch.Tensor, launched: Any) -> None:
        """First the parameters' indices in their new order and the number of buckets, then each bucket's count."""
        self._recorder.communicated("buffers", launched, self.now())
        values = tensor.tolist()
        if self._order is None:
            self._order = values[:-1]
            return
        order, self._order = iter(self._order), None
        self._rebuilds = False
        self._lay([[next(order) for _ in range(count)] for count in values])
        self._recorder.event("buckets_rebuilt", buckets=len(self._members))

    def timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The user's communication hook, with its launch and its completion noted."""
        alive = weakref.ref(self)

        @wraps(hook)
        def noted(state: object, bucket: GradBucket) -> Any:
            attachment = alive()
            if attachment is None or not attachment._handles:
                return hook(state, bucket)
            seen, index, launched = attachment._of_this_pass(), bucket.index(), attachment.now()
            launches = seen.launches + 1  # The hook may have the reducer's own all-reduce do it.
            future = hook(state, bucket)
            if index < len(seen.launched_ns) and launched:
                seen.launches = launches
                seen.launched_ns[index] = launched
                future.add_done_callback(_stamper(seen.done_ns, index, attachment.now))
            return future

        return noted

    def hooked(self, hook: Callable[..., Any]) -> None:
        """Torch took the user's communication hook."""
        self._comm = getattr(hook, "__qualname__", type(hook).__name__)
        self._recorder.event("comm_hook_set", name=self._comm)
        self._tell_layout()

    # ------------------------------------------------------------------ from what was seen to a record

    def _take_over_hook(self, model: Any) -> Any:
        """A hook that is there already: torch takes one a reducer, so an unused reducer is built anew around it.

        Returns:
            One of torch's own, which is to be registered again; else None.
        """
        told, hooks = model._get_ddp_logging_data(), list(model._comm_hooks)
        if "comm_hook" not in told:
            return None
        built_in = getattr(BuiltinCommHookType, told["comm_hook"].rpartition(".")[2], None)
        used = model._lazy_init_ran or told.get("iteration", 0) > 0  # The latter counts after the second forward.
        if used or (len(hooks) != 1 and built_in is None):
            self._unseen = True
            self._recorder.event("comm_hook_unseen", reason="registered before telemetry, and training has begun")
            return None
        model.reducer._remove_autograd_hooks()
        names = model._build_debug_param_to_name_mapping(self._parameters)
        model._ddp_init_helper(self._parameters, self._sparse, names, model.static_graph)
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

    def _of_this_pass(self) -> _Pass:
        if self._pass is None:
            self._pass = _Pass(len(self._members))
            if torch._C._current_graph_task_id() >= 0:
                self._expected = True  # Somebody told the reducer so, and called no forward: Lightning, Accelerate.
            # Somebody kept torch's function from before telemetry, say. Under `join` a rank reduces without a backward.
            if not self._recorder.in_backward and torch._C._current_graph_task_id() >= 0:
                autograd.call_at_end(self._after_reducer)
        return self._pass

    def _after_reducer(self) -> None:
        """The reducer's own end of the backward was queued after this one, and waits for its buckets."""
        Variable._execution_engine.queue_callback(self._backward_ended)

    def _map_noted(self, launched: Any) -> Callable[[Any], None]:
        def noted(_: Any) -> None:
            self._recorder.communicated("unused_map", launched, self.now())
            stay_in_interpreter()

        return noted

    @never_raises
    def _backward_ended(self) -> None:
        if self._expected and not self._over():
            return
        seen, self._pass = self._pass, None
        if not self._expected:
            return
        self._expected = False
        record = self._recorder.backward()
        if record is None:
            return
        if seen is not None and any(seen.launched_ns):
            record.ready_ns = [self._last_ready(members) for members in self._members]
            record.launched_ns, record.done_ns, record.works = seen.launched_ns, seen.done_ns, seen.works
            if record.parameter_ready_ns is not None:
                record.parameter_ready_ns = [self._ready[i] for members in self._members for i in members]
        else:
            record.ready_ns, record.launched_ns, record.done_ns = [], [], []
            record.parameter_ready_ns = None
            record.last_ready = self._last_ready(range(len(self._ready)))
        self._tell_unused(seen)
        self._ready[:] = [0] * len(self._ready)
        self._used_before.clear()
        self._recorder.finished(record)

    def _over(self) -> bool:
        """Whether torch has reduced all gradients: each of several losses of one forward may bring a part of them."""
        if self._unseen:
            return any(self._ready)
        awaited = sum(map(self._reduces, range(len(self._members))))
        return self._pass is not None and self._pass.launches >= awaited

    def _reduces(self, bucket: int) -> bool:
        """Whether torch reduces that bucket: it may have been told to leave those out that are unused."""
        return not self._skips or any(self._ready[i] or i in self._used_before for i in self._members[bucket])

    def _stamper_of(self, index: int) -> Callable[[torch.Tensor], None]:
        ready, turns, now, turn = self._ready, self._turns, self.now, self._turn

        def stamp(_: torch.Tensor) -> None:
            ready[index] = now()
            turns[index] = next(turn)

        return stamp

    def _last_ready(self, members: Iterable[int]) -> Any:
        came = [index for index in members if self._ready[index]]
        return self._ready[max(came, key=self._turns.__getitem__)] if came else 0

    def _left_out(self) -> list[int]:
        before = self._used_before
        return [index for index, ready in enumerate(self._ready) if not ready and index not in before]

    def _tell_unused(self, seen: _Pass | None) -> None:
        """Also with the flag off, where torch says nothing and the ranks part in silence."""
        locally = self._left_out()
        globally: list[int] = []
        if seen is not None and seen.used_map is not None and seen.used_map.device.type == "cpu":
            globally = [index for index in locally if not seen.used_map[index]]
        elif seen is not None and seen.used_map is not None:
            globally = [index for index in locally if self._parameters[index].grad is None]
        self._recorder.unused([self._names[i] for i in locally], [self._names[i] for i in globally])

    def _lay(self, members: list[list[int]]) -> None:
        self._members = members
        self._elements = [sum(_reals(self._parameters[i]) for i in bucket) for bucket in members]
        self._tell_layout()

    def _tell_layout(self) -> None:
        if not self._members:
            return
        self._recorder.layout(
            [
                bucketing.describe([self._parameters[i] for i in bucket], [self._names[i] for i in bucket])
                for bucket in self._members
            ],
            self._comm,
        )


def _gone(handles: list[Any], stop_listening: Callable[[], None], recorder: ModuleRecorder) -> None:
    """The model was collected with its telemetry on.

    When, and on which thread, differs from rank to rank: what the models share stays, so that the ranks stay alike.
    """
    while handles:  # What the model wrapped may live on.
        handles.pop().remove()
    stop_listening()
    telemetry.forget(recorder)


def _current_layout(
    model: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter], sparse: Sequence[bool]
) -> list[list[int]]:
    """Indices of each bucket's parameters: what torch logs of rebuilt buckets, or how it cuts the first ones.

    No bucket where parameters were frozen or unfrozen since the model was wrapped: torch counts those of then.
    """
    facts = model._get_ddp_logging_data()
    if facts["num_parameter_tensors"] != len(parameters):
        return []
    if facts.get("rebuilt_per_bucket_param_indices"):
        return [[int(i) for i in b.split()] for b in facts["rebuilt_per_bucket_param_indices"].split(",")]
    limits, _ = model._bucket_config.compute_bucket_size_limits(
        static_graph=model.static_graph, find_unused_parameters=model.find_unused_parameters
    )
    return assignment.assign(parameters, limits, sparse)


def _reals(tensor: torch.Tensor) -> int:
    """Real numbers in a tensor: a bucket of complex ones is reduced as these, or as it is by a hook."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _stamper(places: list[Any], index: int, now: Callable[[], Any]) -> Callable[[Any], None]:
    def stamp(_: Any) -> None:
        places[index] = now()
        stay_in_interpreter()

    return stamp


def _reducer_settings(model: DistributedDataParallel) -> dict[str, wire.Scalar]:
    return {
        "reducer": "torch",
        "find_unused_parameters": model.find_unused_parameters,
        "gradient_as_bucket_view": model.gradient_as_bucket_view,
        "static_graph": model.static_graph,
        "broadcast_buffers": model.broadcast_buffers,
        "bucket_cap_mb": model.bucket_bytes_cap / 2**20,
    }
