"""Statements as the drivers take them: compiled once, since SQLAlchemy takes longer to compile one than to run it.

PostgreSQL takes many rows in one statement. On a cluster each statement is a round trip from the node with the
connection to the node with the run. SQLite has no round trips, and runs one prepared statement for each row faster. Its
driver is called directly: SQLAlchemy's own work on a statement takes longer than the statement.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

from sqlalchemy import Connection, Dialect, Double, Insert, Select, Table, TextClause, Update, cast, func
from sqlalchemy.dialects import postgresql, sqlite

from ddpobs_server.store.database import database_errors

_NAMED = re.compile(r"%\((\w+)\)s")
"""A parameter by its name, as SQLAlchemy writes it for PostgreSQL's driver, which takes both forms."""
_MAX_PARAMETERS = 32_000
"""Maximum number of parameters of a statement with many rows; PostgreSQL and SQLite take a few more."""
Values = Sequence[Any]
"""A row's values, in the order of the statement's parameters."""
_Row = TypeVar("_Row")


@cache
def compiled(
    statement: Insert | Update | Select[Any] | TextClause, dialect: Dialect, columns: tuple[str, ...] = ()
) -> tuple[str, tuple[str, ...]]:
    """SQL for the driver with parameters by place, and their names in order.

    A parameter of several places is several parameters: PostgreSQL sees no equal expressions in `GROUP BY`.
    """
    keys: dict[str, Any] = {"column_keys": list(columns)} if columns else {}
    result = statement.compile(dialect=dialect, **keys)
    if result.positiontup is not None:
        return str(result), tuple(result.positiontup)
    return _NAMED.sub("%s", str(result)), tuple(_NAMED.findall(str(result)))


def insert(dialect: str, table: Table) -> Any:
    """An insert that accepts `ON CONFLICT` clauses."""
    return (sqlite if dialect == "sqlite" else postgresql).insert(table)


@cache
def _plain_insert(table: Table) -> Insert:
    return table.insert()


def insert_many(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert rows with the same columns."""
    if rows:
        execute_many(connection, _plain_insert(table), rows)


def execute_many(connection: Connection, statement: Insert, rows: list[dict[str, Any]]) -> int:
    """Run an insert for rows with the same columns. Returns the number of rows inserted or changed."""
    sql, names = compiled(statement, connection.dialect, tuple(rows[0]))
    return execute_rows(connection, sql, list(map(itemgetter(*names), rows)))


def execute_rows(connection: Connection, sql: str, rows: Sequence[Values]) -> int:
    """The same for SQL of an insert of one row. If it updates existing rows, no two rows may have the same key."""
    if connection.dialect.name == "sqlite":
        with database_errors.translated(connection):
            count: int = _sqlite(connection).executemany(sql, rows).rowcount
            return count
    count = max(1, _MAX_PARAMETERS // len(rows[0]))
    pages = (rows[first : first + count] for first in range(0, len(rows), count))
    return sum(
        connection.exec_driver_sql(with_rows(sql, len(page)), tuple(chain.from_iterable(page))).rowcount
        for page in pages
    )


def execute_one(connection: Connection, sql: str, values: Values) -> list[Any]:
    """Run a statement in the open transaction, and return its rows."""
    if connection.dialect.name == "sqlite":
        with database_errors.translated(connection):
            rows: list[Any] = _sqlite(connection).execute(sql, values).fetchall()
            return rows
    result = connection.exec_driver_sql(sql, tuple(values))
    return list(result) if result.returns_rows else []


def _sqlite(connection: Connection) -> Any:
    """The driver's own connection, in the same transaction."""
    return connection.connection.dbapi_connection


def with_rows(sql: str, count: int) -> str:
    """SQL of an insert of one row, for `count` rows. Its only parameters must be the row's values."""
    head, values, tail = sql.partition(" VALUES (")
    row, close, tail = tail.partition(")")
    return head + values + f"{row}), (" * (count - 1) + row + close + tail


def distinct(rows: Iterable[_Row], key: Callable[[_Row], Hashable]) -> Iterator[list[_Row]]:
    """The rows in as few lists as possible, in none of which a key occurs twice; a key's rows stay in their order."""
    remaining = list(rows)
    while remaining:
        first: dict[Hashable, _Row] = {}
        repeated = [row for row in remaining if first.setdefault(key(row), row) is not row]
        yield list(first.values())
        remaining = repeated


@lru_cache(256)
def float_sum(column: Any) -> Any:
    """A sum in floating point, which absurd values cannot overflow: SQLite raises if a sum of integers overflows."""
    return func.sum(cast(column, Double))
