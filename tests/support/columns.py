"""Rows of `wire.Steps` and `wire.Spans` for tests that care about some of the columns only.

The names come from the schema, so a new column needs no change here.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from ddpobs import wire

_Columns = TypeVar("_Columns", wire.Steps, wire.Spans)


def make_steps(**columns: Any) -> wire.Steps:
    """Return steps with these columns and zeros in all others.

    Args:
        **columns: Sequences of one length, or a number that fills the column; one row if every column is a number.

    Raises:
        TypeError: The schema has no column of that name.
        ValueError: The columns' lengths differ.
    """
    return _fill(wire.Steps, columns)


def make_spans(**columns: Any) -> wire.Spans:
    """Return bucket spans with these columns and zeros in all others, as `make_steps` does; no wait is known."""
    return _fill(wire.Spans, {**wire.Spans.defaults, **columns})


def _fill(kind: type[_Columns], columns: dict[str, Any]) -> _Columns:
    values = dict.fromkeys(kind.names, 0) | columns
    rows = next((len(column) for column in values.values() if np.ndim(column)), 1)
    return kind(**{name: column if np.ndim(column) else np.full(rows, column) for name, column in values.items()})
