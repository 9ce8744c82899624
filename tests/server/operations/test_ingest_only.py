"""A collector that only takes batches beside one for everything else, on one database and behind a real nginx."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from benchmarks.rig import databases
from benchmarks.rig.collector import collector
from ddpobs import wire
from tests.support.server.batches import assert_problem, batch, get, put, spans, steps, stored_steps
from tests.support.server.calls import CALLS
from tests.support.server.nginx import proxy
from tests.support.server.own_metrics import metrics

CONFIG = Path(__file__).resolve().parents[3] / "deploy" / "nginx-apart.conf"
PEOPLE = "https://ddpobs.example"
BACKGROUND = ("ddpobs_server_retention_failures_total", "ddpobs_server_fleet_failures_total")


@pytest.fixture(scope="module")
def pair(fresh: databases.Fresh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of a collector for batches, and of one for reads."""
    folder = tmp_path_factory.mktemp("pair")
    database = fresh(folder)
    with ExitStack() as stack:
        batches = stack.enter_context(collector(folder, database_url=database, ingest_only=True, public_url=PEOPLE))
        yield batches.url, stack.enter_context(collector(folder, database_url=database)).url


def test_what_one_collector_stores_the_other_reads(pair: tuple[str, str]) -> None:
    batches, reads = pair
    for rank in range(2):
        for seq in range(5):
            sent = batch("stored", seq=seq, rank=rank, steps=steps(8 * seq, 8), spans=spans(8 * seq, 8))
            assert put(batches, sent).status_code == 201
    assert [rank["steps"] for rank in get(reads, "/runs/stored/ranks")["ranks"]] == [40, 40]
    assert get(reads, "/runs/stored/diagnostics")["steps_seen"] == 40
    assert 'ddpobs_steps_total{rank="0",run="stored"' in httpx.get(f"{reads}/metrics?only=runs").text


@pytest.mark.parametrize(("method", "where"), [call for call in CALLS["read"] if call[1] != "/metrics"])
def test_a_read_is_refused_with_the_address_for_people(pair: tuple[str, str], method: str, where: str) -> None:
    put(pair[0], batch("a-run", steps=steps(0, 2)))
    detail = assert_problem(httpx.request(method, pair[0] + where), 421)["detail"]
    assert "DDPOBS_SERVER_INGEST_ONLY" in detail
    assert PEOPLE in detail


def test_a_scrape_has_the_collectors_own_metrics_without_those_of_the_work_that_it_leaves(
    pair: tuple[str, str],
) -> None:
    batches, reads = pair
    put(batches, batch("scraped", steps=steps(0, 2)))
    text = httpx.get(f"{batches}/metrics").text
    assert 'run="scraped"' not in text
    assert metrics(batches)("batches_total", outcome="stored") >= 1
    for name in BACKGROUND:
        assert name not in text
        assert name in httpx.get(f"{reads}/metrics?only=collector").text
    assert_problem(httpx.get(f"{batches}/metrics?only=runs"), 421)


def test_behind_one_address_each_does_its_part_and_batches_go_on_without_the_first(
    fresh: databases.Fresh, tmp_path: Path
) -> None:
    database = fresh(tmp_path)
    with ExitStack() as stack:
        first = stack.enter_context(collector(tmp_path, database_url=database, ingest_only=True))
        second = stack.enter_context(collector(tmp_path, database_url=database))
        url = stack.enter_context(proxy(tmp_path, [first.url, second.url], CONFIG.read_text()))
        stored = [metrics(each.url)("batches_total", outcome="stored") for each in (first, second)]
        assert put(url, batch("parted", seq=0, steps=steps(0, 8))).status_code == 201
        assert metrics(first.url)("batches_total", outcome="stored") == stored[0] + 1
        assert stored_steps(url, "parted") == list(range(8))
        first.end(signal.SIGKILL)
        assert put(url, batch("parted", seq=1, steps=steps(8, 8))).status_code == 201
        assert metrics(second.url)("batches_total", outcome="stored") == stored[1] + 1
        assert stored_steps(url, "parted") == list(range(16))


def test_it_is_ready_and_ends_in_order(tmp_path: Path) -> None:
    with collector(tmp_path, ingest_only=True) as running:
        assert httpx.get(f"{running.url}/readyz").json()["status"] == "ready"
        assert put(running.url, batch("last", events=[wire.Event(kind="goodbye", at_ns=0)])).status_code == 201
        assert running.end() == 0
    assert "collector stopped: all accepted batches are written" in running.log.read_text()
    assert "Traceback" not in running.log.read_text()
