"""The REST reads, over HTTP from a real collector."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import msgspec
import pytest
from ddpobs_server.reports.run_state import state_of_run
from ddpobs_server.settings import Settings
from ddpobs_server.store import Run, schema

from benchmarks.rig.collector import Collector, collector, running_collector
from ddpobs import wire
from tests.support.server.batches import (
    ATTEMPT,
    MS,
    assert_problem,
    batch,
    get,
    hello,
    layout,
    put,
    source_of,
    spans,
    steps,
)

SECOND = 10**9
LONE = "without-a-pipeline"


def fill(url: str, run: str, count: int = 4) -> None:
    """Send two ranks with `count` steps each, in two batches; the later steps first."""
    half = count // 2
    for rank in (1, 0):
        put(url, batch(run, seq=1, rank=rank, steps=steps(half, half), spans=spans(half, half)))
        first = {"hello": hello(f"node{rank}"), "layouts": [layout()]}
        put(url, batch(run, seq=0, rank=rank, steps=steps(0, half), spans=spans(0, half), **first))


def test_a_run_has_its_state_counts_attempts_hello_and_modules(shared: Collector, run: str) -> None:
    fill(shared.url, run)
    details = get(shared.url, f"/runs/{run}")
    summary = {name: details[name] for name in ("run", "state", "attempt", "world_size", "ranks", "steps", "emitted")}
    assert summary == {
        "run": run,
        "state": "running",
        "attempt": ATTEMPT,
        "world_size": 2,
        "ranks": 2,
        "steps": 4,
        "emitted": 20,
    }
    assert 0 < details["created_ns"] <= details["last_seen_ns"]
    assert [set(attempt) for attempt in details["attempts"]] == [{"attempt", "ordinal", "first_seen_ns"}]
    assert details["hello"]["host"] == "node0"
    assert details["modules"] == [{"module": 0, "name": "model"}]


def test_the_list_has_step_times_rate_and_duration_of_the_lowest_rank(shared: Collector, run: str) -> None:
    for rank, count in ((1, 10), (0, 130)):
        put(shared.url, batch(run, rank=rank, steps=steps(0, count), hello=hello(f"node{rank}")))
    listed = next(row for row in get(shared.url, "/runs")["runs"] if row["run"] == run)
    assert listed["step_times_ns"] == [100 * MS] * 3
    assert (listed["step_ns"], listed["steps_per_s"], listed["host"]) == (100 * MS, pytest.approx(10), "node0")
    assert 0 < listed["duration_ns"] == listed["last_seen_ns"] - listed["created_ns"]
    recent = get(shared.url, "/runs", seen_after_ns=listed["last_seen_ns"] - 1)["runs"]
    assert run in [row["run"] for row in recent]
    later = get(shared.url, "/runs", seen_after_ns=listed["last_seen_ns"])["runs"]
    assert run not in [row["run"] for row in later]


def test_a_pipeline_has_its_stages_with_bubble_and_overlap(shared: Collector, run: str) -> None:
    """Two ranks, each a stage of its own: 60 of 75 ms computing, as the formula says for four micro-batches."""
    fill(shared.url, LONE)
    assert get(shared.url, f"/runs/{LONE}/pipeline") == {
        "run": LONE,
        "attempt": ATTEMPT,
        "pipeline": None,
        "missing": ["no rank has reported a schedule of torch.distributed.pipelining, or not every stage has"],
    }
    for rank in range(2):
        detail: dict[str, wire.Scalar] = {
            "schedule": "ScheduleGPipe",
            "stages": 2,
            "held": str(rank),
            "micro_batches": 4,
            "first_rank": 0,
        }
        columns = {"schedule_ns": 75 * MS, "computing_ns": 60 * MS, "send_wait_ns": 0, "receive_wait_ns": 15 * MS}
        reported: dict[str, Any] = {"events": [wire.Event(kind="pipeline", at_ns=0, detail=detail)], "hello": hello()}
        waits = {"exposed_comm_ns": 18 * MS, "forward_ns": 7 * MS, **columns}
        sent = batch(run, rank=rank, steps=steps(0, 8, **waits), spans=spans(0, 8), **reported)
        assert put(shared.url, sent).status_code == 201
    pipeline = get(shared.url, f"/runs/{run}/pipeline")["pipeline"]
    assert (pipeline["expected_bubble"], pipeline["predicted_ns"]) == (0.2, 75 * MS)
    assert [(stage["stages"], stage["bubble"], stage["reduce_wait_ns"]) for stage in pipeline["by_rank"]] == [
        ([0], 0.2, 3 * MS),
        ([1], 0.2, 3 * MS),
    ]


def test_labels_are_those_of_the_training_until_they_are_set(shared: Collector, run: str) -> None:
    settings = {"tags": "nightly,gpt", "note": "baseline"}
    put(shared.url, batch(run, hello=msgspec.structs.replace(hello(), settings=settings)))

    def labels() -> list[tuple[list[str], str]]:
        listed = next(row for row in get(shared.url, "/runs")["runs"] if row["run"] == run)
        return [(row["tags"], row["note"]) for row in (listed, get(shared.url, f"/runs/{run}"))]

    assert labels() == [(["nightly", "gpt"], "baseline")] * 2
    address = f"{shared.url}/api/v1/runs/{run}"
    answer = httpx.patch(address, json={"tags": [" a ", "a", "ü b"]})
    assert (answer.status_code, answer.json()) == (200, {"run": run, "tags": ["a", "ü b"], "note": "baseline"})
    assert httpx.patch(address, json={"note": ""}).json()["note"] == ""
    assert labels() == [(["a", "ü b"], "")] * 2


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"tags": ["a,b"]}', 422),
        (b'{"tags": "a"}', 422),
        (b'{"colour": "red"}', 422),
        (b'{"note": "%s"}' % (b"x" * 2001), 422),
        (b'{"tags": %s}' % json.dumps([str(number) for number in range(17)]).encode(), 422),
        (b'{"note": "a\\u0000b"}', 422),
        (b"\xff", 422),
        (b"x" * 70_000, 413),
    ],
)
def test_malformed_labels_are_refused(shared: Collector, run: str, body: bytes, status: int) -> None:
    put(shared.url, batch(run))
    assert_problem(httpx.patch(f"{shared.url}/api/v1/runs/{run}", content=body), status)
    assert get(shared.url, f"/runs/{run}")["tags"] == []


def test_a_run_has_no_steps_until_a_rank_has_finished_one(shared: Collector, run: str) -> None:
    put(shared.url, batch(run, hello=hello(), pulse=wire.Pulse(at_ns=5, phase="data", step=0)))
    assert get(shared.url, f"/runs/{run}")["steps"] == 0
    put(shared.url, batch(run, rank=1, steps=steps(0, 1)))
    assert get(shared.url, f"/runs/{run}")["steps"] == 1


def test_ranks_have_their_process_counts_and_mean_phases(shared: Collector, run: str) -> None:
    fill(shared.url, run)
    pulse = wire.Pulse(at_ns=5, phase="forward", step=4)
    put(shared.url, batch(run, seq=2, rank=1, emitted=50, dropped=3, pulse=pulse))
    ranks = get(shared.url, f"/runs/{run}/ranks")["ranks"]
    assert [(rank["rank"], rank["host"], rank["source"]) for rank in ranks] == [
        (0, "node0", source_of(0)),
        (1, "node1", source_of(1)),
    ]
    assert (ranks[1]["emitted"], ranks[1]["dropped"], ranks[1]["steps"], ranks[1]["last_step"]) == (50, 3, 4, 3)
    phases_ms = {"data": 10, "forward": 20, "backward": 40, "exposed_comm": 5, "optimizer": 20, "other": 5}
    assert ranks[0]["phases_ns"] == {phase: ms * MS for phase, ms in phases_ms.items()}
    assert ranks[0]["own_ns"] == 95 * MS
    assert (ranks[0]["pulse"], ranks[1]["pulse"]["phase"]) == (None, "forward")
    assert (ranks[1]["pulse"]["bucket"], ranks[1]["pulse"]["module"]) == (None, None)
    machine = wire.Machine(processors=4)
    put(shared.url, batch(run, seq=3, rank=1, pulse=wire.Pulse(at_ns=6, phase="forward", step=4, machine=machine)))
    shown = get(shared.url, f"/runs/{run}/ranks")["ranks"][1]["pulse"]["machine"]
    assert (shown["processors"], shown["device_busy_permille"], shown["device_slowdowns"]) == (4, None, [])


def test_own_time_is_the_mean_over_the_steps_that_have_it(shared: Collector, run: str) -> None:
    own = steps(0, 2).own_ns.copy()
    own[0] = wire.UNKNOWN
    put(shared.url, batch(run, steps=steps(0, 2, own_ns=own)))
    assert get(shared.url, f"/runs/{run}/ranks")["ranks"][0]["own_ns"] == 95 * MS


def test_the_layout_lists_the_parameters_of_each_bucket(shared: Collector, run: str) -> None:
    fill(shared.url, run)
    (layout_json,) = get(shared.url, f"/runs/{run}/layout")["layouts"]
    expected = {"module": 0, "name": "model", "revision": 0, "comm": "allreduce", "noun": "bucket"}
    assert expected.items() <= layout_json.items()
    assert layout_json["buckets"][1] == {
        "bucket": 1,
        "size_bytes": 2000,
        "dtype": "float32",
        "parameters": [{"name": "stem.weight", "size": 500}],
        "kind": "bucket",
        "unit": "",
        "title": "bucket 0.1",
    }


def test_steps_have_every_column_and_are_sorted_by_step_and_rank(shared: Collector, run: str) -> None:
    fill(shared.url, run)
    columns = get(shared.url, f"/runs/{run}/steps")["columns"]
    assert list(columns) == ["rank", *wire.Steps.names]
    assert {len(values) for values in columns.values()} == {8}
    assert list(zip(columns["step"], columns["rank"], strict=True)) == [(s, r) for s in range(4) for r in range(2)]


@pytest.mark.parametrize("route", ["steps", "spans"])
def test_reads_return_only_the_requested_steps_and_rank(shared: Collector, run: str, route: str) -> None:
    fill(shared.url, run)
    columns = get(shared.url, f"/runs/{run}/{route}", **{"rank": 1, "from": 1, "to": 2})["columns"]
    assert (set(columns["step"]), set(columns["rank"])) == ({1, 2}, {1})
    assert get(shared.url, f"/runs/{run}/{route}", **{"from": 4})["columns"]["step"] == []


def test_spans_have_times_on_their_own_clock_and_on_rank_zeros(shared: Collector, run: str) -> None:
    fill(shared.url, run)
    columns = get(shared.url, f"/runs/{run}/spans")["columns"]
    aligned = [f"aligned_{name}_ns" for name in ("ready", "launched", "done")]
    assert set(columns) == {"rank", *wire.Spans.names, *aligned}
    assert columns["ready_ns"][:2] == [40 * MS, 70 * MS]
    assert get(shared.url, f"/runs/{run}/spans", module=1)["columns"]["step"] == []


def test_buckets_are_rolled_up_over_ranks_and_steps(shared: Collector, run: str) -> None:
    fill(shared.url, run)
    first, second = get(shared.url, f"/runs/{run}/buckets")["buckets"]
    times = ("steps", "compute_ns", "comm_ns", "exposed_ns")
    assert [first[name] for name in times] == [8, 0, 10 * MS, 0]
    assert [second[name] for name in times] == [8, 30 * MS, 15 * MS, 15 * MS]
    assert (second["size_bytes"], second["dtype"], second["parameters"]) == (2000, "float32", 1)


def test_unused_parameters_are_listed_by_rank_and_name(shared: Collector, run: str) -> None:
    record = wire.Unused(step=3, module=0, locally=["a", "b"], globally=["a"])
    put(shared.url, batch(run, rank=1, unused=[record]))
    assert get(shared.url, f"/runs/{run}/unused")["unused"] == [
        {"rank": 1, "step": 3, "module": 0, "locally": ["a", "b"], "globally": ["a"]}
    ]


@pytest.mark.parametrize(
    ("route", "members"),
    [
        ("stragglers", "run attempt steps ranks own_ns excess_ns delay_ns last_rank noise_ns per_rank next"),
        ("diagnostics", "run attempt steps_seen findings missing"),
        ("trace", "traceEvents"),
    ],
)
def test_reports_have_their_members(shared: Collector, run: str, route: str, members: str) -> None:
    fill(shared.url, run)
    assert set(members.split()) <= set(get(shared.url, f"/runs/{run}/{route}"))


READS = ["", "/ranks", "/layout", "/steps", "/spans", "/buckets", "/unused", "/stragglers", "/diagnostics", "/trace"]


@pytest.mark.parametrize("route", READS)
def test_an_unknown_run_is_a_404_problem(shared: Collector, route: str) -> None:
    document = assert_problem(httpx.get(f"{shared.url}/api/v1/runs/nobody{route}"), 404)
    assert "nobody" in document["detail"]


@pytest.mark.parametrize("route", READS)
def test_a_run_without_any_records_can_be_read(shared: Collector, run: str, route: str) -> None:
    put(shared.url, batch(run))
    assert get(shared.url, f"/runs/{run}{route}")["run" if route != "/trace" else "traceEvents"] in (run, [])


def test_an_unknown_attempt_a_bad_query_and_an_unknown_path_are_problems(shared: Collector, run: str) -> None:
    put(shared.url, batch(run))
    runs = f"{shared.url}/api/v1/runs"
    assert_problem(httpx.get(f"{runs}/{run}/steps", params={"attempt": "c" * 16}), 404)
    assert assert_problem(httpx.get(f"{runs}/{run}/steps", params={"from": "x"}), 422)["field"] == "query.from"
    assert_problem(httpx.get(runs, params={"cursor": "%%%"}), 422)
    assert_problem(httpx.get(f"{shared.url}/api/v1/nothing"), 404)
    assert_problem(httpx.get(f"{runs}/"), 404)
    assert_problem(httpx.post(runs), 405)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/", "/api/v1/runs", "/metrics", "/api/v1/nothing"])
def test_head_has_the_status_and_type_of_get_without_the_content(shared: Collector, path: str) -> None:
    response, head = httpx.get(shared.url + path), httpx.head(shared.url + path)
    assert (head.status_code, head.headers["content-type"]) == (response.status_code, response.headers["content-type"])
    assert (head.content, len(response.content) > 0) == (b"", True)


def test_runs_are_listed_newest_first_in_pages_that_miss_none(tmp_path: Path) -> None:
    with running_collector(tmp_path) as url:
        for index in range(7):
            put(url, batch(f"run-{index}"))
        cursor: dict[str, Any] = {}
        listed, pages = [], 0
        while True:
            page = get(url, "/runs", limit=3, **cursor)
            listed += [run["run"] for run in page["runs"]]
            pages += 1
            if page["next"] is None:
                break
            cursor = {"cursor": page["next"]}
    assert listed == [f"run-{index}" for index in reversed(range(7))]
    assert pages == 3


def test_a_deleted_run_leaves_no_row(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        fill(running.url, "gone")
        fill(running.url, "kept")
        record = wire.Unused(step=0, module=0, locally=["a"], globally=[])
        put(running.url, batch("gone", seq=5, unused=[record], events=[wire.Event(kind="goodbye", at_ns=1)]))
        assert httpx.delete(f"{running.url}/api/v1/runs/gone").status_code == 204
        assert_problem(httpx.delete(f"{running.url}/api/v1/runs/gone"), 404)
        assert len(get(running.url, "/runs/kept/steps")["columns"]["step"]) == 8
    with sqlite3.connect(running.database) as database:
        for table in {table.name for table in schema.metadata.sorted_tables if table not in schema.REFERENCE_TABLES}:
            rows = database.execute(f"select count(*) from {table} where run_id = 'gone'").fetchone()
            assert rows == (0,), table


def test_a_run_is_finished_after_the_goodbye_of_every_rank(shared: Collector, run: str) -> None:
    goodbye = [wire.Event(kind="goodbye", at_ns=1)]
    for rank in range(2):
        put(shared.url, batch(run, rank=rank))
    put(shared.url, batch(run, seq=1, rank=0, events=goodbye))
    assert get(shared.url, f"/runs/{run}")["state"] == "running"
    put(shared.url, batch(run, seq=1, rank=1, events=goodbye))
    assert get(shared.url, f"/runs/{run}")["state"] == "finished"


@pytest.mark.parametrize(
    ("now_s", "last_step_s", "expected"),
    [
        (101, 100, "running"),
        (129, 70, "running"),
        (129, 60, "stalled"),
        (131, 100, "lost"),
        (500, 0, "lost"),
        (60, 60, "lost"),
    ],
)
def test_a_run_without_pulses_is_lost_and_without_steps_stalled(now_s: int, last_step_s: int, expected: str) -> None:
    counts: dict[str, Any] = dict.fromkeys(("created_ns", "commits", "steps", "emitted", "dropped"), 0)
    run = Run("r", ATTEMPT, world_size=2, ranks=2, last_seen_ns=100 * SECOND,
              last_step_seen_ns=last_step_s * SECOND, **counts)  # fmt: skip
    assert state_of_run(run, Settings(), now_s * SECOND) == expected


def test_with_a_token_only_the_health_routes_stay_public(tmp_path: Path) -> None:
    with running_collector(tmp_path, token="s3cret") as url:
        for path in ("/api/v1/runs", "/api/v1/runs/x/steps", "/metrics"):
            for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic s3cret"}):
                refused = httpx.get(url + path, headers=headers)
                assert_problem(refused, 401)
                assert refused.headers["www-authenticate"].startswith("Bearer")
        assert_problem(put(url, batch("x")), 401)
        bearer = {"Authorization": "Bearer s3cret"}
        assert put(url, batch("x"), **bearer).status_code == 201
        for path in ("/api/v1/runs", "/metrics"):
            assert httpx.get(url + path, headers=bearer).status_code == 200
        for path in ("/healthz", "/readyz"):
            assert httpx.get(url + path).status_code == 200


def refused_start(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("ddpobs-server")), "--port", "0", *flags]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environ, check=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_without_a_token_a_public_host_is_refused_with_the_remedy(tmp_path: Path, host: str) -> None:
    ended = refused_start(tmp_path, "--host", host)
    assert ended.returncode == 2
    assert host in ended.stderr
    assert "loopback" in ended.stderr
    assert "DDPOBS_SERVER_TOKEN" in ended.stderr


def test_the_documentation_loads_only_files_of_the_collector(shared: Collector) -> None:
    page = httpx.get(f"{shared.url}/docs").text
    loaded = re.findall(r"""(?:src|href)=["']([^"']+)""", page)
    assert len(loaded) >= 2
    for address in loaded:
        absolute = urljoin(f"{shared.url}/docs", address)
        assert absolute.startswith(f"{shared.url}/")
        assert httpx.get(absolute).status_code == 200
    assert "/api/v1/runs/{run}/diagnostics" in httpx.get(f"{shared.url}/openapi.json").json()["paths"]
