"""Real faults of a collector, and the metrics that show them."""

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
from ddpobs_server.store.writing import ingest

from benchmarks.rig import databases, patience
from benchmarks.rig.collector import Collector, collector
from ddpobs import wire
from scripts.docs_site import collector_metric_reference
from tests.support.server.batches import assert_problem, batch, path, put, steps
from tests.support.server.own_metrics import metrics
from tests.support.server.serving import served


def wait_until(url: str, condition: Callable[[Callable[..., float]], bool], **headers: str) -> None:
    deadline = time.monotonic() + patience.HANG_S
    while not condition(metrics(url, **headers)):
        assert time.monotonic() < deadline, "the condition did not become true within a minute"
        time.sleep(0.1)


def test_refusals_are_counted_by_their_reason(tmp_path: Path) -> None:
    with collector(tmp_path, token="s3cret") as running:
        bearer = {"Authorization": "Bearer s3cret"}
        initial = metrics(running.url, **bearer)
        anchor = wire.Anchor(wall_ns=time.time_ns() - 3_000 * 10**9, monotonic_ns=0)
        late = batch("a-run", steps=steps(0, 2), anchor=anchor)
        assert put(running.url, late, **bearer).status_code == 201
        assert_problem(put(running.url, batch("a-run", emitted=99), **bearer), 409)
        typed = {"Content-Type": wire.MSGPACK, **bearer}
        assert_problem(httpx.put(running.url + path(late), content=b"rubbish", headers=typed), 422)
        assert_problem(put(running.url, late, Authorization="Bearer guess"), 401)
        assert_problem(put(running.url, late), 401)
        current = metrics(running.url, **bearer)

        def refused(status: str, problem: str) -> float:
            labels = {"method": "PUT", "status": status, "problem": problem}
            return current("problems_total", **labels) - initial("problems_total", **labels)

        for status, problem in (("409", "Conflict"), ("422", "Malformed batch"), ("401", "Wrong token")):
            assert refused(status, problem) == 1, problem
        assert refused("401", "Token needed") == 1
        assert current("batches_total", outcome="conflict") == 1
        assert current("commit_seconds_count") == 2
        assert current("batch_age_seconds_bucket", le="1800.0") == 0
        assert current("batch_age_seconds_bucket", le="7200.0") == 1
        assert (current("writer_alive"), current("database_up"), current("queue_limit")) == (1, 1, 1024)
        assert 0 < current("disk_bytes", what="free") < current("disk_bytes", what="all")
        wait_until(running.url, lambda current: current("event_loop_lag_seconds_count") > 0, **bearer)


def test_an_aborted_upload_counts_as_busy_and_an_unstorable_batch_as_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object) -> None:
        raise OverflowError("too large")

    app = create_app(Settings(database_url=databases.migrated_sqlite(tmp_path)))
    with served(app) as (host, port):
        url = f"http://{host}:{port}"
        with socket.create_connection((host, port), 60) as client:
            head = f"PUT {path(batch('cut'))} HTTP/1.1\r\nHost: here\r\nContent-Type: {wire.JSON}\r\n"
            client.sendall(f"{head}Content-Length: 99\r\n\r\n{{".encode())
        wait_until(url, lambda current: current("batches_total", outcome="busy") == 1)
        monkeypatch.setattr(ingest, "write", too_large)
        assert_problem(put(url, batch("a-run")), 422)
        current = metrics(url)
        assert [current("batches_total", outcome=outcome) for outcome in ("busy", "refused", "failed")] == [1, 1, 0]


