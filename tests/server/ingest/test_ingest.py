"""Guarantees for a client that sends batches, over HTTP to a real collector."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
import pytest
import zstandard
from ddpobs_server.ingest.series_ledger import SeriesLedger
from ddpobs_server.ingest.upload import Upload
from ddpobs_server.ingest.writer import Writer
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Outcome, Store, UnstorableBatchError
from ddpobs_server.web.workspace_limits import WorkspaceLimits
from prometheus_client import CollectorRegistry

from benchmarks.rig import patience
from benchmarks.rig.collector import Collector, collector
from ddpobs import wire
from tests.support.server.batches import (
    assert_problem,
    batch,
    get,
    hello,
    path,
    put,
    source_of,
    spans,
    steps,
    stored_steps,
)


def test_a_new_batch_is_acknowledged_with_its_key(shared: Collector, run: str) -> None:
    answer = put(shared.url, batch(run, seq=3, steps=steps(0, 2)))
    assert answer.status_code == 201
    assert answer.json() == {"source": source_of(0), "seq": 3, "repeated": False}


def test_a_repeated_batch_is_acknowledged_and_not_stored_twice(shared: Collector, run: str) -> None:
    payload = batch(run, steps=steps(0, 3), spans=spans(0, 3))
    answers = [put(shared.url, payload) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [201, 200, 200]
    assert [answer.json()["repeated"] for answer in answers] == [False, True, True]
    assert stored_steps(shared.url, run) == [0, 1, 2]
    assert get(shared.url, f"/runs/{run}/ranks")["ranks"][0]["steps"] == 3
    assert get(shared.url, f"/runs/{run}/buckets")["buckets"][0]["steps"] == 3


def test_another_batch_under_the_same_key_is_a_conflict_and_changes_nothing(shared: Collector, run: str) -> None:
    put(shared.url, batch(run, steps=steps(0, 2)))
    assert_problem(put(shared.url, batch(run, steps=steps(5, 2))), 409)
    assert stored_steps(shared.url, run) == [0, 1]


@pytest.mark.parametrize("form", ["zstd", "msgpack", "json"])
def test_every_encoding_of_a_batch_stores_the_same_data(shared: Collector, run: str, form: str) -> None:
    payload = batch(run, steps=steps(0, 4), spans=spans(0, 4), hello=hello())
    assert put(shared.url, payload, form).status_code == 201
    expected = {name: getattr(payload.steps, name).tolist() for name in wire.Steps.names}
    assert get(shared.url, f"/runs/{run}/steps")["columns"] == {"rank": [0] * 4} | expected
    assert payload.spans is not None
    assert get(shared.url, f"/runs/{run}/spans")["columns"]["done_ns"] == payload.spans.done_ns.tolist()


def bad_batches(run: str) -> dict[str, wire.Batch]:
    """Batches with one wrong field each, by that field's name."""
    return {
        "spans.done_ns": batch(run, steps=steps(0, 2), spans=spans(0, 2, done_ns=np.zeros(4, np.int64))),
        "steps.end_ns": batch(run, steps=steps(5, 2, end_ns=np.zeros(2, np.int64))),
        "steps.other_ns": batch(run, steps=steps(0, 2, data_ns=np.zeros(2, np.int64)), spans=spans(0, 2)),
        "rank": batch(run, world_size=1, rank=1, steps=steps(0, 2)),
        "version": batch(run, version=wire.VERSION + 1),
        "emitted": batch(run, emitted=-1, steps=steps(0, 2)),
        "attempt": batch(run, attempt="no nonce"),
    }


@pytest.mark.parametrize("form", ["unpacked", "json"])
@pytest.mark.parametrize("field", bad_batches("any"))
def test_a_malformed_batch_is_refused_whole_and_the_field_named(
    shared: Collector, run: str, field: str, form: str
) -> None:
    document = assert_problem(put(shared.url, bad_batches(run)[field], form), 422)
    assert document["field"] == field
    assert document["expected"]
    assert document["came"]
    assert_problem(httpx.get(f"{shared.url}/api/v1/runs/{run}"), 404)


@pytest.mark.parametrize("form", [wire.MSGPACK, wire.JSON])
def test_columns_of_unequal_length_are_refused_and_the_shorter_named(shared: Collector, run: str, form: str) -> None:
    payload = batch(run, steps=steps(0, 2), spans=spans(0, 2))
    plain = json.loads(wire.encode_json(payload))
    plain["spans"]["done_ns"].pop()
    body = json.dumps(plain).encode() if form == wire.JSON else msgspec.msgpack.encode(plain)
    answer = httpx.put(shared.url + path(payload), content=body, headers={"Content-Type": form})
    document = assert_problem(answer, 422)
    assert (document["field"], document["came"]) == ("spans.done_ns", "3")


