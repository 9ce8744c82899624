"""Files that are uploaded: the run that they make, and files and clients that are refused with nothing stored."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.rig.collector import Collector, collector
from tests.support.profiler_traces import trace
from tests.support.server.batches import assert_problem, get
from tests.support.server.tokens import create_token
from tests.support.straggler_operations import operations, write

BINARY = {"Content-Type": "application/octet-stream"}
DUMP = {
    "process_group": ["0", "default_pg"],
    "profiling_name": "nccl:all_reduce",
    "time_created_ns": 1_700_000_000 * 10**9,
}


def upload(url: str, run: str, files: dict[str, bytes], **options: Any) -> httpx.Response:
    sizes = {"file": [f"{name}:{len(content)}" for name, content in files.items()]}
    options = {"headers": BINARY, "content": b"".join(files.values())} | options
    return httpx.post(f"{url}/api/v1/runs/{run}/import", params=sizes, timeout=60, **options)


def traces(folder: Path, **fields: int) -> dict[str, bytes]:
    names = [f"rank{rank}.json" for rank in range(2)]
    return {name: trace(folder, name, rank=rank, **fields).read_bytes() for rank, name in enumerate(names)}


def test_files_of_two_ranks_become_a_run(shared: Collector, run: str, tmp_path: Path) -> None:
    answer = upload(shared.url, run, traces(tmp_path))
    assert (answer.status_code, answer.json()["run"]) == (201, run), answer.text
    assert answer.json()["lines"][0] == "3 steps of ranks 0 and 1"
    assert get(shared.url, f"/runs/{run}")["state"] == "finished"
    assert get(shared.url, f"/runs/{run}/steps")["columns"]["step"] == [5, 5, 6, 6, 7, 7]
    assert upload(shared.url, run, traces(tmp_path)).status_code == 200
    assert len(get(shared.url, f"/runs/{run}/attempts")["attempts"]) == 1


def test_dumps_of_a_hang_become_a_run_with_its_finding(shared: Collector, run: str) -> None:
    waits, left = ({**DUMP, "collective_seq_id": number, "retired": number == 8} for number in (9, 8))
    dumps = {f"rank_{rank}": json.dumps({"entries": [entry]}).encode() for rank, entry in enumerate((waits, left))}
    assert upload(shared.url, run, dumps).status_code == 201
    (finding,) = get(shared.url, f"/runs/{run}/diagnostics")["findings"]
    assert finding["verdict"] == "The ranks hang in all_reduce 9 of group default_pg, waiting for rank 1"
    assert finding["cause"] == "rank 1 last called all_reduce 8; rank 0 waits in all_reduce 9"
    assert (finding["code"], finding["ranks"], finding["evidence"]["waiting"]) == ("hang", [1], [0])
    assert finding["when"] == "the last call of rank 0 was at 2023-11-14 22:13:20 UTC"
    (attempt,) = get(shared.url, f"/runs/{run}/attempts")["attempts"]
    assert (attempt["began_ns"], attempt["ended_ns"]) == (None, None)
    report = httpx.get(f"{shared.url}/api/v1/runs/{run}/report.html").text
    assert "the last call of rank 0 was at 2023-11-14 22:13:20 UTC" in report
    assert re.search(r"<dt>uploaded</dt><dd>20\d\d-\d\d-\d\d .* UTC</dd>", report)
    assert not re.search(r"<(?:dt|th)>(first seen|last seen|recorded|began|ended)<", report)


def test_a_trace_has_the_times_that_it_covers_and_not_that_of_its_upload(
    shared: Collector, run: str, tmp_path: Path
) -> None:
    began_s = 1_700_000_000
    assert upload(shared.url, run, traces(tmp_path, baseTimeNanoseconds=began_s * 10**9)).status_code == 201
    (attempt,) = get(shared.url, f"/runs/{run}/attempts")["attempts"]
    took_ns = attempt["ended_ns"] - attempt["began_ns"]
    assert attempt["began_ns"] // 10**9 == began_s
    assert 0 < took_ns < 10**9
    (listed,) = [one for one in get(shared.url, f"/runs?limit=500&search={run}")["runs"] if one["run"] == run]
    assert listed["duration_ns"] == took_ns
    report = httpx.get(f"{shared.url}/api/v1/runs/{run}/report.html").text
    summary = get(shared.url, f"/runs/{run}/diagnostics")["summary"]
    assert summary == "Too short to judge: 3 of 32 steps."  # They are the steps 5 to 7.
    assert "<dt>recorded</dt><dd>2023-11-14 22:13:20" in report
    assert "<dt>uploaded</dt>" in report


def test_a_parquet_file_becomes_a_run(shared: Collector, run: str, tmp_path: Path) -> None:
    content = write(tmp_path / "trace.parquet", operations((1, 0))).read_bytes()
    answer = upload(shared.url, run, {"trace.parquet": content})
    assert answer.status_code == 201, answer.text
    assert answer.json()["lines"][1].startswith("rank 2 arrived last in ")
    assert get(shared.url, f"/runs/{run}")["world_size"] == 4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A collector with little memory and time for imports."""
    with collector(tmp_path_factory.mktemp("small"), import_memory_mb=600, max_import_mb=30) as running:
        yield running


