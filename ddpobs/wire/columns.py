"""Columns of a record: 64-bit integers, all of one length, each with the range that its values may have.

A batch has few rows, and a call costs more than the arithmetic on them. So all columns of a record are rows of one
table, which is decoded, checked, joined and packed as a whole, on the rank as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Self, dataclass_transform, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Range:
    """Values that a column may hold.

    Attributes:
        least: Smallest value.
        most: Largest value.
        is_time: The range is relative to the monotonic clock of the batch's anchor; `UNKNOWN` is allowed besides.
    """

    least: int
    most: int
    is_time: bool = False


@dataclass(frozen=True)
class _AddedLater:
    default: int


def added_later(default: int) -> Any:
    """Declare a column that older clients do not send and older chunks do not hold.

    `CONTRIBUTING.md` has the steps to add a column.

    Args:
        default: Value of each row of a record without the column.
    """
    return _AddedLater(default)


def ranges_of(record: type) -> dict[str, Range]:
    """Return the declared range of each column of a record, in order.

    Raises:
        TypeError: A column is declared as plain `Ints`, without a range.
    """
    ranges: dict[str, Range] = {}
    for name, hint in get_type_hints(record, include_extras=True).items():
        kind, *facts = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if kind == Ints:
            declared = [fact for fact in facts if isinstance(fact, Range)]
            if not declared:
                raise TypeError(
                    f"{record.__name__}.{name} has no range: annotate it with a kind of column from wire.fields, "
                    "such as Times, Durations or Counts"
                )
            ranges[name] = declared[0]
    return ranges


@dataclass_transform(kw_only_default=True)
class Columns:
    """Columns of one length, named by a subclass's annotations.

    They are the rows of one table, so that one numpy call serves them all.

    Args:
        **columns: One array for each name, also for a column that was `added_later`: whoever makes a record fills all.

    Attributes:
        table: Shape (columns, rows).

    Raises:
        TypeError: A column is missing, or has no such name.
        ValueError: Columns of unequal length.
    """

    __slots__ = ("_extremes", "table")
    names: ClassVar[tuple[str, ...]] = ()
    ranges: ClassVar[Mapping[str, Range]] = {}
    defaults: ClassVar[Mapping[str, int]] = {}
    """Value of each column that was added later, for records without it."""

    def __init_subclass__(cls) -> None:
        cls.ranges = ranges_of(cls)
        cls.names = tuple(cls.ranges)
        added = {name: fact.default for name, fact in vars(cls).items() if isinstance(fact, _AddedLater)}
        cls.defaults = {**cls.defaults, **added}
        for index, name in enumerate(cls.names):
            setattr(cls, name, property(partial(_row, index)))

    def __init__(self, **columns: Ints) -> None:
        if columns.keys() != set(self.names):
            missing, unknown = set(self.names) - columns.keys(), columns.keys() - set(self.names)
            raise TypeError(
                f"{type(self).__name__} lacks columns: {', '.join(sorted(missing)) or 'none'}; "
                f"columns that it does not have: {', '.join(sorted(unknown)) or 'none'}"
            )
        self.table: Ints = np.array([columns[name] for name in self.names], np.int64)
        self._extremes: tuple[Ints, Ints] | None = None

    @classmethod
    def of_older(cls, columns: Mapping[str, Ints]) -> Self:
        """Build a record of an older client's columns: those that were added later take their defaults."""
        return cls(**cls.with_defaults(columns))

    @classmethod
    def with_defaults(cls, columns: Mapping[str, Ints]) -> dict[str, Ints]:
        """Add each absent column that has a default; other columns, such as a rank's, stay."""
        rows = len(next(iter(columns.values()), ()))
        absent = {name: value for name, value in cls.defaults.items() if name not in columns}
        return {**columns, **{name: np.full(rows, value, np.int64) for name, value in absent.items()}}

    @classmethod
    def required(cls) -> list[str]:
        """Names of the columns without a default."""
        return [name for name in cls.names if name not in cls.defaults]

    @classmethod
    def from_table(cls, table: Ints) -> Self:
        """Wrap a table, with a row for each column, without a copy."""
        record = cls.__new__(cls)
        record.table, record._extremes = table, None
        return record

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Join the rows of all parts, in their order."""
        if len(parts) == 1:
            return parts[0]
        return cls.from_table(np.concatenate([part.table for part in parts], axis=1))

    def select(self, rows: Any) -> Self:
        """Return some rows, chosen by any numpy index."""
        return self.from_table(self.table[:, rows])

    def by_name(self) -> dict[str, Ints]:
        """Map each name to its column, as a view."""
        return dict(zip(self.names, self.table, strict=True))

    @property
    def extremes(self) -> tuple[Ints, Ints]:
        """Smallest and largest value of each column, each of shape (columns,), of a record with rows.

        They are computed once: the record must not change afterwards.
        """
        if self._extremes is None:
            self._extremes = self.table.min(axis=1), self.table.max(axis=1)
        return self._extremes

    def ends(self, name: str) -> tuple[int, int]:
        """Smallest and largest value of a column, of a record with rows."""
        index = self.names.index(name)
        least, most = self.extremes
        return int(least[index]), int(most[index])

    def __len__(self) -> int:
        return int(self.table.shape[1])


def _row(index: int, columns: Columns) -> Ints:
    row: Ints = columns.table[index]
    return row