@pytest.mark.parametrize("body", [b"", b"{", b"\x00", b"\xff" * 100, b"[" * 100_000])
@pytest.mark.parametrize("form", [wire.MSGPACK, wire.JSON])
def test_garbage_is_refused_as_a_malformed_batch(shared: Collector, run: str, body: bytes, form: str) -> None:
    answer = httpx.put(shared.url + path(batch(run)), content=body, headers={"Content-Type": form})
    assert assert_problem(answer, 422)["field"] == "$"


def test_a_batch_cut_short_in_compression_is_refused(shared: Collector, run: str) -> None:
    payload = batch(run, steps=steps(0, 50))
    body = zstandard.compress(wire.encode(payload))[:-20]
    headers = {"Content-Type": wire.MSGPACK, "Content-Encoding": "zstd"}
    assert_problem(httpx.put(shared.url + path(payload), content=body, headers=headers), 422)
    assert_problem(httpx.get(f"{shared.url}/api/v1/runs/{run}"), 404)


@pytest.mark.parametrize("field", ["run", "source", "seq"])
def test_a_batch_under_another_path_is_refused(shared: Collector, run: str, field: str) -> None:
    other = {"run": batch("another"), "source": batch(run, source="f" * 16), "seq": batch(run, seq=9)}[field]
    payload = batch(run, steps=steps(0, 2))
    headers = {"Content-Type": wire.MSGPACK}
    assert_problem(httpx.put(shared.url + path(other), content=wire.encode(payload), headers=headers), 422)


def test_a_path_that_disagrees_names_the_field(shared: Collector, run: str) -> None:
    headers = {"Content-Type": wire.MSGPACK}
    answer = httpx.put(shared.url + path(batch(run, seq=9)), content=wire.encode(batch(run)), headers=headers)
    assert answer.json()["field"] == "seq"


@pytest.mark.parametrize("headers", [{"Content-Type": "text/plain"}, {"Content-Encoding": "gzip"}])
def test_an_unknown_content_type_or_encoding_gets_415(shared: Collector, run: str, headers: dict[str, str]) -> None:
    assert_problem(put(shared.url, batch(run), "msgpack", **headers), 415)


def test_a_body_over_the_limit_is_refused_packed_or_unpacked(tmp_path: Path) -> None:
    with collector(tmp_path, max_body_mb=0.1, max_batch_mb=1) as running:
        target = running.url + path(batch("big"))
        headers = {"Content-Type": wire.MSGPACK}
        assert_problem(httpx.put(target, content=bytes(100_001), headers=headers), 413)
        bomb = zstandard.compress(bytes(100_000_000))
        assert len(bomb) < 100_000
        assert_problem(httpx.put(target, content=bomb, headers=headers | {"Content-Encoding": "zstd"}), 413)


