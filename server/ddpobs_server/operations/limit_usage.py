"""Shares of the limits that are in use, so that an alert comes before the first refusal."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from ddpobs_server.settings import Settings
from ddpobs_server.store import Store
from ddpobs_server.web.workspace_limits import WorkspaceLimits

_log = logging.getLogger(__name__)
NEAR = 0.8
"""Share of a limit from which it is reported; the alert `DdpobsNearLimit` has the same."""
_PERIOD_S = 60.0
_ACTIVE_NS = 600 * 10**9
"""Runs with a batch in this time may get further sources."""


class LimitUsage:
    """The metric `ddpobs_server_limit_used_ratio`: the fullest workspace or run of each limit.

    Args:
        settings: The limits.
        limits: `max_runs` of each workspace.
        store: Holds the counted runs and sources.
        registry: Receives the metric.
    """

    def __init__(self, settings: Settings, limits: WorkspaceLimits, store: Store, registry: CollectorRegistry) -> None:
        self._settings, self._limits, self._store = settings, limits, store
        self._measured_at = float("-inf")
        self._ratio = Gauge(
            "ddpobs_server_limit_used_ratio",
            "Used share of a limit; clients are refused at 1.",
            ["limit"],
            registry=registry,
        )
        for limit in ("max_runs", "max_sources"):
            self._ratio.labels(limit)
        self.watch("open_files", _open_files_ratio)

    def watch(self, limit: str, used_ratio: Callable[[], float]) -> None:
        """Report a share that is read at each scrape."""
        self._ratio.labels(limit).set_function(used_ratio)

    def measure(self) -> None:
        """Count the stored runs and sources, at most once a minute."""
        if time.monotonic() - self._measured_at < _PERIOD_S:
            return
        self._measured_at = time.monotonic()
        ratios = [0.0]
        for workspace, count in self._store.runs_by_workspace().items():
            most = self._limits.of(workspace).max_runs
            self._warn_if_near("max_runs", f"workspace {workspace}", count, most)
            ratios.append(count / max(1, most))
        self._ratio.labels("max_runs").set(max(ratios))
        run, sources = self._store.most_sources(time.time_ns() - _ACTIVE_NS)
        self._warn_if_near("max_sources", f"run {run}", sources, self._settings.max_sources)
        self._ratio.labels("max_sources").set(sources / self._settings.max_sources)

    def _warn_if_near(self, limit: str, owner: str, count: int, most: int) -> None:
        if count >= NEAR * most:
            _log.warning("%s has %d of %d (DDPOBS_SERVER_%s)", owner, count, most, limit.upper())


def _open_files_ratio() -> float:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir()) / limit if limit > 0 else 0.0
    except OSError:  # A system without /proc.
        return 0.0
