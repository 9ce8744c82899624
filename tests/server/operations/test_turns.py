"""Background work on many runs: workspaces take turns, no run starves, and what is lost is reported."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from ddpobs_server.analysis.steps.step_bins import NAMES
from ddpobs_server.operations.bins_in_turns import BinsInTurns
from ddpobs_server.operations.retention import RetentionJob
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Store, schema
from ddpobs_server.store.sums.stored_bins import OVER_RANKS, packed
from ddpobs_server.store.upkeep.turns import in_turns
from ddpobs_server.web.run_faults import RunFaults
from prometheus_client import CollectorRegistry
from sqlalchemy import func, select

from ddpobs import wire
from tests.support.server.batches import ATTEMPT, batch, pulse, spans, steps

DAY_NS = 86_400 * 10**9
OVER_NS = 1000 * 10**9


def arrive(store: Store, run: str, day: float = 1e-6, count: int = 200, seq: int = 0, **fields: Any) -> None:
    first = seq * count
    sent = batch("run", seq, steps=steps(first, count), spans=spans(first, count), **fields)
    arrived = msgspec.structs.replace(wire.decode(wire.encode(sent)), run=run)
    store.ingest([Arrival(arrived, b"", 1, int(day * DAY_NS))])


def job(store: Store, **settings: Any) -> tuple[RetentionJob, RunFaults, CollectorRegistry]:
    registry, faults = CollectorRegistry(), RunFaults()
    return RetentionJob(Settings(keep_share=1, **settings), store, registry, faults), faults, registry


def bins(store: Store, run: str) -> int:
    return len(store.step_bin_states(run, ATTEMPT))


def damage(store: Store, run: str) -> None:
    with store._engine.begin() as connection:
        connection.execute(schema.chunks.update().where(schema.chunks.c.run_id == run).values(payload=b"0"))


@pytest.fixture
def without_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetentionJob, "_update_step_bins", lambda *_: None)


def test_the_first_run_of_each_workspace_comes_before_the_second_of_any() -> None:
    assert in_turns(["a/1", "a/2", "a/3", "b/1", "run", "b/2"]) == ["a/1", "b/1", "run", "a/2", "b/2", "a/3"]


def test_a_workspaces_bins_wait_for_one_part_of_another_workspace(store: Store) -> None:
    for number in range(5):
        arrive(store, f"many/{number}")
    arrive(store, "few/run")
    parts: list[float] = []

    def pause(took_s: float) -> bool:
        parts.append(took_s)
        return len(parts) == 4

    BinsInTurns(store, CollectorRegistry(), RunFaults()).run(OVER_NS, pause)
    assert bins(store, "few/run") == 4
    assert sum(bins(store, f"many/{number}") > 0 for number in range(5)) == 1


_TROUBLES: dict[str, dict[str, Any]] = {
    "failed": {"events": [wire.Event(kind="failed", at_ns=0)]},
    "stuck": {"pulse": pulse("bucket", 60)},
}


@pytest.mark.parametrize("trouble", list(_TROUBLES))
def test_a_run_that_just_failed_or_hung_is_first_of_its_workspace(store: Store, trouble: str) -> None:
    for number in range(4):
        arrive(store, f"run-{number}")
    arrive(store, "a-last", **_TROUBLES[trouble])
    arrive(store, "finished", events=[wire.Event(kind="goodbye", at_ns=0)])
    assert store.urgent_runs(0) == {"a-last"}
    BinsInTurns(store, CollectorRegistry(), RunFaults()).run(OVER_NS, lambda _: True)
    assert [run for run, _ in store.runs_with_columns() if bins(store, run)] == ["a-last"]
    assert store.urgent_runs(OVER_NS) == set()


@pytest.mark.parametrize(("waited_s", "first"), [(500, "failed"), (700, "waiting")])
def test_a_run_that_waited_for_long_is_before_one_that_just_failed(store: Store, waited_s: float, first: str) -> None:
    arrive(store, "waiting")
    arrive(store, "failed", **_TROUBLES["failed"])
    in_rounds = BinsInTurns(store, CollectorRegistry(), RunFaults())
    in_rounds._waiting_since["waiting"] = time.monotonic() - waited_s
    in_rounds.run(OVER_NS, lambda _: True)
    assert [run for run in ("failed", "waiting") if bins(store, run)] == [first]


def test_a_removed_run_is_forgotten(store: Store) -> None:
    for run in ("kept", "removed"):
        arrive(store, run)
    in_rounds = BinsInTurns(store, CollectorRegistry(), RunFaults())
    in_rounds.run(OVER_NS, lambda _: False)
    assert set(in_rounds._done) == {"kept", "removed"}
    store.delete("removed")
    in_rounds.run(OVER_NS, lambda _: False)
    assert set(in_rounds._done) == {"kept"}


def test_small_chunks_of_a_run_that_failed_are_joined_first(store: Store) -> None:
    for run in ("a", "b", "c"):
        for seq in range(300):
            trouble = _TROUBLES["failed"] if (run, seq) == ("c", 299) else {}
            sent = batch(run, seq, steps=steps(seq * 20, 20), **trouble)
            store.ingest([Arrival(sent, f"{run} {seq}".encode(), 1, DAY_NS)])
    assert next(store.compact(0)) > 0
    with store._engine.connect() as connection:
        counts = {
            run: connection.execute(select(func.count()).where(schema.chunks.c.run_id == run)).scalar_one()
            for run in ("a", "b", "c")
        }
    assert counts["a"] == counts["b"] == 300 > counts["c"]


def test_no_run_starves_while_others_change_and_the_lag_is_a_metric(store: Store) -> None:
    for number in range(6):
        arrive(store, f"run-{number}")
    registry = CollectorRegistry()
    in_rounds = BinsInTurns(store, registry, RunFaults())
    lags_s: list[float] = []
    for round_number in range(6):
        taken: list[float] = []
        in_rounds.run(OVER_NS, lambda took_s, taken=taken: taken.append(took_s) or len(taken) == 4)  # type: ignore[misc]
        arrive(store, "run-5", seq=round_number + 1)  # The newest run.
        lags_s.append(registry.get_sample_value("ddpobs_server_bins_lag_seconds") or 0.0)
    assert lags_s[0] > 0
    assert all(bins(store, f"run-{number}") for number in range(6))


@pytest.mark.usefixtures("without_bins")
def test_columns_stay_until_they_are_binned_and_beyond_twice_their_age_the_loss_is_reported(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    arrive(store, "run", day=1)
    retention, _, registry = job(store, keep_spans_days=5)
    retention.run_once(10 * DAY_NS)
    assert (len(store.steps("run", ATTEMPT)[0]), len(store.spans("run", ATTEMPT)[0])) == (200, 0)
    assert registry.get_sample_value("ddpobs_server_removed_unbinned_chunks_total") == 0
    retention, _, registry = job(store, keep_spans_days=5)
    with caplog.at_level(logging.WARNING):
        retention.run_once(12 * DAY_NS)
    assert len(store.steps("run", ATTEMPT)[0]) == 0
    assert registry.get_sample_value("ddpobs_server_removed_unbinned_chunks_total") == 1
    assert "steps of run run were removed before their bins were made" in caplog.text


def test_a_run_whose_columns_expire_has_its_whole_history_in_bins(store: Store) -> None:
    arrive(store, "run", day=1)
    job(store, keep_spans_days=0.001)[0].run_once(9 * DAY_NS)
    assert len(store.steps("run", ATTEMPT)[0]) == 0
    assert sum(rows for _, rows in store.step_bin_states("run", ATTEMPT).values()) == 200


def test_room_is_made_of_columns_in_bins_first(store: Store) -> None:
    today = time.time_ns() / DAY_NS
    arrive(store, "old", day=today - 0.001, count=2000)
    arrive(store, "binned", day=today, count=2000)
    numbers = store.bins_with_columns("binned", ATTEMPT).tolist()
    table = np.zeros((len(NAMES), 0), np.int64)
    store.write_step_bins("binned", ATTEMPT, 0, [packed(number, OVER_RANKS, 64, table) for number in numbers])
    lost: dict[str, int] = {}
    while not lost:
        left = len(store.steps("binned", ATTEMPT)[0])
        limit_bytes = store.workspace_usage()["default"].size_bytes - 1
        store.shrink(limit_bytes, "default", lost=lambda run, chunks: lost.update({run: chunks}))
    assert (left, lost) == (0, {"old": 1})


def test_a_damaged_run_stops_no_background_work_on_the_others(store: Store) -> None:
    for run in ("first", "bad", "last"):
        for seq in range(300):
            sent = batch(run, seq, steps=steps(seq * 20, 20))
            store.ingest([Arrival(sent, bytes([seq % 256]), 1, 9 * DAY_NS)])
    damage(store, "bad")
    retention, faults, registry = job(store, keep_spans_days=5)
    retention.run_once(9 * DAY_NS + OVER_NS // 2)
    assert registry.get_sample_value("ddpobs_server_joined_chunks_total")
    assert (bins(store, "first"), bins(store, "bad"), bins(store, "last")) == (94, 0, 94)
    assert faults.recent("bins") == ["bad"]
    assert faults.recent("compaction") == ["bad"]
