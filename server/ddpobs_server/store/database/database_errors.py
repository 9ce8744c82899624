"""Database errors that may pass, as `UnavailableError`. All other errors stay as they are.

Passing conditions are a database that is away, locked, ending or full. `web/problems.py` answers them with 503 or 507,
which the exporter retries; nothing needs a restart afterwards.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as NoConnectionError
from sqlalchemy.pool import PoolProxiedConnection, QueuePool
from typing_extensions import override

from ddpobs_server.store.database import database_access

_PASSING = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
    }
)
_DISK_FULL, _READ_ONLY = "53100", "25006"
"""SQLSTATEs of PostgreSQL."""
_POOL_STATES = ("XX000", "08P01", "58000", None)
"""SQLSTATEs with which a pool reports that its server is away; they also have other meanings."""
_DENIED = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)
"""Errors of SQLite for a missing right or folder; the driver's message names neither."""
_LOST_STATEMENTS = frozenset({"26000", "42P05"})
"""SQLSTATEs of prepared statements behind a pool that gives each transaction another connection."""
_LOST_SERVER = re.compile("server (closed|conn|login)|terminating|pgbouncer|query_wait_timeout", re.IGNORECASE)
"""Messages of such a pool."""
_UNCOMMITTED = "could not commit transaction for shard"
"""Message of Citus, with an SQLSTATE of many meanings, if a node went away during the commit."""
_DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, "XX001", "XX002"})
"""Damaged pages, as error codes of SQLite and as SQLSTATEs of PostgreSQL."""


class UnavailableError(Exception):
    """The database rejected the call, and nothing of it is stored; the same call may succeed later.

    Attributes:
        full: The disk is full; otherwise the database is unreachable or busy.
    """

    def __init__(self, reason: str, *, full: bool) -> None:
        super().__init__(reason)
        self.full = full


class LostDatabaseError(UnavailableError):
    """Commits would not last: the database's file was removed or replaced, or its pages are damaged.

    Only an operator can mend it. The message has the place and the remedy.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason, full=False)


class OtherSchemaError(UnavailableError):
    """Another version changed the schema while this one ran. The message has both revisions and the remedy."""

    def __init__(self, current: str | None, own: str | None) -> None:
        super().__init__(
            f"another version changed the schema from {own} to {current}: stop this collector and upgrade it",
            full=False,
        )


class UnusableError(Exception):
    """This version cannot use the database as it is; the message has the reason and the remedy."""


def damaged(error: object) -> LostDatabaseError:
    """The error of a damaged database, with the remedy."""
    return LostDatabaseError(
        f"the database is damaged ({error}): stop the collector, run `ddpobs-server check`, and restore a backup"
    )


def translate(context: ExceptionContext) -> UnavailableError | None:
    """Handler for SQLAlchemy's `handle_error`: returns an `UnavailableError` for an error that may pass.

    Damage is a `LostDatabaseError`.
    """
    error: Any = context.original_exception
    if is_damage(error):
        return damaged(error)
    if context.is_pre_ping:
        return None  # The pool reconnects by itself.
    if _sqlstate(error) == _READ_ONLY:
        # After a failover the old server stays read-only. The pool must drop its connections to find the new server.
        context.is_disconnect = True
    if _is_lost_by_pool(error):
        context.is_disconnect = True  # The driver's record of prepared statements is wrong from now on.
    return _passing(error, context.engine) or (_unavailable(error) if context.is_disconnect else None)


@contextmanager
def translated(connection: Connection) -> Iterator[None]:
    """Do the same for direct calls of SQLite's driver, whose errors SQLAlchemy does not see.

    Raises:
        UnavailableError: As `translate` returns it.
        DBAPIError: SQLAlchemy's form of any other error.
    """
    try:
        yield
    except sqlite3.Error as error:
        if is_damage(error):
            raise damaged(error) from error
        other = DBAPIError.instance(None, None, error, sqlite3.Error)
        raise (_passing(error, connection.engine) or other) from error


def _passing(error: Any, engine: Engine | None) -> UnavailableError | None:
    """The `UnavailableError` of an error that may pass; None for any other."""
    if _sqlite_code(error) in _DENIED and engine is not None and engine.url.database:
        file = Path(engine.url.database).resolve()
        return UnavailableError(f"{error}: {database_access.missing_right(file) or file}", full=False)
    return _unavailable(error) if _passes(error) else None


def _unavailable(error: Any) -> UnavailableError:
    hint = ""
    if _sqlstate(error) in _LOST_STATEMENTS:
        hint = "; behind a pool in transaction mode set DDPOBS_SERVER_PREPARE_THRESHOLD=off"
    return UnavailableError(f"{type(error).__name__}: {error}{hint}", full=is_full(error))


class Pool(QueuePool):
    """SQLAlchemy's pool. Its own timeout is an `UnavailableError` too, and bypasses `handle_error`."""

    @override
    def connect(self) -> PoolProxiedConnection:
        try:
            return super().connect()
        except NoConnectionError as error:
            raise UnavailableError(f"no connection was free: {error}", full=False) from error


def _is_lost_by_pool(error: Any) -> bool:
    """Whether a pool such as pgbouncer lost the server or a prepared statement; another connection may succeed."""
    state = _sqlstate(error)
    return state in _LOST_STATEMENTS or (state in _POOL_STATES and _LOST_SERVER.search(str(error)) is not None)


def is_full(error: Any) -> bool:
    """Whether a driver's error means that no space is left."""
    return _sqlite_code(error) == sqlite3.SQLITE_FULL or _sqlstate(error) == _DISK_FULL


def is_damage(error: Any) -> bool:
    """Whether a driver's error means that pages of the database are damaged."""
    return not {_sqlite_code(error), _sqlstate(error)}.isdisjoint(_DAMAGE)


def _passes(error: Any) -> bool:
    if is_full(error) or _UNCOMMITTED in str(error):
        return True
    if isinstance(error, sqlite3.Error):
        return _sqlite_code(error) in _PASSING
    # psycopg raises it if the server is unreachable, stops, starts, is out of memory, or resolved a deadlock.
    return any(kind.__name__ == "OperationalError" for kind in type(error).__mro__)


def _sqlstate(error: Any) -> str | None:
    return getattr(error, "sqlstate", None)


def _sqlite_code(error: Any) -> int:
    """Primary error code, the lowest byte of an extended code."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
