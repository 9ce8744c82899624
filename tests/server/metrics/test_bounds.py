"""Bounds of /metrics: series, work for unchanged runs, bytes on the wire."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import numpy as np
from ddpobs_server.ingest import series_ledger

from benchmarks.rig.collector import Collector, running_collector
from ddpobs import wire
from tests.support.columns import make_spans
from tests.support.server.batches import assert_problem, batch, layout, put, spans, steps

ROOT = Path(__file__).resolve().parents[3]


def series_of(url: str, run: str, **headers: str) -> list[str]:
    lines = httpx.get(f"{url}/metrics", params={"only": "runs"}, headers=headers).text.splitlines()
    return [line for line in lines if f'run="{run}"' in line]


def named_buckets(module: int, count: int, revision: int = 0) -> wire.Layout:
    buckets = [wire.Bucket(size_bytes=1, dtype="f", parameters=[])] * count
    return wire.Layout(module=module, name="m", revision=revision, comm="allreduce", buckets=buckets)


def test_buckets_that_no_layout_names_have_no_series(shared: Collector, run: str) -> None:
    number = np.arange(50_000)
    unnamed = make_spans(
        step=np.zeros(50_000, int),
        module=number // 1000,
        bucket=number % 1000,
        ready_ns=0,
        launched_ns=0,
        started_ns=wire.UNKNOWN,
        done_ns=0,
    )
    assert put(shared.url, batch(run, 0, spans=unnamed)).status_code == 201
    assert len(series_of(shared.url, run)) < 50
    put(shared.url, batch(run, 1, layouts=[layout()], spans=spans(1, 1)))
    assert sum("ddpobs_bucket_bytes" in line for line in series_of(shared.url, run)) == 2


def test_buckets_of_a_run_are_limited_over_all_modules(tmp_path: Path) -> None:
    with running_collector(tmp_path, max_buckets=100) as url:
        assert put(url, batch("run", 0, layouts=[named_buckets(0, 60)])).status_code == 201
        assert put(url, batch("run", 1, layouts=[named_buckets(0, 100, 1)])).status_code == 201  # The same module.
        assert_problem(put(url, batch("run", 2, layouts=[named_buckets(1, 60)])), 422)
    with running_collector(tmp_path, max_buckets=100) as url:  # The count survives a restart.
        problem = assert_problem(put(url, batch("run", 3, layouts=[named_buckets(1, 60)])), 422)
        assert "DDPOBS_SERVER_MAX_BUCKETS" in problem["detail"]
        own = httpx.get(f"{url}/metrics", params={"only": "collector"}).text
        assert 'ddpobs_server_problems_total{method="PUT",problem="Too many series",status="422"} 1.0\n' in own


def test_series_of_a_run_and_of_a_workspace_are_limited(tmp_path: Path) -> None:
    ranks = series_ledger.RUN_SERIES + 3 * series_ledger.RANK_SERIES
    with running_collector(tmp_path, max_run_series=ranks, max_series=int(1.9 * ranks)) as url:
        answers = [put(url, batch("wide", rank=rank, world_size=9)) for rank in range(4)]
        assert [answer.status_code for answer in answers] == [201] * 3 + [422]
        answers = [put(url, batch("second", rank=rank, world_size=9)) for rank in range(3)]
        assert [answer.status_code for answer in answers] == [201, 201, 429]
        assert answers[-1].headers["retry-after"] == "60"
        assert put(url, batch("wide", 1, 0, world_size=9, steps=steps(0, 1))).status_code == 201  # Known ranks go on.


def used_series(url: str) -> float:
    text = httpx.get(f"{url}/metrics", params={"only": "collector"}).text
    (ratio,) = re.findall(r'limit_used_ratio{limit="max_series"} (\S+)', text)
    return float(ratio)


def test_a_restarted_run_counts_with_its_current_attempt_alone(tmp_path: Path) -> None:
    series = series_ledger.RUN_SERIES + 3 * series_ledger.RANK_SERIES
    with running_collector(tmp_path, max_series=series) as url:
        for number, attempt in enumerate(("a" * 16, "b" * 16, "c" * 16, "d" * 16)):
            for rank in range(3):
                sent = batch("run", rank=rank, world_size=3, attempt=attempt, source=f"{number}{rank:015x}")
                assert put(url, sent).status_code == 201
        assert used_series(url) == 1.0
        refused = [put(url, batch(f"other-{number}", source="e" * 16)).status_code for number in range(3)]
        assert refused == [429] * 3
        assert used_series(url) == 1.0
