"""Acknowledged is stored, and stored once: real collectors that are killed, cut off and run full under load."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from ddpobs import sender
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
from tests.integration.rooms import LARGE, Full, full_disk, full_quota
from tests.server.batches import assert_problem, batch, get, put

_KILLS = 4


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks try again soon, however long a collector was away."""
    monkeypatch.setattr(sender, "_LONGEST_PAUSE_S", 0.3)


def retryable(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The problem document of an answer that asks to try again."""
    assert int(answer.headers["retry-after"]) > 0
    return assert_problem(answer, status)


def test_a_collector_killed_under_load_has_all_that_it_acknowledged(tmp_path: Path) -> None:
    with Mortal(tmp_path) as collector:
        with Ranks(collector.url, "killed", tmp_path / "spool") as ranks:
            for _ in range(_KILLS):
                collector.until_batches(20)
                collector.kill()
                collector.start()
            collector.until_batches(20)
        push(ranks.spool, collector.url)
        assert_once(collector.url, "killed", ranks.steps)


def test_where_one_of_two_collectors_is_killed_the_other_takes_its_batches(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(databases.postgresql_server(tmp_path / "pg"))
        url = databases.new_database(server)
        pair = [stack.enter_context(Mortal(tmp_path / name, database_url=url)) for name in "ab"]
        balancer = Proxy(pair[1].url, pair[0].url)
        address = stack.enter_context(proxy(balancer))
        with Ranks(address, "shared", tmp_path / "spool") as ranks:
            for number in range(_KILLS):
                dies, lives = pair[number % 2], pair[1 - number % 2]
                balancer.upstreams.reverse()
                dies.until_batches(20)
                dies.kill()
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


def test_a_collector_ended_under_load_has_all_that_it_acknowledged(tmp_path: Path) -> None:
    with Mortal(tmp_path) as collector:
        with Ranks(collector.url, "ended", tmp_path / "spool") as ranks:
            for _ in range(2):
                collector.until_batches(20)
                assert collector.running.end(signal.SIGTERM) == 0
                collector.start()
            collector.until_batches(20)
        push(ranks.spool, collector.url)
        assert_once(collector.url, "ended", ranks.steps)


def test_a_database_that_stops_is_waited_for(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(databases.postgresql_server(tmp_path / "pg"))
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
                server.ensure_postgres_running()
            collector.until_batches(20)
        push(ranks.spool, collector.url)
        assert_once(collector.url, "waited", ranks.steps)


@pytest.mark.parametrize("full", [full_disk, full_quota])
def test_a_full_disk_is_said_and_left_behind(tmp_path: Path, full: Full) -> None:
    disk = tmp_path / "disk"
    with full(disk) as room, Mortal(tmp_path / "collector", database_url=f"sqlite:///{disk}/runs.db") as collector:
        with Ranks(collector.url, "full", tmp_path / "spool") as ranks:
            for _ in range(2):
                collector.until_batches(20)
                with room(collector) as status:
                    collector.until_batches(5, "failed")
                    said = retryable(put(collector.url, batch("large", events=[LARGE])), status)
                    assert "nothing of this was stored" in said["detail"]
                    until(lambda: whole(collector.url, "full"))
            collector.until_batches(20)
        push(ranks.spool, collector.url)
        assert_once(collector.url, "full", ranks.steps)


def test_what_the_spool_kept_is_sent_by_the_process_and_by_push(tmp_path: Path) -> None:
    with Mortal(tmp_path) as collector:
        collector.kill()
        ranks = Ranks(collector.url, "spooled", tmp_path / "spool", count=2)
        ranks.step(400)
        until(lambda: spooled(ranks) > 20)
        collector.start()
        until(lambda: not spooled(ranks))
        collector.kill()
        ranks.step(100)
        ranks.stop()
        assert spooled(ranks) > 0
        collector.start()
        assert f"sent {spooled(ranks)}, " in push(ranks.spool, collector.url)
        assert spooled(ranks) == 0
        assert_once(collector.url, "spooled", ranks.steps)


@pytest.mark.parametrize("sent_by", ["the process", "push"])
def test_what_the_spool_could_not_hold_is_counted_to_the_last_record(tmp_path: Path, sent_by: str) -> None:
    with Mortal(tmp_path) as collector:
        collector.kill()
        ranks = Ranks(collector.url, "overflown", tmp_path / "spool", count=1, spool_mb=0.02)
        ranks.step(2000)
        until(lambda: ranks.exporters[0].dropped)
        if sent_by == "the process":
            collector.start()
            until(lambda: not spooled(ranks))
            ranks.step()
            ranks.stop()
        else:
            ranks.stop()
            collector.start()
        push(ranks.spool, collector.url)
        told = get(collector.url, "/runs/overflown")
        assert (told["emitted"], told["dropped"]) == (WEIGHT * ranks.steps[0], ranks.exporters[0].dropped)
        arrived = stored(collector.url, "overflown")
        assert set(arrived.values()) == {1}
        assert_sums(collector.url, "overflown", arrived)
        assert len(arrived) // BUCKETS * WEIGHT == told["emitted"] - told["dropped"]
        findings = get(collector.url, "/runs/overflown/diagnostics")["findings"]
        assert "telemetry-loss" in {finding["code"] for finding in findings}
