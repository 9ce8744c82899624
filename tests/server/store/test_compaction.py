"""Compaction joins small chunks, and reads return the same rows."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ddpobs_server.store import Arrival, Store, schema
from ddpobs_server.store.upkeep import compaction
from sqlalchemy import create_engine, select, text

from benchmarks.rig.databases import Fresh
from ddpobs import wire
from tests.support.server.batches import ATTEMPT, batch, spans, steps

FLUSHES, STEPS = 60, 100


@pytest.fixture
def url(fresh: Fresh, tmp_path: Path) -> str:
    return fresh(tmp_path)


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = Store(url)
    store.migrate()
    yield store
    store.close()


def comms(first: int, count: int) -> wire.Comms:
    step = np.arange(first, first + count)
    return wire.Comms(step=step, module=step * 0, kind=step * 0, launched_ns=step * 1000, done_ns=step * 1000 + 7)


def arrive(store: Store, rank: int, flushes: int = FLUSHES) -> None:
    """Store a rank's flushes, each in its own transaction."""
    for seq in range(flushes):
        first = seq * STEPS
        noise = np.random.default_rng([rank, seq]).integers(0, 10**9, 2 * STEPS)
        noisy = spans(first, STEPS, done_ns=spans(first, STEPS).done_ns + noise)
        body = wire.encode(
            batch("run", rank=rank, seq=seq, steps=steps(first, STEPS), spans=noisy, comms=comms(first, STEPS))
        )
        store.ingest([Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), seq + 1)])


def all_rows(store: Store) -> dict[str, Any]:
    rows = {}
    for kind in ("steps", "spans", "comms"):
        ranks, columns = getattr(store, kind)("run", ATTEMPT)
        rows[kind] = [ranks.tolist(), *(getattr(columns, name).tolist() for name in columns.names)]
    return rows


def chunks(url: str) -> tuple[int, int, int]:
    """Number of chunks, their size in bytes, and the size in the run's own row."""
    with create_engine(url).connect() as connection:
        count, size = connection.execute(text("select count(*), sum(length(payload)) from chunks")).one()
        return count, int(size), int(connection.execute(text("select chunk_bytes from runs")).scalar_one())


def test_compaction_keeps_all_rows_and_needs_less_space(store: Store, url: str) -> None:
    for rank in (0, 1):
        arrive(store, rank)
    rows, (count, size_bytes, _) = all_rows(store), chunks(url)
    joined = sum(store.compact(since_ns=0))
    assert all_rows(store) == rows
    joined_count, joined_bytes, run_bytes = chunks(url)
    assert joined_count == count - joined < count / 2
    assert run_bytes == joined_bytes < size_bytes * 0.9
    assert store.spans("run", ATTEMPT, rank=1, first=250, last=251)[1].step.tolist() == [250, 250, 251, 251]


def test_a_second_compaction_changes_neither_large_chunks_nor_remaining_small_chunks(store: Store, url: str) -> None:
    arrive(store, rank=0)
    sum(store.compact(since_ns=0))
    compacted = chunks(url)
    assert sum(store.compact(since_ns=0)) == 0
    assert chunks(url) == compacted


def test_two_collectors_that_compact_at_once_lose_no_row(store: Store, url: str) -> None:
    for rank in (0, 1):
        arrive(store, rank)
    rows, count = all_rows(store), chunks(url)[0]
    stores = [Store(url) for _ in range(2)]
    joined: list[int] = []
    threads = [
        threading.Thread(target=lambda other=other: joined.append(sum(other.compact(since_ns=0)))) for other in stores
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for other in stores:
        other.close()
    assert all_rows(store) == rows
    assert len(joined) == 2
    assert chunks(url)[0] == count - sum(joined)


def test_a_chunk_that_another_collector_joined_during_a_join_is_not_replaced(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive(store, rank=0, flushes=4)
    rows = all_rows(store)
    joined, join = compaction._joined, compaction._join
    c = schema.chunks.c
    columns = (c.attempt, c.kind, c.rank, c.source, c.seq, c.rows)
    with store._engine.connect() as connection:
        query = select(*columns).where(c.kind == "spans").order_by(c.seq)
        first, second, third, late = connection.execute(query).all()

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(compaction, "_joined", joined)
        assert join(store._engine, "run", [late, third]) == 1
        return joined(*arguments)

    monkeypatch.setattr(compaction, "_joined", meanwhile)
    assert join(store._engine, "run", [first, second, third]) == 0
    assert all_rows(store) == rows


def test_a_run_deleted_during_a_join_stays_deleted(store: Store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrive(store, rank=0)
    joined = compaction._joined

    def meanwhile(*arguments: Any) -> Any:
        store.delete("run")
        return joined(*arguments)

    monkeypatch.setattr(compaction, "_joined", meanwhile)
    assert sum(store.compact(since_ns=0)) == 0
    with create_engine(url).connect() as connection:
        assert connection.execute(text("select count(*) from chunks")).scalar_one() == 0
