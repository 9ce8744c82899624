"""A run that is deleted while it trains stays deleted, and a new launch may use its name."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from ddpobs_server.store import Arrival, DeletedRunError, Store
from ddpobs_server.store.upkeep import removal

from benchmarks.rig.collector import Collector, collector
from tests.support.server.batches import assert_problem, batch, get, put, steps

OTHER: dict[str, Any] = {"attempt": "b" * 16, "source": "b" * 16}


def test_a_deleted_run_stays_deleted_for_every_process_of_its_attempt(shared: Collector, run: str) -> None:
    for seq in range(2):
        put(shared.url, batch(run, seq=seq, steps=steps(2 * seq, 2)))
    assert httpx.delete(f"{shared.url}/api/v1/runs/{run}").status_code == 204
    for rank, seq in ((0, 2), (0, 3), (1, 0), (0, 0)):
        problem = assert_problem(put(shared.url, batch(run, seq=seq, rank=rank, steps=steps(2 * seq, 2))), 410)
        assert "deleted while this process trained" in problem["detail"]
    assert_problem(httpx.get(f"{shared.url}/api/v1/runs/{run}"), 404)


def test_a_new_launch_of_a_deleted_run_is_whole(shared: Collector, run: str) -> None:
    put(shared.url, batch(run, steps=steps(0, 2)))
    httpx.delete(f"{shared.url}/api/v1/runs/{run}")
    assert put(shared.url, batch(run, **OTHER, steps=steps(0, 3))).status_code == 201
    assert_problem(put(shared.url, batch(run, seq=1, steps=steps(2, 2))), 410)
    assert [record["attempt"] for record in get(shared.url, f"/runs/{run}")["attempts"]] == [OTHER["attempt"]]
    assert get(shared.url, f"/runs/{run}/diagnostics")["steps_seen"] == 3


def test_a_deletion_is_remembered_over_a_restart(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        put(running.url, batch("x"))
        httpx.delete(f"{running.url}/api/v1/runs/x")
    with collector(tmp_path) as running:
        assert_problem(put(running.url, batch("x", seq=1)), 410)


def test_batches_of_a_deleted_run_fail_no_batch_beside_them(shared: Collector, run: str) -> None:
    put(shared.url, batch(run))
    httpx.delete(f"{shared.url}/api/v1/runs/{run}")
    batches = [batch(run, seq=seq) for seq in range(1, 20)] + [batch(f"{run}-b", seq=seq) for seq in range(20)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda payload: put(shared.url, payload).status_code, batches))
    assert answers == [410] * 19 + [201] * 20


def arrival(seq: int, received_ns: int | None = None) -> Arrival:
    return Arrival(batch("x", seq=seq, steps=steps(2 * seq, 2)), bytes([seq]) * 32, 1, received_ns or time.time_ns())


def by_request(store: Store) -> None:
    store.delete("x")


def by_age(store: Store) -> None:
    assert store.expire_runs(time.time_ns()) == 1


def to_make_room(store: Store) -> None:
    while store.run("x") is not None:
        removal.delete_run(store._engine, "x", [])


@pytest.mark.parametrize("remove", [by_request, by_age, to_make_room])
def test_each_kind_of_removal_is_remembered(store: Store, remove: Callable[[Store], None]) -> None:
    store.ingest([arrival(0, 10**15)])
    remove(store)
    with pytest.raises(DeletedRunError):
        store.ingest([arrival(1)])
    assert store.run("x") is None
    store.forget_deleted(time.time_ns() + 1)
    store.ingest([arrival(1)])
    assert store.run("x") is not None
