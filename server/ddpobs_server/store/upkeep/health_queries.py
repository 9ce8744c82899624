"""Checks of the database itself: its answer, clock, size, integrity and write access."""

from __future__ import annotations

import numpy as np
from sqlalchemy import Column, Connection, Engine, MetaData, String, Table, func, select
from sqlalchemy.exc import DatabaseError
from sqlalchemy.schema import CreateTable

from ddpobs import wire
from ddpobs_server.store.database import distribution
from ddpobs_server.store.database.database_errors import LostDatabaseError
from ddpobs_server.store.writing import ingest

_TRIED = Table("ddpobs_tried", MetaData(), Column("run_id", String(1), primary_key=True))


def answers(connection: Connection) -> bool:
    """Whether the database answers."""
    return connection.execute(select(1)).scalar() == 1


def now_ns(connection: Connection) -> int:
    """Wall clock of the database."""
    if connection.dialect.name == "sqlite":
        return int(connection.exec_driver_sql("SELECT (julianday('now') - 2440587.5) * 86400.0e9").scalar_one())
    return int(connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp()) * 1e9").scalar_one())


def size_bytes(connection: Connection) -> int:
    """Size of the database on disk, on all nodes of a cluster."""
    if connection.dialect.name == "sqlite":
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        return int(pages) * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())
    if distribution.is_distributed(connection):
        return distribution.size_bytes(connection)
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


def try_batch(connection: Connection) -> None:
    """Store a batch in all tables and roll it back. An idle database is thus known to accept the next batch.

    Raises:
        UnavailableError: The database is full, read-only, or locked for long.
        SQLAlchemyError: Tables or rights are missing.
    """
    with connection.begin() as transaction:
        ingest.write(connection, [ingest.Arrival(_probe(), b"", 0, 0)])
        transaction.rollback()


def _probe() -> wire.Batch:
    """A batch of a run that no client can name. It has a row for most of the tables."""
    steps = wire.Steps(**{name: np.zeros(1, np.int64) for name in wire.Steps.names})
    return wire.Batch(
        version=wire.VERSION,
        run="/probe",
        attempt="0" * 16,
        source="0" * 16,
        seq=0,
        rank=0,
        world_size=1,
        emitted=1,
        dropped=0,
        anchor=wire.Anchor(wall_ns=0, monotonic_ns=0),
        steps=steps,
        layouts=[wire.Layout(module=0, name="", revision=0, comm="", buckets=[])],
    )


def integrity_errors(engine: Engine) -> list[str]:
    """Damage in a SQLite file, which is read as a whole; empty for a server's database."""
    if engine.dialect.name != "sqlite":
        return []
    try:
        with engine.connect() as connection:
            messages = connection.exec_driver_sql("PRAGMA quick_check(5)").scalars().all()
    except DatabaseError as error:
        return [str(error.orig)]
    except LostDatabaseError as error:
        return [str(error)]
    return [] if messages == ["ok"] else list(messages)
