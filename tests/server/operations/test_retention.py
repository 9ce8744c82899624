"""Retention: rows removed, rows kept, and the return of their space."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from ddpobs_server.operations.retention import RetentionJob
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Store, schema
from ddpobs_server.store.database import engine
from ddpobs_server.store.queries import unused_queries
from ddpobs_server.store.upkeep import compaction, removal
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine, func, select, text

from benchmarks.rig import databases
from ddpobs import wire
from tests.support.server.batches import ATTEMPT, batch, fingerprint, spans, steps

DAY_NS = 86_400 * 10**9


def arrive(store: Store, run: str, day: float, seq: int = 0, count: int = 200, **fields: Any) -> None:
    """Store a batch of noisy times, which compress badly."""
    noise = np.random.default_rng(seq).integers(0, 10**9, 2 * count)
    noisy = spans(seq * count, count, done_ns=spans(seq * count, count).done_ns + noise)
    body = wire.encode(batch(run, seq=seq, steps=steps(seq * count, count), spans=noisy, **fields))
    store.ingest([Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), int(day * DAY_NS))])


def rows(store: Store, run: str) -> tuple[int, int, int]:
    """Number of steps and spans that can be read, and of steps in the sums."""
    counts = len(store.steps(run, ATTEMPT)[0]), len(store.spans(run, ATTEMPT)[0])
    return (*counts, sum(rollup.steps for rollup in store.rollups(run, ATTEMPT)))


@pytest.fixture
def without_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no bins of steps. Beside the few buckets of these runs they would take as much room as columns."""
    monkeypatch.setattr(RetentionJob, "_update_step_bins", lambda *_: None)


def run_retention(store: Store, day: float, **settings: float) -> None:
    accepted: dict[str, Any] = {"keep_share": 1, **settings}
    RetentionJob(Settings(**accepted), store, CollectorRegistry()).run_once(int(day * DAY_NS))


def test_old_spans_are_removed_and_their_sums_stay(store: Store) -> None:
    arrive(store, "long", day=1)
    arrive(store, "long", day=9, seq=1)
    arrive(store, "new", day=9)
    run_retention(store, day=10, keep_spans_days=5)
    assert rows(store, "long") == (200, 400, 400)
    assert rows(store, "new") == (200, 400, 200)


@pytest.mark.parametrize("kind", ["not_reduced", "stuck", "exchanged"])
def test_every_event_of_a_repeated_kind_stays_as_long_as_a_diagnosis_reads_it(store: Store, kind: str) -> None:
    for seq, reason in enumerate(("unsynchronised", "bypassed", "unfrozen")):
        event = wire.Event(kind=kind, at_ns=0, step=seq, detail={"reason": reason})
        store.ingest([Arrival(batch("run", seq, events=[event]), bytes([seq]), 1, seq * DAY_NS)])
    run_retention(store, day=10, keep_spans_days=1)
    events = [event for _, event in store.first_events("run", ATTEMPT)]
    assert [event.detail["reason"] for event in events] == ["unsynchronised", "bypassed", "unfrozen"]


@pytest.mark.parametrize(
    ("day", "settings", "events"),
    [(10, {"keep_spans_days": 3}, [0, 7, 8, 9]), (9.01, {}, list(range(10)))],
    ids=["by age", "unused sets after an hour"],
)
def test_old_unused_sets_and_events_are_removed_except_those_in_use(
    store: Store, monkeypatch: pytest.MonkeyPatch, day: float, settings: dict[str, float], events: list[int]
) -> None:
    monkeypatch.setattr(removal, "_CHUNKS", 2)
    monkeypatch.setattr(unused_queries, "UNUSED_JUDGED", 4)
    for seq in range(10):
        sets = [wire.Unused(step=seq, module=module, locally=["a"], globally=[]) for module in range(2)]
        event = wire.Event(kind="rebuilt", at_ns=0, step=seq)
        records: dict[str, Any] = {"unused": sets if seq < 3 else sets[:1], "events": [event]}
        store.ingest([Arrival(batch("run", seq, **records), bytes([seq]), 1, seq * DAY_NS)])

    def read() -> Any:
        return msgspec.to_builtins([store.latest_unused("run", ATTEMPT), store.first_events("run", ATTEMPT)])

    in_use = read()
    run_retention(store, day, **settings)
    remaining = [(0, 1), (1, 1), (2, 1), (6, 0), (7, 0), (8, 0), (9, 0)]
    assert [(record.step, record.module) for _, record in store.unused("run", ATTEMPT)[0]] == remaining
    assert read() == in_use
    with store._engine.connect() as connection:
        seqs = connection.execute(select(schema.events.c.seq).where(schema.events.c.run_id == "run")).scalars()
        assert sorted(seqs) == events


