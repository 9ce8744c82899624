"""What goes and what stays, and that its space is returned."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from ddpobs_server.retention import Keeper
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Store, compacting, removing, schema
from prometheus_client import CollectorRegistry
from sqlalchemy import func, select, text

from ddpobs import wire
from tests import databases
from tests.server.batches import ATTEMPT, batch, spans, steps

DAY_NS = 86_400 * 10**9


def arrive(store: Store, run: str, day: int, seq: int = 0, count: int = 200) -> None:
    """A batch of noisy times, which compress badly."""
    noise = np.random.default_rng(seq).integers(0, 10**9, 2 * count)
    sent = spans(seq * count, count)
    sent = spans(seq * count, count, done_ns=sent.done_ns + noise)
    body = wire.encode(batch(run, seq=seq, steps=steps(seq * count, count), spans=sent))
    store.ingest([Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), day * DAY_NS)])


def rows(store: Store, run: str) -> tuple[int, int, int]:
    """Steps and spans that can be read, and steps that were summed up."""
    read = len(store.steps(run, ATTEMPT)[0]), len(store.spans(run, ATTEMPT)[0])
    return (*read, sum(rollup.steps for rollup in store.rollups(run, ATTEMPT)))


def tidy(store: Store, day: float, **settings: float) -> None:
    Keeper(Settings(**settings), store, CollectorRegistry()).tidy(int(day * DAY_NS))  # type: ignore[arg-type]


def test_old_spans_go_and_their_sums_stay(store: Store) -> None:
    arrive(store, "long", day=1)
    arrive(store, "long", day=9, seq=1)
    arrive(store, "new", day=9)
    tidy(store, day=10, keep_spans_days=5)
    assert rows(store, "long") == (200, 400, 400)
    assert rows(store, "new") == (200, 400, 200)


def test_runs_that_fell_silent_go_altogether(store: Store) -> None:
    arrive(store, "silent", day=1)
    arrive(store, "long", day=1)
    arrive(store, "long", day=9, seq=1)
    tidy(store, day=10, keep_runs_days=5)
    assert store.run("silent") is None
    assert rows(store, "long") == (400, 800, 400)


@pytest.mark.parametrize("what", ["compact", "expire", "shrink"])
def test_what_is_kept_is_tidied_while_the_run_is_deleted(
    postgresql: databases.Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(compacting, "_ROWS", 300)
    store = Store(postgresql(tmp_path))
    store.migrate()
    for seq in range(4):
        arrive(store, "run", day=1, seq=seq)
    tidy = {
        "compact": lambda: sum(store.compact(0)),
        "expire": lambda: store.expire_chunks(2 * DAY_NS),
        "shrink": lambda: store.shrink(0),
    }[what]
    waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    with ThreadPoolExecutor(1) as pool, store._engine.connect() as deleting, store._engine.connect() as watching:
        # As a deletion of the run does: first its own row, then everything else.
        deleting.execute(schema.runs.delete().where(schema.runs.c.run_id == "run"))
        tidied = pool.submit(tidy)
        while not watching.execute(waiting).scalar_one() and not tidied.done():
            watching.rollback()
        removing.delete_rows(deleting, "run")
        deleting.commit()
        tidied.result(60)
    assert store.run("run") is None
    assert store.used_bytes() == 0
    with store._engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(schema.chunks)).scalar_one() == 0
    store.close()


def test_without_settings_nothing_goes(store: Store) -> None:
    arrive(store, "old", day=1)
    tidy(store, day=10_000)
    assert rows(store, "old") == (200, 400, 200)


def test_the_oldest_spans_make_room_before_any_run_goes(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/runs.db")
    store.migrate()
    empty = store.size_bytes()
    for day in range(4):
        for seq in range(10):
            arrive(store, f"run-{day}", day=day, seq=seq, count=2000)
    full = store.size_bytes()
    limit = (empty + full) // 2
    tidy(store, day=10, keep_gb=limit / 1e9)
    assert store.size_bytes() <= limit
    kept = [rows(store, f"run-{day}")[0] > 0 for day in range(4)]
    assert kept == sorted(kept)  # The oldest first.
    assert (kept[0], kept[-1]) == (False, True)
    assert [rows(store, f"run-{day}")[2] for day in range(4)] == [20_000] * 4
    store.close()


def test_a_deleted_run_returns_its_space(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/runs.db")
    store.migrate()
    empty = store.size_bytes()
    for seq in range(20):
        arrive(store, "large", day=1, seq=seq, count=2000)
    assert store.size_bytes() > 2 * empty
    store.delete("large")
    assert store.size_bytes() <= 1.2 * empty
    store.close()


def test_batches_get_in_between_while_much_is_removed(
    fresh: databases.Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removing, "_CHUNKS", 5)
    monkeypatch.setattr(removing, "_PAGES", 20)
    store = Store(fresh(tmp_path))
    store.migrate()
    for seq in range(10):
        arrive(store, "large", day=1, seq=seq, count=1000)
    came: list[int] = []

    def arrive_meanwhile(_: float) -> None:
        arrive(store, "other", day=1, seq=len(came), count=1)
        came.append(len(rows_left(store)))

    monkeypatch.setattr(time, "sleep", arrive_meanwhile)
    assert store.delete("large")
    assert came[:4] == [15, 10, 5, 0], "chunks of steps and spans"
    assert rows_left(store) == set()
    assert rows(store, "other")[0] == len(came)
    store.close()


def rows_left(store: Store) -> set[tuple[object, ...]]:
    c = schema.chunks.c
    with store._engine.connect() as connection:
        return set(map(tuple, connection.execute(select(c.source, c.kind, c.seq).where(c.run_id == "large"))))


def test_a_limit_below_what_an_empty_database_takes_ends_too(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/runs.db")
    store.migrate()
    arrive(store, "a-run", day=1)
    tidy(store, day=2, keep_gb=1e-9)
    assert store.run("a-run") is None
    store.close()


def test_metrics_tell_what_is_kept_and_when_a_round_last_succeeded(store: Store) -> None:
    arrive(store, "some", day=1)
    registry = CollectorRegistry()
    began = time.time()
    Keeper(Settings(keep_gb=1), store, registry).tidy(2 * DAY_NS)

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"ddpobs_server_retention_{name}", labels) or 0.0

    assert 0 < value("bytes", what="used") < value("bytes", what="limit") == 1e9
    assert value("success_timestamp_seconds") >= began
