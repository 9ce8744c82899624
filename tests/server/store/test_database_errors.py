"""Database errors that may pass are `UnavailableError`; other errors stay as they are."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ddpobs_server.store import Store, UnavailableError
from ddpobs_server.store.database import database_errors
from ddpobs_server.store.upkeep import removal
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DatabaseError, DBAPIError

from benchmarks.rig import databases


def engine(url: str, **arguments: float) -> Engine:
    result = create_engine(url, connect_args=arguments)
    event.listen(result, "handle_error", database_errors.translate, retval=True)
    return result


@pytest.mark.parametrize(
    ("condition", "full"),
    [("disk_full", True), ("deadlock_detected", False), ("cannot_connect_now", False), ("too_many_connections", False)],
)
def test_a_passing_error_of_postgresql_is_an_unavailable_error(
    postgresql: databases.Fresh, tmp_path: Path, condition: str, full: bool
) -> None:
    with (
        engine(postgresql(tmp_path)).connect() as connection,
        pytest.raises(UnavailableError) as error,
    ):
        connection.exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{condition}'; END $$")
    assert error.value.full is full


def test_a_commit_that_a_clusters_node_lost_may_be_repeated(postgresql: databases.Fresh, tmp_path: Path) -> None:
    lost = "could not commit transaction for shard 102140 on at least one active node"
    with engine(postgresql(tmp_path)).connect() as connection, pytest.raises(UnavailableError, match=lost):
        connection.exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION '{lost}' USING ERRCODE = 'XX000'; END $$")


def test_a_read_only_postgresql_is_unavailable_and_the_next_call_reconnects(
    postgresql: databases.Fresh, tmp_path: Path
) -> None:
    store = Store(postgresql(tmp_path))
    store.migrate()
    with store._engine.connect() as connection:
        session: Any = connection.connection.driver_connection
        connection.exec_driver_sql("SET default_transaction_read_only = on")  # As after a failover to another server.
        connection.commit()
    with pytest.raises(UnavailableError, match="read-only"):
        store.delete("any")
    assert session.closed
    assert not store.delete("any")
    store.close()


def test_a_locked_sqlite_file_is_an_unavailable_error(tmp_path: Path) -> None:
    url = databases.sqlite(tmp_path)
    with engine(url).connect() as holder, engine(url, timeout=0.1).connect() as connection:
        holder.exec_driver_sql("BEGIN EXCLUSIVE")
        with pytest.raises(UnavailableError, match="locked"):
            connection.exec_driver_sql("CREATE TABLE numbers (n INTEGER)")


@contextmanager
def with_free_pages(tmp_path: Path) -> Iterator[tuple[Engine, Any]]:
    """Engine of a file with free pages, and the driver's connection that the store uses next."""
    store = Store(databases.migrated_sqlite(tmp_path))
    with store._engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE large (bytes BLOB)")
        connection.exec_driver_sql("INSERT INTO large VALUES (zeroblob(1000000))")
        connection.exec_driver_sql("DROP TABLE large")
    with store._engine.connect() as connection:
        driver = connection.connection.driver_connection
    yield store._engine, driver
    store.close()


def test_a_vacuum_of_a_locked_file_is_an_unavailable_error(tmp_path: Path) -> None:
    with with_free_pages(tmp_path) as (store_engine, driver), engine(str(store_engine.url)).connect() as holder:
        driver.execute("PRAGMA busy_timeout=10")
        holder.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(UnavailableError, match="locked") as error:
            removal.vacuum(store_engine)
        assert not error.value.full
        holder.rollback()
        removal.vacuum(store_engine)
        assert driver.execute("PRAGMA freelist_count").fetchone() == (0,)


def test_a_log_that_cannot_be_truncated_leaves_the_busy_timeout_unchanged(tmp_path: Path) -> None:
    def authorize(_action: int, name: str | None, *_: object) -> int:
        return sqlite3.SQLITE_DENY if name == "wal_checkpoint" else sqlite3.SQLITE_OK

    with with_free_pages(tmp_path) as (store_engine, driver):
        timeout_ms = driver.execute("PRAGMA busy_timeout").fetchone()
        driver.set_authorizer(authorize)
        with pytest.raises(DatabaseError, match="authorized"):
            removal.vacuum(store_engine)
        assert driver.execute("PRAGMA busy_timeout").fetchone() == timeout_ms != (0,)


def test_an_error_in_a_statement_stays_a_database_error(fresh: databases.Fresh, tmp_path: Path) -> None:
    with engine(fresh(tmp_path)).connect() as connection, pytest.raises(DBAPIError, match="nowhere"):
        connection.exec_driver_sql("SELECT * FROM nowhere")


def test_a_store_without_a_free_connection_is_unavailable(fresh: databases.Fresh, tmp_path: Path) -> None:
    store = Store(fresh(tmp_path))
    pool: Any = store._engine.pool
    pool._timeout = 0.1
    with ExitStack() as connections:
        for _ in range(pool.size() + pool._max_overflow):
            connections.enter_context(store._engine.connect())
        with pytest.raises(UnavailableError, match="no connection was free") as error:
            store.ready()
        assert not error.value.full
    assert store.ready()
    store.close()


def test_a_vanished_postgresql_is_detected_within_half_a_minute(postgresql: databases.Fresh, tmp_path: Path) -> None:
    store = Store(postgresql(tmp_path))
    with store._engine.connect() as connection:
        driver: Any = connection.connection.dbapi_connection
        parameters = {name: int(value) for name, value in driver.info.get_parameters().items() if value.isdecimal()}
    store.close()
    assert parameters["keepalives_idle"] + parameters["keepalives_interval"] * parameters["keepalives_count"] <= 30
    assert parameters["tcp_user_timeout"] == 30_000
