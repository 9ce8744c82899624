"""What a client may rely on when it sends a batch, over HTTP to a real collector."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import numpy as np
import pytest
import zstandard
from ddpobs_server.ingest.upload import Upload
from ddpobs_server.ingest.writer import Writer
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Outcome, Store, UnstorableBatchError, ingest, removal
from prometheus_client import CollectorRegistry

from ddpobs import wire
from tests import databases
from tests.collector import Collector, collector
from tests.server.batches import ATTEMPT, assert_problem, batch, get, hello, path, put, source_of, spans, steps


def stored_steps(url: str, run: str) -> list[int]:
    columns: dict[str, list[int]] = get(url, f"/runs/{run}/steps")["columns"]
    return columns["step"]


def test_a_new_batch_is_acknowledged_with_its_key(shared: Collector, run: str) -> None:
    answer = put(shared.url, batch(run, seq=3, steps=steps(0, 2)))
    assert answer.status_code == 201
    assert answer.json() == {"source": source_of(0), "seq": 3, "repeated": False}


def test_a_repeated_batch_is_acknowledged_and_not_stored_twice(shared: Collector, run: str) -> None:
    sent = batch(run, steps=steps(0, 3), spans=spans(0, 3))
    answers = [put(shared.url, sent) for _ in range(3)]
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
def test_every_form_of_a_batch_stores_the_same(shared: Collector, run: str, form: str) -> None:
    sent = batch(run, steps=steps(0, 4), spans=spans(0, 4), hello=hello())
    assert put(shared.url, sent, form).status_code == 201
    expected = {name: getattr(sent.steps, name).tolist() for name in wire.Steps.names}
    assert get(shared.url, f"/runs/{run}/steps")["columns"] == {"rank": [0] * 4} | expected
    assert sent.spans is not None
    assert get(shared.url, f"/runs/{run}/spans")["columns"]["done_ns"] == sent.spans.done_ns.tolist()


def bad_batches(run: str) -> dict[str, wire.Batch]:
    """A batch that is wrong in one field, under that field's name."""
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
    sent = batch(run, steps=steps(0, 2), spans=spans(0, 2))
    plain = json.loads(wire.encode_json(sent))
    plain["spans"]["done_ns"].pop()
    body = json.dumps(plain).encode() if form == wire.JSON else msgspec.msgpack.encode(plain)
    answer = httpx.put(shared.url + path(sent), content=body, headers={"Content-Type": form})
    document = assert_problem(answer, 422)
    assert (document["field"], document["came"]) == ("spans.done_ns", "3")


@pytest.mark.parametrize("body", [b"", b"{", b"\x00", b"\xff" * 100, b"[" * 100_000])
@pytest.mark.parametrize("form", [wire.MSGPACK, wire.JSON])
def test_rubbish_is_a_malformed_batch(shared: Collector, run: str, body: bytes, form: str) -> None:
    answer = httpx.put(shared.url + path(batch(run)), content=body, headers={"Content-Type": form})
    assert assert_problem(answer, 422)["field"] == "$"


def test_a_batch_cut_short_in_compression_is_refused(shared: Collector, run: str) -> None:
    sent = batch(run, steps=steps(0, 50))
    body = zstandard.compress(wire.encode(sent))[:-20]
    headers = {"Content-Type": wire.MSGPACK, "Content-Encoding": "zstd"}
    assert_problem(httpx.put(shared.url + path(sent), content=body, headers=headers), 422)
    assert_problem(httpx.get(f"{shared.url}/api/v1/runs/{run}"), 404)


@pytest.mark.parametrize("field", ["run", "source", "seq"])
def test_a_batch_under_another_path_is_refused(shared: Collector, run: str, field: str) -> None:
    other = {"run": batch("another"), "source": batch(run, source="f" * 16), "seq": batch(run, seq=9)}[field]
    sent = batch(run, steps=steps(0, 2))
    headers = {"Content-Type": wire.MSGPACK}
    assert_problem(httpx.put(shared.url + path(other), content=wire.encode(sent), headers=headers), 422)


