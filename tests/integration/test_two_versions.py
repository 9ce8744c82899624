"""Collectors of two versions on one database during an upgrade."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from benchmarks.rig import databases, patience
from benchmarks.rig.collector import collector
from ddpobs.export import http_sender
from tests.support.integration.faults import Proxy, Ranks, RestartableCollector, assert_stored_once, push, serving

pytestmark = pytest.mark.wide
OLDER = """
from alembic import command
from ddpobs_server import app
from ddpobs_server.store.database import migration
upgrade = command.upgrade
command.upgrade = lambda config, _: upgrade(config, "0016")
migration._head = lambda: "0016"
app.main()
"""
"""A collector of schema 0016. The tables of later revisions take no part in the ingest."""


def test_ranks_go_from_an_older_collector_to_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_sender, "_LONGEST_PAUSE_S", 0.3)
    with ExitStack() as stack:
        url = stack.enter_context(databases.postgresql())(tmp_path)
        command = [sys.executable, "-c", OLDER, "serve"]
        older = stack.enter_context(collector(tmp_path, command, database_url=url))
        newer = stack.enter_context(RestartableCollector(tmp_path / "newer", start=False, database_url=url))
        balancer = Proxy(older.url)
        with serving(balancer) as address, Ranks(address, "upgraded", tmp_path / "spool") as ranks:
            patience.until(lambda: _batches(older.url) >= 20)
            newer.start()
            patience.until(lambda: httpx.get(f"{older.url}/readyz").status_code == 503)
            stored = _batches(older.url)
            balancer.upstreams = Proxy(newer.url).upstreams  # As a balancer does that looks at /readyz.
            newer.wait_for_batches(20)
            assert _batches(older.url) == stored
        push(ranks.spool, newer.url)
        assert_stored_once(newer.url, "upgraded", ranks.steps)


def _batches(url: str) -> float:
    metrics = httpx.get(f"{url}/metrics?only=collector").text.splitlines()
    (count,) = (line.split()[1] for line in metrics if line.startswith('ddpobs_server_batches_total{outcome="stored"}'))
    return float(count)
