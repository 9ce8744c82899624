"""Torch's DDP class, instrumented to tell the attachment of a model, where it has one. The models stay untouched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpobs.torch_seam.patching import Patches


class Attached(Protocol):
    """Who is told."""

    now: Callable[[], Any]

    def forward_began(self, inputs: tuple[Any, ...], named: dict[str, Any], synchronises: bool) -> None:
        """The model's forward was called."""
        ...

    def buffers_synced(self, began: Any) -> None:
        """The buffers' broadcast has ended."""
        ...

    def shadowed(self) -> None:
        """The model, out of data, took part in a backward of the other ranks."""
        ...

    def observe(self, model: DistributedDataParallel) -> None:
        """The model's reducer has another process group."""
        ...

    def timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The user's communication hook, timed."""
        ...

    def hooked(self, hook: Callable[..., Any]) -> None:
        """Torch took the user's communication hook."""
        ...


class TorchClass:
    """Torch's DDP class, instrumented for as long as it is installed.

    Args:
        attachments: By model; those that are there when a method is called are told.
    """

    def __init__(self, attachments: Mapping[Any, Attached]) -> None:
        self._attachments = attachments
        self._patches = Patches()

    def install(self) -> None:
        """Wrap its methods."""
        self.remove()  # Models that were collected left them wrapped.
        for name, around in (
            ("_pre_forward", self._telling_forward),
            ("_sync_buffers", self._telling_buffers),
            ("register_comm_hook", self._timing_hook),
            ("_update_process_group", self._observing_again),
            ("_match_all_reduce_for_bwd_pass", self._telling_shadows),
        ):
            self._patches.put(DistributedDataParallel, name, around)

    def remove(self) -> None:
        """Put them back."""
        self._patches.undo()

    def _telling_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        attachments = self._attachments

        def _pre_forward(model: Any, *inputs: Any, **kwargs: Any) -> Any:
            attachment = attachments.get(model)
            if attachment is not None:
                attachment.forward_began(inputs, kwargs, torch.is_grad_enabled() and model.require_backward_grad_sync)
            return original(model, *inputs, **kwargs)

        return _pre_forward

    def _telling_buffers(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _sync_buffers(model: Any) -> Any:
            attachment = self._attachments.get(model)
            if attachment is None:
                return original(model)
            began = attachment.now()
            result = original(model)
            attachment.buffers_synced(began)
            return result

        return _sync_buffers

    def _timing_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def register_comm_hook(model: Any, state: object, hook: Callable[..., Any]) -> Any:
            attachment = self._attachments.get(model)
            if attachment is None:
                return original(model, state, hook)
            return register(model, state, hook, attachment)

        return register_comm_hook

    def _observing_again(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _update_process_group(model: Any, new_process_group: Any) -> Any:
            result = original(model, new_process_group)
            attachment = self._attachments.get(model)
            if attachment is not None:
                attachment.observe(model)
            return result

        return _update_process_group

    def _telling_shadows(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _match_all_reduce_for_bwd_pass(model: Any) -> Any:
            result = original(model)
            attachment = self._attachments.get(model)
            if attachment is not None:
                attachment.shadowed()
            return result

        return _match_all_reduce_for_bwd_pass


def register(model: Any, state: object, hook: Callable[..., Any], attachment: Attached) -> None:
    """Register the user's hook, timed, on a model of the instrumented class; the model still names the user's own."""
    DistributedDataParallel.register_comm_hook.__wrapped__(model, state, attachment.timed(hook))  # type: ignore[attr-defined]
    model._comm_hooks[-1] = (hook, state)
    attachment.hooked(hook)
