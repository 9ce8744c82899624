"""The count of unused parameters: distinct names over the ranks, of which each set is read once."""

from __future__ import annotations

import pytest
from ddpobs_server.store import Arrival, Store
from ddpobs_server.store.sums import unused_names
from sqlalchemy import event

from ddpobs import wire
from tests.support.server.batches import batch


def arrive(store: Store, rank: int, *names: str, module: int = 0, seq: int = 0, run: str = "run") -> None:
    record = wire.Unused(step=seq, module=module, locally=list(names), globally=[])
    sent_batch = batch(run, seq, rank, world_size=9, unused=[record])
    store.ingest([Arrival(sent_batch, bytes([rank, seq, module]), 1, 1)])


def count(store: Store) -> int:
    return store.aggregates(0).unused["run"]


@pytest.fixture
def bodies_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the sets whose names are read."""
    keys: list[str] = []
    original = unused_names.UnusedNames._add

    def add(names: unused_names.UnusedNames, key: unused_names._Key, entry: unused_names._Hashed) -> None:
        keys.append(key.source)
        original(names, key, entry)

    monkeypatch.setattr(unused_names.UnusedNames, "_add", add)
    return keys


def test_names_count_once_over_all_ranks_and_once_in_each_module(store: Store) -> None:
    arrive(store, 0, "a", "b")
    arrive(store, 1, "b", "c")
    arrive(store, 0, "a", module=1, seq=1)
    assert count(store) == 4


def test_only_the_latest_set_of_a_rank_counts(store: Store) -> None:
    arrive(store, 0, "a", "b", "c")
    arrive(store, 1, "d")
    assert count(store) == 4
    arrive(store, 0, seq=1)
    assert count(store) == 1


def test_a_set_is_read_once(store: Store, bodies_read: list[str]) -> None:
    for rank in range(3):
        arrive(store, rank, "a", str(rank))
    assert (count(store), count(store), len(bodies_read)) == (4, 4, 3)
    arrive(store, 0, "a", "new", seq=1)
    assert (count(store), len(bodies_read)) == (4, 4)


def test_sets_beyond_the_bytes_of_a_run_count_by_the_longest(
    store: Store, bodies_read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unused_names, "_RUN_BYTES", 100)
    for rank in range(8):
        arrive(store, rank, *(f"{rank}.{index}" for index in range(2 + rank)))
    assert 9 <= count(store) < 40
    assert len(bodies_read) < 8
    read = len(bodies_read)
    assert 9 <= count(store) < 40
    assert len(bodies_read) == read


def test_sets_that_one_scrape_does_not_reach_are_read_by_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unused_names, "_READ_BYTES", 100)
    for rank in range(8):
        arrive(store, rank, f"{rank}.first", f"{rank}.second")
    counts = [count(store) for _ in range(8)]
    assert counts[0] < 16
    assert counts[-1] == 16


def test_the_cache_stays_small(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unused_names, "_CACHED_HASHES", 4)
    for rank in range(5):
        arrive(store, rank, f"{rank}.first", f"{rank}.second")
    assert 4 <= count(store) <= 10
    assert store._unused_names._size <= 4


def test_the_names_of_very_long_sets_are_not_read(
    store: Store, bodies_read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unused_names, "_MAX_NAMES", 2)
    arrive(store, 0, "a", "b", "c")
    assert (count(store), bodies_read) == (3, [])


def test_the_number_of_statements_is_that_of_groups(store: Store) -> None:
    for rank in range(unused_names._GROUP + 1):
        store.ingest(
            [
                Arrival(
                    batch(
                        "run",
                        0,
                        rank,
                        world_size=99,
                        unused=[wire.Unused(step=0, module=0, locally=["a"], globally=[])],
                    ),
                    bytes([rank]),
                    1,
                    1,
                )
            ]
        )
    statements: list[str] = []
    event.listen(store._engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    assert count(store) == 1
    assert sum("unused.body" in statement for statement in statements) == 2