def test_of_old_fingerprints_and_repeated_events_those_that_diagnoses_read_stay(store: Store) -> None:
    for seq in range(70):
        records: dict[str, Any] = {
            "fingerprints": [fingerprint(1000 * seq)],
            "events": [wire.Event(kind=kind, at_ns=0, step=seq) for kind in ("stuck", "failed")],
        }
        store.ingest([Arrival(batch("run", seq, **records), bytes([seq]), 1, 13 * DAY_NS // 2)])
    run_retention(store, day=10, keep_spans_days=3)
    prints, events = schema.fingerprints.c, schema.events.c
    with store._engine.connect() as connection:
        steps = connection.execute(select(prints.synchronised).where(prints.run_id == "run")).scalars().all()
        kinds = connection.execute(select(events.kind).where(events.run_id == "run")).scalars().all()
    assert sorted(steps) == [0, 69_000]
    assert (kinds.count("stuck"), kinds.count("failed")) == (64, 1)
    assert store.delete("run")
    with store._engine.connect() as connection:
        query = select(func.count()).select_from(schema.fingerprints).where(prints.run_id == "run")
        assert connection.execute(query).scalar_one() == 0


def test_silent_runs_are_removed_completely(store: Store) -> None:
    arrive(store, "silent", day=1)
    arrive(store, "long", day=1)
    arrive(store, "long", day=9, seq=1)
    run_retention(store, day=10, keep_runs_days=5)
    assert store.run("silent") is None
    assert rows(store, "long") == (400, 800, 400)


def test_a_run_that_resumes_just_before_its_removal_stays_complete(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive(store, "back", day=1)
    delete = removal.delete_run

    def meanwhile(engine: Engine, run: str, *conditions: Any) -> bool:
        arrive(store, run, day=9, seq=1)
        return delete(engine, run, *conditions)

    monkeypatch.setattr(removal, "delete_run", meanwhile)
    assert store.expire_runs(5 * DAY_NS) == 0
    assert rows(store, "back") == (400, 800, 400)


def test_a_run_that_resumes_during_its_removal_keeps_the_remaining_rows(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "_CHUNKS", 1)
    for seq in range(3):
        arrive(store, "back", day=1, seq=seq)
    monkeypatch.setattr(removal, "_pause", lambda: arrive(store, "back", day=9, seq=3))
    assert store.expire_runs(5 * DAY_NS) == 0
    assert rows(store, "back") in ((600, 1600, 800), (800, 1200, 800)), "a single chunk was removed"
    c = schema.chunks.c
    with store._engine.connect() as connection:
        size_bytes = connection.execute(select(func.sum(func.length(c.payload))).where(c.run_id == "back")).scalar_one()
        assert connection.execute(select(schema.runs.c.chunk_bytes)).scalar_one() == size_bytes


@pytest.mark.parametrize("task", ["compact", "expire", "shrink"])
def test_maintenance_during_the_deletion_of_a_run_leaves_no_rows(
    postgresql: databases.Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setattr(compaction, "_ROWS", 300)
    store = Store(postgresql(tmp_path))
    store.migrate()
    for seq in range(4):
        arrive(store, "run", day=1, seq=seq)
    maintain = {
        "compact": lambda: sum(store.compact(0)),
        "expire": lambda: store.expire_chunks(2 * DAY_NS),
        "shrink": lambda: store.shrink(0),
    }[task]
    waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    with ThreadPoolExecutor(1) as pool, store._engine.connect() as deleting, store._engine.connect() as watching:
        # In the order of a deletion: the run's own row first, then all other rows.
        deleting.execute(schema.runs.delete().where(schema.runs.c.run_id == "run"))
        maintenance = pool.submit(maintain)
        while not watching.execute(waiting).scalar_one() and not maintenance.done():
            watching.rollback()
        removal.delete_rows(deleting, "run")
        deleting.commit()
        maintenance.result(60)
    assert store.run("run") is None
    assert store.used_bytes() == 0
    with store._engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(schema.chunks)).scalar_one() == 0
    store.close()


def test_without_settings_no_row_is_removed(store: Store) -> None:
    arrive(store, "old", day=1)
    run_retention(store, day=10_000)
    assert rows(store, "old") == (200, 400, 200)


@pytest.mark.usefixtures("without_bins")
def test_the_oldest_spans_are_removed_before_any_run(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/runs.db")
    store.migrate()
    empty = store.size_bytes()
    for day in range(4):
        for seq in range(10):
            arrive(store, f"run-{day}", day=day, seq=seq, count=3000)
    full = store.size_bytes()
    limit = (empty + full) // 2
    run_retention(store, day=10, keep_gb=limit / 1e9)
    assert store.size_bytes() <= limit
    has_spans = [rows(store, f"run-{day}")[1] > 0 for day in range(4)]
    assert has_spans == sorted(has_spans)  # The oldest are removed first.
    assert (has_spans[0], has_spans[-1]) == (False, True)
    assert [rows(store, f"run-{day}")[2] for day in range(4)] == [30_000] * 4
    store.close()


@pytest.mark.usefixtures("without_bins")
def test_a_runs_oldest_columns_are_removed_and_no_more_than_necessary(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "_CHUNKS_FOR_ROOM", 1)
    empty = store.used_bytes()
    for seq in range(5, 10):
        arrive(store, "running", day=9, seq=seq, count=8000)
    old = store.used_bytes()
    for seq in range(5):
        arrive(store, "running", day=9, seq=seq, count=8000, attempt="b" * 16, source="b" * 16)
    limit = (empty + old) // 2 + store.used_bytes() - old
    run_retention(store, day=9, keep_gb=limit / 1e9)
    step = store.spans("running", ATTEMPT)[1].step
    assert 40_000 < step[0] < step[-1] == 79_999
    assert len(step) == 2 * (80_000 - step[0])
    assert len(store.spans("running", "b" * 16)[0]) == 80_000
    assert limit - (old - empty) / 5 < store.used_bytes() <= limit


def test_a_run_with_recent_batches_loses_only_columns(tmp_path: Path) -> None:
    store = Store(databases.migrated_sqlite(tmp_path))
    arrive(store, "silent", day=1)
    arrive(store, "running", day=time.time_ns() / DAY_NS)
    run_retention(store, day=time.time_ns() / DAY_NS, keep_gb=1e-9)
    assert store.run("silent") is None
    assert rows(store, "running") == (0, 0, 200)
    store.close()


def test_silent_runs_are_removed_before_a_live_runs_columns_if_rows_take_the_room(tmp_path: Path) -> None:
    store = Store(databases.migrated_sqlite(tmp_path))
    now = time.time_ns()
    parameters = [wire.Parameter(name=f"layers.{index}.weight", size=1) for index in range(400)]
    buckets = [wire.Bucket(size_bytes=4, dtype="float32", parameters=parameters)]
    layout = wire.Layout(module=0, name="model", revision=0, comm="all_reduce", buckets=buckets)
    for run in ("older", "old"):
        batches = [batch(run, rank=rank, world_size=64, layouts=[layout], steps=steps(0, 4)) for rank in range(64)]
        store.ingest([Arrival(sent_batch, bytes(32), 1, now - 90 * DAY_NS + len(run)) for sent_batch in batches])
    for seq in range(3):
        arrive(store, "live", day=now / DAY_NS, seq=seq)
    whole = store.used_bytes()
    run_retention(store, day=now / DAY_NS, keep_gb=0.95 * whole / 1e9)
    assert [store.run(run) is not None for run in ("older", "old", "live")] == [True, False, True]
    assert rows(store, "older") == (256, 0, 256), "its columns are too small to make room"
    assert rows(store, "live") == (600, 1200, 600)
    assert store.used_bytes() <= 0.95 * whole
    store.close()


def test_a_deleted_run_returns_its_space(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/runs.db")
    store.migrate()
    empty = store.size_bytes()
    for seq in range(20):
        arrive(store, "large", day=1, seq=seq, count=2000)
    assert store.size_bytes() > 2 * empty
    assert on_disk(tmp_path) > 2 * empty
    store.delete("large")
    assert store.size_bytes() <= 1.2 * empty
    assert on_disk(tmp_path) <= 1.2 * empty, "the log shrinks too"
    store.close()


def test_the_return_of_space_does_not_wait_for_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup reads for minutes. Batches would wait for it until a writer's lock timeout."""
    monkeypatch.setattr(engine, "_BUSY_S", 100)
    store = Store(f"sqlite:///{tmp_path}/runs.db")
    store.migrate()
    for seq in range(5):
        arrive(store, "large", day=1, seq=seq, count=2000)
    with store._engine.connect() as reader:
        reader.exec_driver_sql("BEGIN")
        reader.exec_driver_sql("SELECT count(*) FROM chunks").one()
        began = time.monotonic()
        assert store.delete("large")
        arrive(store, "other", day=1, seq=0, count=1)
        assert time.monotonic() - began < 100
    store.close()


def on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if not file.name.endswith("-shm"))


def test_batches_are_stored_during_a_large_removal(
    fresh: databases.Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "_CHUNKS", 5)
    monkeypatch.setattr(removal, "_PAGES", 20)
    store = Store(fresh(tmp_path))
    store.migrate()
    for seq in range(10):
        arrive(store, "large", day=1, seq=seq, count=1000)
    remaining: list[int] = []

    def arrive_meanwhile() -> None:
        arrive(store, "other", day=1, seq=len(remaining), count=1)
        remaining.append(len(remaining_rows(store)))

    monkeypatch.setattr(removal, "_pause", arrive_meanwhile)
    assert store.delete("large")
    assert remaining[:4] == [15, 10, 5, 0], "chunks of steps and spans"
    assert remaining_rows(store) == set()
    assert rows(store, "other")[0] == len(remaining)
    store.close()


def remaining_rows(store: Store) -> set[tuple[object, ...]]:
    c = schema.chunks.c
    with store._engine.connect() as connection:
        return set(map(tuple, connection.execute(select(c.source, c.kind, c.seq).where(c.run_id == "large"))))


def test_a_limit_below_the_size_of_an_empty_database_ends(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/runs.db")
    store.migrate()
    arrive(store, "a-run", day=1)
    run_retention(store, day=2, keep_gb=1e-9)
    assert store.run("a-run") is None
    store.close()


def test_metrics_show_the_used_size_and_the_last_successful_round(store: Store) -> None:
    arrive(store, "some", day=1)
    registry = CollectorRegistry()
    began = time.time()
    RetentionJob(Settings(keep_gb=1), store, registry).run_once(2 * DAY_NS)

    def value(name: str, **labels: str) -> float:
        return registry.get_sample_value(f"ddpobs_server_retention_{name}", labels) or 0.0

    assert 0 < value("bytes", what="used") < value("bytes", what="limit") == 1e9
    assert value("success_timestamp_seconds") >= began
