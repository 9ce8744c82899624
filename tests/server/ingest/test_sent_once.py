"""A step counts once, under whatever number, and by whichever process, it is sent again."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
from ddpobs_server.store import Arrival, Store, UnstorableBatchError, schema
from sqlalchemy import Connection, Table, select

from ddpobs import wire
from ddpobs.errors import WireError
from tests.support.server.batches import ATTEMPT, batch, pulse, spans, steps
from tests.support.server.peers import peers

_SUMS = (schema.rollups, schema.step_histogram, schema.bucket_sums, schema.peer_totals)
_OTHER = "f" * 16


def arrival(seq: int, first: int | None = None, count: int = 3, **fields: Any) -> Arrival:
    """A batch with these steps; without any if there is no first step."""
    if first is not None:
        fields = {"steps": steps(first, count), "spans": spans(first, count), **fields}
    payload = batch("run", seq, **fields)
    if payload.spans is not None:
        payload = msgspec.structs.replace(payload, packed_spans=wire.pack_spans(payload.spans))
    return Arrival(payload, f"{payload.source}{seq:016x}".encode(), 100, 1)


def of_run(connection: Connection, table: Table) -> list[str]:
    return sorted(map(str, connection.execute(select(table).where(table.c.run_id == "run")).all()))


def sums(store: Store) -> list[list[str]]:
    with store._engine.connect() as connection:
        return [of_run(connection, table) for table in _SUMS]


def everything(store: Store) -> list[list[str]]:
    with store._engine.connect() as connection:
        rows = [of_run(connection, table) for table in (schema.chunks, schema.batches, schema.sources)]
    return [*sums(store), *rows]


def assert_refused(store: Store, again: Arrival, message: str) -> None:
    before = everything(store)
    with pytest.raises(UnstorableBatchError, match=message):
        store.ingest([again])
    assert everything(store) == before


@pytest.mark.parametrize(
    ("seq", "first", "message"),
    [
        (9, 3, "^steps: expected steps after 14, as this source's other batches have those, got 3 to 5: a process"),
        (9, 14, "expected steps after 14"),
        (5, 3, "expected steps after 5 and before 12"),
        (5, 10, "expected steps after 5 and before 12"),
        (0, 10, "expected steps before 3"),
    ],
)
def test_steps_under_a_second_number_are_refused(store: Store, seq: int, first: int, message: str) -> None:
    for arrived in (arrival(1, 3), arrival(2), arrival(7), arrival(8, 12)):
        store.ingest([arrived])
    assert_refused(store, arrival(seq, first), message)
    store.ingest([arrival(5, 9)])  # It waited in a spool.


def test_steps_twice_in_a_transaction_are_refused(store: Store) -> None:
    with pytest.raises(UnstorableBatchError, match="expected steps"):
        store.ingest([arrival(0, 0), arrival(1, 2)])
    assert store.run("run") is None


def test_spans_without_their_steps_are_refused_again_too(store: Store) -> None:
    store.ingest([arrival(0, 0)])
    assert_refused(store, arrival(1, spans=spans(2, 1)), "expected steps after 2")


def test_batches_in_any_order_add_up_to_the_same_sums(store: Store) -> None:
    sent = [arrival(seq, 3 * seq if seq % 3 else None, rank=rank) for seq in range(12) for rank in range(2)]
    ranks = [arrival(seq, pulse=pulse("bucket"), peers=[peers(3 * seq, 3 * seq + 2)]) for seq in range(12, 16)]
    store.ingest([*sent, *ranks])
    expected = sums(store)
    store.delete("run")
    with store._engine.begin() as connection:
        connection.execute(schema.deleted_attempts.delete())
    shuffled = random.Random(4).sample([*sent, *ranks], len(sent) + len(ranks))
    for index in range(0, len(shuffled), 5):
        store.ingest(shuffled[index : index + 5])
    assert sums(store) == expected


def test_a_window_of_collectives_counts_once(store: Store) -> None:
    store.ingest([arrival(0, peers=[peers(0, 9)]), arrival(3, peers=[peers(30, 39)])])
    assert_refused(store, arrival(4, peers=[peers(30, 39)]), "^peers: expected collectives after 39, .* got 30 to 39")
    assert_refused(store, arrival(1, peers=[peers(5, 12)]), "after 9 and before 30")
    store.ingest([arrival(2, peers=[peers(10, 29)])])


def test_a_second_process_of_a_rank_is_refused(store: Store) -> None:
    store.ingest([arrival(0, 0)])
    assert_refused(
        store, arrival(0, 0, source=_OTHER), f"^source: expected {0:016x}, which sends the steps of rank 0 .* {_OTHER}"
    )
    assert_refused(store, arrival(0, 90, source=_OTHER), "a rank of an attempt is one process")
    store.ingest([arrival(0, 0, source=_OTHER, attempt="b" * 16)])
    with pytest.raises(UnstorableBatchError, match="which sends the steps of rank 1"):
        store.ingest([arrival(0, 0, rank=1), arrival(0, 0, rank=1, source="e" * 16)])
    store.ingest([arrival(0, 0, rank=1)])
    assert [source.source for source in store.sources("run", ATTEMPT)] == [f"{0:016x}", f"{1:016x}"]


def test_a_process_without_steps_may_have_the_rank_of_another(store: Store) -> None:
    """One that failed at its start, under the same launch."""
    failed = [wire.Event(kind="failed", at_ns=0)]
    for source in (_OTHER, "e" * 16):
        store.ingest([arrival(0, events=failed, source=source)])
    store.ingest([arrival(0, 0), arrival(1, events=failed, source=_OTHER)])
    store.ingest([arrival(0, events=failed, source="d" * 16)])
    assert_refused(store, arrival(2, 0, source=_OTHER), "a rank of an attempt is one process")


@pytest.mark.parametrize("numbers", [[0, 1, 1], [2, 1, 3]])
def test_a_batch_with_a_step_twice_is_refused(numbers: list[int]) -> None:
    twice = batch("run", steps=steps(0, 3, step=np.array(numbers)))
    with pytest.raises(WireError, match=r"steps\.step"):
        wire.decode(wire.encode(twice), wire.MSGPACK)


def test_windows_of_collectives_that_overlap_in_a_batch_are_refused() -> None:
    twice = batch("run", peers=[peers(0, 9), peers(9, 12)])
    with pytest.raises(WireError, match=r"peers\[1\]\.first_collective"):
        wire.decode(wire.encode(twice), wire.MSGPACK)
