"""A database that loses commits is noticed: its file removed or replaced, or its pages damaged."""

from __future__ import annotations

import os
import shutil
import sqlite3
import traceback
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from ddpobs_server.operations import commands, retention
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, LostDatabaseError, Store
from ddpobs_server.store.database import database_errors, database_lock
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from benchmarks.rig import databases, patience
from benchmarks.rig.collector import Collector, collector
from ddpobs import wire
from tests.support.server.batches import assert_problem, batch, put, spans, steps


def remove(file: Path) -> None:
    file.unlink()


def move_away(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))


def replace(file: Path) -> None:
    shutil.copy(file, file.with_name("copy"))
    file.with_name("copy").rename(file)


def remove_log(file: Path) -> None:
    Path(f"{file}-wal").unlink()


@pytest.mark.parametrize("change", [remove, move_away, replace, remove_log])
def test_no_batch_is_acknowledged_after_the_database_file_changed(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    with collector(tmp_path) as running:
        assert put(running.url, batch("x", steps=steps(0, 2))).status_code == 201
        change(running.database)
        assert_problem(put(running.url, batch("x", seq=1, steps=steps(2, 2))), 503)
        assert "removed, replaced or damaged" in assert_problem(httpx.get(f"{running.url}/readyz"), 503)["detail"]
        assert str(running.database) in running.log.read_text()


def test_a_database_file_that_is_moved_back_is_used_again(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        move_away(running.database)
        assert put(running.url, batch("x", steps=steps(0, 2))).status_code == 503
        (tmp_path / "elsewhere").rename(running.database)
        assert put(running.url, batch("x", steps=steps(0, 2))).status_code == 201


def test_every_commit_to_a_removed_file_is_refused(tmp_path: Path) -> None:
    store = Store(databases.sqlite(tmp_path))
    store.migrate()
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(LostDatabaseError, match="was removed"):
        store.revoke_token("00000000", 1)
    with pytest.raises(LostDatabaseError, match="was removed"):
        store.delete("x")
    store.close()


def restore(running: Collector, backup: Path) -> tuple[int, str]:
    done = CliRunner().invoke(commands.cli, ["restore", str(backup), "--database-url", f"sqlite:///{running.database}"])
    return done.exit_code, done.stderr


def test_a_restore_is_refused_while_a_collector_runs_without_its_file(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        store = Store(f"sqlite:///{tmp_path}/backup")
        store.migrate()
        store.close()
        for name in ("runs.db", "runs.db-wal", "runs.db-shm"):
            (tmp_path / name).rename(tmp_path / f"{name}.old")
        code, message = restore(running, tmp_path / "backup")
        assert (code, running.database.exists()) == (1, False)
        assert "a collector uses it: stop it first" in message
        running.end()
        assert restore(running, tmp_path / "backup")[0] == 0


def test_a_collector_does_not_start_during_a_restore(tmp_path: Path) -> None:
    with (
        database_lock.held(tmp_path / "runs.db", alone=True),
        pytest.raises(RuntimeError, match="a restore is in progress"),
        collector(tmp_path),
    ):
        pass
    with collector(tmp_path) as running:
        assert running.url


def test_collectors_share_the_lock(tmp_path: Path) -> None:
    database = tmp_path / "runs.db"
    with database_lock.held(database, alone=False), database_lock.held(database, alone=False):
        assert Path(f"{database}.lock").exists()


def damage(file: Path) -> int:
    """Overwrite all pages but the first, as a broken disk may; return their number."""
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    connection.close()
    with file.open("r+b") as pages_of_file:
        for page in range(1, pages):
            pages_of_file.seek(page * size)
            pages_of_file.write(os.urandom(size))
    return int(pages)


def test_a_damaged_database_is_not_ready_and_acknowledges_nothing(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        for seq in range(20):
            put(running.url, batch("x", seq=seq, steps=steps(2 * seq, 2), spans=spans(2 * seq, 2)))
        assert damage(running.database) > 13
        for seq in range(20, 23):
            assert_problem(put(running.url, batch("x", seq=seq, steps=steps(2 * seq, 2))), 503)
        assert_problem(httpx.get(f"{running.url}/readyz"), 503)
        assert "ddpobs-server check" in running.log.read_text()


def test_damage_that_a_direct_call_of_the_driver_meets_is_remembered(tmp_path: Path) -> None:
    database = databases.sqlite(tmp_path)
    Store(database).migrate()
    file = tmp_path / Path(database).name
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        roots = connection.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = 'batches' AND rootpage > 0")
        pages = [page for (page,) in roots]
    connection.close()
    with file.open("r+b") as pages_of_file:
        for page in pages:
            pages_of_file.seek((page - 1) * size)
            pages_of_file.write(os.urandom(size))
    store = Store(database)
    sent = wire.decode(wire.encode(batch("x", steps=steps(0, 2))))
    with pytest.raises(LostDatabaseError, match="damaged") as raised:
        store.ingest([Arrival(sent, b"", 1, 1)])
    assert "execute_one" in [frame.name for frame in traceback.extract_tb(raised.tb)]
    with pytest.raises(LostDatabaseError, match="damaged"):
        store.ready()
    store.close()


@pytest.mark.parametrize("code", ["XX001", "XX002"])
def test_damage_of_postgresql_is_remembered(postgresql: databases.Fresh, tmp_path: Path, code: str) -> None:
    store = Store(postgresql(tmp_path))
    store.migrate()
    with store._engine.connect() as connection, pytest.raises(LostDatabaseError):
        connection.exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{code}'; END $$")
    with pytest.raises(LostDatabaseError, match="damaged"):
        store.ready()
    store.close()


@pytest.mark.parametrize("table", ["batches", "layouts", "step_histogram"])
def test_a_database_without_a_table_is_not_ready_before_a_batch_arrives(store: Store, table: str) -> None:
    store.check_health()
    with store._engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER TABLE {table} RENAME TO renamed")
    with pytest.raises(Exception, match=table):
        store.check_health()


def test_a_health_check_leaves_no_row(store: Store) -> None:
    store.check_health()
    assert store.count_runs("default") == 0


def test_a_locked_database_is_not_damaged() -> None:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    assert not database_errors.is_damage(error)


def test_retention_of_a_removed_database_logs_one_line_a_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "_PERIOD_S", 0.01)
    url = databases.sqlite(tmp_path)
    store = Store(url)
    store.migrate()
    Path(url.removeprefix("sqlite:///")).unlink()
    job = retention.RetentionJob(Settings(), store, CollectorRegistry())
    job.start()
    patience.until(lambda: caplog.records)
    job.close()
    store.close()
    record = caplog.records[0]
    assert "was removed while the collector had it open" in record.getMessage()
    assert record.exc_info is None
