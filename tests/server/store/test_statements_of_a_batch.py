"""Statements of a transaction on PostgreSQL. On a cluster all but the first two and the last go to the run's node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ddpobs_server.store import Arrival, Outcome, Store, UnavailableError
from ddpobs_server.store.database import migration, sql
from sqlalchemy import event, text

from benchmarks.rig import databases
from ddpobs import wire
from tests.support.server.batches import batch, hello, layout, spans, steps

LATER = [
    "SELECT set_config",  # Locks, on the node with the connection.
    "SET LOCAL",  # Limits the waits for locks. A cluster sends it with the transaction's begin to the run's node.
    "INSERT batches",
    "INSERT runs",
    "SELECT attempts",
    "SELECT batches",
    "SELECT sources",
    "INSERT sources",
    "INSERT chunks",
    "UPDATE step_bins",
    "INSERT rollups",
    "INSERT step_histogram",
    "SELECT bucket_sums",
    "INSERT bucket_sums",
    "SELECT alembic_version",  # Has another version changed the schema? Every node has this table.
]
"""Of steps and spans of known sources."""
FIRST = [
    *LATER[:5],
    "SELECT deleted_attempts",
    "INSERT attempts",
    "UPDATE runs",
    *LATER[5:8],
    "SELECT runs",  # The text by which the run is found.
    "UPDATE runs",
    LATER[8],
    "INSERT layouts",
    *LATER[9:-1],
    "UPDATE runs",
    LATER[-1],
]


@pytest.fixture
def on_postgresql(postgresql: databases.Fresh, tmp_path: Path) -> Iterator[Store]:
    store = Store(postgresql(tmp_path))
    store.migrate()
    yield store
    store.close()


def arrivals(ranks: int, seq: int) -> list[Arrival]:
    records: dict[str, Any] = {} if seq else {"hello": hello(), "layouts": [layout()]}
    columns = {"steps": steps(20 * seq, 20), "spans": spans(20 * seq, 20)}
    batches = [batch("run", seq, rank, world_size=ranks, **columns, **records) for rank in range(ranks)]
    packed = [wire.decode(wire.encode(sent), wire.MSGPACK, 10**6) for sent in batches]
    return [Arrival(sent, b"", 0, 10**18 + seq) for sent in packed]


@contextmanager
def statements(store: Store) -> Iterator[list[str]]:
    """Verb and table of each statement. A statement that is run once for each row counts as often."""
    executed: list[str] = []

    def record(_connection: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, many: bool) -> None:
        match = re.match(r"(\w+) (?:INTO |.*?\bFROM )?(\w+)", statement, re.DOTALL)
        assert match is not None, statement
        executed.extend([f"{match[1]} {match[2]}"] * (len(parameters) if many else 1))

    event.listen(store._engine, "before_cursor_execute", record)
    yield executed
    event.remove(store._engine, "before_cursor_execute", record)


@pytest.mark.parametrize("ranks", [1, 64])
def test_many_ranks_take_as_many_statements_as_one(on_postgresql: Store, ranks: int) -> None:
    for seq, expected in enumerate((FIRST, LATER, LATER)):
        with statements(on_postgresql) as executed:
            assert on_postgresql.ingest(arrivals(ranks, seq)) == [Outcome.STORED] * ranks
        assert executed == expected


def test_rows_beyond_a_statements_parameters_are_stored_by_further_statements(
    on_postgresql: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "_MAX_PARAMETERS", 50)  # Two rows of sources.
    for seq in range(2):
        with statements(on_postgresql) as executed:
            on_postgresql.ingest(arrivals(7, seq))
        assert executed.count("INSERT sources") == 4
    sources = on_postgresql.sources("run", "a" * 16)
    assert [(source.rank, source.last_step) for source in sources] == [(rank, 39) for rank in range(7)]
    assert [rollup.steps for rollup in on_postgresql.rollups("run", "a" * 16)] == [40] * 7


def test_a_batch_that_waits_long_for_a_lock_may_be_sent_again(
    on_postgresql: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "_LOCK_S", 0.1)
    on_postgresql.ingest(arrivals(1, 0))
    with on_postgresql._engine.connect() as other:
        other.execute(text("UPDATE runs SET note = 'held'"))
        with pytest.raises(UnavailableError, match="lock timeout"):
            on_postgresql.ingest(arrivals(1, 1))
        other.rollback()
    assert on_postgresql.ingest(arrivals(1, 1)) == [Outcome.STORED]
