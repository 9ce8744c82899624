"""Shares, limits and usage of workspaces, on a real collector."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.rig import databases
from benchmarks.rig.collector import running_collector
from ddpobs import wire
from tests.support.server.batches import assert_problem, batch, path, put, spans, steps
from tests.support.server.tenants import bearer, stuck_clients

pytestmark = pytest.mark.wide

SERVER = str(Path(sys.executable).with_name("ddpobs-server"))


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return databases.sqlite(tmp_path)


@pytest.fixture
def loud(database_url: str) -> dict[str, str]:
    return bearer(database_url, "loud")


@pytest.fixture
def quiet(database_url: str) -> dict[str, str]:
    return bearer(database_url, "quiet")


@pytest.fixture
def url(tmp_path: Path, database_url: str, loud: dict[str, str], quiet: dict[str, str]) -> Iterator[str]:
    with running_collector(tmp_path, database_url=database_url, max_under_way_mb=8, min_pace_kb_s=1) as address:
        yield address


def set_limits(database_url: str, *options: str) -> str:
    command = [SERVER, "workspace", "limits", "loud", *options, "--database-url", database_url]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def usage_of(url: str, headers: dict[str, str]) -> dict[str, Any]:
    answer = httpx.get(f"{url}/api/v1/workspaces", headers=headers).json()
    usage: dict[str, Any] = answer["workspaces"][0]["usage"]
    return usage


def test_unfinished_bodies_of_a_workspace_leave_memory_to_another(
    url: str, loud: dict[str, str], quiet: dict[str, str]
) -> None:
    head = f"PUT {path(batch('a'))}"
    headers = loud | {"Content-Type": wire.MSGPACK, "Content-Length": "3000000"}
    with stuck_clients(url, 12, head, headers, bytes(700_000)):
        deadline = time.monotonic() + 30
        while "Busy" not in (used := usage_of(url, loud))["refused"]:
            assert time.monotonic() < deadline, "no body is refused: five of them fill the share of 4 MB"
            time.sleep(0.1)
        assert used["under_way_bytes"] <= 4_000_000
        answers = [put(url, batch("b", seq, steps=steps(seq, 1)), **quiet).status_code for seq in range(5)]
    assert answers == [201] * 5


def test_a_body_below_the_least_pace_is_refused(tmp_path: Path) -> None:
    with running_collector(tmp_path, min_pace_kb_s=50, upload_timeout_s=600) as url:
        headers = {"Content-Type": wire.MSGPACK, "Content-Length": "3000000"}
        with stuck_clients(url, 1, f"PUT {path(batch('a'))}", headers, bytes(1000)):
            deadline = time.monotonic() + 40
            while 'problem="Upload too slow",status="408"} 1.0' not in httpx.get(f"{url}/metrics").text:
                assert time.monotonic() < deadline, "the unfinished body still holds memory"
                time.sleep(0.5)


def test_unread_answers_of_a_workspace_leave_reads_to_another_and_small_answers_to_itself(
    url: str, loud: dict[str, str], quiet: dict[str, str]
) -> None:
    for seq in range(8):
        put(url, batch("large", seq, spans=spans(5000 * seq, 5000)), **loud)
    put(url, batch("small", steps=steps(0, 1)), **quiet)
    with stuck_clients(url, 24, "GET /api/v1/runs/large/spans", loud):
        time.sleep(1)
        for headers, name in ((quiet, "small"), (loud, "large")):
            for route in ("/api/v1/runs", f"/api/v1/runs/{name}/diagnostics", "/metrics"):
                assert httpx.get(url + route, headers=headers, timeout=20).status_code == 200


def test_stored_limits_apply_within_seconds_and_usage_is_listed(
    url: str, database_url: str, loud: dict[str, str], quiet: dict[str, str]
) -> None:
    assert "max_runs" in set_limits(database_url, "--max-runs", "1", "--batches-per-s", "1")
    time.sleep(6)
    assert put(url, batch("one", steps=steps(0, 1)), **loud).status_code == 201
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda seq: put(url, batch("one", seq, steps=steps(seq, 1)), **loud), range(1, 13)))
        assert put(url, batch("one"), **quiet).status_code == 201
    assert {answer.status_code for answer in answers} == {201, 429}
    too_fast = [assert_problem(answer, 429)["title"] for answer in answers if answer.status_code == 429]
    time.sleep(6)
    assert assert_problem(put(url, batch("two"), **loud), 429)["title"] == "Too many runs"
    (row,) = httpx.get(f"{url}/api/v1/workspaces", headers=loud).json()["workspaces"]
    assert (row["workspace"], row["limits"]["max_runs"], row["usage"]["runs"]) == ("loud", 1, 1)
    assert row["usage"]["refused"] == {"Too fast": len(too_fast), "Too many runs": 1}
    assert row["usage"]["stored_bytes"] > 0
    set_limits(database_url, "--reset")
    assert "stored" not in set_limits(database_url)


def test_usage_of_other_workspaces_is_shown_to_the_operator_alone(
    url: str, database_url: str, loud: dict[str, str], quiet: dict[str, str]
) -> None:
    operator = bearer(database_url, "default", "admin")
    for headers in (loud, quiet):
        assert put(url, batch("run", steps=steps(0, 1)), **headers).status_code == 201

    def names(headers: dict[str, str]) -> set[str]:
        listed = httpx.get(f"{url}/api/v1/workspaces", headers=headers).json()["workspaces"]
        metrics = httpx.get(f"{url}/metrics", headers=headers).text
        shown = {name for name in ("default", "loud", "quiet") if f'_runs{{workspace="{name}"}}' in metrics}
        assert shown == {row["workspace"] for row in listed}
        return shown

    assert names(loud) == {"loud"}
    assert names(operator) == {"default", "loud", "quiet"}


def test_changes_of_labels_count_as_batches(tmp_path: Path) -> None:
    with running_collector(tmp_path, workspace_batches_per_s=1) as address:
        assert put(address, batch("run", steps=steps(0, 1))).status_code == 201
        with ThreadPoolExecutor(8) as pool:
            change = partial(httpx.patch, f"{address}/api/v1/runs/run", timeout=60)
            answers = list(pool.map(lambda number: change(json={"note": str(number)}), range(8)))
        assert {answer.status_code for answer in answers} == {200, 429}
