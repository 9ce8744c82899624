"""Upgrades of databases with data of earlier versions."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from alembic.operations import Operations
from ddpobs_server.store import Arrival, BucketRollup, OtherSchemaError, Outcome, Store, schema
from ddpobs_server.store.database import engine, migration
from sqlalchemy import create_engine, func, select, text

from benchmarks.rig import patience
from benchmarks.rig.databases import Fresh
from ddpobs import wire
from tests.support.server.batches import ATTEMPT, batch, fingerprint, source_of, spans
from tests.support.server.migration import at_revision, insert

pytestmark = pytest.mark.wide

EARLIER = (
    "0001",
    "0002",
    "0003",
    "0004",
    "0005",
    "0006",
    "0007",
    "0008",
    "0009",
    "0010",
    "0011",
    "0012",
    "0013",
    "0014",
    "0015",
    "0016",
    "0017",
    "0018",
    "0019",
)
"""Earlier revisions of the schema that an existing database may have."""


def test_every_earlier_revision_is_tested(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path}/x.db")
    assert store.earlier_revisions() - {store.revisions()[1]} == set(EARLIER)
    store.close()


@pytest.mark.parametrize("revision", [None, *EARLIER])
def test_collectors_that_start_at_once_upgrade_the_schema_once(
    fresh: Fresh, tmp_path: Path, revision: str | None
) -> None:
    url, together = fresh(tmp_path), threading.Barrier(4)
    if revision is not None:
        at_revision(url, revision)

    def start(_: int) -> int:
        together.wait(60)
        store = Store(url)
        store.migrate()
        count = len(store.runs(10))
        store.close()
        return count

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(start, range(4))) == [0 if revision is None else 1] * 4


def test_a_connection_retries_if_sqlite_does_not_wait_for_others_that_open_the_file() -> None:
    busy = sqlite3.OperationalError("database is locked")
    busy.sqlite_errorcode = sqlite3.SQLITE_BUSY
    io_error = sqlite3.OperationalError("disk I/O error")
    io_error.sqlite_errorcode = sqlite3.SQLITE_IOERR
    cursor = Mock(execute=Mock(side_effect=[busy, busy, None]))
    engine._use_write_ahead_log(cursor)
    assert cursor.execute.call_count == 3
    with pytest.raises(sqlite3.OperationalError, match="I/O"):
        engine._use_write_ahead_log(Mock(execute=Mock(side_effect=[busy, io_error])))


def test_an_interrupted_upgrade_leaves_the_schema_unchanged(
    fresh: Fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = fresh(tmp_path)
    at_revision(url, "0001")
    store = Store(url)
    with monkeypatch.context() as interruption:
        # Revision 0003 creates a table last.
        interruption.setattr(Operations, "create_table", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.migrate()
    assert store.revisions()[0] == "0001"
    store.migrate()
    assert [run.run for run in store.runs(10)] == ["old"]
    store.close()


_KILLED = """
import os, signal, sys
from alembic.operations import Operations
from ddpobs_server.store import Store
Operations.drop_table = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
Store(sys.argv[1]).migrate()
"""


def test_a_kill_during_an_upgrade_leaves_the_earlier_schema(fresh: Fresh, tmp_path: Path) -> None:
    url = fresh(tmp_path)
    at_revision(url, "0004")
    # Revision 0005 drops a table after it has converted the rows.
    done = subprocess.run([sys.executable, "-c", _KILLED, url], check=False, timeout=patience.HANG_S)
    assert done.returncode == -signal.SIGKILL
    store = Store(url)
    assert store.revisions()[0] == "0004"
    store.migrate()
    assert store.bucket_rollups("old", ATTEMPT, 100)[0][0].comm_ns == 2**41
    store.close()


def test_an_older_collector_stores_nothing_in_a_newer_schema(fresh: Fresh, tmp_path: Path) -> None:
    url = fresh(tmp_path)
    older = Store(url)
    older.migrate()
    newer = create_engine(url)
    with ThreadPoolExecutor(1) as pool:
        with newer.begin() as connection:
            if newer.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(migration._LOCK)))
            connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
            sent = pool.submit(older.ingest, [Arrival(batch("run"), bytes(32), 1, 1)])
            with pytest.raises(TimeoutError):
                sent.result(0.5)
        with pytest.raises(OtherSchemaError, match="to 9999: stop this collector and upgrade it"):
            sent.result(patience.HANG_S)
    assert older.runs(10) == []
    newer.dispose()
    older.close()


@pytest.mark.parametrize("revision", EARLIER)
def test_rows_of_an_older_version_can_be_read(fresh: Fresh, tmp_path: Path, revision: str) -> None:
    url = fresh(tmp_path)
    at_revision(url, revision)
    store = Store(url)
    store.migrate()
    (run,) = store.runs(10)
    assert (run.run, run.ranks, run.ended) == ("old", 2, 2)
    ranks, rows = store.steps("old", ATTEMPT)
    assert ranks.tolist() == [0, 1] * 10
    assert rows.own_ns.tolist() == [95_000_000] * 20
    ranks, bucket_spans = store.spans("old", ATTEMPT, rank=1, first=3, last=4)
    assert ranks.tolist() == [1] * 4
    np.testing.assert_array_equal(bucket_spans.done_ns, spans(3, 2).done_ns)
    store.close()


@pytest.mark.parametrize("revision", EARLIER)
def test_an_upgrade_keeps_the_rows_of_tables_that_it_rebuilds(fresh: Fresh, tmp_path: Path, revision: str) -> None:
    url = fresh(tmp_path)
    at_revision(url, revision)
    store = Store(url)
    store.migrate()
    with store._engine.connect() as connection:
        batches = connection.execute(select(schema.batches.c.source, schema.batches.c.digest)).all()
        histogram = connection.execute(select(schema.step_histogram.c.source, schema.step_histogram.c.steps)).all()
        unused = connection.execute(select(schema.unused.c.module, schema.unused.c.names)).all()
    assert sorted(unused) == [(0, 0), (1, 1)]
    assert sorted(batches) == [(source_of(rank), bytes(32)) for rank in range(2)]
    assert sorted(histogram) == [(source_of(rank), 10) for rank in range(2)]
    store.close()


def test_an_upgrade_reads_the_unused_sets_of_one_source_at_a_time(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    at_revision(url, "0003")
    engine, body = (
        create_engine(url),
        wire.pack_json(wire.Unused(step=1, module=3, locally=["x" * 100_000], globally=[])),
    )
    with engine.begin() as connection:
        for source in range(200):
            key = {"run_id": "old", "source": source_of(10 + source), "seq": 0, "position": 0}
            insert(connection, "unused", **key, body=body.decode())
    engine.dispose()
    store = Store(url)
    tracemalloc.start()
    store.migrate()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with store._engine.connect() as connection:
        unused = connection.execute(select(schema.unused.c.module, schema.unused.c.names)).all()
    assert sorted(unused) == [(0, 0), (1, 1), *[(3, 1)] * 200]
    assert peak < 100 * len(body)
    store.close()


@pytest.mark.parametrize("revision", [revision for revision in EARLIER if revision < "0006"])
def test_an_upgrade_finds_how_each_source_ended(fresh: Fresh, tmp_path: Path, revision: str) -> None:
    url = fresh(tmp_path)
    at_revision(url, revision)
    engine = create_engine(url)
    with engine.begin() as connection:
        body = wire.pack_json(wire.Event(kind="failed", at_ns=0, detail={"error": "ValueError"})).decode()
        key = {"run_id": "old", "source": source_of(1), "seq": 0, "position": 0}
        insert(connection, "events", **key, kind="failed", body=body)
    engine.dispose()
    store = Store(url)
    store.migrate()
    sources = store.sources("old", ATTEMPT)
    assert [(source.ended, source.stuck_ns) for source in sources] == [("finished", 0), ("failed", 0)]
    arrival = Arrival(batch("old", 1, fingerprints=[fingerprint(0)]), bytes(32), 1, 1)
    assert store.ingest([arrival]) == [Outcome.STORED]
    store.close()


@pytest.mark.parametrize("revision", EARLIER)
def test_an_upgrade_keeps_every_sum(fresh: Fresh, tmp_path: Path, revision: str) -> None:
    url = fresh(tmp_path)
    at_revision(url, revision)
    store = Store(url)
    store.migrate()
    aggregates = store.aggregates(0, workspace="default")
    times = {"steps": 20, "compute_ns": 10 + 11, "comm_ns": 2**41}
    buckets = [BucketRollup(module=0, revision=1, bucket=bucket, exposed_ns=2 * bucket, **times) for bucket in (0, 1)]
    assert store.bucket_rollups("old", ATTEMPT, 100) == (buckets, False)
    assert aggregates.buckets == []  # No layout names them.
    assert aggregates.phases == {"old": ((0, 1), (10, 10), *((5, 5),) * (1 + len(wire.PHASES)))}
    assert aggregates.peers["old"][:3] == ((0, 1), (10, 10), (3, 3))
    store.close()


@pytest.mark.parametrize("revision", [None, *EARLIER])
def test_sqlite_stores_narrow_rows_in_key_order_alone(tmp_path: Path, revision: str | None) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    if revision is not None:
        at_revision(url, revision)
    store = Store(url)
    store.migrate()
    with store._engine.connect() as connection:
        tables = connection.execute(text("SELECT name, wr FROM pragma_table_list")).all()
    without_rowid = {str(name) for name, flag in tables if flag}
    assert without_rowid == {"batches", "rollups", "step_histogram", "peer_totals", "host_totals"}
    store.close()
