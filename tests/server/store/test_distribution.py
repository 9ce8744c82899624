"""The schema can be distributed over a cluster by run: its keys, and every statement of the server."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ddpobs_server.operations import fleet_totals, self_check
from ddpobs_server.operations.retention import RetentionJob
from ddpobs_server.settings import Settings
from ddpobs_server.store import NotificationKey, Store, UnusableError, schema
from ddpobs_server.store.upkeep import compaction
from prometheus_client import CollectorRegistry
from sqlalchemy.exc import SQLAlchemyError

from benchmarks.rig import databases
from ddpobs import wire
from tests.support.server.batches import ATTEMPT, batch, fingerprint
from tests.support.server.in_process import client, fill, put
from tests.support.server.statement_counts import SPREAD, assert_spreads, recorded

DAY_NS = 86_400 * 10**9
QUERIES: list[dict[str, Any]] = [{}, {"rank": 1}, {"from": 1, "to": 30}, {"attempt": ATTEMPT}, {"mean": True}]


def test_every_key_begins_with_the_run() -> None:
    for name in SPREAD:
        table = schema.metadata.tables[name]
        assert table.primary_key.columns.keys()[0] == "run_id", name
        assert [index.name for index in table.indexes if index.unique] == []
        assert [constraint for constraint in table.constraints if constraint is not table.primary_key] == []


def test_every_statement_is_confined_to_a_run(
    postgresql: databases.Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_ROWS", 50)
    monkeypatch.setattr(fleet_totals, "_PERIOD_S", 3600.0)  # Its thread would write first what the test writes.
    with client(postgresql(tmp_path)) as http, recorded() as executed:
        for run in ("a", "b"):
            fill(http, run, 3)
        counted: dict[str, Any] = dict.fromkeys(("first_collective", "last_collective", "steps"), 1)
        columns: dict[str, Any] = {
            name: np.ones(2, np.int64) for name in wire.Peers.__struct_fields__ if name not in counted
        }
        records: dict[str, Any] = {
            "events": [wire.Event(kind="goodbye", at_ns=0)],
            "peers": [wire.Peers(**counted, **columns)],
        }
        put(http, batch("a", 9, attempt="b" * 16, source="b" * 16, **records))
        for rank in range(2):
            died = wire.Event(kind="died", at_ns=0, detail={"rank": rank, "source": "c" * 16})
            put(http, batch("a", 9, rank, fingerprints=[fingerprint(0, gradients=[rank, 1])], events=[died]))
        reads = [path for path, item in http.app.openapi()["paths"].items() if "get" in item]  # type: ignore[attr-defined]
        for path in reads:
            for query in QUERIES:
                assert http.get(path.replace("{run}", "a"), params=query).status_code in (200, 422)
        following = http.get("/api/v1/runs", params={"limit": 1}).json()["next"]
        http.get("/api/v1/runs", params={"cursor": following})
        http.app.state.services.fleet.write(time.time_ns())  # type: ignore[attr-defined]
        store: Store = http.app.state.services.store  # type: ignore[attr-defined]
        assert store.claim_notification(NotificationKey("a", ATTEMPT, "straggler", "critical"), 1, 1)
        assert sum(store.compact(0)) > 0
        RetentionJob(Settings(keep_spans_days=1, keep_gb=1e-9, keep_share=1), store, CollectorRegistry()).run_once(
            time.time_ns() + 2 * DAY_NS
        )
        assert http.delete("/api/v1/runs/b").status_code == 204
        assert store.expire_runs(time.time_ns() + DAY_NS) == 1
    for statement in set(executed):
        assert_spreads(statement)
    written = {match[1] for statement in executed if (match := re.match(r"INSERT INTO (\w+)", statement))}
    assert written - {"deleted_attempts", "audit_log"} == SPREAD
    removed = {match[1] for statement in executed if (match := re.match(r"DELETE FROM (\w+)", statement))}
    assert removed - {"deleted_attempts"} == SPREAD
    assert len(set(executed)) > 50


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM chunks WHERE chunks.rows < %(rows_1)s",
        "SELECT sum(rollups.steps) FROM rollups JOIN runs ON runs.run_id = rollups.run_id",
        "SELECT a FROM batches WHERE batches.run_id = %(r)s AND batches.source IN (SELECT sources.source FROM sources)",
        "SELECT a FROM rollups JOIN sources ON sources.source = rollups.source",
        "SELECT a FROM rollups JOIN sources ON sources.run_id = rollups.run_id WHERE rollups.run_id = %s",
        "SELECT max(sources.rank) FROM sources JOIN runs ON runs.run_id = sources.run_id GROUP BY sources.rank",
        "DELETE FROM chunks WHERE chunks.last_step < ?",
        "INSERT INTO events (source, seq) VALUES (?, ?)",
    ],
)
def test_a_statement_over_many_runs_fails_the_check(statement: str) -> None:
    with pytest.raises(AssertionError):
        assert_spreads(statement)


def test_the_statements_that_distribute_name_every_table(tmp_path: Path) -> None:
    store = Store(databases.sqlite(tmp_path))
    statements = store.distribution()
    assert {statement.split("'")[1] for statement in statements} == {*schema.metadata.tables, "alembic_version"}
    assert statements[0] == "SELECT create_distributed_table('runs', 'run_id')"
    others = [statement for statement in statements[1:] if "reference" not in statement]
    assert all("'run_id', colocate_with => 'runs')" in statement for statement in others)
    with pytest.raises(UnusableError, match="expected a PostgreSQL"):
        store.distribute()
    store.close()


CITUS = """
CREATE TABLE pg_dist_partition (logicalrelid regclass PRIMARY KEY);
CREATE FUNCTION create_distributed_table(regclass, text, colocate_with text DEFAULT 'default')
  RETURNS void LANGUAGE sql AS
  'INSERT INTO pg_dist_partition VALUES ($1)';
