"""Statements compiled once to SQL for the driver: SQLAlchemy takes longer to compile a statement than to run it."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Dialect, Insert, Select, Table
from sqlalchemy.dialects import postgresql, sqlite


@cache
def compiled(
    statement: Insert | Select[Any], dialect: Dialect, columns: tuple[str, ...] = ()
) -> tuple[str, tuple[str, ...]]:
    """SQL for the driver, and the order of its parameters: empty if the driver takes parameters by name."""
    result = statement.compile(dialect=dialect, column_keys=list(columns) or None)
    return str(result), tuple(result.positiontup or ())


def insert(dialect: str, table: Table) -> Any:
    """An insert that accepts `ON CONFLICT` clauses."""
    return (sqlite if dialect == "sqlite" else postgresql).insert(table)
