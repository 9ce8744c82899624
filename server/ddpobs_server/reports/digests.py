"""A digest of each run for the list of runs: its times, its step time over time, its rate, its host and labels.

Digests are kept by the run's last commit, so that a list of a thousand runs reads only those that have changed.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from ddpobs import wire
from ddpobs_server.reports.run_times import Span, span_of_run
from ddpobs_server.store import Run, RunVersion, Store, trained_labels
from ddpobs_server.web.run_faults import RunFaults

_RECENT = 2
"""Number of the last step times that make the rate."""
_KEPT, _FRESH_S = 5000, 5.0
"""Digests in memory, and the age up to which a live run's digest is used again."""


@dataclass(frozen=True)
class RunDigest:
    """Facts of a run; all but its span are of its latest attempt.

    Attributes:
        step_times_ns: Mean step time of at most 32 parts of the run, oldest first.
        steps_per_s: Steps a second at the end; None without steps.
        host: Host of its lowest rank; empty if unknown.
        span: Begin of the run's first attempt, and the latest time of all; None if unknown.
        tags: Tags that the training set.
        note: Note that the training set.
    """

    step_times_ns: tuple[int, ...] = ()
    steps_per_s: float | None = None
    host: str = ""
    span: Span | None = None
    tags: tuple[str, ...] = ()
    note: str = ""

    @property
    def step_ns(self) -> int | None:
        """Median of the step times; None without steps."""
        return round(median(self.step_times_ns)) if self.step_times_ns else None


@dataclass(frozen=True)
class _Kept:
    version: RunVersion
    made_s: float
    digest: RunDigest


class RunDigests:
    """Makes and keeps digests.

    Args:
        store: Source of the rows.
        faults: Contains the errors of single runs, whose digests are empty.
        now_s: A monotonic clock.
    """

    def __init__(self, store: Store, faults: RunFaults, now_s: Callable[[], float] = time.monotonic) -> None:
        self._store, self._faults, self._now_s = store, faults, now_s
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, runs: Sequence[Run]) -> list[RunDigest]:
        """Return the digest of each run; that of a live run may be five seconds old."""
        now_s = self._now_s()
        with self._lock:
            known = {run.run: self._kept.get((run.run, run.attempt)) for run in runs}
        old = [run for run in runs if not _is_current(known[run.run], run, now_s)]
        digests = self._make(old)
        with self._lock:
            for run in old:
                self._kept[run.run, run.attempt] = _Kept(run.version, now_s, digests[run.run])
                self._kept.move_to_end((run.run, run.attempt))
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return [digests.get(run.run) or _digest_of(known[run.run]) for run in runs]

    def _make(self, runs: Sequence[Run]) -> dict[str, RunDigest]:
        digests = {run.run: RunDigest() for run in runs}
        for part in self._faults.apart("list", list(digests), self._read):
            digests |= part
        return digests

    def _read(self, keys: Sequence[str]) -> dict[str, RunDigest]:
        parts, hellos, times = self._store.step_parts(keys), self._store.hellos(keys), self._store.attempt_times(keys)
        return {key: _digest(parts.get(key, []), hellos.get(key), span_of_run(times[key].values())) for key in keys}


def _is_current(kept: _Kept | None, run: Run, now_s: float) -> bool:
    if kept is None or kept.version.created_ns != run.created_ns:
        return False
    return kept.version == run.version or (not run.is_over and now_s - kept.made_s < _FRESH_S)


def _digest_of(kept: _Kept | None) -> RunDigest:
    return kept.digest if kept is not None else RunDigest()


def _digest(parts: Sequence[tuple[int, float]], hello: wire.Hello | None, span: Span | None) -> RunDigest:
    tags, note = trained_labels(hello)
    steps, wall_ns = (sum(values) for values in zip(*parts[-_RECENT:], strict=True)) if parts else (0, 0.0)
    return RunDigest(
        step_times_ns=tuple(round(ns / count) for count, ns in parts if count),
        steps_per_s=steps / wall_ns * 1e9 if wall_ns > 0 else None,
        host=hello.host if hello is not None else "",
        span=span,
        tags=tags,
        note=note,
    )
