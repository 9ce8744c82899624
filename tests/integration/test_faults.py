"""Acknowledged batches are stored exactly once: real collectors under load, killed, cut off or with a full disk."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sqlalchemy import Engine, create_engine

from benchmarks.rig import databases, patience
from ddpobs.export import http_sender
from tests.support.integration.faults import (
    BUCKETS,
    FAULTS,
    WEIGHT,
    Proxy,
    Ranks,
    RestartableCollector,
    assert_stored_once,
    assert_sums,
    count_spooled,
    is_consistent,
    push,
    serving,
    stored_spans,
)
from tests.support.integration.full_disks import LARGE, FillDisk, SmallDisk, full_disk, full_quota
from tests.support.server.batches import assert_problem, batch, get, put, spans, steps

pytestmark = pytest.mark.wide


@pytest.fixture(autouse=True)
def short_retry_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks retry soon, however long the collector was down."""
    monkeypatch.setattr(http_sender, "_LONGEST_PAUSE_S", 0.3)


@pytest.fixture
def server() -> Iterator[Any]:
    """A PostgreSQL server that tests may stop."""
    with databases.postgresql_server() as running:
        yield running


def retryable(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Assert that an answer allows a retry, and return its problem document."""
    assert int(answer.headers["retry-after"]) > 0
    return assert_problem(answer, status)


def test_a_collector_that_ends_under_load_has_stored_every_acknowledged_batch(tmp_path: Path) -> None:
    with RestartableCollector(tmp_path) as collector:
        with Ranks(collector.url, "ended", tmp_path / "spool") as ranks:
            for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
                collector.wait_for_batches(20)
                collector.end(number)
                collector.start()
            collector.wait_for_batches(20)
        push(ranks.spool, collector.url)
        assert_stored_once(collector.url, "ended", ranks.steps)


def test_if_one_of_two_collectors_is_killed_the_other_takes_its_batches(server: Any, tmp_path: Path) -> None:
    with ExitStack() as stack:
        url = databases.new_database(server)
        pair = [stack.enter_context(RestartableCollector(tmp_path / name, database_url=url)) for name in "ab"]
        balancer = Proxy(pair[1].url, pair[0].url)
        address = stack.enter_context(serving(balancer))
        with Ranks(address, "shared", tmp_path / "spool") as ranks:
            for number in range(3):
                killed, survivor = pair[number % 2], pair[1 - number % 2]
                balancer.upstreams.reverse()
                killed.wait_for_batches(20)
                killed.end()
                survivor.wait_for_batches(20)
                killed.start()
        push(ranks.spool, survivor.url)
        assert_stored_once(killed.url, "shared", ranks.steps)


def test_a_proxy_that_cuts_delays_repeats_and_reorders_requests_changes_no_data(tmp_path: Path) -> None:
    with RestartableCollector(tmp_path) as collector:
        proxy = Proxy(collector.url, faults=FAULTS)
        with serving(proxy) as address, Ranks(address, "proxied", tmp_path / "spool", count=8) as ranks:
            collector.wait_for_batches(150)
        proxy.settle()
        assert set(proxy.fault_counts) == set(FAULTS)
        push(ranks.spool, collector.url)
        assert_stored_once(collector.url, "proxied", ranks.steps)
        assert collector.batches("repeated") > 0


def test_ranks_retry_until_a_stopped_database_is_back(server: Any, tmp_path: Path) -> None:
    with ExitStack() as stack:
        database = databases.new_database(server)
        collector = stack.enter_context(RestartableCollector(tmp_path / "collector", database_url=database))
        with Ranks(collector.url, "waited", tmp_path / "spool") as ranks:
            for mode in ("fast", "immediate", "fast"):
                collector.wait_for_batches(20)
                databases.stop(server, mode)
                assert "once the database is back" in retryable(put(collector.url, batch("other")), 503)["detail"]
                assert retryable(httpx.get(f"{collector.url}/api/v1/runs"), 503)["title"] == "Storage unavailable"
                assert httpx.get(f"{collector.url}/readyz").status_code == 503
                assert httpx.get(f"{collector.url}/healthz").status_code == 200
                databases.start(server)
            collector.wait_for_batches(20)
        push(ranks.spool, collector.url)
        assert_stored_once(collector.url, "waited", ranks.steps)


def test_sigterm_ends_a_collector_in_order_while_the_database_hangs(server: Any, tmp_path: Path) -> None:
    url = databases.new_database(server)
    store = create_engine(url)
    with RestartableCollector(tmp_path / "collector", database_url=url) as collector, store.connect() as holder:
        put(collector.url, batch("hung", steps=steps(0, 2)))
        holder.exec_driver_sql("LOCK TABLE chunks IN ACCESS EXCLUSIVE MODE")
        httpx.get(f"{collector.url}/metrics")  # A diagnosis hangs; below, a batch and a read.
        requests = [lambda: put(collector.url, batch("hung", seq=1, steps=steps(2, 2))),
                    lambda: httpx.get(f"{collector.url}/api/v1/runs/hung/steps")]  # fmt: skip
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = [pool.submit(request) for request in requests]
            patience.until(lambda: count_lock_waits(store) == 3, limit_s=20)
            began = time.monotonic()
            collector.end(signal.SIGTERM)  # With status 0: not by the alarm that would end it after 30 s.
            assert time.monotonic() - began < 27
        assert not [answer for answer in answers if answer.exception() is None and answer.result().status_code < 500]
        holder.rollback()
    store.dispose()


def count_lock_waits(engine: Engine) -> int:
    """Return the number of connections that wait for a lock."""
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted").scalar_one())


@pytest.mark.parametrize("small_disk", [full_disk, full_quota])
def test_a_full_disk_is_reported_and_recovered_from(tmp_path: Path, small_disk: SmallDisk) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk) as fill:
        assert_recovery(tmp_path, f"sqlite:///{disk}/runs.db", fill)


def test_runs_can_be_deleted_on_a_disk_that_batches_filled(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with (
        full_disk(disk),
        RestartableCollector(
            tmp_path / "collector", database_url=f"sqlite:///{disk}/runs.db", keep_free_mb=8
        ) as collector,
    ):
        for seq in range(1000):
            sent = spans(2000 * seq, 2000)
            noisy = spans(2000 * seq, 2000, done_ns=sent.done_ns + noise(seq))
            answer = put(collector.url, batch("ab"[seq % 2], seq=seq, spans=noisy))
            if answer.status_code != 201:
                break
        assert seq > 50, answer.text
        assert "delete runs" in retryable(answer, 507)["detail"]
        assert httpx.delete(f"{collector.url}/api/v1/runs/a").status_code == 204
        assert put(collector.url, batch("c", steps=steps(0, 1))).status_code == 201
        assert get(collector.url, "/runs/b")["run"] == "b"


def noise(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 10**9, 4000)


def test_a_full_disk_of_postgresql_is_reported_and_recovered_from(server: Any, tmp_path: Path) -> None:
    disk = server.pgdata.with_name("disk")
    with full_disk(disk) as fill:
        data = disk / "data"
        data.mkdir()
        if server.system_user is not None:
            shutil.chown(data, server.system_user)
        server.psql(f"CREATE TABLESPACE small LOCATION '{data}';")
        url = databases.new_database(server, "TABLESPACE small")
        try:
            assert_recovery(tmp_path, url, fill)
        finally:
            databases.stop(server, "immediate")


def assert_recovery(tmp_path: Path, database_url: str, fill: FillDisk) -> None:
    """Assert that a collector refuses batches while its disk is full, and stores all of them afterwards."""
    with RestartableCollector(tmp_path / "collector", database_url=database_url, keep_free_mb=0) as collector:
        with Ranks(collector.url, "full", tmp_path / "spool") as ranks:
            for _ in range(2):
                collector.wait_for_batches(20)
                with fill(collector) as status:
                    collector.wait_for_batches(5, "failed")
                    problem = retryable(put(collector.url, batch("large", events=LARGE)), status)
                    assert "nothing of this request was stored" in problem["detail"]
                    patience.until(lambda: is_consistent(collector.url, "full"))
            collector.wait_for_batches(20)
        push(ranks.spool, collector.url)
        assert_stored_once(collector.url, "full", ranks.steps)


def test_spooled_batches_are_sent_by_the_process_and_by_push(tmp_path: Path) -> None:
    with RestartableCollector(tmp_path, start=False) as collector:
        ranks = Ranks(collector.url, "spooled", tmp_path / "spool", count=2)
        ranks.step(200)
        patience.until(lambda: count_spooled(ranks) > 20)
        collector.start()
        patience.until(lambda: not count_spooled(ranks))
        collector.end()
        ranks.step(100)
        ranks.stop()
        remaining = count_spooled(ranks)
        assert remaining > 0
        collector.start()
        assert f"sent {remaining}, " in push(ranks.spool, collector.url)
        assert count_spooled(ranks) == 0
        assert_stored_once(collector.url, "spooled", ranks.steps)


def wait_for_a_drop(ranks: Ranks) -> None:
    patience.until(lambda: ranks.exporters[0].dropped)


def test_records_that_the_spool_could_not_hold_are_all_counted_as_dropped(tmp_path: Path) -> None:
    with RestartableCollector(tmp_path, start=False) as collector:
        live, ended = (Ranks(collector.url, run, tmp_path / run, count=1, spool_mb=0.02) for run in ("live", "ended"))
        for ranks in (live, ended):
            ranks.step(1000)
            wait_for_a_drop(ranks)
        ended.stop()
        collector.start()
        patience.until(lambda: not count_spooled(live))
        live.step()
        live.stop()
        for ranks in (live, ended):
            push(ranks.spool, collector.url)
            summary = get(collector.url, f"/runs/{ranks.run}")
            assert (summary["emitted"], summary["dropped"]) == (WEIGHT * ranks.steps[0], ranks.exporters[0].dropped)
            arrived = stored_spans(collector.url, ranks.run)
            assert set(arrived.values()) == {1}
            assert_sums(collector.url, ranks.run, arrived)
            assert len(arrived) // BUCKETS * WEIGHT == summary["emitted"] - summary["dropped"]
            findings = get(collector.url, f"/runs/{ranks.run}/diagnostics")["findings"]
            assert "telemetry-loss" in {finding["code"] for finding in findings}