def test_a_path_that_disagrees_names_the_field(shared: Collector, run: str) -> None:
    headers = {"Content-Type": wire.MSGPACK}
    answer = httpx.put(shared.url + path(batch(run, seq=9)), content=wire.encode(batch(run)), headers=headers)
    assert answer.json()["field"] == "seq"


@pytest.mark.parametrize("headers", [{"Content-Type": "text/plain"}, {"Content-Encoding": "gzip"}])
def test_an_unknown_form_is_refused_as_such(shared: Collector, run: str, headers: dict[str, str]) -> None:
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
        sent = batch("held", steps=steps(0, 2))
        headers, impatient = {"Content-Type": wire.MSGPACK}, httpx.Timeout(30, read=2)
        lock = sqlite3.connect(running.database, isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")  # nobody else can commit from here on
        with pytest.raises(httpx.ReadTimeout):
            httpx.put(running.url + path(sent), content=wire.encode(sent), headers=headers, timeout=impatient)
        lock.execute("ROLLBACK")
        lock.close()
        assert put(running.url, sent, "msgpack").status_code == 200
        assert put(running.url, batch("held", seq=1), "msgpack").status_code == 201


def test_a_full_queue_is_answered_busy_with_a_time_to_come_back(tmp_path: Path) -> None:
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


def test_batches_that_come_together_have_each_its_own_answer(shared: Collector, run: str) -> None:
    wrong = [batch(run, seq=seq, rank=7, world_size=2) for seq in range(20)]
    right = [batch(run, seq=seq, steps=steps(seq, 1)) for seq in range(20)]
    mixed = [one for pair in zip(wrong, right, strict=True) for one in pair]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda one: put(shared.url, one), mixed))
    assert [answer.status_code for answer in answers] == [422, 201] * 20
    assert all(assert_problem(answer, 422)["field"] == "rank" for answer in answers[::2])
    assert stored_steps(shared.url, run) == list(range(20))


def test_one_bad_batch_of_many_costs_the_others_few_transactions(store: Store) -> None:
    attempts = ["a"] * 64
    attempts[37] = "b"  # A source stays with its attempt.
    sent = [batch("run", seq, attempt=attempt * 16, steps=steps(seq, 1)) for seq, attempt in enumerate(attempts)]
    registry = CollectorRegistry()
    writer = Writer(store, len(sent), registry)

    async def together() -> list[Outcome | BaseException]:
        answers: list[asyncio.Future[Outcome]] = [asyncio.get_running_loop().create_future() for _ in sent]
        for one, answer in zip(sent, answers, strict=True):
            key = {"run": one.run, "source": one.source, "seq": str(one.seq)}
            upload = Upload(one.run, key, wire.encode(one), wire.MSGPACK, "", time.time_ns(), Settings())
            writer._waiting.put((upload, answer))
        writer.start()
        return await asyncio.gather(*answers, return_exceptions=True)

    answers = asyncio.run(together())
    writer.close()
    assert isinstance(answers.pop(37), UnstorableBatchError)
    assert answers == [Outcome.STORED] * 63
    assert registry.get_sample_value("ddpobs_server_commit_seconds_count") == 1 + 2 * 6


def test_concurrent_senders_and_retries_store_each_batch_once(shared: Collector, run: str) -> None:
    sent = [batch(run, seq=seq, rank=rank, world_size=4, steps=steps(seq, 1)) for seq in range(15) for rank in range(4)]
    with ThreadPoolExecutor(12) as pool:
        codes = list(pool.map(lambda one: put(shared.url, one).status_code, sent * 2))
    assert sorted(codes) == [200] * len(sent) + [201] * len(sent)
    columns = get(shared.url, f"/runs/{run}/steps")["columns"]
    expected = [(seq, rank) for seq in range(15) for rank in range(4)]
    assert list(zip(columns["step"], columns["rank"], strict=True)) == expected


