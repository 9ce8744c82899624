"""Reads of large records stop at their budgets of bytes: events with tracebacks, and pulses with stacks."""

from __future__ import annotations

import msgspec
from ddpobs_server.store import Arrival, Store

from ddpobs import wire
from tests.support.server.batches import ATTEMPT, batch

MB = 1_000_000
LONG = "x" * 16_000


def store_batches(store: Store, *batches: wire.Batch) -> None:
    store.ingest([Arrival(payload, bytes([0]), 1, 1) for payload in batches])


def size(records: list[wire.Event]) -> int:
    return sum(map(len, map(msgspec.json.encode, records)))


def test_events_of_a_diagnosis_have_a_budget_and_ends_come_first(store: Store) -> None:
    many = [wire.Event(kind=f"kind-{n}", at_ns=0, detail={"traceback": LONG}) for n in range(600)]
    store_batches(store, batch("run", events=[*many, wire.Event(kind="failed", at_ns=0, detail={"traceback": LONG})]))
    events = [event for _, event in store.first_events("run", ATTEMPT)]
    assert 7.9 * MB < size(events) <= 8 * MB
    assert "failed" in [event.kind for event in events]


def test_the_ends_of_many_attempts_have_a_budget_and_the_latest_come_first(store: Store) -> None:
    died = [wire.Event(kind=f"died:{n}", at_ns=0, detail={"traceback": LONG}) for n in range(300)]
    first = batch("run", events=died, attempt="1" * 16, source="1" * 16)
    second = batch("run", events=died, attempt="2" * 16, source="2" * 16)
    store_batches(store, first)
    store_batches(store, second)
    ends = store.end_events("run")
    assert 7.9 * MB < size([event for _, _, event in ends]) <= 8 * MB
    latest = store.attempts("run")[-1].attempt
    assert sum(attempt == latest for attempt, _, _ in ends) == 300


def test_long_pulses_beyond_a_budget_lose_their_stacks(store: Store) -> None:
    stack = ["x" * 256] * 40
    pulse = wire.Pulse(at_ns=1, phase="data", step=1, stack=stack, place="train.py:1")
    store_batches(store, *(batch("run", rank=rank, world_size=1600, pulse=pulse) for rank in range(1600)))
    pulses = [source.pulse for source in store.sources("run", ATTEMPT) if source.pulse]
    whole = [record for record in pulses if record.stack]
    assert len(pulses) == 1600
    assert 15.9 * MB < len(whole) * len(msgspec.json.encode(pulse)) <= 16 * MB
    assert {(record.place, record.step) for record in pulses if not record.stack} == {("", 1)}
