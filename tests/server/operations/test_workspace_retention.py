"""Ages and sizes of single workspaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ddpobs_server.operations.retention import RetentionJob
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Store
from prometheus_client import CollectorRegistry

from ddpobs import wire
from tests.support.server.batches import batch, spans

DAY_NS = 86_400 * 10**9


def fill(store: Store, run: str, batches: int) -> None:
    for seq in range(batches):
        rows = spans(500 * seq, 500)
        arrival = Arrival(batch(run, seq, spans=rows, packed_spans=wire.pack_spans(rows)), bytes([seq]), 1, 1)
        store.ingest([arrival])


def retain(store: Store, day: float, **settings: Any) -> None:
    RetentionJob(Settings(**settings), store, CollectorRegistry()).run_once(int(day * DAY_NS))


def test_a_workspace_with_its_own_age_loses_its_silent_runs_alone(store: Store) -> None:
    fill(store, "keeps", 1)
    fill(store, "short/run", 1)
    store.set_workspace_limits("short", {"keep_runs_days": 1})
    retain(store, 3)
    assert (store.run("keeps") is None, store.run("short/run") is None) == (False, True)


def test_a_workspace_beyond_its_size_loses_its_own_data(store: Store) -> None:
    fill(store, "other/run", 4)
    fill(store, "full/run", 4)
    before = store.workspace_usage()
    store.set_workspace_limits("full", {"keep_gb": before["full"].size_bytes / 2e9})
    retain(store, 3)
    after = store.workspace_usage()
    assert after["other"] == before["other"]
    assert after.get("full") is None or after["full"].size_bytes <= before["full"].size_bytes / 2


def test_a_database_beyond_its_size_loses_data_of_the_largest_workspace(store: Store) -> None:
    fill(store, "small/run", 2)
    fill(store, "large/run", 12)
    before = store.workspace_usage()
    store.shrink(store.used_bytes() - 1)
    after = store.workspace_usage()
    assert after["small"] == before["small"]
    assert after.get("large") != before["large"]


def test_records_count_as_bytes_of_their_workspace(store: Store, tmp_path: Path) -> None:
    names = ["x" * 50] * 100
    sets = [wire.Unused(step=0, module=0, locally=names, globally=[])]
    store.ingest([Arrival(batch("team/run", unused=sets), b"", 1, 1)])
    assert store.workspace_usage()["team"].size_bytes == pytest.approx(5300, abs=300)
