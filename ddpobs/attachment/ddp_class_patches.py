"""Patches of torch's DDP class that report to a model's attachment, if it has one. The models stay unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpobs.torch_seam.patching import Patches


class Attached(Protocol):
    """Receives the calls of one model's DDP methods."""

    def forward_began(self, inputs: tuple[Any, ...], named: dict[str, Any], synchronises: bool) -> None:
        """Record that the model's forward was called."""
        ...

    def buffers_began(self) -> Any:
        """Count the buffers' broadcast that begins, and return its stamp."""
        ...

    def buffers_synced(self, began: Any) -> None:
        """Record that the buffers' broadcast, which began at that stamp, has ended."""
        ...

    def participated_with_zeros(self) -> None:
        """Record that the model, out of data, took part in a backward of the other ranks."""
        ...

    def observe_group(self, model: DistributedDataParallel) -> None:
        """Observe the new process group of the model's reducer."""
        ...

    def time_hook(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return the user's communication hook with its times recorded."""
        ...

    def hook_registered(self, hook: Callable[..., Any]) -> None:
        """Record that torch accepted the user's communication hook."""
        ...


class DDPClassPatches:
    """Wrappers around methods of torch's DDP class, until they are removed.

    Args:
        attachments: Attachments by model, looked up at each call.
    """

    def __init__(self, attachments: Mapping[Any, Attached]) -> None:
        self._attachments = attachments
        self._patches = Patches()

    def install(self) -> None:
        """Wrap the methods."""
        self.remove()  # They are still wrapped if the last attached models were garbage-collected.
        for name, around in (
            ("_pre_forward", self._report_forward),
            ("_sync_buffers", self._report_buffers),
            ("register_comm_hook", self._time_hook),
            ("_update_process_group", self._observe_new_group),
            ("_match_all_reduce_for_bwd_pass", self._report_participation),
        ):
            self._patches.put(DistributedDataParallel, name, around)

    def remove(self) -> None:
        """Restore the methods."""
        self._patches.undo()

    def _report_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        attachments = self._attachments

        def _pre_forward(model: Any, *inputs: Any, **kwargs: Any) -> Any:
            attachment = attachments.get(model)
            if attachment is not None:
                attachment.forward_began(inputs, kwargs, torch.is_grad_enabled() and model.require_backward_grad_sync)
            return original(model, *inputs, **kwargs)

        return _pre_forward

    def _report_buffers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _sync_buffers(model: Any) -> Any:
            attachment = self._attachments.get(model)
            if attachment is None:
                return original(model)
            began = attachment.buffers_began()
            result = original(model)
            attachment.buffers_synced(began)
            return result

        return _sync_buffers

    def _time_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def register_comm_hook(model: Any, state: object, hook: Callable[..., Any]) -> Any:
            attachment = self._attachments.get(model)
            if attachment is None:
                return original(model, state, hook)
            return register(model, state, hook, attachment)

        return register_comm_hook

    def _observe_new_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _update_process_group(model: Any, new_process_group: Any) -> Any:
            result = original(model, new_process_group)
            attachment = self._attachments.get(model)
            if attachment is not None:
                attachment.observe_group(model)
            return result

        return _update_process_group

    def _report_participation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _match_all_reduce_for_bwd_pass(model: Any) -> Any:
            result = original(model)
            attachment = self._attachments.get(model)
            if attachment is not None:
                attachment.participated_with_zeros()
            return result

        return _match_all_reduce_for_bwd_pass


def register(model: Any, state: object, hook: Callable[..., Any], attachment: Attached) -> None:
    """Register the timed form of the user's hook on a model; the model's list of hooks still holds the user's own."""
    original = DistributedDataParallel.register_comm_hook.__wrapped__  # type: ignore[attr-defined]
    original(model, state, attachment.time_hook(hook))
    model._comm_hooks[-1] = (hook, state)
    attachment.hook_registered(hook)