def test_sigterm_lets_a_request_under_way_end(tmp_path: Path) -> None:
    sent = batch("drained", steps=steps(0, 5))
    body = wire.encode(sent)
    with collector(tmp_path) as running:
        address = urlsplit(running.url)
        with socket.create_connection((address.hostname, address.port), 30) as client:
            head = f"PUT {path(sent)} HTTP/1.1\r\nHost: here\r\nContent-Type: {wire.MSGPACK}\r\n"
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
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), 1).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.02)
    raise TimeoutError("the collector still listens")


def test_data_before_its_hello_is_accepted_and_waits(shared: Collector, run: str) -> None:
    put(shared.url, batch(run, seq=1, steps=steps(0, 2), spans=spans(0, 2)))
    assert get(shared.url, f"/runs/{run}/ranks")["ranks"][0]["host"] is None
    put(shared.url, batch(run, seq=0, hello=hello("late")))
    assert get(shared.url, f"/runs/{run}/ranks")["ranks"][0]["host"] == "late"


def test_an_attempt_that_waited_in_a_spool_does_not_take_the_run_over(shared: Collector, run: str) -> None:
    live, waited = {"attempt": "b" * 16, "source": "b" * 16}, {"attempt": "c" * 16, "source": "c" * 16}

    def at(hour: int) -> wire.Anchor:
        return wire.Anchor(wall_ns=time.time_ns() + hour * 3600 * 10**9, monotonic_ns=0)

    put(shared.url, batch(run, rank=1, anchor=at(-1), steps=steps(0, 3), **live))
    put(shared.url, batch(run, rank=1, anchor=at(-24), steps=steps(0, 7), **waited))
    assert get(shared.url, f"/runs/{run}")["attempt"] == live["attempt"]
    assert stored_steps(shared.url, run) == [0, 1, 2]
    # On a host whose clock is behind a restart looks just so, until its clock has gone by the last that was told.
    put(shared.url, batch(run, rank=1, seq=1, anchor=at(0), steps=steps(7, 1), **waited))
    put(shared.url, batch(run, rank=1, seq=1, anchor=at(1), steps=steps(3, 1), **live))
    assert get(shared.url, f"/runs/{run}")["attempt"] == waited["attempt"]


def test_an_attempt_whose_clock_was_ahead_gives_way_to_the_next(shared: Collector, run: str) -> None:
    year_ns = 365 * 86_400 * 10**9
    ahead = wire.Anchor(wall_ns=time.time_ns() + year_ns, monotonic_ns=0)
    put(shared.url, batch(run, anchor=ahead, steps=steps(0, 3)))
    now = wire.Anchor(wall_ns=time.time_ns(), monotonic_ns=0)
    put(shared.url, batch(run, anchor=now, attempt="b" * 16, source="b" * 16, steps=steps(0, 7)))
    assert get(shared.url, f"/runs/{run}")["attempt"] == "b" * 16
    assert stored_steps(shared.url, run) == list(range(7))


@pytest.mark.parametrize("first", ["b", "c"])
def test_of_attempts_that_come_in_one_transaction_the_later_one_is_the_run_s(store: Store, first: str) -> None:
    hours = {"b": 5, "c": 3}

    def arrival(attempt: str, seq: int) -> Arrival:
        anchor = wire.Anchor(wall_ns=10**18 + hours[attempt] * 3600 * 10**9, monotonic_ns=0)
        sent = batch("job", seq=seq, attempt=attempt * 16, source=attempt * 16, anchor=anchor, steps=steps(seq, 1))
        return Arrival(sent, bytes(32), 1, 10**18 + 6 * 3600 * 10**9)

    second = "c" if first == "b" else "b"
    store.ingest([arrival(first, 0), arrival(second, 0)])
    store.ingest([arrival("b", 1), arrival("c", 1)])
    told = store.run("job")
    assert told is not None
    assert told.attempt == "b" * 16


