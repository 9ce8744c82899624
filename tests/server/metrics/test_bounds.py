"""Bounds of /metrics: series, work for unchanged runs, bytes on the wire."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from ddpobs_server.app import create_app
from ddpobs_server.ingest import series_ledger
from ddpobs_server.metrics import scrape
from ddpobs_server.settings import Settings
from fastapi.testclient import TestClient

from benchmarks.rig import databases
from benchmarks.rig.collector import Collector, collector, running_collector
from ddpobs import wire
from tests.support.columns import make_spans
from tests.support.server.batches import assert_problem, batch, get, hello, layout, path, put, spans, steps
from tests.support.server.peers import peers
from tests.support.server.statement_counts import recorded

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


def test_straggler_statistics_of_absent_ranks_count_as_series(tmp_path: Path) -> None:
    with running_collector(tmp_path, max_run_series=series_ledger.RUN_SERIES + 2 * series_ledger.RANK_SERIES) as url:
        assert put(url, batch("two", peers=[peers(0, 9)])).status_code == 201
        assert_problem(put(url, batch("two", 1, rank=2, world_size=3)), 422)


def test_the_ledger_counts_as_many_series_as_metrics_have(shared: Collector, run: str) -> None:
    put(shared.url, batch(run, layouts=[layout()], hello=hello(), steps=steps(0, 40), spans=spans(0, 40)))
    put(shared.url, batch(run, 1, steps=steps(40, 1), peers=[peers(0, 9)]))
    lines = series_of(shared.url, run)
    assert sum('rank="0"' in line for line in lines) == series_ledger.RANK_SERIES
    assert sum('bucket="0"' in line for line in lines) == series_ledger.BUCKET_SERIES
    assert sum("rank=" not in line and "bucket=" not in line for line in lines) <= series_ledger.RUN_SERIES


def test_metrics_are_compressed_for_clients_that_accept_gzip(shared: Collector, run: str) -> None:
    put(shared.url, batch(run, steps=steps(0, 1)))
    query = {"only": "runs"}
    for accepted, encoding in {"gzip": "gzip", "deflate, gzip;q=0.5": "gzip", "identity": "", "gzip;q=0": ""}.items():
        with httpx.stream(
            "GET", f"{shared.url}/metrics", params=query, headers={"Accept-Encoding": accepted}
        ) as answer:
            raw = b"".join(answer.iter_raw())
        assert answer.headers.get("content-encoding", "") == encoding
        assert f'run="{run}"'.encode() in (gzip.decompress(raw) if encoding else raw)


@pytest.mark.usefixtures("no_time_passes")
def test_a_scrape_reads_only_the_runs_that_changed(tmp_path: Path) -> None:
    with TestClient(create_app(Settings(database_url=databases.sqlite(tmp_path)))) as http:

        def send(run: str, seq: int) -> None:
            payload = batch(run, seq, steps=steps(seq, 1))
            http.put(path(payload), content=wire.encode(payload), headers={"Content-Type": wire.MSGPACK})

        def scraped() -> tuple[str, int]:
            for name in "ab":
                http.get(f"/api/v1/runs/{name}/diagnostics")
            with recorded() as statements:
                text = http.get("/metrics", params={"only": "runs"}).text
            return text, sum("rollups" in statement for statement in statements)

        send("a", 0)
        send("b", 0)
        assert scraped()[1] == 1
        before, reads = scraped()
        assert reads == 0
        send("b", 1)
        after, reads = scraped()
        assert reads == 1
    assert 'ddpobs_steps_total{rank="0",run="b"} 2\n' in after
    lines_of_a = re.findall(r'^\S+run="a"[^ ]* .*$', before, re.MULTILINE)
    assert re.findall(r'^\S+run="a"[^ ]* .*$', after, re.MULTILINE) == lines_of_a != []


def test_runs_beyond_the_size_of_an_answer_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "SCRAPE_BYTES", 12_000)
    with TestClient(create_app(Settings(database_url=databases.sqlite(tmp_path)))) as http:
        for number in range(6):
            payload = batch(f"run-{number}", steps=steps(0, 1))
            http.put(path(payload), content=wire.encode(payload), headers={"Content-Type": wire.MSGPACK})
        text = http.get("/metrics", params={"only": "runs"}).text
        own = http.get("/metrics", params={"only": "collector"}).text
    shown = text.count("ddpobs_run_info{")
    assert 0 < shown < 6
    assert f"ddpobs_server_scrape_runs_left_out_total {6 - shown}.0\n" in own


def peak_mb(pid: int) -> float:
    """Largest resident memory of a process so far, from `VmHWM`."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kilobytes) / 1000


def test_reads_of_large_records_stay_within_their_bytes(tmp_path: Path) -> None:
    (stated_mb,) = re.findall(r"below (\d+) MB in a test", (ROOT / "docs" / "operations" / "limits.md").read_text())
    with collector(tmp_path) as running:
        url = running.url
        for rank in range(30):
            names = [f"layers.{rank}.{index}" for index in range(50_000)]
            unused = [wire.Unused(step=0, module=0, locally=names, globally=[])]
            parameters = [wire.Parameter(name=name, size=1) for name in names]
            buckets = [wire.Bucket(size_bytes=1, dtype="f", parameters=parameters)]
            layouts = [wire.Layout(module=rank, name="m", revision=0, comm="c", buckets=buckets)]
            assert put(url, batch("run", rank=rank, world_size=30, unused=unused, layouts=layouts)).status_code == 201
        for read in ("unused", "layout"):
            answer = get(url, f"/runs/run/{read}")
            assert answer["left_out"] > 0
            assert answer["left_out"] + len(answer[f"{read}s" if read == "layout" else read]) == 30
        (finding,) = (
            row for row in get(url, "/runs/run/diagnostics")["findings"] if row["code"] == "unused-parameters"
        )
        assert len(finding["parameters"]) == 50
        assert 'ddpobs_unused_parameters{run="run"} 1500000\n' in httpx.get(f"{url}/metrics").text
        assert len(get(url, "/runs/run")["modules"]) == 30
        assert peak_mb(running.process.pid) < int(stated_mb)
