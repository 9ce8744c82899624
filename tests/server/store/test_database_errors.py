"""Which of a database's errors pass, and which are ours."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from ddpobs_server.store import Store, UnavailableError, database_errors, removal
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DatabaseError, DBAPIError

from tests import databases


def engine(url: str, **arguments: float) -> Engine:
    made = create_engine(url, connect_args=arguments)
    event.listen(made, "handle_error", database_errors.translate, retval=True)
    return made


@pytest.mark.parametrize(
    ("condition", "full"),
    [("disk_full", True), ("deadlock_detected", False), ("cannot_connect_now", False), ("too_many_connections", False)],
)
def test_what_passes_in_postgresql_asks_to_try_again(
    postgresql: databases.Fresh, tmp_path: Path, condition: str, full: bool
) -> None:
    with (
        engine(postgresql(tmp_path)).connect() as connection,
        pytest.raises(UnavailableError) as told,
    ):
        connection.exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{condition}'; END $$")
    assert told.value.full is full


def test_a_postgresql_that_takes_no_writing_asks_to_try_again_and_is_looked_for_anew(
    postgresql: databases.Fresh, tmp_path: Path
) -> None:
    store = Store(postgresql(tmp_path))
    store.migrate()
    with store._engine.connect() as connection:
        session: Any = connection.connection.driver_connection
        connection.exec_driver_sql("SET default_transaction_read_only = on")  # As where another server took over.
        connection.commit()
    with pytest.raises(UnavailableError, match="read-only"):
        store.delete("any")
    assert session.closed
    assert not store.delete("any")
    store.close()


def test_a_sqlite_file_that_another_process_holds_asks_to_try_again(tmp_path: Path) -> None:
    url = databases.sqlite(tmp_path)
    with engine(url).connect() as holder, engine(url, timeout=0.1).connect() as other:
        holder.exec_driver_sql("BEGIN EXCLUSIVE")
        with pytest.raises(UnavailableError, match="locked"):
            other.exec_driver_sql("CREATE TABLE numbers (n INTEGER)")


@contextmanager
def with_free_pages(tmp_path: Path) -> Iterator[tuple[Engine, Any]]:
    """A file of which a part is free, and the driver's connection that a store uses next."""
    store = Store(databases.sqlite(tmp_path))
    store.migrate()
    with store._engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE large (bytes BLOB)")
        connection.exec_driver_sql("INSERT INTO large VALUES (zeroblob(1000000))")
        connection.exec_driver_sql("DROP TABLE large")
    with store._engine.connect() as connection:
        driver = connection.connection.driver_connection
    yield store._engine, driver
    store.close()


def test_room_that_cannot_be_given_back_now_asks_to_try_again(tmp_path: Path) -> None:
    with with_free_pages(tmp_path) as (of_store, driver), engine(str(of_store.url)).connect() as holder:
        driver.execute("PRAGMA busy_timeout=10")
        holder.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(UnavailableError, match="locked") as told:
            removal.vacuum(of_store)
        assert not told.value.full
        holder.rollback()
        removal.vacuum(of_store)
        assert driver.execute("PRAGMA freelist_count").fetchone() == (0,)


def test_a_log_that_cannot_be_cut_leaves_a_connection_as_patient_as_it_was(tmp_path: Path) -> None:
    def authorize(_action: int, name: str | None, *_: object) -> int:
        return sqlite3.SQLITE_DENY if name == "wal_checkpoint" else sqlite3.SQLITE_OK

    with with_free_pages(tmp_path) as (of_store, driver):
        before = driver.execute("PRAGMA busy_timeout").fetchone()
        driver.set_authorizer(authorize)
        with pytest.raises(DatabaseError, match="authorized"):
            removal.vacuum(of_store)
        assert driver.execute("PRAGMA busy_timeout").fetchone() == before != (0,)


def test_an_error_of_ours_stays_what_it_is(fresh: databases.Fresh, tmp_path: Path) -> None:
    with engine(fresh(tmp_path)).connect() as connection, pytest.raises(DBAPIError, match="nowhere"):
        connection.exec_driver_sql("SELECT * FROM nowhere")


def test_where_all_connections_are_taken_a_store_asks_to_try_again(fresh: databases.Fresh, tmp_path: Path) -> None:
    store = Store(fresh(tmp_path))
    pool: Any = store._engine.pool
    pool._timeout = 0.1
    with ExitStack() as held:
        for _ in range(pool.size() + pool._max_overflow):
            held.enter_context(store._engine.connect())
        with pytest.raises(UnavailableError, match="no connection was free") as told:
            store.ready()
        assert not told.value.full
    assert store.ready()
    store.close()


def test_a_postgresql_that_vanishes_is_noticed_within_half_a_minute(
    postgresql: databases.Fresh, tmp_path: Path
) -> None:
    store = Store(postgresql(tmp_path))
    with store._engine.connect() as connection:
        driver: Any = connection.connection.dbapi_connection
        told = {name: int(value) for name, value in driver.info.get_parameters().items() if value.isdecimal()}
    store.close()
    assert told["keepalives_idle"] + told["keepalives_interval"] * told["keepalives_count"] <= 30
    assert told["tcp_user_timeout"] == 30_000
