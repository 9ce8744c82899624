"""What stands around torch's loader: frameworks' own loaders, and samplers whose order repeats."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from ddpobs import wire
from ddpobs.recording.journal import Journal, never_raises
from ddpobs.torch_seam.patching import Patches

_FRAMEWORKS = {"accelerate.data_loader": ("DataLoaderShard", "DataLoaderDispatcher")}
"""Loaders whose `__iter__` does more than ask torch's: they move, broadcast and slice batches."""


class _Fetching:
    """An iterator whose every step is the data phase."""

    def __init__(self, batches: Iterator[Any], journal: Journal) -> None:
        self._batches, self._journal = batches, journal

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # Or an error, as its own would be.

    def __bool__(self) -> bool:
        return bool(self._batches)  # A generator is true and has no length.

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # Of a copy that is being made.
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __next__(self) -> Any:
        if not self._journal.fetch_began(id(self)):
            return next(self._batches)
        try:
            return next(self._batches)
        finally:
            self._journal.fetch_ended()


class LoaderHooks:
    """Hooks on loaders and samplers, for as long as they are installed.

    Args:
        journal: Learns of the data phase.
        told: Called with an event's kind, step and detail.
    """

    def __init__(self, journal: Journal, told: Callable[[str, int, dict[str, wire.Scalar]], object]) -> None:
        self._journal = journal
        self._told = told
        self._drawn_last: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        self._repeating: dict[int, tuple[int, dict[str, wire.Scalar]]] = {}
        self._said = False
        self._patches = Patches()

    def install(self) -> None:
        """Put them in place; a framework that is not imported is left alone."""
        self._patches.put(DistributedSampler, "__iter__", self._drawn)
        for module, names in _FRAMEWORKS.items():
            for name in names:
                if loader := getattr(sys.modules.get(module), name, None):
                    self._patches.put(loader, "__iter__", self._fetching)
        for loader in set(_subclasses(DataLoader)):
            if "__iter__" in vars(loader):  # Some have a thread of theirs fetch ahead.
                self._patches.put(loader, "__iter__", self._fetching)

    def remove(self) -> None:
        """Take all of them out again."""
        self._patches.undo()

    @never_raises
    def look(self) -> None:
        """Tell once of a sampler that repeats an order on which training went on; on any thread, now and then.

        Not at once: a script may draw a batch only to look at it, or go over its training data to evaluate.
        """
        for since, detail in list(self._repeating.values()):
            if not self._said and self._journal.number > since:
                self._said = True
                self._told("sampler_without_set_epoch", since, detail)

    def _fetching(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def iterate(loader: Any) -> Iterator[Any]:
            batches = original(loader)
            return (
                batches if isinstance(batches, (_BaseDataLoaderIter, _Fetching)) else _Fetching(batches, self._journal)
            )

        return iterate

    def _drawn(self, original: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
        def draw(sampler: Any) -> Iterator[int]:
            self._note(sampler)
            return original(sampler)

        return draw

    @never_raises
    def _note(self, sampler: Any) -> None:
        self.look()
        if self._said or not sampler.shuffle or self._journal.evaluating() or not torch.is_grad_enabled():
            return
        epoch, step = sampler.epoch, self._journal.number
        last = self._drawn_last.get(sampler)
        self._drawn_last[sampler] = (epoch, step)
        if last is None or last[0] != epoch:
            self._repeating.pop(id(sampler), None)
        elif last[1] < step:
            detail = {"sampler": type(sampler).__name__, "dataset": type(sampler.dataset).__name__, "epoch": epoch}
            self._repeating[id(sampler)] = (step, detail)


def _subclasses(of: type[Any]) -> Iterator[type[Any]]:
    for subclass in of.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
