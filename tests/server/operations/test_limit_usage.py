"""The used share of each limit is a metric before clients are refused."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from ddpobs_server.operations.limit_usage import LimitUsage
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Store
from ddpobs_server.web.workspace_limits import WorkspaceLimits
from prometheus_client import CollectorRegistry

from benchmarks.rig.collector import collector
from tests.support.server.batches import batch, layout, put
from tests.support.server.own_metrics import metrics


def usage(store: Store, **limits: Any) -> dict[str, float]:
    registry = CollectorRegistry()
    settings = Settings(**limits)
    workspaces = WorkspaceLimits(settings, store)
    workspaces.refresh()
    LimitUsage(settings, workspaces, store, registry).measure()
    (family,) = registry.collect()
    return {sample.labels["limit"]: sample.value for sample in family.samples}


def arrive(store: Store, *batches: tuple[str, int], received_ns: int | None = None) -> None:
    now_ns = received_ns or time.time_ns()
    store.ingest([Arrival(batch(run, rank=rank), bytes(32), 1, now_ns) for run, rank in batches])


def test_the_fullest_workspace_and_the_largest_active_run_count(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    arrive(store, ("a", 0), ("a", 1), ("vision/a", 0), ("vision/b", 0), ("vision/c", 0), ("vision/c", 1))
    arrive(store, *(("vision/old", rank) for rank in range(9)), received_ns=1)
    with caplog.at_level(logging.WARNING):
        used = usage(store, max_runs=5, max_sources=8)
    assert (used["max_runs"], used["max_sources"]) == (4 / 5, 2 / 8)
    assert "workspace vision has 4 of 5 (DDPOBS_SERVER_MAX_RUNS)" in caplog.text
    assert "MAX_SOURCES" not in caplog.text


def test_a_run_near_its_limit_of_sources_is_in_the_log(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    arrive(store, *(("a", rank) for rank in range(4)))
    assert usage(store, max_sources=5)["max_sources"] == 0.8
    assert "run a has 4 of 5 (DDPOBS_SERVER_MAX_SOURCES)" in caplog.text


def test_a_workspace_is_measured_by_its_own_limit_of_runs(store: Store) -> None:
    arrive(store, ("a", 0), ("vision/a", 0))
    store.set_workspace_limits("vision", {"max_runs": 1})
    assert usage(store, max_runs=10)["max_runs"] == 1


def test_an_empty_store_uses_nothing(store: Store) -> None:
    used = usage(store)
    assert (used["max_runs"], used["max_sources"]) == (0, 0)
    assert 0 < used["open_files"] < 1


def test_a_collector_reports_each_limit(tmp_path: Path) -> None:
    with collector(tmp_path, max_runs=2, max_buckets=10, max_run_series=1000, max_series=2000) as running:
        put(running.url, batch("a", layouts=[layout()]))
        current = metrics(running.url)
        for limit in ("max_runs", "max_sources", "queue_batches", "max_under_way_mb", "open_files"):
            assert 0 <= current("limit_used_ratio", limit=limit) < 1
        assert current("limit_used_ratio", limit="max_buckets") == 0.2
        assert current("limit_used_ratio", limit="max_run_series") == 2 * current(
            "limit_used_ratio", limit="max_series"
        )
        assert current("limit_used_ratio", limit="max_series") > 0
