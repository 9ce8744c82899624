"""Writes the totals by host that diagnoses leave, and begins diagnoses of runs that nobody has looked at.

It also makes the figures of the fleet in `/metrics` again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter

from ddpobs_server.reports.reports import Reports
from ddpobs_server.reports.run_state import ReportVersion
from ddpobs_server.store import Store, UnavailableError

_log = logging.getLogger(__name__)
_PERIOD_S = 5.0
_ROUND_S, _RUNS = 60.0, 50
"""Seconds between two rounds of diagnoses, and the number that a round begins."""
_SILENT_NS = 120 * 10**9
"""A run without a batch for this long is over."""
_EVERY_S = 600.0
"""Seconds after which the totals of a run that goes on are written again."""
_MAX_WRITTEN = 20_000
"""Runs whose last write is remembered."""
_CLOSE_S = 5.0


class FleetTotals:
    """Keeps the totals by host up to date, on a thread.

    Args:
        store: Receives the totals.
        reports: Source of the diagnoses.
        registry: Receives the metric.
    """

    def __init__(self, store: Store, reports: Reports, registry: CollectorRegistry) -> None:
        self._store, self._reports, self._faults = store, reports, reports.faults
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpobs-fleet", daemon=True)
        self._written: OrderedDict[str, tuple[ReportVersion, float]] = OrderedDict()
        self._before_ns = 2**63 - 1
        self.failures = Counter("ddpobs_server_fleet_failures", "Failed rounds of fleet totals.", registry=registry)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread after a last write."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def write(self, now_ns: int) -> int:
        """Write the totals that wait; of a run that goes on, every ten minutes. Returns the number of runs written.

        Raises:
            UnavailableError: The database does not answer. What is not written waits for the next call.
        """
        count, waiting = 0, self._reports.unwritten_totals.take()
        try:
            for run in list(waiting):
                version, totals = waiting[run]
                if self._is_due(run, version):
                    with self._faults.contained("fleet", run):
                        made = [replace(total, commits=version.commits) for total in totals]
                        self._store.write_host_totals(run, made, now_ns)
                    self._remember(run, version)
                    count += 1
                del waiting[run]
        finally:
            for run, (version, totals) in waiting.items():
                self._reports.unwritten_totals.put(run, version, totals)
        return count

    def _remember(self, run: str, version: ReportVersion) -> None:
        self._written[run] = version, time.monotonic()
        self._written.move_to_end(run)
        while len(self._written) > _MAX_WRITTEN:
            self._written.popitem(last=False)

    def _is_due(self, run: str, version: ReportVersion) -> bool:
        if (last := self._written.get(run)) is None:
            return True
        written, at_s = last
        if (written.created_ns, written.commits) == (version.created_ns, version.commits):
            return False
        return not version.clock.isdecimal() or time.monotonic() - at_s > _EVERY_S

    def diagnose(self, now_ns: int) -> int:
        """Begin the diagnoses of some runs whose totals are missing or old; return their number.

        Each round goes on where the one before ended, so that runs that fail do not hold up the others.
        """
        made_ns = now_ns - int(_EVERY_S * 1e9)
        due = self._store.runs_without_totals(now_ns - _SILENT_NS, made_ns, self._before_ns, _RUNS)
        self._before_ns = due[-1][2] if len(due) == _RUNS else 2**63 - 1
        self._reports.diagnose_soon((run, attempt) for run, attempt, _ in due)
        return len(due)

    def _run(self) -> None:
        round_s = time.monotonic()
        is_closing = False
        while not is_closing:
            is_closing = self._closing.wait(_PERIOD_S)
            try:
                self.write(time.time_ns())
                if not is_closing:
                    self._reports.fleet_figures.refresh()
                if not is_closing and time.monotonic() - round_s > _ROUND_S:
                    round_s = time.monotonic()
                    self.diagnose(time.time_ns())
            except UnavailableError as error:
                self.failures.inc()
                _log.warning("the totals of the fleet were not written: %s", error)
            except Exception:
                self.failures.inc()
                _log.exception("the totals of the fleet were not written")
