"""Checks of the database itself: its answer, clock, size, integrity and write access."""

from __future__ import annotations

from sqlalchemy import Column, Connection, Engine, MetaData, String, Table, func, select
from sqlalchemy.exc import DatabaseError
from sqlalchemy.schema import CreateTable

_TRIED = Table("ddpobs_tried", MetaData(), Column("run_id", String(1), primary_key=True))


def ready(connection: Connection) -> bool:
    """Whether the database answers."""
    return connection.execute(select(1)).scalar() == 1


def now_ns(connection: Connection) -> int:
    """Wall clock of the database."""
    if connection.dialect.name == "sqlite":
        return int(connection.exec_driver_sql("SELECT (julianday('now') - 2440587.5) * 86400.0e9").scalar_one())
    return int(connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp()) * 1e9").scalar_one())


def size_bytes(connection: Connection) -> int:
    """Size of the database on disk."""
    if connection.dialect.name == "sqlite":
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        return int(pages) * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())
    return int(connection.execute(select(func.pg_database_size(func.current_database()))).scalar_one())


def try_write(connection: Connection) -> None:
    """Create a table with a row and roll it back.

    Raises:
        UnavailableError: The disk is full, or the file or server is read-only.
        SQLAlchemyError: Permissions are missing.
    """
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    connection.execute(CreateTable(_TRIED))
    connection.execute(_TRIED.insert(), {"run_id": ""})
    connection.rollback()


def integrity_errors(engine: Engine) -> list[str]:
    """Damage in a SQLite file, which is read as a whole; empty for a server's database."""
    if engine.dialect.name != "sqlite":
        return []
    try:
        with engine.connect() as connection:
            messages = connection.exec_driver_sql("PRAGMA quick_check(5)").scalars().all()
    except DatabaseError as error:
        return [str(error.orig)]
    return [] if messages == ["ok"] else list(messages)
