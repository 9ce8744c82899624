"""Connections to the database, set up for durable writes and for early detection of a lost server."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

from sqlalchemy import Engine, create_engine, event

from ddpobs_server.store.database import database_errors

_BUSY_S = 30
"""Seconds for which a connection to SQLite waits for a lock."""
_SERVER = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""Options of libpq. A server that vanishes is detected within half a minute; the default is a quarter of an hour."""
_SETTINGS = ("synchronous=FULL", "foreign_keys=ON", "cache_size=-8192", "journal_size_limit=67108864")


def engine(url: str, *, write_ahead: bool = True, prepare_threshold: int | None = 5) -> Engine:
    """SQLAlchemy engine for SQLite or PostgreSQL; its connections raise `UnavailableError` for errors that may pass.

    They raise `UnusableError` for a PostgreSQL database that is not in UTF-8.

    Args:
        url: SQLAlchemy URL.
        prepare_threshold: Executions after which PostgreSQL prepares a statement; None for never.
        write_ahead: Whether to switch a SQLite file to a write-ahead log; otherwise its journal mode stays.
    """
    sqlite = url.startswith("sqlite")
    options = {"timeout": _BUSY_S} if sqlite else {**_SERVER, "prepare_threshold": prepare_threshold}
    # Reuse the connection used last: its cache most likely holds the pages that the next statement needs.
    result = create_engine(
        url, connect_args=options, poolclass=database_errors.Pool, pool_pre_ping=not sqlite, pool_use_lifo=True
    )
    event.listen(result, "handle_error", database_errors.translate, retval=True)
    if sqlite:
        event.listen(result, "connect", _configure_durable if write_ahead else _configure)
    else:
        event.listen(result, "connect", _check_encoding, insert=True)  # SQLAlchemy's own first query needs text.
    return result


def _check_encoding(connection: Any, _record: object) -> None:
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise database_errors.UnusableError(
            f"the database has the encoding {encoding}, and UTF8 is needed: create it with "
            "`CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0`"
        )


def _configure_durable(connection: Any, record: object) -> None:
    cursor = connection.cursor()
    # On a file with pages this statement waits for the current writer, even if the mode is set already.
    if cursor.execute("PRAGMA page_count").fetchone() == (0,):
        cursor.execute("PRAGMA auto_vacuum=INCREMENTAL")
    _use_write_ahead_log(cursor)
    cursor.close()
    _configure(connection, record)


def _configure(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for setting in _SETTINGS:
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()


def _use_write_ahead_log(cursor: Any) -> None:
    """Switch to a write-ahead log. SQLite does not always wait while another connection makes the same switch."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return
