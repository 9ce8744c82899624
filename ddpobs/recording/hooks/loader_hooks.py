"""Hooks on loaders: counts of torch's, the data phase of others, and samplers that repeat an order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from time import monotonic_ns
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from ddpobs import wire
from ddpobs.never_raises import never_raises
from ddpobs.recording.hooks.input_counts import InputCounts
from ddpobs.recording.journal import Journal
from ddpobs.torch_seam.loaders import awaited_worker, time_collate
from ddpobs.torch_seam.patching import Patches

_FRAMEWORKS = {"accelerate.data_loader": ("DataLoaderShard", "DataLoaderDispatcher")}
"""Loaders that do more in `__iter__` than call torch's: they move, broadcast and slice batches."""


class _TimedBatches:
    """An iterator that records each call as the data phase."""

    def __init__(self, batches: Iterator[Any], journal: Journal) -> None:
        self._batches, self._journal = batches, journal

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # Raises the iterator's own error if it has no length.

    def __bool__(self) -> bool:
        return bool(self._batches)  # A generator is true and has no length.

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # During a copy the attribute is not set yet.
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __next__(self) -> Any:
        if not self._journal.fetch_began(id(self)):
            return next(self._batches)
        try:
            batch = next(self._batches)
        except BaseException as error:
            self._journal.fetch_ended(raised=not isinstance(error, StopIteration))
            raise
        self._journal.fetch_ended()
        return batch


class LoaderHooks:
    """Hooks on loaders and samplers, while installed.

    Args:
        journal: Records the data phase.
        report: Called with an event's kind, step and detail.

    Attributes:
        counts: Use of torch's loaders by training.
    """

    def __init__(self, journal: Journal, report: Callable[[str, int, dict[str, wire.Scalar]], object]) -> None:
        self._journal = journal
        self._report = report
        self._last_draw: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        """Epoch and step of each sampler's last order."""
        self._repeats: dict[int, tuple[int, dict[str, wire.Scalar]]] = {}
        """Step and detail of each sampler's repeated order, by the sampler's id."""
        self._reported = False
        self._patches = Patches()
        self.counts = InputCounts()

    def install(self) -> None:
        """Install the hooks; a framework that is not imported stays unchanged."""
        self._patches.put(DataLoader, "__iter__", self._counted_creation)
        self._patches.put(_BaseDataLoaderIter, "__next__", self._counted_fetch)
        self._patches.put(_MultiProcessingDataLoaderIter, "_shutdown_workers", self._counted_closing)
        self._patches.put(DistributedSampler, "__iter__", self._checked)
        for module, names in _FRAMEWORKS.items():
            for name in names:
                if loader := getattr(sys.modules.get(module), name, None):
                    self._patches.put(loader, "__iter__", self._timed)
        for loader in set(_subclasses(DataLoader)):
            if "__iter__" in vars(loader):  # Some fetch ahead on a separate thread.
                self._patches.put(loader, "__iter__", self._timed)

    def remove(self) -> None:
        """Remove the hooks."""
        self._patches.undo()

    @never_raises
    def report_repeated_order(self) -> None:
        """Report the first repeated order of a sampler that was trained on; called periodically, on any thread.

        Not reported at the draw: a script may draw a batch only to print it, or evaluate on its training data.
        """
        for since, detail in list(self._repeats.values()):
            if not self._reported and self._journal.number > since:
                self._reported = True
                self._report("sampler_without_set_epoch", since, detail)

    def _counted_creation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(loader: Any) -> Any:
            began = monotonic_ns()
            batches = original(loader)
            if self._trains():
                self.counts.created(loader, monotonic_ns() - began)
                time_collate(batches, self.counts.collated)
            return batches

        return iterate

    def _counted_fetch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def fetch(batches: Any) -> Any:
            worker, began = awaited_worker(batches), monotonic_ns()
            batch = original(batches)
            if self._trains():
                self.counts.fetched(batches, monotonic_ns() - began, worker)
            return batch

        return fetch

    def _counted_closing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        journal = self._journal

        def close(batches: Any) -> Any:
            if not journal.closing_began():
                return original(batches)
            began = monotonic_ns()
            try:
                return original(batches)
            finally:
                self.counts.closed(monotonic_ns() - began)
                journal.closing_ended()

        return close

    def _trains(self) -> bool:
        return self._journal.thread.is_here and torch.is_grad_enabled()

    def _timed(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def iterate(loader: Any) -> Iterator[Any]:
            batches = original(loader)
            if isinstance(batches, (_BaseDataLoaderIter, _TimedBatches)):
                return batches
            return _TimedBatches(batches, self._journal)

        return iterate

    def _checked(self, original: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
        def draw(sampler: Any) -> Iterator[int]:
            self._check_epoch(sampler)
            return original(sampler)

        return draw

    @never_raises
    def _check_epoch(self, sampler: Any) -> None:
        self.report_repeated_order()
        evaluates = self._journal.evaluation.covers_all() or not torch.is_grad_enabled()
        if self._reported or not sampler.shuffle or evaluates:
            return
        epoch, step = sampler.epoch, self._journal.number
        last = self._last_draw.get(sampler)
        self._last_draw[sampler] = (epoch, step)
        if last is None or last[0] != epoch:
            self._repeats.pop(id(sampler), None)
        elif last[1] < step:
            detail = {"sampler": type(sampler).__name__, "dataset": type(sampler.dataset).__name__, "epoch": epoch}
            self._repeats[id(sampler)] = (step, detail)


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    for subclass in base.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
