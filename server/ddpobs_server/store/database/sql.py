"""Statements as the drivers take them: compiled once, since SQLAlchemy takes longer to compile one than to run it.

PostgreSQL takes many rows in one statement. On a cluster each statement is a round trip from the node with the
connection to the node with the run. SQLite has no round trips, and runs one prepared statement for each row faster. Its
driver is called directly: SQLAlchemy's own work on a statement takes longer than the statement.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, TypeVar

from sqlalchemy import Connection, Dialect, Double, Insert, Result, Select, Table, TextClause, Update, cast, func
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


def execute_built(
    connection: Connection,
    build: Callable[..., Select[Any]],
    *arguments: Hashable,
    values: Mapping[str, object],
    yield_per: int | None = None,
) -> Result[*tuple[Any, ...]]:
    """Run the statement that `build` returns for the arguments. It is built once, and compiled once.

    Args:
        connection: To the database.
        build: Returns the same statement for equal arguments, without lists of values: their lengths vary.
        arguments: Arguments of `build`.
        values: Values of the statement's named parameters.
        yield_per: Rows that the driver buffers; all by default. SQLAlchemy streams only statements of its own.
    """
    if yield_per is not None:
        return connection.execute(_built(build, *arguments), values, execution_options={"yield_per": yield_per})
    sql, names, constants = _compiled(build, connection.dialect, *arguments)
    known = {**constants, **values}
    return connection.exec_driver_sql(sql, tuple(known[name] for name in names))


@cache
def _built(build: Callable[..., Select[Any]], *arguments: Hashable) -> Select[Any]:
    return build(*arguments)


@cache
def _compiled(
    build: Callable[..., Select[Any]], dialect: Dialect, *arguments: Hashable
) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    statement = _built(build, *arguments)
    return *compiled(statement, dialect), dict(statement.compile(dialect=dialect).params)


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


def padded(rows: Iterable[tuple[Any, ...]], *names: str) -> tuple[int, dict[str, Any]]:
    """A power of two, and the values of parameters `NAME_INDEX` for as many rows; the last row is repeated.

    A statement with parameters for each row is thus built for few numbers of rows.
    """
    known = list(rows)
    count = 1 << (len(known) - 1).bit_length()
    known += [known[-1]] * (count - len(known))
    values = {
        f"{name}_{index}": value for index, row in enumerate(known) for name, value in zip(names, row, strict=True)
    }
    return count, values


def columns_by_run(rows: Iterable[Any]) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    """Each run, and the other columns of its rows, from rows that begin with the run and are sorted by it."""
    for run, group in groupby(rows, itemgetter(0)):
        yield run, list(zip(*group, strict=True))[1:]


@lru_cache(256)
def float_sum(column: Any) -> Any:
    """A sum in floating point, which absurd values cannot overflow: SQLite raises if a sum of integers overflows."""
    return func.sum(cast(column, Double))
