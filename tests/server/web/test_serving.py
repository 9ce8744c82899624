"""Log lines of the collector's start and end at the default level."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from ddpobs_server.store.database import migration
from sqlalchemy import create_engine

from benchmarks.rig import databases
from benchmarks.rig.collector import Collector, collector


def lines_of(running: Collector) -> list[dict[str, Any]]:
    running.end()
    return [json.loads(line) for line in running.log.read_text().splitlines()]


@pytest.mark.parametrize(
    ("settings", "access"),
    [({}, "no token needed (loopback only)"), ({"token": "a-token-of-its-own", "host": "0.0.0.0"}, "token needed")],
)
def test_the_start_prints_one_line_with_address_database_and_access(
    tmp_path: Path, settings: dict[str, Any], access: str
) -> None:
    with collector(tmp_path, **settings) as running:
        start, end = lines_of(running)
    assert start["event"] == f"ddpobs-server: {running.url}, database sqlite:///{tmp_path}/runs.db, {access}"
    assert "written" in end["event"]


def test_the_address_of_an_ipv6_host_is_a_url(tmp_path: Path) -> None:
    with collector(tmp_path, host="::1") as running:
        assert running.url.startswith("http://[::1]:")


def test_debug_prints_the_migrations(tmp_path: Path) -> None:
    with collector(tmp_path, log_level="debug", database_url=databases.sqlite(tmp_path)) as running:
        assert any("Running upgrade" in line["event"] for line in lines_of(running))


def test_an_upgrade_of_an_older_database_prints_one_line_more(tmp_path: Path) -> None:
    create_database(tmp_path, revision="0004")
    with collector(tmp_path) as running:
        upgrade, start, _ = lines_of(running)
    assert upgrade["event"].startswith("database schema upgraded from 0004 to ")
    assert start["event"].startswith("ddpobs-server: ")
    with collector(tmp_path) as running:
        assert len(lines_of(running)) == 2


def create_database(folder: Path, revision: str) -> None:
    config = migration._alembic()
    with create_engine(f"sqlite:///{folder}/runs.db").begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
