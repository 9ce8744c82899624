"""Statements as SQL for the driver, made once: to make one takes longer than to run it."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Dialect, Insert, Select, Table
from sqlalchemy.dialects import postgresql, sqlite


@cache
def compiled(
    statement: Insert | Select[Any], dialect: Dialect, columns: tuple[str, ...] = ()
) -> tuple[str, tuple[str, ...]]:
    """SQL for the driver, and the order of its values where the driver knows them by place and not by name."""
    made = statement.compile(dialect=dialect, column_keys=list(columns) or None)
    return str(made), tuple(made.positiontup or ())


def insert(dialect: str, table: Table) -> Any:
    """An insert that may say what becomes of rows that are there already."""
    return (sqlite if dialect == "sqlite" else postgresql).insert(table)
