"""Errors about single runs: each costs its own run, and is counted, logged once, and shown by `/readyz`."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge

from ddpobs_server.store import UnavailableError

_log = logging.getLogger(__name__)
Work = Literal["metrics", "findings", "list", "diagnosis", "bins", "retention", "compaction", "webhook", "fleet"]
_RETRY_S, _SHOWN_S = 60.0, 600.0
"""Seconds until a scrape reads a run again that failed, and for which a fault that does not recur is shown."""
_MAX_RUNS = 10_000
"""Faults in memory."""
Part = TypeVar("Part")


class RunFaults:
    """Contains errors, except those of the database, which concern all runs.

    Args:
        registry: Receives the metrics.
        now_s: A monotonic clock.
    """

    def __init__(self, registry: CollectorRegistry | None = None, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s, self._lock = now_s, threading.Lock()
        self._latest: OrderedDict[tuple[Work, str], float] = OrderedDict()
        self._count = Counter(
            "ddpobs_server_run_faults", "Errors that cost one run its part.", ["work"], registry=registry
        )
        for work in Work.__args__:  # type: ignore[attr-defined]
            self._count.labels(work)
        Gauge("ddpobs_server_faulty_runs", "Runs with such an error lately.", registry=registry).set_function(self.runs)

    def runs(self) -> int:
        """Number of runs with a fault in the last ten minutes that has not gone."""
        since_s = self._now_s() - _SHOWN_S
        with self._lock:
            return len({run for (_, run), at_s in self._latest.items() if at_s >= since_s})

    def recent(self, work: Work) -> list[str]:
        """Runs that failed in this work within the last minute."""
        since_s = self._now_s() - _RETRY_S
        with self._lock:
            return [run for (of, run), at_s in self._latest.items() if of == work and at_s >= since_s]

    @contextmanager
    def contained(self, work: Work, run: str) -> Iterator[None]:
        """Contain an error of the block, which is about one run.

        Raises:
            UnavailableError: The database does not answer.
        """
        try:
            yield
        except UnavailableError:
            raise
        except Exception as error:
            self._record(work, run, error)
        else:
            self._forget(work, [run])

    def apart(self, work: Work, runs: Sequence[str], read: Callable[[Sequence[str]], Part]) -> list[Part]:
        """Read runs together; if that fails, in halves, until only the runs that fail are left out.

        Returns:
            What `read` returned for each group of runs.

        Raises:
            UnavailableError: The database does not answer.
        """
        if not runs:
            return []
        try:
            part = read(runs)
        except UnavailableError:
            raise
        except Exception as error:
            if len(runs) == 1:
                self._record(work, runs[0], error)
                return []
            middle = len(runs) // 2
            return [*self.apart(work, runs[:middle], read), *self.apart(work, runs[middle:], read)]
        self._forget(work, runs)
        return [part]

    def _record(self, work: Work, run: str, error: Exception) -> None:
        self._count.labels(work).inc()
        with self._lock:
            is_known = self._latest.pop((work, run), None) is not None
            self._latest[work, run] = self._now_s()
            while len(self._latest) > _MAX_RUNS:
                self._latest.popitem(last=False)
        if not is_known:
            _log.error("%s of run %s failed and is left out", work, run, exc_info=error)

    def _forget(self, work: Work, runs: Sequence[str]) -> None:
        with self._lock:
            for run in runs if self._latest else ():
                self._latest.pop((work, run), None)
