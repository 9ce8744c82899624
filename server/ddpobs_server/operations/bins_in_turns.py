"""Makes the bins of all runs, for a limited time in each round. Workspaces take turns, part by part."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Gauge

from ddpobs_server.operations.make_bins import is_over, update_step_bins
from ddpobs_server.reports.read_bins import AttemptBins
from ddpobs_server.store import Store
from ddpobs_server.store.upkeep.turns import by_workspace
from ddpobs_server.web.run_faults import RunFaults

_ROUND_S = 20.0
"""Longest time for bins in a round, so that the removal of old data never waits long."""
_URGENT_NS = 3600 * 10**9
"""Time after its last batch in which a run that failed or hung is urgent."""
_HEAD_START_S = 600.0
"""Time by which an urgent run counts as waiting longer: it comes first, and another run waits no longer than this."""


class BinsInTurns:
    """Makes the bins that are due of the runs that changed.

    Within a workspace, a run that just failed or hung is first, then the run that waited longest.

    Args:
        store: The store.
        registry: Receives the metric.
        faults: Contains the errors of single runs.
    """

    def __init__(self, store: Store, registry: CollectorRegistry, faults: RunFaults) -> None:
        self._store, self._faults = store, faults
        self._done: dict[str, int] = {}
        """Commits of the runs that need no further bins until the next commit."""
        self._waiting_since: dict[str, float] = {}
        self.lag = Gauge(
            "ddpobs_server_bins_lag_seconds",
            "Longest time that a run has waited for its bins of steps.",
            registry=registry,
        )

    def run(self, now_ns: int, pause: Callable[[float], bool]) -> None:
        """Make bins for at most `_ROUND_S`; the next round does the rest.

        Args:
            now_ns: The wall clock.
            pause: Called after each part with the time that it took, in seconds; true to stop.
        """
        began = time.monotonic()
        stored = dict(self._store.runs_with_columns())
        self._done = {run: commits for run, commits in self._done.items() if run in stored}
        changed = {run: commits for run, commits in stored.items() if self._done.get(run) != commits}
        self._waiting_since = {run: self._waiting_since.get(run, began) for run in changed}
        urgent = self._store.urgent_runs(now_ns - _URGENT_NS) if changed else set()
        in_order = sorted(changed, key=lambda run: self._waiting_since[run] - _HEAD_START_S * (run in urgent))
        turns = deque(self._parts(runs, changed, now_ns) for runs in by_workspace(in_order).values())
        while turns:
            part_began, turn = time.monotonic(), turns.popleft()
            if next(turn, None) is not None:
                turns.append(turn)
            if pause(time.monotonic() - part_began) or time.monotonic() - began > _ROUND_S:
                break
        ended = time.monotonic()
        self.lag.set(ended - min(self._waiting_since.values(), default=ended))

    def _parts(self, runs: list[str], commits: dict[str, int], now_ns: int) -> Iterator[int]:
        """Make the bins of a workspace's runs, and yield after each part."""
        for run in runs:
            with self._faults.contained("bins", run):
                yield from self._parts_of(run, commits[run], now_ns)
            self._waiting_since.pop(run, None)
            yield 0

    def _parts_of(self, run: str, commits: int, now_ns: int) -> Iterator[int]:
        attempts = self._store.attempts(run)
        for attempt in attempts:
            yield from update_step_bins(AttemptBins(self._store, run, attempt.attempt), now_ns)
        if not attempts or is_over(self._store.sources(run, attempts[-1].attempt), now_ns):
            self._done[run] = commits
