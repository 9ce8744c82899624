"""Acknowledged is stored, and stored once: real collectors that are killed, cut off and run full under load."""

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

from ddpobs.export import http_sender
from tests import databases
from tests.integration.faults import (
    BUCKETS,
    FAULTS,
    WEIGHT,
    Mortal,
    Proxy,
    Ranks,
    assert_once,
    assert_sums,
    proxy,
    push,
    spooled,
    stored,
    until,
    whole,
)
from tests.integration.namespaces import LARGE, Full, Room, full_disk, full_quota
from tests.server.batches import assert_problem, batch, get, put, spans, steps


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks try again soon, however long a collector was away."""
    monkeypatch.setattr(http_sender, "_LONGEST_PAUSE_S", 0.3)


@pytest.fixture
def server() -> Iterator[Any]:
    """A PostgreSQL server that may be stopped."""
    with databases.postgresql_server() as own:
        yield own


def retryable(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The problem document of an answer that asks to try again."""
    assert int(answer.headers["retry-after"]) > 0
    return assert_problem(answer, status)


def test_a_collector_that_ends_under_load_has_all_that_it_acknowledged(tmp_path: Path) -> None:
    with Mortal(tmp_path) as collector:
        with Ranks(collector.url, "ended", tmp_path / "spool") as ranks:
            for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
                collector.until_batches(20)
                collector.end(how)
                collector.start()
            collector.until_batches(20)
        push(ranks.spool, collector.url)
        assert_once(collector.url, "ended", ranks.steps)


def test_where_one_of_two_collectors_is_killed_the_other_takes_its_batches(server: Any, tmp_path: Path) -> None:
    with ExitStack() as stack:
        url = databases.new_database(server)
        pair = [stack.enter_context(Mortal(tmp_path / name, database_url=url)) for name in "ab"]
        balancer = Proxy(pair[1].url, pair[0].url)
        address = stack.enter_context(proxy(balancer))
        with Ranks(address, "shared", tmp_path / "spool") as ranks:
            for number in range(3):
                dies, lives = pair[number % 2], pair[1 - number % 2]
                balancer.upstreams.reverse()
                dies.until_batches(20)
                dies.end()
                lives.until_batches(20)
                dies.start()
        push(ranks.spool, lives.url)
        assert_once(dies.url, "shared", ranks.steps)


def test_a_proxy_that_cuts_delays_doubles_and_reorders_changes_nothing(tmp_path: Path) -> None:
    with Mortal(tmp_path) as collector:
        bad = Proxy(collector.url, faults=FAULTS)
        with proxy(bad) as address, Ranks(address, "proxied", tmp_path / "spool", count=8) as ranks:
            collector.until_batches(150)
        bad.settle()
        assert set(bad.seen) == set(FAULTS)
        push(ranks.spool, collector.url)
        assert_once(collector.url, "proxied", ranks.steps)
        assert collector.batches("repeated") > 0


def test_a_database_that_stops_is_waited_for(server: Any, tmp_path: Path) -> None:
    with ExitStack() as stack:
        database = databases.new_database(server)
        collector = stack.enter_context(Mortal(tmp_path / "collector", database_url=database))
        with Ranks(collector.url, "waited", tmp_path / "spool") as ranks:
            for mode in ("fast", "immediate", "fast"):
                collector.until_batches(20)
                databases.stop(server, mode)
                assert "once the database is back" in retryable(put(collector.url, batch("other")), 503)["detail"]
                assert retryable(httpx.get(f"{collector.url}/api/v1/runs"), 503)["title"] == "Storage unavailable"
                assert httpx.get(f"{collector.url}/readyz").status_code == 503
                assert httpx.get(f"{collector.url}/healthz").status_code == 200
                databases.start(server)
            collector.until_batches(20)
        push(ranks.spool, collector.url)
        assert_once(collector.url, "waited", ranks.steps)


def test_sigterm_ends_it_well_and_soon_where_the_database_hangs(server: Any, tmp_path: Path) -> None:
    url = databases.new_database(server)
    store = create_engine(url)
    with Mortal(tmp_path / "collector", database_url=url) as collector, store.connect() as holder:
        put(collector.url, batch("hung", steps=steps(0, 2)))
        holder.exec_driver_sql("LOCK TABLE chunks IN ACCESS EXCLUSIVE MODE")
        httpx.get(f"{collector.url}/metrics")  # A diagnosis hangs; below, a batch and a read.
        asked = [lambda: put(collector.url, batch("hung", seq=1, steps=steps(2, 2))),
                 lambda: httpx.get(f"{collector.url}/api/v1/runs/hung/steps", timeout=60)]  # fmt: skip
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = [pool.submit(ask) for ask in asked]
            until(lambda: waiting_for_a_lock(store) == 3, 20)
            began = time.monotonic()
            collector.end(signal.SIGTERM)  # With 0, and so not by the alarm that would end it after 30 s.
            assert time.monotonic() - began < 27
        assert not [answer for answer in answers if answer.exception() is None and answer.result().status_code < 500]
        holder.rollback()
    store.dispose()