def test_the_acknowledgement_waits_for_the_commit_even_when_the_client_does_not(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        payload = batch("held", steps=steps(0, 2))
        headers, impatient = {"Content-Type": wire.MSGPACK}, httpx.Timeout(30, read=2)
        lock = sqlite3.connect(running.database, isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")  # No other connection can commit from here on.
        with pytest.raises(httpx.ReadTimeout):
            httpx.put(running.url + path(payload), content=wire.encode(payload), headers=headers, timeout=impatient)
        lock.execute("ROLLBACK")
        lock.close()
        assert put(running.url, payload, "msgpack").status_code == 200
        assert put(running.url, batch("held", seq=1), "msgpack").status_code == 201


def test_a_full_queue_gets_503_with_retry_after(tmp_path: Path) -> None:
    with collector(tmp_path, queue_batches=1) as running, ThreadPoolExecutor(6) as pool:
        lock = sqlite3.connect(running.database, isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        answers = [pool.submit(put, running.url, batch("full", seq=seq)) for seq in range(6)]
        busy = [next(as_completed(answers, timeout=20)).result()]
        lock.execute("ROLLBACK")
        lock.close()
        codes = sorted(answer.result(30).status_code for answer in answers)
    assert assert_problem(busy[0], 503)
    assert busy[0].headers["retry-after"] == "1"
    assert set(codes) == {201, 503}


def test_concurrent_batches_each_get_their_own_response(shared: Collector, run: str) -> None:
    wrong = [batch(run, seq=seq, rank=7, world_size=2) for seq in range(20)]
    right = [batch(run, seq=seq, steps=steps(seq, 1)) for seq in range(20)]
    mixed = [payload for pair in zip(wrong, right, strict=True) for payload in pair]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda payload: put(shared.url, payload), mixed))
    assert [answer.status_code for answer in answers] == [422, 201] * 20
    assert all(assert_problem(answer, 422)["field"] == "rank" for answer in answers[::2])
    assert stored_steps(shared.url, run) == list(range(20))


def write_together(store: Store, payloads: list[tuple[str, wire.Batch]]) -> tuple[list[Any], CollectorRegistry]:
    """Write batches, each with its workspace, that all wait when the writer starts; return the answers and metrics."""
    registry = CollectorRegistry()
    limits = WorkspaceLimits(Settings(), store)
    writer = Writer(store, len(payloads), limits, SeriesLedger(Settings(), limits, store), registry)

    async def write() -> list[Outcome | BaseException]:
        answers: list[asyncio.Future[Outcome]] = [asyncio.get_running_loop().create_future() for _ in payloads]
        for (workspace, payload), answer in zip(payloads, answers, strict=True):
            key = {"run": payload.run, "source": payload.source, "seq": str(payload.seq)}
            upload = Upload(payload.run, key, wire.encode(payload), wire.MSGPACK, "", time.time_ns(), Settings())
            writer.queue.put(workspace, (upload, answer))
        writer.start()
        return await asyncio.gather(*answers, return_exceptions=True)

    answers = asyncio.run(write())
    writer.close()
    return answers, registry


def test_one_bad_batch_of_many_costs_the_others_few_transactions(store: Store) -> None:
    attempts = ["a"] * 64
    attempts[37] = "b"  # The store refuses a source under a second attempt.
    payloads = [batch("run", seq, attempt=attempt * 16, steps=steps(seq, 1)) for seq, attempt in enumerate(attempts)]
    answers, registry = write_together(store, [("default", payload) for payload in payloads])
    assert isinstance(answers.pop(37), UnstorableBatchError)
    assert answers == [Outcome.STORED] * 63
    assert registry.get_sample_value("ddpobs_server_commit_seconds_count") == 1 + 2 * 6


@pytest.fixture
def groups(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Runs of the batches of each transaction."""
    groups: list[list[str]] = []
    ingest = store.ingest

    def grouped(arrivals: list[Arrival]) -> Any:
        groups.append([item.batch.run for item in arrivals])
        return ingest(arrivals)

    monkeypatch.setattr(store, "ingest", grouped)
    return groups


def test_a_cluster_stores_each_run_in_a_transaction_of_its_own(
    store: Store, groups: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "is_distributed", lambda: True)
    payloads = [batch(run, seq, steps=steps(seq, 1)) for seq in range(2) for run in ("a", "b")]
    answers, _ = write_together(store, [("default", payload) for payload in payloads])
    assert answers == [Outcome.STORED] * 4
    assert groups == [["a", "a"], ["b", "b"]]


def test_transactions_are_short_while_several_workspaces_send(store: Store, groups: list[list[str]]) -> None:
    loud = [("loud", batch("loud", seq, steps=steps(seq, 1))) for seq in range(40)]
    write_together(store, loud)
    assert groups == [["loud"] * 40]
    groups.clear()
    write_together(store, [*loud, ("quiet", batch("quiet", steps=steps(0, 1)))])
    assert "quiet" in groups[0]
    assert all(len(group) <= 8 for group in groups)


def test_concurrent_senders_and_retries_store_each_batch_once(shared: Collector, run: str) -> None:
    payloads = [
        batch(run, seq=seq, rank=rank, world_size=4, steps=steps(seq, 1)) for seq in range(15) for rank in range(4)
    ]
    with ThreadPoolExecutor(12) as pool:
        codes = list(pool.map(lambda payload: put(shared.url, payload).status_code, payloads * 2))
    assert sorted(codes) == [200] * len(payloads) + [201] * len(payloads)
    columns = get(shared.url, f"/runs/{run}/steps")["columns"]
    expected = [(seq, rank) for seq in range(15) for rank in range(4)]
    assert list(zip(columns["step"], columns["rank"], strict=True)) == expected


def test_sigterm_lets_an_open_upload_complete(tmp_path: Path) -> None:
    payload = batch("drained", steps=steps(0, 5))
    body = wire.encode(payload)
    with collector(tmp_path) as running:
        address = urlsplit(running.url)
        with socket.create_connection((address.hostname, address.port), 30) as client:
            head = f"PUT {path(payload)} HTTP/1.1\r\nHost: here\r\nContent-Type: {wire.MSGPACK}\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode())
            assert b"100 Continue" in client.recv(1000)
            client.sendall(body[:10])
            running.process.send_signal(signal.SIGTERM)
            wait_until_refused(str(address.hostname), int(address.port or 0))
            client.sendall(body[10:])
            assert b" 201 " in client.recv(1000)
        assert running.process.wait(30) == 0
    with collector(tmp_path) as again:
        assert stored_steps(again.url, "drained") == list(range(5))


def wait_until_refused(host: str, port: int) -> None:
    deadline = time.monotonic() + patience.HANG_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), 1).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.02)
    raise TimeoutError("the collector still listens")
