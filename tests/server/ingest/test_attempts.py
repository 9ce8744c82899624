"""Attempts of a run whose batches arrive late, together, or from several collectors."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ddpobs_server.store import Arrival, Store, UnstorableBatchError
from ddpobs_server.store.upkeep import removal
from ddpobs_server.store.writing import ingest

from benchmarks.rig import databases
from benchmarks.rig.collector import Collector
from ddpobs import wire
from tests.support.server.batches import (
    ATTEMPT,
    assert_problem,
    batch,
    get,
    hello,
    pulse,
    put,
    spans,
    steps,
    stored_steps,
)


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


def test_late_messages_of_an_old_attempt_do_not_take_the_run_over(shared: Collector, run: str) -> None:
    """The restart trains; the old attempt's ranks then end, and one of them reports for the first time."""
    second: list[dict[str, Any]] = [{"attempt": "b" * 16, "source": f"{rank:x}" * 16} for rank in (2, 3)]

    def send(payload: wire.Batch) -> None:
        answer = put(shared.url, payload)
        assert answer.status_code == 201, answer.text

    def event(kind: str, **detail: str | int | float | bool | None) -> list[wire.Event]:
        return [wire.Event(kind=kind, at_ns=10 * 10**9, step=5, detail=detail)]

    send(batch(run, hello=hello(), steps=steps(0, 3)))
    for rank, fields in enumerate(second):
        send(batch(run, rank=rank, hello=hello(), steps=steps(0, 5), pulse=pulse("code"), **fields))
    before = get(shared.url, f"/runs/{run}")
    send(batch(run, seq=1, steps=steps(3, 2), pulse=pulse("bucket", idle_s=60)))
    send(batch(run, seq=2, events=event("failed", error="ValueError", phase="forward", exit_code=1)))
    send(batch(run, rank=1, hello=hello("late"), steps=steps(0, 9), events=event("goodbye")))
    after = get(shared.url, f"/runs/{run}")
    kept = ("state", "attempt", "ranks", "steps")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert after["attempt"] == "b" * 16
    assert (after["ranks"], after["steps"]) == (2, 5)
    assert [rank["host"] for rank in get(shared.url, f"/runs/{run}/ranks")["ranks"]] == ["node", "node"]
    old, new = get(shared.url, f"/runs/{run}/attempts")["attempts"]
    assert (old["outcome"], old["first_rank"], new["outcome"]) == ("failed", 0, before["state"])
    codes = {finding["code"] for finding in get(shared.url, f"/runs/{run}/diagnostics")["findings"]}
    assert not codes & {"crash", "hang"}


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
        payloads = [
            batch("run", seq, attempt=attempt * 16, steps=steps(3 * seq, 3)) for seq, attempt in enumerate(attempts)
        ]
        store.ingest([Arrival(payload, bytes([payload.seq]) * 32, 100, 1) for payload in payloads])

    with pytest.raises(UnstorableBatchError, match="attempt, rank: expected those"):
        ingest("a", "b")
    assert store.run("run") is None
    ingest("a", "a")
    with pytest.raises(UnstorableBatchError, match="attempt, rank: expected those"):
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


def test_a_source_that_changes_its_rank_is_refused(shared: Collector, run: str) -> None:
    assert put(shared.url, batch(run, 0, 0, steps=steps(0, 3))).status_code == 201
    moved = batch(run, 1, 0, steps=steps(3, 3))
    problem = assert_problem(put(shared.url, msgspec.structs.replace(moved, rank=1)), 422)
    assert "attempt, rank: expected those of this source's earlier batches" in problem["detail"]
    assert [rank["steps"] for rank in get(shared.url, f"/runs/{run}/ranks")["ranks"]] == [3]
    assert put(shared.url, batch(run, 1, 0, steps=steps(3, 3))).status_code == 201
