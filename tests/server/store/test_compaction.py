"""Small chunks become large ones, and nobody who reads can tell."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ddpobs_server.store import Arrival, Store, compaction, schema
from sqlalchemy import create_engine, select, text

from ddpobs import wire
from tests.databases import Fresh
from tests.server.batches import ATTEMPT, batch, spans, steps

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
    """A rank's flushes, each a transaction of its own."""
    for seq in range(flushes):
        first = seq * STEPS
        noise = np.random.default_rng([rank, seq]).integers(0, 10**9, 2 * STEPS)
        sent = spans(first, STEPS)
        sent = spans(first, STEPS, done_ns=sent.done_ns + noise)
        one = batch("run", rank=rank, seq=seq, steps=steps(first, STEPS), spans=sent, comms=comms(first, STEPS))
        body = wire.encode(one)
        store.ingest([Arrival(wire.decode(body), hashlib.sha256(body).digest(), len(body), seq + 1)])


def everything(store: Store) -> dict[str, Any]:
    found = {}
    for kind in ("steps", "spans", "comms"):
        ranks, columns = getattr(store, kind)("run", ATTEMPT)
        found[kind] = [ranks.tolist(), *(getattr(columns, name).tolist() for name in columns.names)]
    return found


def chunks(url: str) -> tuple[int, int, int]:
    """How many there are, their bytes, and what the run's own sum says of these."""
    with create_engine(url).connect() as connection:
        count, size = connection.execute(text("select count(*), sum(length(payload)) from chunks")).one()
        return count, int(size), int(connection.execute(text("select chunk_bytes from runs")).scalar_one())


def test_what_is_read_stays_the_same_and_takes_less(store: Store, url: str) -> None:
    for rank in (0, 1):
        arrive(store, rank)
    before, (count, size, _) = everything(store), chunks(url)
    joined = sum(store.compact(since_ns=0))
    assert everything(store) == before
    fewer, smaller, said = chunks(url)
    assert fewer == count - joined < count / 2
    assert said == smaller < size * 0.9
    assert store.spans("run", ATTEMPT, rank=1, first=250, last=251)[1].step.tolist() == [250, 250, 251, 251]


def test_what_is_large_is_left_alone_and_what_is_still_small_waits(store: Store, url: str) -> None:
    arrive(store, rank=0)
    sum(store.compact(since_ns=0))
    after = chunks(url)
    assert sum(store.compact(since_ns=0)) == 0
    assert chunks(url) == after


def test_two_collectors_at_once_lose_nothing(store: Store, url: str) -> None:
    for rank in (0, 1):
        arrive(store, rank)
    before, count = everything(store), chunks(url)[0]
    others = [Store(url) for _ in range(2)]
    joined: list[int] = []
    threads = [threading.Thread(target=lambda one=one: joined.append(sum(one.compact(since_ns=0)))) for one in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in others:
        one.close()
    assert everything(store) == before
    assert len(joined) == 2
    assert chunks(url)[0] == count - sum(joined)


def test_what_another_collector_joined_meanwhile_is_not_replaced(
    store: Store, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrive(store, rank=0, flushes=4)
    before = everything(store)
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
    assert everything(store) == before


def test_a_run_that_goes_meanwhile_stays_gone(store: Store, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrive(store, rank=0)
    joined = compaction._joined

    def meanwhile(*arguments: Any) -> Any:
        store.delete("run")
        return joined(*arguments)

    monkeypatch.setattr(compaction, "_joined", meanwhile)
    assert sum(store.compact(since_ns=0)) == 0
    with create_engine(url).connect() as connection:
        assert connection.execute(text("select count(*) from chunks")).scalar_one() == 0
