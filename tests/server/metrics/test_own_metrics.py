"""Each fault of a collector's, made for real, and the metric that shows it."""

from __future__ import annotations

import re
import socket
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from ddpobs_server.app import create_app
from ddpobs_server.settings import Settings
from ddpobs_server.store import ingest
from prometheus_client.parser import text_string_to_metric_families

from ddpobs import wire
from tests import databases
from tests.collector import Collector, collector
from tests.server.batches import assert_problem, batch, path, put, steps
from tests.server.serving import served

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "operations.md"


def metrics(url: str, only: str = "collector", **headers: str) -> Callable[..., float]:
    """A look at /metrics: gives a sample's value by its name without the prefix, and labels."""
    answer = httpx.get(f"{url}/metrics", params={"only": only}, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    samples = [s for family in text_string_to_metric_families(answer.text) for s in family.samples]

    def value(name: str, **labels: str) -> float:
        found = [s.value for s in samples if s.name == f"ddpobs_server_{name}" and labels.items() <= s.labels.items()]
        assert len(found) == 1, f"{name} {labels}: {found}"
        return found[0]

    return value


def until(url: str, holds: Callable[[Callable[..., float]], bool], **headers: str) -> None:
    deadline = time.monotonic() + 60
    while not holds(metrics(url, **headers)):
        assert time.monotonic() < deadline, "it did not come true within a minute"
        time.sleep(0.1)


def test_what_is_refused_is_counted_by_the_reason(tmp_path: Path) -> None:
    with collector(tmp_path, token="s3cret") as running:
        mine = {"Authorization": "Bearer s3cret"}
        began = metrics(running.url, **mine)
        anchor = wire.Anchor(wall_ns=time.time_ns() - 3_000 * 10**9, monotonic_ns=0)
        late = batch("a-run", steps=steps(0, 2), anchor=anchor)
        assert put(running.url, late, **mine).status_code == 201
        assert_problem(put(running.url, batch("a-run", emitted=99), **mine), 409)
        typed = {"Content-Type": wire.MSGPACK, **mine}
        assert_problem(httpx.put(running.url + path(late), content=b"rubbish", headers=typed), 422)
        assert_problem(put(running.url, late, Authorization="Bearer guess"), 401)
        assert_problem(put(running.url, late), 401)
        seen = metrics(running.url, **mine)

        def refused(status: str, problem: str) -> float:
            labels = {"method": "PUT", "status": status, "problem": problem}
            return seen("problems_total", **labels) - began("problems_total", **labels)

        for status, problem in (("409", "Conflict"), ("422", "Malformed batch"), ("401", "Wrong token")):
            assert refused(status, problem) == 1, problem
        assert refused("401", "Token needed") == 1
        assert seen("batches_total", outcome="conflict") == 1
        assert seen("commit_seconds_count") == 2
        assert seen("batch_age_seconds_bucket", le="1800.0") == 0
        assert seen("batch_age_seconds_bucket", le="7200.0") == 1
        assert (seen("writer_alive"), seen("database_up"), seen("queue_limit")) == (1, 1, 1024)
        assert 0 < seen("disk_bytes", what="free") < seen("disk_bytes", what="all")
        until(running.url, lambda seen: seen("event_loop_lag_seconds_count") > 0, **mine)


def test_what_a_client_broke_off_is_busy_and_what_no_database_holds_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> None:
        raise OverflowError("too large")

    app = create_app(Settings(database_url=databases.sqlite(tmp_path)))
    with served(app) as (host, port):
        url = f"http://{host}:{port}"
        with socket.create_connection((host, port), 60) as client:
            head = f"PUT {path(batch('cut'))} HTTP/1.1\r\nHost: here\r\nContent-Type: {wire.JSON}\r\n"
            client.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
        until(url, lambda seen: seen("batches_total", outcome="busy") == 1)
        monkeypatch.setattr(ingest, "write", too_large)
        assert_problem(put(url, batch("a-run")), 422)
        seen = metrics(url)
        assert [seen("batches_total", outcome=of) for of in ("busy", "refused", "failed")] == [1, 1, 0]


def test_a_database_that_hangs_and_a_full_queue_are_seen(tmp_path: Path) -> None:
    with collector(tmp_path, queue_batches=1) as running:
        holder = sqlite3.connect(running.database, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        answers: list[int] = []

        def send(seq: int) -> None:
            answers.append(put(running.url, batch("waiting", seq=seq)).status_code)

        threads = [threading.Thread(target=send, args=(seq,)) for seq in range(4)]
        threads[0].start()
        until(running.url, lambda seen: seen("writer_busy_seconds") > 0)  # It has that batch, and takes no more.
        for thread in threads[1:]:
            thread.start()
        busy = {"method": "PUT", "status": "503", "problem": "Busy"}
        until(running.url, lambda seen: seen("problems_total", **busy) == 2 and seen("queue_depth") == 1)
        until(running.url, lambda seen: seen("writer_busy_seconds") > 0.5)
        holder.execute("ROLLBACK")
        for thread in threads:
            thread.join()
        assert sorted(answers) == [201, 201, 503, 503]
        until(running.url, lambda seen: seen("writer_busy_seconds") == 0)


def test_without_its_database_a_collector_still_says_what_is_wrong(tmp_path: Path) -> None:
    with databases.postgresql() as fresh:
        started = collector(tmp_path, database_url=fresh(tmp_path))
        running = started.__enter__()
        put(running.url, batch("before"))
        assert b"before" in httpx.get(f"{running.url}/metrics").content
    try:
        until(running.url, lambda seen: seen("database_up") == 0)
        whole = httpx.get(f"{running.url}/metrics", timeout=30)
        assert whole.status_code == 200
        assert b"before" not in whole.content
        assert metrics(running.url)("scrape_failures_total") >= 1
        failed = metrics(running.url)("batches_total", outcome="failed")
        for run in ("before", "never-seen"):  # One waits for the writer, the other to be let in.
            assert_problem(put(running.url, batch(run, seq=1)), 503)
        assert metrics(running.url)("batches_total", outcome="failed") == failed + 2
        assert_problem(httpx.get(f"{running.url}/readyz"), 503)
        assert httpx.get(f"{running.url}/healthz").status_code == 200
        assert "the database does not answer" in running.log.read_text()
    finally:
        started.__exit__(None, None, None)


def test_a_collector_that_writes_no_more_is_not_ready(tmp_path: Path) -> None:
    app = create_app(Settings(database_url=databases.sqlite(tmp_path)))
    with served(app) as address:
        url = f"http://{address[0]}:{address[1]}/readyz"
        assert httpx.get(url).status_code == 200
        app.state.writer.close()
        assert "the thread that writes has ended" in assert_problem(httpx.get(url), 503)["detail"]


def test_several_collectors_metrics_can_be_had_without_counting_runs_twice(shared: Collector) -> None:
    put(shared.url, batch("once", steps=steps(0, 2)))
    names = {
        only: set(re.findall(r"^(\w+)[{ ]", httpx.get(f"{shared.url}/metrics", params=query).text, re.MULTILINE))
        for only, query in (("both", {}), ("runs", {"only": "runs"}), ("collector", {"only": "collector"}))
    }
    assert names["runs"] | names["collector"] == names["both"]
    assert {name for name in names["runs"] if name.startswith(("ddpobs_server_", "process_"))} == set()
    assert {name for name in names["collector"] if not name.startswith(("ddpobs_server_", "process_"))} == set()
    assert "ddpobs_steps_total" in names["runs"]
    guide = GUIDE.read_text()
    own = {re.sub("_(bucket|count|sum|created)$", "", name) for name in names["collector"]}
    short = {name.removeprefix("ddpobs_server_") for name in own if name.startswith("ddpobs_server_")}
    families = {name for name in short if f"{name}_total" not in short}  # A counter's creation has its name.
    assert [name for name in sorted(families) if f"`…{name}" not in guide] == []
    as_open = {"Accept": "application/openmetrics-text"}
    for query in ({}, {"only": "runs"}, {"only": "collector"}):
        text = httpx.get(f"{shared.url}/metrics", params=query, headers=as_open).text
        assert text.count("# EOF") == 1
        assert text.endswith("# EOF\n")
