"""Columns of one length, as NumPy arrays, and their forms in other libraries and in a notebook.

A column with unknown values is a masked array: `mean` and `sum` leave them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SHOWN_ROWS = 10


class Columns(Mapping[str, NDArray[np.int64]]):
    """Columns by name, each an array of int64 with the shape [rows], masked where values are unknown.

    Args:
        columns: Lists or arrays of one length; None is an unknown value.

    Attributes:
        rows: Number of rows.
    """

    def __init__(self, columns: Mapping[str, Sequence[int | None] | NDArray[np.int64]]) -> None:
        self._columns = {name: _array(values) for name, values in columns.items()}
        self.rows = len(next(iter(self._columns.values()), ()))

    def __getitem__(self, name: str) -> NDArray[np.int64]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Columns({self.rows} rows: {', '.join(self)})"

    def to_arrow(self) -> Any:
        """Return a `pyarrow.Table`.

        Raises:
            ImportError: pyarrow is not installed.
        """
        return import_module("pyarrow").table(self._columns)

    def to_pandas(self) -> Any:
        """Return a `pandas.DataFrame`.

        Raises:
            ImportError: pandas is not installed.
        """
        pandas = import_module("pandas")
        masked = {
            name: pandas.arrays.IntegerArray(values.data, np.ma.getmaskarray(values))
            for name, values in self._columns.items()
            if isinstance(values, np.ma.MaskedArray)
        }
        return pandas.DataFrame(self._columns | masked)

    def to_polars(self) -> Any:
        """Return a `polars.DataFrame`.

        Raises:
            ImportError: polars is not installed.
        """
        masked = {
            name: values.tolist() for name, values in self._columns.items() if isinstance(values, np.ma.MaskedArray)
        }
        return import_module("polars").DataFrame(self._columns | masked)

    def _repr_html_(self) -> str:
        shown = list(zip(*(values[:_SHOWN_ROWS].tolist() for values in self._columns.values()), strict=True))
        more = f"<p>{self.rows} rows</p>" if self.rows > len(shown) else ""
        return html_table(list(self), shown) + more


def _array(values: Sequence[int | None] | NDArray[np.int64]) -> NDArray[np.int64]:
    if isinstance(values, np.ndarray):
        return values
    try:
        return np.array(values, np.int64)
    except TypeError:
        mask = [value is None for value in values]
        return np.ma.masked_array([value or 0 for value in values], mask, np.int64)


def html_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An HTML table with every text escaped."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
