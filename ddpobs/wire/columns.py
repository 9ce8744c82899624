"""A record's columns: 64-bit integers, all of one length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Self, dataclass_transform

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass_transform(kw_only_default=True)
class Columns:
    """Columns of one length, named by a subclass's annotations: the rows of one table, so that a call does for all.

    Args:
        **columns: One for each name.

    Attributes:
        table: Shape (columns, rows).

    Raises:
        ValueError: Columns of unequal length.
    """

    __slots__ = ("table",)
    names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        cls.names = tuple(cls.__annotations__)
        for place, name in enumerate(cls.names):
            setattr(cls, name, property(partial(_row, place)))

    def __init__(self, **columns: Ints) -> None:
        if columns.keys() != set(self.names):
            raise TypeError(f"expected {', '.join(self.names)}, got {', '.join(columns)}")
        self.table: Ints = np.array([columns[name] for name in self.names], np.int64)

    @classmethod
    def from_table(cls, table: Ints) -> Self:
        """Columns that are the rows of a table."""
        made = cls.__new__(cls)
        made.table = table
        return made

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, one part after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls.from_table(np.concatenate([part.table for part in parts], axis=1))

    def select(self, rows: Any) -> Self:
        """Some rows, by whatever indexes an array."""
        return self.from_table(self.table[:, rows])

    def by_name(self) -> dict[str, Ints]:
        """Each column."""
        return dict(zip(self.names, self.table, strict=True))

    def __len__(self) -> int:
        return len(self.table[0])


def _row(place: int, columns: Columns) -> Ints:
    row: Ints = columns.table[place]
    return row
