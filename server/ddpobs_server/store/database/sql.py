"""Statements as the drivers take them: compiled once, since SQLAlchemy takes longer to compile one than to run it."""

from __future__ import annotations

from functools import cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Dialect, Double, Insert, Select, Table, TextClause, Update, cast, func
from sqlalchemy.dialects import postgresql, sqlite


@cache
def compiled(
    statement: Insert | Update | Select[Any] | TextClause, dialect: Dialect, columns: tuple[str, ...] = ()
) -> tuple[str, tuple[str, ...]]:
    """SQL for the driver, and the order of its parameters: empty if the driver takes parameters by name."""
    keys: dict[str, Any] = {"column_keys": list(columns)} if columns else {}
    result = statement.compile(dialect=dialect, **keys)
    return str(result), tuple(result.positiontup or ())


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
    values = itemgetter(*names) if names else dict
    return connection.exec_driver_sql(sql, list(map(values, rows))).rowcount


def float_sum(column: Any) -> Any:
    """A sum in floating point, which absurd values cannot overflow: SQLite raises if a sum of integers overflows."""
    return func.sum(cast(column, Double))
