"""What a database cannot do just now, told apart from what it will never do."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import TimeoutError as NoConnectionError
from sqlalchemy.pool import PoolProxiedConnection, QueuePool

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


class UnavailableError(Exception):
    """The database did not do it, and nothing of it is stored; the same call may succeed later.

    Attributes:
        full: It has no room left, rather than being away.
    """

    def __init__(self, reason: str, *, full: bool) -> None:
        super().__init__(reason)
        self.full = full


class UnusableError(Exception):
    """A database that this version cannot use as it is; says why, and what to do."""


def translate(context: ExceptionContext) -> UnavailableError | None:
    """SQLAlchemy's `handle_error`: what passes becomes an `UnavailableError`, and everything else stays as it is."""
    error: Any = context.original_exception
    if context.is_pre_ping:
        return None  # The pool then connects anew by itself.
    if _sqlstate(error) == _READ_ONLY:
        context.is_disconnect = True  # A server that another took over from stays so: the pool is to find the other.
    return _unavailable(error) if context.is_disconnect or _passes(error) else None


@contextmanager
def of_driver() -> Iterator[None]:
    """The same for what is asked of SQLite's driver itself, where SQLAlchemy sees no error."""
    try:
        yield
    except sqlite3.Error as error:
        if _passes(error):
            raise _unavailable(error) from error
        raise


def _unavailable(error: Any) -> UnavailableError:
    return UnavailableError(f"{type(error).__name__}: {error}", full=is_full(error))


class Pool(QueuePool):
    """SQLAlchemy's, whose own error passes too, and does not come by `handle_error`."""

    def connect(self) -> PoolProxiedConnection:
        """A connection.

        Raises:
            UnavailableError: Others had them all for too long.
        """
        try:
            return super().connect()
        except NoConnectionError as error:
            raise UnavailableError(f"no connection was free: {error}", full=False) from error


def is_full(error: Any) -> bool:
    """Whether a driver's error says that there is no room."""
    return _sqlite_code(error) == sqlite3.SQLITE_FULL or _sqlstate(error) == _DISK_FULL


def _passes(error: Any) -> bool:
    if is_full(error):
        return True
    if isinstance(error, sqlite3.Error):
        return _sqlite_code(error) in _PASSING
    # psycopg's word for a server that is away, ending, starting, out of memory, or that undid a deadlock.
    return any(kind.__name__ == "OperationalError" for kind in type(error).__mro__)


def _sqlstate(error: Any) -> str | None:
    return getattr(error, "sqlstate", None)


def _sqlite_code(error: Any) -> int:
    """The primary code: extended ones hold it in their lowest byte."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