def test_a_restart_under_the_same_run_is_a_new_attempt_and_the_latest_stays_so(shared: Collector, run: str) -> None:
    second = {"attempt": "b" * 16, "source": "b" * 16}
    put(shared.url, batch(run, steps=steps(0, 3)))
    put(shared.url, batch(run, steps=steps(0, 2), **second))
    put(shared.url, batch(run, seq=1, steps=steps(3, 1)))
    told = get(shared.url, f"/runs/{run}")
    assert [(one["attempt"], one["ordinal"]) for one in told["attempts"]] == [(ATTEMPT, 0), ("b" * 16, 1)]
    assert told["attempt"] == "b" * 16
    assert stored_steps(shared.url, run) == [0, 1]
    assert get(shared.url, f"/runs/{run}/steps", attempt=ATTEMPT)["columns"]["step"] == [0, 1, 2, 3]


def test_two_collectors_number_attempts_that_come_at_the_same_moment_in_turn(
    postgresql: databases.Fresh, tmp_path: Path
) -> None:
    """Each in a transaction of its own: the second waits for the first, and does not count without it."""
    url, second_ns = postgresql(tmp_path), 10**9
    one, two = Store(url), Store(url)
    one.migrate()

    def arrival(attempt: str, ago: int) -> Arrival:
        anchor = wire.Anchor(wall_ns=(10_000 - ago) * second_ns, monotonic_ns=0)
        sent = batch("run", attempt=attempt * 16, source=attempt * 16, anchor=anchor, steps=steps(0, 3))
        return Arrival(sent, attempt.encode() * 32, 1, time.time_ns())

    one.ingest([arrival("a", 7200)])
    with one._engine.begin() as connection, ThreadPoolExecutor(1) as pool:
        ingest.write(connection, [arrival("c", 3600)])  # As one that waited in a spool does.
        restart = pool.submit(two.ingest, [arrival("b", 0)])
        time.sleep(0.3)
        connection.commit()
        restart.result(30)
    attempts = {found.attempt[0]: found.ordinal for found in one.attempts("run")}
    run = one.run("run")
    one.close()
    two.close()
    assert attempts == {"a": 0, "c": 1, "b": 2}
    assert run is not None
    assert run.attempt[0] == "b"


def test_a_source_stays_with_its_attempt(store: Store) -> None:
    def ingest(*attempts: str) -> None:
        sent = [batch("run", seq, attempt=attempt * 16, steps=steps(0, 3)) for seq, attempt in enumerate(attempts)]
        store.ingest([Arrival(one, bytes([one.seq]) * 32, 100, 1) for one in sent])

    with pytest.raises(UnstorableBatchError, match="attempt: expected the one"):
        ingest("a", "b")
    assert store.run("run") is None
    ingest("a", "a")
    with pytest.raises(UnstorableBatchError, match="attempt: expected the one"):
        ingest("a", "a", "b")
    assert [found.attempt for found in store.attempts("run")] == ["a" * 16]


def test_a_run_that_is_deleted_while_its_batch_arrives_keeps_that_ones_attempt(
    postgresql: databases.Fresh, tmp_path: Path
) -> None:
    store = Store(postgresql(tmp_path))
    store.migrate()

    def arrival(seq: int) -> Arrival:
        return Arrival(batch("run", seq=seq, steps=steps(3 * seq, 3)), bytes([seq]) * 32, 1, time.time_ns())

    store.ingest([arrival(0)])
    with store._engine.connect() as connection, ThreadPoolExecutor(1) as pool:
        removal.delete_rows(connection, "run")
        later = pool.submit(store.ingest, [arrival(1)])
        time.sleep(0.3)
        connection.commit()
        later.result(30)
    attempts = [found.attempt for found in store.attempts("run")]
    store.close()
    assert attempts == [ATTEMPT]
