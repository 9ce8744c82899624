"""Counts of training's use of torch's loaders, for the finding `input-bound`."""

from __future__ import annotations

import os
from typing import Any

from ddpobs import wire
from ddpobs.never_raises import never_raises
from ddpobs.torch_seam.loaders import is_alone

_HALVED_AT = 4096
"""Batches at which all counts are halved, so that the past fades."""
_MAX_WORKERS = 256
_LONG_NS = 1_000_000
"""Time above which a fetch waited. Only then are the other workers' batches counted, which takes microseconds."""


class InputCounts:
    """Counts of iterators, batches and times; filled on the training thread, read on the telemetry thread."""

    def __init__(self) -> None:
        self._iterators = self._batches = 0
        self._creating_ns = self._fetching_ns = self._first_ns = self._closing_ns = self._collating_ns = 0
        self._workers, self._ahead, self._persistent = wire.UNKNOWN, 0, False
        self._awaited_ns: list[int] = []
        self._alone_ns: list[int] = []

    @never_raises
    def created(self, loader: Any, took_ns: int) -> None:
        """Count an iterator that training began over a loader."""
        self._iterators += 1
        self._creating_ns += took_ns
        workers = min(int(loader.num_workers), _MAX_WORKERS)
        if workers != self._workers:
            self._workers, self._awaited_ns, self._alone_ns = workers, [0] * workers, [0] * workers
        self._ahead, self._persistent = (
            int(loader.prefetch_factor or 0),
            bool(getattr(loader, "persistent_workers", False)),
        )

    def fetched(self, batches: Any, took_ns: int, worker: int | None) -> None:
        """Count a batch, for which training waited for this worker; None if it did not wait for a known one."""
        self._batches += 1
        self._fetching_ns += took_ns
        if getattr(batches, "_num_yielded", 0) == 1:
            self._first_ns += took_ns
        if worker is not None and took_ns > _LONG_NS:
            self._count_wait(batches, took_ns, worker)
        if self._batches >= _HALVED_AT:
            self._halve()

    def _count_wait(self, batches: Any, took_ns: int, worker: int) -> None:
        if worker < len(self._awaited_ns):
            self._awaited_ns[worker] += took_ns
            if is_alone(batches, worker):
                self._alone_ns[worker] += took_ns

    def collated(self, took_ns: int) -> None:
        """Count time in `collate_fn`, called by the training process itself."""
        self._collating_ns += took_ns

    def closed(self, took_ns: int) -> None:
        """Count time in ending the workers of an iterator that was dropped."""
        self._closing_ns += took_ns

    def record(self) -> wire.Input | None:
        """Return the counts for the wire; None before the first batch."""
        if not self._batches:
            return None
        return wire.Input(
            iterators=self._iterators,
            creating_ns=self._creating_ns,
            batches=self._batches,
            fetching_ns=self._fetching_ns,
            first_ns=self._first_ns,
            closing_ns=self._closing_ns,
            collating_ns=self._collating_ns,
            workers=self._workers,
            persistent=self._persistent,
            ahead=self._ahead,
            cpus=len(os.sched_getaffinity(0)),
            awaited_ns=list(self._awaited_ns),
            alone_ns=list(self._alone_ns),
        )

    def _halve(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(self, name, [ns // 2 for ns in value])
            elif name not in ("_workers", "_ahead", "_persistent"):
                setattr(self, name, value // 2)