ABSURD = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": -(10.0**30), "dur": -1}]
# Made when they are needed: some are large.
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "not JSON": (lambda: b"no trace", "a list of events"),
    "empty": (lambda: b"", "an empty file"),
    "cut off": (lambda: b'{"traceEvents": [{"name": "a"}, {"na', "a whole list of events"),
    "broken gzip": (lambda: gzip.compress(b'{"traceEvents": []}')[:-9], "a whole gzip file"),
    "brackets": (lambda: b'{"traceEvents": [' + b"[" * 2**22, "a whole list of events"),
    "bomb": (lambda: gzip.compress(b'{"traceEvents": [' + b"[" * 2**30, 1), "at most 16 MiB"),
    "one string": (lambda: gzip.compress(b'{"traceEvents": [{"name": "' + b"a" * 2**28, 1), "at most 16 MiB"),
    "header": (lambda: gzip.compress(b'{"x": "' + b"a" * 2**28, 1), "a list of events"),
    "absurd times": (lambda: json.dumps({"traceEvents": ABSURD}).encode(), "after 0 events: Expected `float` >= "),
    "code": (lambda: b"\x80\x04cposix\nsystem\n.", "it holds posix.system"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_and_nothing_is_stored(small: Collector, tmp_path: Path, case: str) -> None:
    make, expected = HOSTILE[case]
    good = {} if case == "code" else {"rank0.json": trace(tmp_path).read_bytes()}
    problem = assert_problem(upload(small.url, "hostile", {**good, "rank_1.json": make()}), 422)
    assert problem["title"] == "Not imported"
    assert expected in problem["detail"]
    assert problem["detail"].startswith("rank_1.json: expected")
    assert httpx.get(f"{small.url}/api/v1/runs/hostile").status_code == 404
    assert httpx.get(f"{small.url}/healthz").status_code == 200


def test_files_beyond_the_memory_are_refused(small: Collector) -> None:
    event = b'{"ph":"X","cat":"user_annotation","name":"DistributedDataParallel.forward","ts":1,"dur":1}'
    packed = gzip.compress(b"[" + (event + b",") * 8_000_000 + event + b"]", 1)
    problem = assert_problem(upload(small.url, "large", {"large.json.gz": packed}), 422)
    assert "600 MB" in problem["detail"]
    assert httpx.get(f"{small.url}/api/v1/runs/large").status_code == 404


def test_reading_ends_in_time(tmp_path: Path) -> None:
    with collector(tmp_path, import_timeout_s=0.01) as running:
        problem = assert_problem(upload(running.url, "late", traces(tmp_path)), 422)
    assert "longer than 0.01 s (DDPOBS_SERVER_IMPORT_TIMEOUT_S)" in problem["detail"]


@pytest.mark.parametrize(
    ("options", "status", "detail"),
    [
        ({"params": [("file", "a.json:31000000")]}, 413, "at most 30 MB (DDPOBS_SERVER_MAX_IMPORT_MB), got 31 MB"),
        ({"params": [("file", "a.json")]}, 422, "query.file: expected NAME:BYTES"),
        ({"params": []}, 422, "file"),
        ({"params": [("file", "a.json:9")], "content": b"1"}, 422, "shorter than its files"),
        ({"params": [("file", "a.json:1")], "content": b"12"}, 422, "longer than its files"),
        ({"headers": {"Content-Type": "text/plain"}}, 415, "expected application/octet-stream"),
        ({"headers": {"Content-Type": "multipart/form-data"}}, 415, "expected application/octet-stream"),
        ({"params": [("file", "a.json:1"), ("rank", "0")]}, 422, "rank"),
    ],
)
def test_a_malformed_request_is_refused(small: Collector, options: dict[str, Any], status: int, detail: str) -> None:
    defaults = {"params": [("file", "a.json:1")], "headers": BINARY, "content": b"1"}
    answer = httpx.post(f"{small.url}/api/v1/runs/r/import", **defaults | options)
    assert detail in assert_problem(answer, status)["detail"]


def test_names_of_files_stay_in_their_folder(small: Collector, tmp_path: Path) -> None:
    names = {f"../../../{tmp_path}/owned": b"x"}
    assert "owned: expected" in assert_problem(upload(small.url, "names", names), 422)["detail"]
    assert not (tmp_path / "owned").exists()


def test_an_import_needs_the_scope_ingest_and_stays_in_its_workspace(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/runs.db"
    tokens = {
        name: create_token(url, name, workspace, scope)
        for name, workspace, scope in (("w", "team", "ingest"), ("r", "team", "read"), ("other", "else", "read"))
    }
    headers = {name: BINARY | {"Authorization": f"Bearer {token}"} for name, token in tokens.items()}
    with collector(tmp_path) as running:
        files = traces(tmp_path)
        assert upload(running.url, "mine", files).status_code == 401
        assert upload(running.url, "mine", files, headers=headers["r"]).status_code == 403
        assert upload(running.url, "mine", files, headers=headers["w"]).status_code == 201
        reads = {name: httpx.get(f"{running.url}/api/v1/runs/mine", headers=headers[name]) for name in ("r", "other")}
        assert {name: answer.status_code for name, answer in reads.items()} == {"r": 200, "other": 404}


def test_a_deleted_run_is_imported_under_another_name(small: Collector, tmp_path: Path) -> None:
    files = traces(tmp_path)
    assert upload(small.url, "gone", files).status_code == 201
    httpx.delete(f"{small.url}/api/v1/runs/gone").raise_for_status()
    assert "under another name" in assert_problem(upload(small.url, "gone", files), 410)["detail"]
    assert upload(small.url, "back", files).status_code == 201
