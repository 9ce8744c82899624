"""Reads the counters that explain own time, at the end of each synchronised backward.

Training has emptied the processor's caches, so a system call takes 5 to 10 us there, ten times as long as in a loop.
One is made in each step: `/proc/thread-self/schedstat` through a kept descriptor, which belongs to the thread that
opened it. `getrusage` follows in every eighth step, or in each step while the process has page faults that read a disk.
A processor quota takes another call, only if the control group has one.
"""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from threading import get_ident
from time import monotonic_ns
from typing import Any

from ddpobs.recording.probes.cpu_quota import CpuQuota, close_if
from ddpobs.steps.counters import NO_USAGE, Reading

pread: Any = getattr(os, "pread", None)  # Windows has none; then nothing is read.
try:
    from resource import RUSAGE_SELF, RUSAGE_THREAD, getrusage
except ImportError:  # Only Linux counts by thread.
    getrusage = None  # type: ignore[assignment]

_SCHEDULE = "/proc/thread-self/schedstat"
_MAX_BYTES = 64
_MAJOR_FAULTS, _PREEMPTIONS = 7, 15
"""Positions in the result of `getrusage`."""
_USAGE_EVERY = 8
"""Readings from one call of `getrusage` to the next."""
_QUIET_LOOKS = 5
"""Looks of the telemetry thread without a page fault after which not every reading counts them."""
_QUOTA_EVERY = 8
"""Looks from one search for the quota to the next: it reads a dozen files, for 0.5 ms, a third of a pulse."""


class CounterReader:
    """Reads the totals of the calling thread, and counts the process's garbage collections while installed.

    Attributes:
        quota: The control group's processor quota.
    """

    __slots__ = (
        "_began_ns",
        "_collecting_ns",
        "_collections",
        "_is_limited",
        "_process_faults",
        "_quiet_looks",
        "_schedule",
        "_series",
        "_thread",
        "_until_quota",
        "_until_usage",
        "_usage_every",
        "quota",
    )

    def __init__(self, quota: CpuQuota | None = None) -> None:
        self.quota = CpuQuota() if quota is None else quota
        self._is_limited = self.quota.is_limited
        self._thread, self._series = 0, 0
        self._schedule = -1
        """Descriptor of the training thread's statistics, or of an empty file if there are none."""
        self._collections = self._collecting_ns = self._began_ns = 0
        self._until_usage = 0
        """Readings until the next call of `getrusage`."""
        self._usage_every = _USAGE_EVERY
        self._process_faults = self._quiet_looks = 0
        self._until_quota = _QUOTA_EVERY
        """Looks until the next search for the quota."""

    def install(self) -> None:
        """Count garbage collections from now on."""
        if self._collection not in gc.callbacks:
            gc.callbacks.append(self._collection)

    def remove(self) -> None:
        """Count no further collections."""
        with suppress(ValueError):
            gc.callbacks.remove(self._collection)
        self._began_ns = 0

    def close(self) -> None:
        """Remove the callback and close the descriptors, when training has ended."""
        self.remove()
        self.reset()
        self.quota.close()

    def read(self) -> Reading | tuple[()]:
        """Read all totals on the training thread. Returns an empty tuple on an error; never raises."""
        try:
            if get_ident() != self._thread:
                self._follow_thread()
            until_usage = self._until_usage = self._until_usage - 1
            preemptions, major_faults = NO_USAGE if until_usage >= 0 else self._usage()
            return (
                self._series,
                pread(self._schedule, _MAX_BYTES, 0),
                preemptions,
                major_faults,
                self.quota.statistics() if self._is_limited else None,
                self._collections,
                self._collecting_ns,
            )
        except Exception:  # Telemetry never stops a training, such as one that closed all its descriptors.
            return ()

    def begin_series(self) -> None:
        """Begin a new series of readings: the next increase is not known."""
        self._series += 1
        self._until_usage = 0

    def look(self) -> None:
        """Decide how often page faults are counted, and every eighth time find the quota.

        Called from time to time on another thread.
        """
        self._until_quota -= 1
        if not self._until_quota:
            self._until_quota = _QUOTA_EVERY
            self.quota.look()
            self._is_limited = self.quota.is_limited
        if getrusage is None:
            return
        faults = getrusage(RUSAGE_SELF).ru_majflt
        self._quiet_looks = 0 if faults > self._process_faults else self._quiet_looks + 1
        self._process_faults = faults
        self._usage_every = _USAGE_EVERY if self._quiet_looks >= _QUIET_LOOKS else 1

    def _usage(self) -> tuple[int, int]:
        self._until_usage = self._usage_every - 1
        if getrusage is None:
            return NO_USAGE
        usage = getrusage(RUSAGE_THREAD)
        return int(usage[_PREEMPTIONS]), int(usage[_MAJOR_FAULTS])

    def reset(self) -> None:
        """Begin anew at the next reading: in a forked child the descriptor belongs to the parent's thread."""
        self._thread = 0
        schedule, self._schedule = self._schedule, -1
        close_if(schedule, "schedstat", "null")

    def _follow_thread(self) -> None:
        self.reset()
        self._series += 1
        self._until_usage = 0
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            self._schedule = os.open(_SCHEDULE, flags)
        except OSError:
            self._schedule = os.open(os.devnull, flags)
        self._thread = get_ident()

    def _collection(self, phase: str, _: dict[str, Any]) -> None:
        """Count a collection; the interpreter calls this at its begin and its end."""
        if phase == "start":
            self._began_ns = monotonic_ns()
        elif self._began_ns:
            self._collecting_ns += monotonic_ns() - self._began_ns
            self._collections += 1
            self._began_ns = 0
