"""The same telemetry for torch's own DDP, whose reducer is C++ and tells nothing per bucket.

What can be seen from outside: a post-accumulate hook on each parameter gives readiness, and a communication hook that
does just what torch does by itself gives launch and completion. The hook divides as torch's reducer would, so not a
bit of the result changes; a hook of the user's own takes its place and is timed instead.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket, _register_comm_hook
from torch.nn.parallel import DistributedDataParallel

from ddpobs import config as settings
from ddpobs import telemetry, wire
from ddpobs.errors import DataParallelError, DdpobsError
from ddpobs.recorder import ModuleRecorder

_LAYOUT_LOOKS = 4
"""Torch rebuilds its buckets once, after the first backward: after so many backwards the layout is not read again."""


def attach(
    model: DistributedDataParallel, telemetry: bool | str | settings.TelemetryConfig | None = True
) -> Attachment | None:
    """Give torch's own DDP the telemetry of ours.

    Args:
        model: Built by torch, before its first forward and before a communication hook is registered.
        telemetry: As on `ddpobs.DistributedDataParallel`; None takes what the environment says.

    Returns:
        What takes it off again (`detach()`), or None with telemetry off.

    Raises:
        DdpobsError: A communication hook is registered already: attach first, then register it.
        DataParallelError: The model is a `torch.nn.DataParallel`.
        ConfigError: A setting holds a value that it cannot have.
    """
    if isinstance(model, torch.nn.DataParallel):
        raise DataParallelError
    config = settings.resolve(telemetry, os.environ)
    if config is None:
        return None
    if not isinstance(model, DistributedDataParallel):
        raise DdpobsError(
            f"attach: expected a torch DistributedDataParallel, got {type(model).__name__}: wrap it first"
        )
    if model._comm_hooks:
        raise DdpobsError("attach: a communication hook is registered already; call ddpobs.attach(model) before it")
    return Attachment(model, config)


@dataclass(slots=True)
class _Pass:
    """One synchronised backward as the hooks see it; completions may come after it is over."""

    launched_ns: dict[int, Any] = field(default_factory=dict)
    done_ns: list[Any] = field(default_factory=list)
    parameters: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    sizes: dict[int, tuple[int, str]] = field(default_factory=dict)


class Attachment:
    """Telemetry on one torch DDP module, until `detach()`."""

    def __init__(self, model: DistributedDataParallel, config: settings.TelemetryConfig) -> None:
        self._model = weakref.ref(model)
        self._recorder: ModuleRecorder = telemetry.join(model, config, model.process_group, _reducer_settings(model))
        self._names = {id(p): name for name, p in model.module.named_parameters()}
        self._index = {key: index for index, key in enumerate(id(p) for p in model.parameters() if p.requires_grad)}
        self._ready: list[Any] = [0] * len(self._index)
        self._scale = 1.0 / dist.get_world_size(model.process_group)
        self._group = model.process_group
        self._user_hook: tuple[Any, Callable[..., Any]] | None = None
        self._pass: _Pass | None = None
        self._buckets: dict[int, list[int]] = {}
        self._sizes: dict[int, tuple[int, str]] = {}
        self._looks = 0
        self._undo: list[Callable[[], None]] = []
        self._install(model)

    def detach(self) -> None:
        """Take the telemetry off. Torch keeps the communication hook, which then only does what torch would."""
        while self._undo:
            self._undo.pop()()
        telemetry.leave(self._recorder)

    def _install(self, model: DistributedDataParallel) -> None:
        now = self._recorder.now
        for parameter in model.parameters():
            if parameter.requires_grad:
                stamp = _stamper(self._ready, self._index[id(parameter)], now)
                handle = parameter.register_post_accumulate_grad_hook(stamp)
                self._undo.append(handle.remove)
        before = model.register_forward_pre_hook(
            lambda _, inputs, kwargs: self._recorder.forward_began(inputs, kwargs), with_kwargs=True
        )
        self._undo.append(before.remove)
        # Past the instance's own register_comm_hook, which is the user's: torch takes one hook a reducer.
        _register_comm_hook(model.reducer, None, self._comm_hook)
        model.register_comm_hook = self._register_comm_hook  # type: ignore[method-assign]
        original = model._sync_buffers
        model._sync_buffers = self._timed(original)  # type: ignore[method-assign]
        ended = self._recorder.on_backward_end(self._backward_ended)
        self._undo += [
            ended,
            lambda: model.__dict__.pop("register_comm_hook"),
            lambda: model.__dict__.pop("_sync_buffers"),
        ]

    def _register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """The user's hook: checked as torch checks it, then run inside ours."""
        model = self._model()
        if model is None:
            return
        model._check_comm_hook(hook)
        if self._user_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._user_hook = (state, hook)
        model._comm_hooks.append((hook, state))
        self._recorder.event("comm_hook_set", name=getattr(hook, "__qualname__", repr(hook)))

    def _comm_hook(self, _state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        index = bucket.index()
        seen = self._pass
        if seen is None:
            seen = self._pass = _Pass()
        if self._looks < _LAYOUT_LOOKS or index not in self._buckets:
            seen.parameters[index] = bucket.parameters()
            buffer = bucket.buffer()
            seen.sizes[index] = (buffer.numel() * buffer.element_size(), str(buffer.dtype).removeprefix("torch."))
        seen.done_ns.extend([0] * (index + 1 - len(seen.done_ns)))
        seen.launched_ns[index] = self._recorder.now()
        future: torch.futures.Future[torch.Tensor]
        if self._user_hook is None:
            work = dist.all_reduce(bucket.buffer().mul_(self._scale), group=self._group, async_op=True)
            future = work.get_future().then(_first)
        else:
            state, hook = self._user_hook
            future = hook(state, bucket)
        future.add_done_callback(_stamper(seen.done_ns, index, self._recorder.now))
        return future

    def _backward_ended(self) -> None:
        seen, self._pass = self._pass, None
        if seen is None:
            return
        self._look(seen)
        record = self._recorder.backward()
        ready = [max((self._ready[i] for i in members if self._ready[i]), default=0) for members in self._members()]
        record.ready_ns = ready
        record.launched_ns = [seen.launched_ns.get(index, 0) for index in range(len(ready))]
        seen.done_ns.extend([0] * (len(ready) - len(seen.done_ns)))
        record.done_ns = seen.done_ns
        if record.parameter_ready_ns is not None:
            record.parameter_ready_ns = [self._ready[i] for members in self._members() for i in members]
        self._tell_unused()
        self._ready[:] = [0] * len(self._ready)
        self._recorder.finished(record)

    def _members(self) -> list[list[int]]:
        return [self._buckets[index] for index in sorted(self._buckets)]

    def _look(self, seen: _Pass) -> None:
        """Read the layout off the buckets of this backward, and tell it where it is new."""
        self._looks += 1
        if not seen.parameters:
            return
        found = {index: [self._index[id(p)] for p in members] for index, members in seen.parameters.items()}
        if found == self._buckets:
            return
        if self._buckets:
            self._recorder.event("buckets_rebuilt")
        self._buckets, self._sizes = found, seen.sizes
        named = {index: seen.parameters[index] for index in sorted(found)}
        self._recorder.layout(
            [
                wire.Bucket(
                    size_bytes=self._sizes[index][0],
                    dtype=self._sizes[index][1],
                    parameters=[wire.Parameter(name=self._names[id(p)], size=p.numel()) for p in members],
                )
                for index, members in named.items()
            ],
            "all_reduce" if self._user_hook is None else "comm_hook",
        )

    def _tell_unused(self) -> None:
        model = self._model()
        if model is None or not model.find_unused_parameters:
            return
        trained = [p for p in model.parameters() if p.requires_grad]
        locally = [p for p in trained if not self._ready[self._index[id(p)]]]
        self._recorder.unused(
            [self._names[id(p)] for p in locally], [self._names[id(p)] for p in locally if p.grad is None]
        )

    def _timed(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def sync_buffers() -> Any:
            began = self._recorder.now()
            result = original()
            self._recorder.communicated("buffers", began, self._recorder.now())
            return result

        return sync_buffers


def _stamper(places: list[Any], index: int, now: Callable[[], Any]) -> Callable[[Any], None]:
    def stamp(_: Any) -> None:
        places[index] = now()

    return stamp


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def _reducer_settings(model: DistributedDataParallel) -> dict[str, wire.Scalar]:
    return {
        "reducer": "torch",
        "find_unused_parameters": model.find_unused_parameters,
        "gradient_as_bucket_view": model.gradient_as_bucket_view,
        "static_graph": model.static_graph,
        "broadcast_buffers": model.broadcast_buffers,
        "bucket_cap_mb": model.bucket_bytes_cap / 2**20,
    }