CREATE FUNCTION create_reference_table(regclass) RETURNS void LANGUAGE sql AS
  'INSERT INTO pg_dist_partition VALUES ($1)';
CREATE FUNCTION citus_total_relation_size(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT 1000';
CREATE FUNCTION citus_check_cluster_node_health(
  OUT from_nodename text, OUT from_nodeport int, OUT to_nodename text, OUT to_nodeport int, OUT result bool)
  RETURNS SETOF record LANGUAGE sql AS
  $$VALUES ('one', 5432, 'one', 5432, true), ('one', 5432, 'two', 5433, false), ('two', 5433, 'one', 5432, NULL)$$;
"""
"""Stand-ins for the catalog and functions of Citus. Citus also raises if a table is distributed twice."""


def test_tables_that_an_upgrade_adds_are_distributed_by_the_next_call(
    postgresql: databases.Fresh, tmp_path: Path
) -> None:
    store = Store(postgresql(tmp_path))
    store.migrate()
    with pytest.raises(SQLAlchemyError, match="pg_dist_partition"):
        store.distribute()
    with store._engine.begin() as connection:
        connection.exec_driver_sql(CITUS)
        for table in SPREAD - {"bucket_sums"}:
            connection.exec_driver_sql(f"SELECT create_distributed_table('{table}', 'run_id')")
    for _ in range(2):
        store.distribute()
    with store._engine.connect() as connection:
        distributed = connection.exec_driver_sql("SELECT logicalrelid::text FROM pg_dist_partition").scalars().all()
    assert set(distributed) == {*schema.metadata.tables, "alembic_version"}
    store.close()


def test_size_and_links_are_those_of_the_whole_cluster(postgresql: databases.Fresh, tmp_path: Path) -> None:
    url = postgresql(tmp_path)
    store = Store(url)
    store.migrate()
    assert not store.is_distributed()
    with store._engine.begin() as connection:
        connection.exec_driver_sql(CITUS)
    assert not store.is_distributed()  # Citus is installed, but nothing is distributed.
    store.distribute()
    assert store.is_distributed()
    assert store.size_bytes() == 1000 * (len(schema.metadata.tables) + 1)
    store.close()
    results = {result.name: result for result in self_check.run(Settings(database_url=url))}
    assert results["cluster"].state == "fail"
    assert results["cluster"].detail == "unreachable: one:5432 to two:5433, two:5433 to one:5432"
