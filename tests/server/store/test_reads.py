"""Reads: number of statements, pages, limits, concurrency with ingest; and the text of metrics."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from ddpobs_server.analysis.findings.unused_parameters import LATEST_SETS
from ddpobs_server.analysis.trace.chrome_trace import EVENTS
from ddpobs_server.api import columns
from ddpobs_server.app import create_app
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Store
from ddpobs_server.store.queries import column_queries, unused_queries
from fastapi.testclient import TestClient
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.rig.databases import Fresh, sqlite
from ddpobs import wire
from tests.support.server.batches import ATTEMPT, MS, batch, hello, layout, path, spans, steps
from tests.support.server.in_process import client, fill, put
from tests.support.server.statement_counts import recorded


def count_statements(http: TestClient, url: str) -> int:
    with recorded() as executed:
        assert http.get(url).status_code == 200
    return len(executed)


@pytest.mark.usefixtures("no_time_passes")
def test_the_number_of_statements_grows_with_neither_ranks_nor_runs(fresh: Fresh, tmp_path: Path) -> None:
    reads = [
        "/diagnostics",
        "/stragglers",
        "/ranks",
        "/attempts",
        "/buckets",
        "/spans?from=3&to=3",
        "/trace?from=3&to=3",
    ]
    counts: list[dict[str, int]] = []
    for ranks, runs_count in ((2, 1), (9, 4)):
        with client(fresh(tmp_path)) as http:
            for number in range(runs_count):
                fill(http, f"run-{number}", ranks)
            statements = {read: count_statements(http, f"/api/v1/runs/run-0{read}") for read in reads}
            assert http.get("/metrics").status_code == 200  # Layouts never change, and are read once.
            for number in range(runs_count):  # Otherwise /metrics starts the diagnoses.
                put(http, batch(f"run-{number}", 9, world_size=ranks, steps=steps(40, 1)))
                assert http.get(f"/api/v1/runs/run-{number}/diagnostics").status_code == 200
            for read in ("/metrics", "/api/v1/runs"):
                statements[read] = count_statements(http, read)
            counts.append(statements)
    assert counts[0] == counts[1]
    assert max(counts[0].values()) <= 16


@pytest.mark.parametrize("gap", [0, 1000])
def test_rows_are_sorted_by_step_and_rank_with_and_without_gaps(store: Store, gap: int) -> None:
    batches = ((0, 1, 0), (1, 1, 5 + gap), (0, 0, 0), (1, 0, 5 + gap))
    sent = [batch("run", seq, rank, steps=steps(first, 5)) for seq, rank, first in batches]
    store.ingest([Arrival(wire.decode(wire.encode(one)), bytes([number]), 1, 1) for number, one in enumerate(sent)])
    rank, rows = store.steps("run", ATTEMPT)
    assert rank.tolist() == [0, 1] * 10
    assert rows.step.tolist() == np.repeat([*range(5), *range(5 + gap, 10 + gap)], 2).tolist()
    assert rows.start_ns.tolist() == (rows.step * 100 * MS).tolist()


@pytest.mark.usefixtures("no_time_passes")
def test_the_list_of_runs_has_the_worst_finding_of_the_last_diagnosis(tmp_path: Path) -> None:
    with client(sqlite(tmp_path)) as http:
        fill(http, "slow", 3)
        assert http.get("/api/v1/runs").json()["runs"][0]["diagnosis"] is None
        worst = http.get("/api/v1/runs/slow/diagnostics").json()["findings"][0]
        diagnosis = http.get("/api/v1/runs").json()["runs"][0]["diagnosis"]
        assert {name: diagnosis[name] for name in ("worst", "severity", "code", "gain", "current")} == {
            "worst": worst["verdict"], "current": True, **{name: worst[name] for name in ("severity", "code", "gain")}
        }  # fmt: skip
        put(http, batch("slow", seq=9))
        diagnosis = http.get("/api/v1/runs").json()["runs"][0]["diagnosis"]
        assert (diagnosis["worst"], diagnosis["current"]) == (worst["verdict"], False)


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_prometheus_own_parsers_read_the_metrics(tmp_path: Path, accept: str) -> None:
    evil = 'a"b\\c\nd'
    with client(sqlite(tmp_path)) as http:
        fill(http, "run", 3)
        put(http, batch("run", 2, 0, world_size=3, hello=wire.Hello(
            host="h", pid=1, device=evil, backend="gloo", versions={})))  # fmt: skip
        assert http.get("/api/v1/runs/run/diagnostics").status_code == 200
        text = http.get("/metrics", headers={"Accept": accept}).text
    parse = openmetrics.text_string_to_metric_families if accept else text_string_to_metric_families
    samples = {(row.name, *sorted(row.labels.items())): row.value for family in parse(text) for row in family.samples}

    def sample(name: str, **labels: str) -> float:
        return samples[name, *sorted((labels | {"run": "run"}).items())]

    assert sample("ddpobs_steps_total", rank="2") == 40
    assert sample("ddpobs_phase_seconds_total", rank="0", phase="forward") == pytest.approx(40 * 0.02)
    assert sample("ddpobs_allreduce_bytes_total", rank="1") == 40 * (1000 + 2000)
    assert sample("ddpobs_bucket_comm_seconds_total", bucket="1") == pytest.approx(3 * 40 * 0.015)
    assert sample("ddpobs_last_step", rank="1") == 39
    assert sample("ddpobs_last_step_timestamp_seconds", rank="1") > 0
    assert sample("ddpobs_unused_parameters") == 1
    assert sample("ddpobs_findings", code="straggler", severity="critical") == 1
    assert sample("ddpobs_step_duration_seconds_count") == 120
    facts = {"attempt": ATTEMPT, "backend": "gloo", "torch": "", "world_size": "3"}
    assert sample("ddpobs_run_info", device=evil, **facts) == 1
    assert any(name == "ddpobs_server_batches_total" for name, *_ in samples)


def test_a_rank_without_a_step_has_no_metrics_of_its_last_step(tmp_path: Path) -> None:
    with client(sqlite(tmp_path)) as http:
        put(http, batch("run", rank=0, hello=hello()))
        put(http, batch("run", rank=1, steps=steps(0, 1)))
        text = http.get("/metrics").text
    for family in ("last_step", "last_step_timestamp_seconds"):
        assert f'ddpobs_{family}{{rank="1",run="run"}}' in text
        assert f'ddpobs_{family}{{rank="0",run="run"}}' not in text


def test_reduced_bytes_are_right_if_buckets_are_reduced_unequally_often(tmp_path: Path) -> None:
    with client(sqlite(tmp_path)) as http:
        step = np.array([0, 0, 1])
        four = spans(0, 2)
        three = {name: getattr(four, name)[:3] for name in four.names}
        put(http, batch("run", steps=steps(0, 2), spans=wire.Spans(**three | {"step": step}), layouts=[layout()]))
        text = http.get("/metrics").text
    assert 'ddpobs_allreduce_bytes_total{rank="0",run="run"} 4000' in text


def test_totals_of_a_long_run_include_late_batches(fresh: Fresh, tmp_path: Path) -> None:
    database = fresh(tmp_path)
    store = Store(database)
    with client(database) as http:
        for seq, first, count in ((0, 0, 500), (2, 600, 700), (3, 1300, 600), (1, 500, 100), (4, 1900, 1)):
            for rank in range(2):
                put(http, batch("run", seq, rank, steps=steps(first, count)))
                for _ in range(2):
                    phases = store.aggregates(0).phases["run"]
                    assert dict(zip(phases.rank, phases.steps, strict=True)) == {
                        rollup.rank: rollup.steps for rollup in store.rollups("run", ATTEMPT)
                    }
    assert phases == ((0, 1), (1901, 1901), *((1901 * MS * ms,) * 2 for ms in (30, 10, 20, 40, 5, 20, 5)))
    store.close()


def scrape_after(store: Store, *batches: wire.Batch, received_ns: int) -> tuple[int, int]:
    """Store batches and scrape. Returns the number of statements over rollups, and the end of the cached windows."""
    store.ingest(
        [Arrival(sent_batch, bytes([sent_batch.rank, sent_batch.seq]) * 16, 1, received_ns) for sent_batch in batches]
    )
    with recorded(store._engine) as executed:
        phases = store.aggregates(0).phases["run"]
    assert dict(zip(phases.rank, phases.steps, strict=True)) == {
        rollup.rank: rollup.steps for rollup in store.rollups("run", ATTEMPT)
    }
    (cached,) = store._phases["default"]._cache.values()
    return sum("JOIN rollups" in statement for statement in executed), cached.until


def test_ranks_with_diverging_steps_do_not_cause_a_full_sum_at_each_scrape(store: Store) -> None:
    """The second rank falls further and further behind, so windows must stay uncached up to its step."""
    scrapes = [
        scrape_after(
            store,
            *(batch("run", seq, rank, steps=steps(seq * size, size)) for rank, size in enumerate((1024, 512))),
            received_ns=1,
        )
        for seq in range(6)
    ]
    assert scrapes == [(1, 0), (2, 8), (2, 16), (2, 24), (2, 32), (2, 40)]


def test_a_silent_rank_does_not_hold_the_cache_back(store: Store) -> None:
    minute_ns = 60 * 10**9
    batches = [batch("run", 0, rank, steps=steps(0, 64)) for rank in range(2)]
    assert scrape_after(store, *batches, batch("run", 1, steps=steps(64, 960)), received_ns=1) == (1, 0)
    assert scrape_after(store, batch("run", 2, steps=steps(1024, 64)), received_ns=2 + minute_ns) == (2, 8)
    assert scrape_after(store, batch("run", 3, steps=steps(1088, 64)), received_ns=3 + minute_ns) == (1, 8)


def test_pages_hold_every_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_PAGE_ROWS", 50)
    with client(sqlite(tmp_path)) as http:
        fill(http, "run", 3, count=70)
        for kind, rows in (("steps", 70 * 3), ("spans", 70 * 6), ("steps", 70)):
            rank = {"rank": 1} if rows == 70 else {}
            rows_seen: list[tuple[int, int]] = []
            following: int | None = 0
            pages = 0
            while following is not None:
                answer = http.get(f"/api/v1/runs/run/{kind}", params={"from": following, **rank}).json()
                page = list(zip(answer["columns"]["step"], answer["columns"]["rank"], strict=True))
                assert 0 < len(page) <= 50
                rows_seen, following, pages = rows_seen + page, answer["next"], pages + 1
            assert (len(rows_seen), rows_seen) == (rows, sorted(rows_seen))
            assert pages < rows / 10


def test_a_page_has_at_least_a_step_and_at_most_a_number_of_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = sqlite(tmp_path)
    with client(database) as http:
        fill(http, "run", 3)
    store = Store(database)
    assert store.page_end("spans", "run", ATTEMPT, first=7, last=None, rows=1) == 7
    assert store.page_end("spans", "run", ATTEMPT, first=None, last=None, rows=10**6) is None
    monkeypatch.setattr(column_queries, "_PAGE_CHUNKS", 2)
    assert store.page_end("spans", "run", ATTEMPT, first=None, last=None, rows=10**6) == 19
    store.close()


def test_the_refusal_of_a_long_trace_names_the_last_step_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events_a_step = 3 * (EVENTS["steps"] + 2 * EVENTS["spans"])
    monkeypatch.setattr("ddpobs_server.reports.timeline._TRACE_EVENTS", 10 * events_a_step)
    with client(sqlite(tmp_path)) as http:
        fill(http, "run", 3)
        refused = http.get("/api/v1/runs/run/trace", params={"from": 5, "to": 39})
        assert (refused.status_code, refused.json()["field"]) == (422, "query.to")
        assert "at most 14" in refused.json()["detail"]
        fitting = http.get("/api/v1/runs/run/trace", params={"from": 5, "to": 14}).json()["traceEvents"]
        latest = http.get("/api/v1/runs/run/trace").json()["traceEvents"]
    assert {e["args"]["step"] for e in fitting if e["ph"] == "X"} == set(range(5, 15))
    assert sum(e["ph"] in "Xsf" for e in fitting) <= 10 * events_a_step
    assert {e["args"]["step"] for e in latest if e["ph"] == "X"} == set(range(30, 40))


@pytest.mark.parametrize("kind", ["spans", "comms", "steps"])
def test_batches_from_a_time_of_larger_limits_can_be_read(store: Store, kind: str) -> None:
    step = np.arange(1_400_000 if kind != "steps" else 450_000)
    sent_batch: Any = spans(0, len(step) // 2) if kind != "steps" else steps(0, len(step))
    if kind == "comms":
        sent_batch = wire.Comms(step=step, module=step * 0, kind=step * 0, launched_ns=step, done_ns=step)
    packed: dict[str, Any] = {"packed_spans": wire.pack_spans(sent_batch)} if kind == "spans" else {}
    store.ingest([Arrival(batch("run", **{kind: sent_batch}, **packed), b"", 1, 1)])
    rows = getattr(store, kind)("run", ATTEMPT, first=7, last=7)[1]
    assert rows.step.tolist() == [7] * (2 if kind == "spans" else 1)


def unused(step: int, module: int, *names: str) -> wire.Unused:
    return wire.Unused(step=step, module=module, locally=list(names), globally=[])


def test_metrics_and_diagnoses_read_the_latest_unused_sets_and_each_kind_of_event_once(store: Store) -> None:
    evil = ',"module":7,"locally":["'
    for rank in range(2):
        for seq in range(20):
            sets = [unused(seq, 0, *([evil] if seq % 2 else [])), unused(seq, 1), unused(seq, 1, f"{seq}")]
            events = [wire.Event(kind="rebuilt", at_ns=0, step=seq), wire.Event(kind="drawn", at_ns=0, step=seq)]
            sent_batch = batch("run", seq, rank, unused=sets if seq < 10 else sets[:1], events=events)
            store.ingest([Arrival(sent_batch, bytes([rank, seq]), 1, seq)])
    assert store.aggregates(0).unused == {"run": 2}  # A name in each module, the same on both ranks.
    assert unused_queries.UNUSED_JUDGED >= LATEST_SETS
    judged = [record for rank, record in store.latest_unused("run", ATTEMPT)[0] if rank == 1]
    assert [record.step for record in judged if record.module == 0] == list(range(20 - 2 * LATEST_SETS, 20))
    assert [record.step for record in judged if record.module == 1] == [*np.repeat(range(10 - LATEST_SETS, 10), 2)]
    first = store.first_events("run", ATTEMPT)
    assert [(rank, event.kind, event.step) for rank, event in first] == [
        (rank, kind, 0) for rank in range(2) for kind in ("rebuilt", "drawn")
    ]


def test_a_diagnosis_reads_fewer_sets_of_each_rank_if_they_have_many_names(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unused_queries, "NAMES_BYTES", 45)
    for rank in range(4):
        for seq in range(6):
            sent_batch = batch("run", seq, rank, unused=[unused(seq, 0, *(f"{seq}.{name}" for name in range(2)))])
            store.ingest([Arrival(sent_batch, bytes([rank, seq]), 1, seq)])
    judged, left_out = store.latest_unused("run", ATTEMPT)
    assert (len(judged), left_out) == (12, 12)
    assert [rank for rank, record in judged if record.step == 5] == [0, 1, 2, 3]


def test_the_limit_on_unused_sets_keeps_the_latest_of_all_ranks(tmp_path: Path) -> None:
    with client(sqlite(tmp_path)) as http:
        for rank in range(2):
            for seq in range(20):
                put(http, batch("run", seq, rank, unused=[unused(seq, 0, "a"), unused(seq, 1, "b")]))

        def sets(**query: int) -> list[tuple[int, int, int]]:
            rows = http.get("/api/v1/runs/run/unused", params=query).json()["unused"]
            return [(row["rank"], row["step"], row["module"]) for row in rows]

        assert len(sets()) == 80
        assert sets(limit=4) == [(0, 19, 0), (0, 19, 1), (1, 19, 0), (1, 19, 1)]
        assert sets(limit=4, module=1) == [(0, 18, 1), (0, 19, 1), (1, 18, 1), (1, 19, 1)]


@pytest.mark.parametrize("read", ["steps", "steps?mean=true", "steps?from=3&to=3", "spans", "stragglers", "trace"])
def test_a_step_of_too_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str) -> None:
    with client(sqlite(tmp_path)) as http:
        fill(http, "run", 3)
        assert http.get(f"/api/v1/runs/run/{read}").status_code == 200
        monkeypatch.setattr(column_queries, "_MAX_BYTES", 300)
        refused = http.get(f"/api/v1/runs/run/{read}")
        assert (refused.status_code, refused.json()["title"]) == (422, "Too many rows")
        assert http.get("/api/v1/runs/run/diagnostics").status_code == 200


def test_the_mean_over_ranks_has_a_row_per_step(tmp_path: Path) -> None:
    with client(sqlite(tmp_path)) as http:
        fill(http, "run", 3)
        columns = http.get("/api/v1/runs/run/steps", params={"from": 2, "to": 5, "mean": True}).json()["columns"]
    assert (columns["step"], columns["ranks"]) == ([2, 3, 4, 5], [3] * 4)
    assert columns["wall_ns"] == [120 * MS] * 4
    assert columns["backward_ns"] == [60 * MS] * 4


def test_batches_are_acknowledged_while_more_reads_wait_than_threads_exist(tmp_path: Path) -> None:
    app = create_app(Settings(database_url=sqlite(tmp_path)))
    release, began = threading.Event(), threading.Semaphore(0)

    async def scenario() -> None:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://in") as http,
        ):
            sent_batch = batch("run", steps=steps(0, 2))
            headers = {"Content-Type": wire.MSGPACK}
            assert (
                await http.put(path(sent_batch), content=wire.encode(sent_batch), headers=headers)
            ).status_code == 201
            read = app.state.services.store.steps

            def slow(*arguments: Any) -> Any:
                began.release()
                assert release.wait(60)
                return read(*arguments)

            app.state.services.store.steps = slow
            reads = [asyncio.create_task(http.get("/api/v1/runs/run/steps")) for _ in range(60)]
            while not began.acquire(blocking=False):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)  # Without the limit, the other reads now take all threads.
            more = batch("run", 1, steps=steps(2, 2))
            request = http.put(path(more), content=wire.encode(more), headers=headers)
            try:
                assert (await asyncio.wait_for(request, 30)).status_code == 201
            finally:
                release.set()
            assert {answer.status_code for answer in await asyncio.gather(*reads)} == {200}

    asyncio.run(scenario())


def test_the_buckets_of_a_run_without_a_layout_have_no_sums(store: Store) -> None:
    """Its buckets have the module and the revision of another run's layout."""
    for run, layouts in (("named", [layout()]), ("unnamed", [])):
        sent = batch(run, steps=steps(0, 3), spans=spans(0, 3), layouts=layouts)
        packed = wire.decode(wire.encode(sent), wire.MSGPACK, 10**6)
        store.ingest([Arrival(packed, bytes(32), 1, 10**18)])
    aggregates = store.aggregates(0)
    assert [(run, total.bucket, total.steps) for run, total in aggregates.buckets] == [("named", 0, 3), ("named", 1, 3)]
    assert aggregates.reduced_bytes == {"named": {0: 3 * (1000 + 2000)}}
