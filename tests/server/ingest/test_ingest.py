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
from ddpobs_server.store.upkeep import removal
from ddpobs_server.store.writing import ingest
from ddpobs_server.web.workspace_limits import WorkspaceLimits
from prometheus_client import CollectorRegistry

from benchmarks.rig import databases, patience
from benchmarks.rig.collector import Collector, collector
from ddpobs import wire
from tests.support.server.batches import ATTEMPT, assert_problem, batch, get, hello, path, put, source_of, spans, steps


def stored_steps(url: str, run: str) -> list[int]:
    columns: dict[str, list[int]] = get(url, f"/runs/{run}/steps")["columns"]
    return columns["step"]


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


def test_transactions_are_short_while_several_workspaces_send(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[list[str]] = []
    ingest = store.ingest

    def grouped(arrivals: list[Arrival]) -> Any:
        groups.append([item.batch.run for item in arrivals])
        return ingest(arrivals)

    monkeypatch.setattr(store, "ingest", grouped)
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


def test_data_that_arrives_before_its_hello_is_stored(shared: Collector, run: str) -> None:
    put(shared.url, batch(run, seq=1, steps=steps(0, 2), spans=spans(0, 2)))
    assert get(shared.url, f"/runs/{run}/ranks")["ranks"][0]["host"] is None
    put(shared.url, batch(run, seq=0, hello=hello("late")))
    assert get(shared.url, f"/runs/{run}/ranks")["ranks"][0]["host"] == "late"


def test_an_attempt_from_a_spool_does_not_replace_a_later_one(shared: Collector, run: str) -> None:
    live: dict[str, Any] = {"attempt": "b" * 16, "source": "b" * 16}
    spooled: dict[str, Any] = {"attempt": "c" * 16, "source": "c" * 16}

    def anchor_at(hour: int) -> wire.Anchor:
        return wire.Anchor(wall_ns=time.time_ns() + hour * 3600 * 10**9, monotonic_ns=0)

    put(shared.url, batch(run, rank=1, anchor=anchor_at(-1), steps=steps(0, 3), **live))
    put(shared.url, batch(run, rank=1, anchor=anchor_at(-24), steps=steps(0, 7), **spooled))
    assert get(shared.url, f"/runs/{run}")["attempt"] == live["attempt"]
    assert stored_steps(shared.url, run) == [0, 1, 2]
    # A restart on a host whose clock is behind looks the same, until its clock passes the last recorded time.
    put(shared.url, batch(run, rank=1, seq=1, anchor=anchor_at(0), steps=steps(7, 1), **spooled))
    put(shared.url, batch(run, rank=1, seq=1, anchor=anchor_at(1), steps=steps(3, 1), **live))
    assert get(shared.url, f"/runs/{run}")["attempt"] == spooled["attempt"]


def test_the_next_attempt_replaces_one_whose_clock_was_ahead(shared: Collector, run: str) -> None:
    year_ns = 365 * 86_400 * 10**9
    ahead = wire.Anchor(wall_ns=time.time_ns() + year_ns, monotonic_ns=0)
    put(shared.url, batch(run, anchor=ahead, steps=steps(0, 3)))
    now = wire.Anchor(wall_ns=time.time_ns(), monotonic_ns=0)
    put(shared.url, batch(run, anchor=now, attempt="b" * 16, source="b" * 16, steps=steps(0, 7)))
    assert get(shared.url, f"/runs/{run}")["attempt"] == "b" * 16
    assert stored_steps(shared.url, run) == list(range(7))


@pytest.mark.parametrize("first", ["b", "c"])
def test_of_attempts_in_one_transaction_the_later_becomes_the_runs_attempt(store: Store, first: str) -> None:
    hours = {"b": 5, "c": 3}

    def arrival(attempt: str, seq: int) -> Arrival:
        anchor = wire.Anchor(wall_ns=10**18 + hours[attempt] * 3600 * 10**9, monotonic_ns=0)
        payload = batch("job", seq=seq, attempt=attempt * 16, source=attempt * 16, anchor=anchor, steps=steps(seq, 1))
        return Arrival(payload, bytes(32), 1, 10**18 + 6 * 3600 * 10**9)

    second = "c" if first == "b" else "b"
    store.ingest([arrival(first, 0), arrival(second, 0)])
    store.ingest([arrival("b", 1), arrival("c", 1)])
    record = store.run("job")
    assert record is not None
    assert record.attempt == "b" * 16


def test_a_restart_is_a_new_attempt_and_stays_the_latest(shared: Collector, run: str) -> None:
    second: dict[str, Any] = {"attempt": "b" * 16, "source": "b" * 16}
    put(shared.url, batch(run, steps=steps(0, 3)))
    put(shared.url, batch(run, steps=steps(0, 2), **second))
    put(shared.url, batch(run, seq=1, steps=steps(3, 1)))
    details = get(shared.url, f"/runs/{run}")
    assert [(attempt["attempt"], attempt["ordinal"]) for attempt in details["attempts"]] == [
        (ATTEMPT, 0),
        ("b" * 16, 1),
    ]
    assert details["attempt"] == "b" * 16
    assert stored_steps(shared.url, run) == [0, 1]
    assert get(shared.url, f"/runs/{run}/steps", attempt=ATTEMPT)["columns"]["step"] == [0, 1, 2, 3]


def test_two_collectors_number_concurrent_attempts_in_order(postgresql: databases.Fresh, tmp_path: Path) -> None:
    """The second transaction waits for the first, and counts its attempt."""
    url, second_ns = postgresql(tmp_path), 10**9
    first, second = Store(url), Store(url)
    first.migrate()

    def arrival(attempt: str, age_s: int) -> Arrival:
        anchor = wire.Anchor(wall_ns=(10_000 - age_s) * second_ns, monotonic_ns=0)
        payload = batch("run", attempt=attempt * 16, source=attempt * 16, anchor=anchor, steps=steps(0, 3))
        return Arrival(payload, attempt.encode() * 32, 1, time.time_ns())

    first.ingest([arrival("a", 7200)])
    with first._engine.begin() as connection, ThreadPoolExecutor(1) as pool:
        ingest.write(connection, [arrival("c", 3600)])  # An attempt from a spool.
        restart = pool.submit(second.ingest, [arrival("b", 0)])
        time.sleep(0.3)
        connection.commit()
        restart.result(30)
    attempts = {record.attempt[0]: record.ordinal for record in first.attempts("run")}
    run = first.run("run")
    first.close()
    second.close()
    assert attempts == {"a": 0, "c": 1, "b": 2}
    assert run is not None
    assert run.attempt[0] == "b"


def test_a_source_under_a_second_attempt_is_refused(store: Store) -> None:
    def ingest(*attempts: str) -> None:
        payloads = [batch("run", seq, attempt=attempt * 16, steps=steps(0, 3)) for seq, attempt in enumerate(attempts)]
        store.ingest([Arrival(payload, bytes([payload.seq]) * 32, 100, 1) for payload in payloads])

    with pytest.raises(UnstorableBatchError, match="attempt: expected the one"):
        ingest("a", "b")
    assert store.run("run") is None
    ingest("a", "a")
    with pytest.raises(UnstorableBatchError, match="attempt: expected the one"):
        ingest("a", "a", "b")
    assert [record.attempt for record in store.attempts("run")] == ["a" * 16]


def test_a_new_attempt_that_arrives_during_a_deletion_is_stored(postgresql: databases.Fresh, tmp_path: Path) -> None:
    store = Store(postgresql(tmp_path))
    store.migrate()

    def arrival(seq: int) -> Arrival:
        launch: dict[str, Any] = {"attempt": f"{seq:016x}", "source": f"{seq:016x}"}
        return Arrival(batch("run", seq=seq, **launch, steps=steps(3 * seq, 3)), bytes([seq]) * 32, 1, time.time_ns())

    store.ingest([arrival(0)])
    with store._engine.connect() as connection, ThreadPoolExecutor(1) as pool:
        removal.delete_rows(connection, "run")
        later = pool.submit(store.ingest, [arrival(1)])
        time.sleep(0.3)
        connection.commit()
        later.result(30)
    attempts = [record.attempt for record in store.attempts("run")]
    store.close()
    assert attempts == [f"{1:016x}"]
