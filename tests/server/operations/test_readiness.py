"""Readiness, `database_up` and `check` fail for every reason for which ingest refuses all batches."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from ddpobs_server.app import create_app
from ddpobs_server.operations import self_check
from ddpobs_server.settings import Settings
from ddpobs_server.store import Store, UnavailableError

from benchmarks.rig import patience
from benchmarks.rig.collector import collector
from tests.support.server.batches import assert_problem, batch, get, put, steps
from tests.support.server.own_metrics import metrics
from tests.support.server.serving import served

ABOVE_ALL_DISKS_MB = 10**12


def _remove_file(database: Path) -> None:
    database.unlink()


def _drop_table(database: Path) -> None:
    with sqlite3.connect(database, timeout=patience.HANG_S) as connection:
        connection.execute("DROP TABLE step_bins")
    connection.close()


def _upgrade(database: Path) -> None:
    """As a collector of a newer version that starts on this database."""
    with sqlite3.connect(database, timeout=patience.HANG_S) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()


def _nothing(_: Path) -> None:
    """The setting is the reason."""


REASONS: dict[str, tuple[Callable[[Path], None], dict[str, Any], int]] = {
    "removed file": (_remove_file, {}, 503),
    "missing table": (_drop_table, {}, 500),
    "newer schema": (_upgrade, {}, 503),
    "too little space": (_nothing, {"keep_free_mb": ABOVE_ALL_DISKS_MB}, 507),
}


@pytest.mark.parametrize("reason", REASONS)
def test_readiness_and_the_metric_agree_with_ingest(tmp_path: Path, reason: str) -> None:
    with collector(tmp_path) as earlier:
        put(earlier.url, batch("before", steps=steps(0, 2)))
    cause, settings, status = REASONS[reason]
    with served(create_app(Settings(database_url=f"sqlite:///{tmp_path}/runs.db", **settings))) as (host, port):
        url = f"http://{host}:{port}"
        httpx.get(f"{url}/healthz", timeout=patience.HANG_S).raise_for_status()
        cause(tmp_path / "runs.db")
        assert_problem(put(url, batch("run", steps=steps(0, 2))), status)
        patience.until(lambda: metrics(url)("database_up") == 0)
        assert_problem(httpx.get(f"{url}/readyz"), 503)


def test_a_collector_is_ready_while_a_clusters_size_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Store) -> int:
        raise UnavailableError("could not connect to 10.0.0.2:5432 to get size of relation", full=False)

    monkeypatch.setattr(Store, "size_bytes", refuse)
    with served(create_app(Settings(database_url=f"sqlite:///{tmp_path}/runs.db"))) as (host, port):
        assert httpx.get(f"http://{host}:{port}/readyz").status_code == 200


def test_with_too_little_space_reads_and_scrapes_go_on_and_check_fails(tmp_path: Path) -> None:
    with collector(tmp_path) as earlier:
        put(earlier.url, batch("before", steps=steps(0, 2)))
    settings = Settings(database_url=f"sqlite:///{tmp_path}/runs.db", keep_free_mb=ABOVE_ALL_DISKS_MB)
    with served(create_app(settings)) as (host, port):
        url = f"http://{host}:{port}"
        assert [run["run"] for run in get(url, "/runs")["runs"]] == ["before"]
        assert 'run="before"' in httpx.get(f"{url}/metrics").text
        assert "too little space is free" in assert_problem(httpx.get(f"{url}/readyz"), 503)["detail"]
    (disk,) = (result for result in self_check.run(settings, integrity=False) if result.name == "disk")
    assert (disk.state, "KEEP_FREE_MB" in disk.detail) == ("fail", True)


def test_a_token_that_can_be_guessed_is_warned_of(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("x\n")
    with collector(tmp_path, token_file=tokens) as running:
        patience.until(lambda: "a token has 1 characters and can be guessed" in running.log.read_text())
    database = f"sqlite:///{tmp_path}/runs.db"
    for settings, states in (({"token": "x"}, ["warn"]), ({"token": "x" * 16}, [])):
        results = self_check.run(Settings(database_url=database, **settings), integrity=False)  # type: ignore[arg-type]
        assert [result.state for result in results if result.name == "token"] == states