def waiting_for_a_lock(engine: Engine) -> int:
    """How many connections do."""
    with engine.connect() as connection:
        return int(connection.exec_driver_sql("SELECT count(*) FROM pg_locks WHERE NOT granted").scalar_one())


@pytest.mark.parametrize("full", [full_disk, full_quota])
def test_a_full_disk_is_said_and_left_behind(tmp_path: Path, full: Full) -> None:
    disk = tmp_path / "disk"
    with full(disk) as room:
        assert_left_behind(tmp_path, f"sqlite:///{disk}/runs.db", room)


def test_on_a_disk_that_batches_filled_there_is_room_to_remove_them(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with (
        full_disk(disk),
        Mortal(tmp_path / "collector", database_url=f"sqlite:///{disk}/runs.db", keep_free_mb=8) as collector,
    ):
        for seq in range(1000):
            sent = spans(seq, 2000, done_ns=spans(seq, 2000).done_ns + noise(seq))
            answer = put(collector.url, batch("ab"[seq % 2], seq=seq, spans=sent))
            if answer.status_code != 201:
                break
        assert seq > 50, answer.text
        assert "delete runs" in retryable(answer, 507)["detail"]
        assert httpx.delete(f"{collector.url}/api/v1/runs/a", timeout=60).status_code == 204
        assert put(collector.url, batch("c", steps=steps(0, 1))).status_code == 201
        assert get(collector.url, "/runs/b")["run"] == "b"


def noise(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 10**9, 4000)


def test_a_full_disk_of_postgresql_is_said_and_left_behind(server: Any, tmp_path: Path) -> None:
    disk = server.pgdata.with_name("disk")
    with full_disk(disk) as room:
        data = disk / "data"
        data.mkdir()
        if server.system_user is not None:
            shutil.chown(data, server.system_user)
        server.psql(f"CREATE TABLESPACE small LOCATION '{data}';")
        url = databases.new_database(server, "TABLESPACE small")
        try:
            assert_left_behind(tmp_path, url, room)
        finally:
            databases.stop(server, "immediate")


def assert_left_behind(tmp_path: Path, database_url: str, room: Room) -> None:
    with Mortal(tmp_path / "collector", database_url=database_url, keep_free_mb=0) as collector:
        with Ranks(collector.url, "full", tmp_path / "spool") as ranks:
            for _ in range(2):
                collector.until_batches(20)
                with room(collector) as status:
                    collector.until_batches(5, "failed")
                    said = retryable(put(collector.url, batch("large", events=LARGE)), status)
                    assert "nothing of this request was stored" in said["detail"]
                    until(lambda: whole(collector.url, "full"))
            collector.until_batches(20)
        push(ranks.spool, collector.url)
        assert_once(collector.url, "full", ranks.steps)


def test_what_the_spool_kept_is_sent_by_the_process_and_by_push(tmp_path: Path) -> None:
    with Mortal(tmp_path, away=True) as collector:
        ranks = Ranks(collector.url, "spooled", tmp_path / "spool", count=2)
        ranks.step(200)
        until(lambda: spooled(ranks) > 20)
        collector.start()
        until(lambda: not spooled(ranks))
        collector.end()
        ranks.step(100)
        ranks.stop()
        kept = spooled(ranks)
        assert kept > 0
        collector.start()
        assert f"sent {kept}, " in push(ranks.spool, collector.url)
        assert spooled(ranks) == 0
        assert_once(collector.url, "spooled", ranks.steps)


def test_what_the_spool_could_not_hold_is_counted_to_the_last_record(tmp_path: Path) -> None:
    with Mortal(tmp_path, away=True) as collector:
        lives, ended = (Ranks(collector.url, run, tmp_path / run, count=1, spool_mb=0.02) for run in ("lives", "ended"))
        for ranks in (lives, ended):
            ranks.step(1000)
            until(lambda ranks=ranks: ranks.exporters[0].dropped)
        ended.stop()
        collector.start()
        until(lambda: not spooled(lives))
        lives.step()
        lives.stop()
        for ranks in (lives, ended):
            push(ranks.spool, collector.url)
            told = get(collector.url, f"/runs/{ranks.run}")
            assert (told["emitted"], told["dropped"]) == (WEIGHT * ranks.steps[0], ranks.exporters[0].dropped)
            arrived = stored(collector.url, ranks.run)
            assert set(arrived.values()) == {1}
            assert_sums(collector.url, ranks.run, arrived)
            assert len(arrived) // BUCKETS * WEIGHT == told["emitted"] - told["dropped"]
            findings = get(collector.url, f"/runs/{ranks.run}/diagnostics")["findings"]
            assert "telemetry-loss" in {finding["code"] for finding in findings}
