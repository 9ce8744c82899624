"""Connections to the database, set up as durable writing, and noticing a server's end, want them."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

from sqlalchemy import Engine, create_engine, event

from ddpobs_server.store import database_errors

_BUSY_S = 30
_SERVER = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""libpq's. A server that is gone without a word is noticed within half a minute, not after a quarter of an hour."""
_SETTINGS = ("synchronous=FULL", "foreign_keys=ON", "cache_size=-8192", "journal_size_limit=67108864")


def engine(url: str, *, write_ahead: bool = True) -> Engine:
    """SQLAlchemy's, of SQLite or PostgreSQL; its connections raise `UnavailableError` for what may pass.

    Args:
        url: SQLAlchemy's.
        write_ahead: Whether a SQLite file is written by way of a log from now on, or stays as it is.
    """
    sqlite = url.startswith("sqlite")
    waiting = {"timeout": _BUSY_S} if sqlite else _SERVER
    # The connection used last is used again: what it has in its cache is what the next statement wants.
    made = create_engine(
        url, connect_args=waiting, poolclass=database_errors.Pool, pool_pre_ping=not sqlite, pool_use_lifo=True
    )
    event.listen(made, "handle_error", database_errors.translate, retval=True)
    if sqlite:
        event.listen(made, "connect", _durable if write_ahead else _set)
    return made


def _durable(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    if cursor.execute("PRAGMA page_count").fetchone() == (0,):  # Else it waits for whoever writes, though it is set.
        cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")
    _write_ahead(cursor)
    cursor.close()
    _set(connection, record)


def _set(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for setting in _SETTINGS:
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()


def _write_ahead(cursor: Any) -> None:
    """Have the file written by way of a log; SQLite does not always wait for others that have it so at this moment."""
    ends = time.monotonic() + _BUSY_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > ends:
                raise
            time.sleep(0.01)
        else:
            return