def test_a_hanging_database_and_a_full_queue_appear_in_the_metrics(tmp_path: Path) -> None:
    with collector(tmp_path, queue_batches=1) as running:
        holder = sqlite3.connect(running.database, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        answers: list[int] = []

        def send(seq: int) -> None:
            answers.append(put(running.url, batch("waiting", seq=seq)).status_code)

        threads = [threading.Thread(target=send, args=(seq,)) for seq in range(4)]
        threads[0].start()
        wait_until(
            running.url, lambda current: current("writer_busy_seconds") > 0
        )  # The writer has the first batch and takes no other.
        for thread in threads[1:]:
            thread.start()
        busy = {"method": "PUT", "status": "503", "problem": "Busy"}
        wait_until(running.url, lambda current: current("problems_total", **busy) == 2 and current("queue_depth") == 1)
        wait_until(running.url, lambda current: current("writer_busy_seconds") > 0.5)
        holder.execute("ROLLBACK")
        for thread in threads:
            thread.join()
        assert sorted(answers) == [201, 201, 503, 503]
        wait_until(running.url, lambda current: current("writer_busy_seconds") == 0)


def test_without_its_database_a_collector_still_reports_its_own_metrics(tmp_path: Path) -> None:
    with databases.postgresql() as fresh:
        started = collector(tmp_path, database_url=fresh(tmp_path))
        running = started.__enter__()
        put(running.url, batch("before"))
        assert b"before" in httpx.get(f"{running.url}/metrics").content
    try:
        wait_until(running.url, lambda current: current("database_up") == 0)
        for query in ({}, {"only": "runs"}):  # An empty answer would keep `up` at 1, and resolve the runs' alerts.
            assert_problem(httpx.get(f"{running.url}/metrics", params=query), 503)
        assert metrics(running.url)("scrape_failures_total") >= 2
        failed = metrics(running.url)("batches_total", outcome="failed")
        for run in ("before", "never-seen"):  # The first fails in the writer, the second in the admission.
            assert_problem(put(running.url, batch(run, seq=1)), 503)
        assert metrics(running.url)("batches_total", outcome="failed") == failed + 2
        assert_problem(httpx.get(f"{running.url}/readyz"), 503)
        assert httpx.get(f"{running.url}/healthz").status_code == 200
        assert "the database does not answer" in running.log.read_text()
    finally:
        started.__exit__(None, None, None)


def test_a_collector_without_its_writer_is_not_ready(tmp_path: Path) -> None:
    app = create_app(Settings(database_url=databases.migrated_sqlite(tmp_path)))
    with served(app) as address:
        url = f"http://{address[0]}:{address[1]}/readyz"
        assert httpx.get(url).status_code == 200
        app.state.services.writer.close()
        assert "the writer thread has ended" in assert_problem(httpx.get(url), 503)["detail"]


def test_runs_and_collector_metrics_can_be_scraped_separately_and_are_in_the_reference(shared: Collector) -> None:
    put(shared.url, batch("once", steps=steps(0, 2)))
    names = {
        only: set(re.findall(r"^(\w+)[{ ]", httpx.get(f"{shared.url}/metrics", params=query).text, re.MULTILINE))
        for only, query in (("both", {}), ("runs", {"only": "runs"}), ("collector", {"only": "collector"}))
    }
    assert names["runs"] | names["collector"] == names["both"]
    assert {name for name in names["runs"] if name.startswith(("ddpobs_server_", "process_"))} == set()
    assert {name for name in names["collector"] if not name.startswith(("ddpobs_server_", "process_"))} == set()
    assert "ddpobs_steps_total" in names["runs"]
    reference = collector_metric_reference()
    own = {re.sub("_(bucket|count|sum|created)$", "", name) for name in names["collector"]}
    short = {name.removeprefix("ddpobs_server_") for name in own if name.startswith("ddpobs_server_")}
    families = {
        name for name in short if f"{name}_total" not in short
    }  # A counter's `_created` sample has the counter's bare name.
    assert [name for name in sorted(families) if f"`ddpobs_server_{name}" not in reference] == []
    as_open = {"Accept": "application/openmetrics-text"}
    for query in ({}, {"only": "runs"}, {"only": "collector"}):
        text = httpx.get(f"{shared.url}/metrics", params=query, headers=as_open).text
        assert text.count("# EOF") == 1
        assert text.endswith("# EOF\n")
