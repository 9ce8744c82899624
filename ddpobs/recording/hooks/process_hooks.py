"""Process-wide hooks that report calls of the user's code to the journal; the user's code stays unchanged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import dataloader

from ddpobs import wire
from ddpobs.never_raises import never_raises
from ddpobs.recording.journal import Journal
from ddpobs.torch_seam import step_hooks
from ddpobs.torch_seam.patching import Patches

_STORAGES = (torch.UntypedStorage, torch.TypedStorage)


class ProcessHooks:
    """Hooks on loaders, backward, optimizers and checkpoints, while installed."""

    def __init__(self, journal: Journal, event: Callable[[str, int, dict[str, wire.Scalar]], None]) -> None:
        self._journal = journal
        self._event = event
        self._patches = Patches()
        self._undo: list[Callable[[], None]] = []
        self._waits_for_step = False
        """Telemetry began inside of an optimizer's step, whose hooks can be added after it only."""

    def install(self) -> None:
        """Install the hooks."""
        journal = self._journal
        journal.optimizer_is_running = never_raises(step_hooks.is_in_step)
        self._undo.append(step_hooks.listen(journal.optimizer_began, journal.optimizer_ended))
        self._waits_for_step = not step_hooks.add_pair()
        self._patches.put(torch.autograd, "backward", self._backward)
        same_function = torch.serialization.save is torch.save
        self._patches.put(torch, "save", self._save)
        if same_function:  # Pickle looks the function up there, and requires the same object.
            self._patches.put(torch.serialization, "save", lambda _: torch.save)
        safetensors = sys.modules.get("safetensors.torch")
        for name in ("serialize", "serialize_file"):  # Every save function of safetensors calls these.
            if hasattr(safetensors, name):
                self._patches.put(safetensors, name, self._save)
        self._patch_distributed_checkpoints()
        self._patches.put(torch.cuda.CUDAGraph, "capture_begin", self._capture_begin)
        self._patches.put(torch.cuda.CUDAGraph, "capture_end", self._capture_end)
        self._patches.put(dataloader._BaseDataLoaderIter, "__next__", self._fetch)
        self._patches.put(dataloader.DataLoader, "__iter__", self._fetch)

    def _patch_distributed_checkpoints(self) -> None:
        checkpoint = sys.modules.get("torch.distributed.checkpoint")
        savers = sys.modules.get("torch.distributed.checkpoint.state_dict_saver")
        for name in ("save", "async_save"):
            for module in (checkpoint, savers):
                if hasattr(module, name):
                    self._patches.put(module, name, self._save)

    def remove(self) -> None:
        """Remove the hooks."""
        self._patches.undo()
        while self._undo:
            self._undo.pop()()

    @never_raises
    def _add_step_hooks(self) -> None:
        self._waits_for_step = not step_hooks.add_pair()

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        journal = self._journal

        def backward(*args: Any, **kwargs: Any) -> Any:
            if self._waits_for_step:
                self._add_step_hooks()
            if not journal.backward_began():
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                journal.backward_ended(raised=True)
                raise
            journal.backward_ended()
            return result

        return backward

    def _fetch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        journal = self._journal

        def fetch(loader: Any, *args: Any, **kwargs: Any) -> Any:
            if self._waits_for_step:
                self._add_step_hooks()
            if not journal.fetch_began(id(loader)):
                return original(loader, *args, **kwargs)
            try:
                result = original(loader, *args, **kwargs)
            except BaseException as error:
                journal.fetch_ended(raised=not isinstance(error, StopIteration))
                raise
            journal.fetch_ended()
            return result

        return fetch

    def _capture_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(*args: Any, **kwargs: Any) -> Any:
            self._event("cuda_graph_captured", self._journal.number, {})
            self._journal.pause(True)
            try:
                return original(*args, **kwargs)
            except BaseException:
                self._journal.pause(False)
                raise

        return capture_begin

    def _capture_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                self._journal.pause(False)

        return capture_end

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        journal = self._journal

        def save(*args: Any, **kwargs: Any) -> Any:
            is_part = bool(args) and isinstance(args[0], _STORAGES)  # Pickling a tensor saves its storage.
            if is_part or not journal.waits.save_began():
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                journal.waits.save_ended()

        return save
