"""Tables of Parquet files, within bounds. Needs pyarrow: pip install 'ddpobs[export]'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ddpobs.errors import TraceFileError

_MAGIC = b"PAR1"
_MAX_CELLS = 2**28
"""Maximum number of cells of a file: 2 GiB in memory."""


class Table(NamedTuple):
    """A file's columns by name, as numpy arrays, and its own metadata."""

    path: Path
    columns: dict[str, Any]
    metadata: Mapping[bytes, bytes]


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet."""
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def column_names(path: Path) -> list[str]:
    """Names of a file's columns, which its footer has.

    Raises:
        TraceFileError: pyarrow is not installed, or the file is not whole.
    """
    names: list[str] = _opened(path).schema_arrow.names
    return names


def read(path: Path, columns: list[str]) -> Table:
    """Read these columns, as far as the file has them. Absent numbers are -1.

    Raises:
        TraceFileError: The file is too large, or not whole.
    """
    file = _opened(path)
    names = [name for name in columns if name in file.schema_arrow.names]
    cells = file.metadata.num_rows * max(1, len(names))
    if cells > _MAX_CELLS:
        raise TraceFileError(path, f"at most {_MAX_CELLS:,} cells", f"{cells:,}")
    try:
        table = file.read(columns=names)
        arrays = {name: _array(table.column(name)) for name in names}
    except (OSError, ValueError, NotImplementedError) as error:
        raise TraceFileError(path, "a whole Parquet file of numbers and texts", error) from None
    return Table(path, arrays, file.schema_arrow.metadata or {})


def _array(column: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return column.fill_null(-1).to_numpy()
    return column.cast(pa.string()).fill_null("").to_numpy()


def _opened(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise TraceFileError(path, "pyarrow, which reads it: pip install 'ddpobs[export]'", "none") from None
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise TraceFileError(path, "a whole Parquet file", error) from None
