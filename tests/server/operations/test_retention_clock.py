"""Retention removes nothing while the clock may be wrong, and reports it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ddpobs_server.operations import clock_guard, retention
from ddpobs_server.operations.retention import RetentionJob, RetentionRefusedError
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Store
from prometheus_client import CollectorRegistry

from benchmarks.rig import databases, patience
from ddpobs import wire
from tests.support.server.batches import batch, spans, steps

DAY_NS = 86_400 * 10**9
YEAR_NS = 365 * DAY_NS


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(databases.migrated_sqlite(tmp_path))
    yield store
    store.close()


def arrive(store: Store, run: str, received_ns: int) -> None:
    payload = wire.decode(wire.encode(batch(run, steps=steps(0, 2), spans=spans(0, 2))))
    store.ingest([Arrival(payload, run.encode().ljust(32), 1, received_ns)])


def job(store: Store, **settings: Any) -> tuple[RetentionJob, CollectorRegistry]:
    registry = CollectorRegistry()
    return RetentionJob(Settings(**settings), store, registry), registry


class Elapsed:
    """A clock that is never set, moved by the test."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


@pytest.mark.parametrize("setting", [{"keep_runs_days": 30}, {"keep_spans_days": 30}])
def test_a_clock_a_year_ahead_at_the_start_removes_nothing(store: Store, setting: dict[str, float]) -> None:
    now_ns = time.time_ns()
    for run in "abc":
        arrive(store, run, now_ns)
    keeper, registry = job(store, **setting)
    with pytest.raises(RetentionRefusedError, match="100% of the data are older than 30 days"):
        keeper.run_once(now_ns + YEAR_NS)
    assert len(store.runs(10)) == 3
    assert registry.get_sample_value("ddpobs_server_retention_refused", {"reason": "it would remove too much"}) == 1
    keeper.run_once(now_ns)
    assert registry.get_sample_value("ddpobs_server_retention_refused", {"reason": "it would remove too much"}) == 0


@pytest.mark.parametrize("jump_ns", [YEAR_NS, 3600 * 10**9, -3600 * 10**9])
@pytest.mark.parametrize("setting", [{"keep_runs_days": 30}, {"keep_spans_days": 30}])
def test_a_clock_that_is_set_between_two_rounds_removes_nothing_until_it_is_set_back(
    store: Store, setting: dict[str, float], jump_ns: int
) -> None:
    now_ns, elapsed = time.time_ns(), Elapsed()
    arrive(store, "a", now_ns)
    keeper, _ = job(store, **setting)
    keeper.clock = clock_guard.ClockGuard(elapsed)
    keeper.clock.accept(now_ns)
    elapsed.ns = 60 * 10**9
    keeper.run_once(now_ns + elapsed.ns)
    for _ in range(2):
        elapsed.ns += 60 * 10**9
        with pytest.raises(RetentionRefusedError, match="set it back, or restart"):
            keeper.run_once(now_ns + elapsed.ns + jump_ns)
    assert len(store.runs(10)) == 1
    elapsed.ns += 60 * 10**9
    keeper.run_once(now_ns + elapsed.ns)


def test_runs_that_become_due_while_the_collector_runs_are_all_removed(store: Store) -> None:
    now_ns, elapsed = time.time_ns(), Elapsed()
    for run in "abc":
        arrive(store, run, now_ns)
    keeper, _ = job(store, keep_runs_days=30)
    keeper.clock = clock_guard.ClockGuard(elapsed)
    keeper.run_once(now_ns)
    elapsed.ns = 31 * DAY_NS
    keeper.run_once(now_ns + elapsed.ns)
    assert store.runs(10) == []


def test_the_share_is_a_setting(store: Store) -> None:
    now_ns = time.time_ns()
    for run, age_ns in (("old", YEAR_NS), ("older", YEAR_NS), ("new", 0)):
        arrive(store, run, now_ns - age_ns)
    with pytest.raises(RetentionRefusedError, match="67%"):
        job(store, keep_runs_days=30)[0].run_once(now_ns)
    job(store, keep_runs_days=30, keep_share=0.7)[0].run_once(now_ns)
    assert [run.run for run in store.runs(10)] == ["new"]


def test_a_limit_by_size_holds_while_removal_by_age_is_refused(store: Store) -> None:
    now_ns = time.time_ns()
    arrive(store, "a", now_ns - YEAR_NS)
    with pytest.raises(RetentionRefusedError):
        job(store, keep_runs_days=30, keep_gb=1e-9)[0].run_once(now_ns)
    assert store.runs(10) == []


def test_a_refused_round_is_an_error_in_the_log_and_counts_as_failed(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention, "_PERIOD_S", 0.01)
    arrive(store, "a", time.time_ns() - YEAR_NS)
    keeper, registry = job(store, keep_runs_days=30)
    with caplog.at_level(logging.ERROR):
        keeper.start()
        deadline = time.monotonic() + patience.HANG_S
        while not registry.get_sample_value("ddpobs_server_retention_failures_total"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        keeper.close()
    assert "set DDPOBS_SERVER_KEEP_SHARE=1" in caplog.text
