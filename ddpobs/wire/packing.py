"""Columns of 64-bit integers in few bytes: in the narrowest width, as differences if these are smaller."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from ddpobs.errors import WireError
from ddpobs.wire.columns import Columns, Ints

_C = TypeVar("_C", bound=Columns)
UNPACKED_BYTES = 64_000_000
"""Default limit of the size of unpacked columns."""
_UNIT = 1000
_WINDOW_BYTES = 2**24
"""Limit of the memory for zstd's window."""
_SAMPLE = 512
_FEW = 2048
"""Rows below which a frame for each byte's position costs more than it saves."""
_CHUNK_VALUES = 2**16
"""Values of several columns that one numpy call processes: for few rows, a call costs more than its arithmetic."""
_WIDTHS = {width: np.dtype(width) for width in ("<i1", "<i2", "<i4", "<i8")}
_BEYOND = np.array([2**7, 2**15, 2**31])
"""Smallest numbers that do not fit into each width, except the last."""


class _ThreadLocal(threading.local):
    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)


_thread_local = _ThreadLocal()
_Order = Annotated[int, msgspec.Meta(ge=0, le=1)]
_Base = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_PlanedColumn = tuple[Literal["<i1", "<i2", "<i4", "<i8"], _Order, _Base, Literal[1, 1000], list[bytes]]
_PACKED_DECODER = msgspec.msgpack.Decoder(
    tuple[
        Annotated[int, msgspec.Meta(ge=0, le=2**32)], Annotated[dict[str, _PlanedColumn], msgspec.Meta(max_length=64)]
    ]
)


class _Packed(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A column in transit: little-endian numbers of that width. The first clients sent no unit."""

    width: Literal["<i1", "<i2", "<i4", "<i8"]
    order: _Order
    base: _Base
    values: bytes
    unit: Literal[1, 1000] = 1


def decompressor() -> zstandard.ZstdDecompressor:
    """Return this thread's decompressor.

    Threads must not share one, and creating one takes longer than most of its uses.
    """
    return _thread_local.decompressor


def pack(columns: Mapping[str, Ints]) -> bytes:
    """Compress columns of one length, byte position by byte position, because high bytes vary less than low bytes.

    Each byte position is a zstd frame with its own statistics. Columns of few rows share one frame.
    """
    compressor = zstandard.ZstdCompressor(1)
    rows = len(next(iter(columns.values()), ()))
    packed: dict[str, list[Any]] = {}
    columns_per_call = _CHUNK_VALUES // (rows + 1) + 1
    for first in range(0, len(columns), columns_per_call):
        names = list(columns)[first : first + columns_per_call]
        for name, (width, order, base, narrow, unit) in zip(
            names, _narrowed([columns[name] for name in names]), strict=True
        ):
            planes = _planes(narrow)
            packed[name] = [width, order, base, unit, planes if rows < _FEW else [*map(compressor.compress, planes)]]
    body = msgspec.msgpack.encode([rows, packed])
    return compressor.compress(body) if rows < _FEW else body


def _planes(narrow: npt.NDArray[Any]) -> list[bytes]:
    """Bytes of a column by position."""
    if narrow.itemsize == 1:
        return [narrow.tobytes()]
    return [plane.tobytes() for plane in narrow.view(np.uint8).reshape(-1, narrow.itemsize).T]


def unpack(packed: bytes, limit_bytes: int = UNPACKED_BYTES) -> dict[str, Ints]:
    """Reverse `pack`.

    Raises:
        WireError: The bytes are not packed columns, or their columns take more than `limit_bytes`.
    """
    names, table = _unpacked(packed, limit_bytes)
    return dict(zip(names, table, strict=True))


def unpack_as(kind: type[_C], packed: bytes, limit_bytes: int = UNPACKED_BYTES) -> _C:
    """Reverse `pack` for the columns of a record; absent columns take their defaults.

    Raises:
        WireError: As for `unpack`, or a column without a default is missing.
    """
    names, table = _unpacked(packed, limit_bytes)
    if names == kind.names:
        return kind.from_table(table)
    if missing := sorted(set(kind.required()) - set(names)):
        raise WireError("packed_spans", "every column of spans", f"none of {', '.join(missing)}")
    columns = dict(zip(names, table, strict=True))
    return kind.of_older({name: columns[name] for name in kind.names if name in columns})


def pack_column(column: Ints) -> list[Any]:
    """Pack a column as ``[width, order, base, bytes, unit]``, in the narrowest little-endian width."""
    return _in_transit([column])[0]


def pack_columns(columns: Columns) -> dict[str, list[Any]]:
    """Pack each column as `pack_column` does."""
    return dict(zip(columns.names, _in_transit(columns.table), strict=True))


def _in_transit(columns: Sequence[Ints] | Ints) -> list[list[Any]]:
    return [[width, order, base, narrow.tobytes(), unit] for width, order, base, narrow, unit in _narrowed(columns)]


def unpack_columns(kind: type[_C], packed: Any) -> _C:
    """Reverse `pack_columns`, or read a plain list of integers for each column; absent columns take their defaults.

    Raises:
        WireError: A column is in neither form, has no default and is missing, or differs in length.
        ValueError: The value is not a map of names.
    """
    try:
        by_name = msgspec.convert(packed, dict[str, _Packed])
        names = [name for name in kind.names if name in by_name or name not in kind.defaults]
        columns = [by_name[name] for name in names]
    except (msgspec.ValidationError, KeyError):
        return _unpacked_one_by_one(kind, packed)
    rows = len(columns[0].values) // _WIDTHS[columns[0].width].itemsize
    if any(len(column.values) != rows * _WIDTHS[column.width].itemsize for column in columns):
        return _unpacked_one_by_one(kind, packed)
    table = _widened(columns, rows)
    if len(names) == len(kind.names):
        return kind.from_table(table)
    return kind.of_older(dict(zip(names, table, strict=True)))


def unpack_column(packed: Any) -> Ints:
    """Reverse `pack_column`, or read a plain list of integers.

    Raises:
        ValueError: The value is in neither form.
    """
    if isinstance(packed, list) and set(map(type, packed)) <= {int}:
        try:
            return np.array(packed, np.int64)
        except OverflowError:
            raise ValueError("Expected 64-bit integers, got a larger one") from None
    try:
        column = msgspec.convert(packed, _Packed)
    except msgspec.ValidationError:
        raise ValueError("Expected a column of integers") from None
    size_bytes = _WIDTHS[column.width].itemsize
    if len(column.values) % size_bytes:
        raise ValueError(f"Expected whole {column.width} values, got {len(column.values)} bytes")
    widened: Ints = _widened([column], len(column.values) // size_bytes)[0]
    return widened


def _unpacked_one_by_one(kind: type[_C], packed: Any) -> _C:
    if not isinstance(packed, dict):
        raise ValueError(f"Expected `object`, got `{type(packed).__name__}`")
    columns: dict[str, Ints] = {}
    for name in kind.names:
        if name not in packed:
            if name in kind.defaults:
                continue
            raise ValueError(f"Object missing required field `{name}`")
        try:
            columns[name] = unpack_column(packed[name])
        except ValueError as error:
            raise WireError(name, "the wire schema", error) from None
        rows = len(columns[kind.names[0]])
        if len(columns[name]) != rows:
            raise WireError(name, f"{rows} values, as in the columns before it", len(columns[name]))
    return kind.of_older(columns)


def _unpacked(packed: bytes, limit_bytes: int) -> tuple[tuple[str, ...], Ints]:
    zstd = decompressor()
    try:
        if packed.startswith(zstandard.FRAME_HEADER):
            if not 0 <= zstandard.frame_content_size(packed) <= limit_bytes:
                raise WireError("packed_spans", f"a zstd frame of at most {limit_bytes} bytes", "another one")
            packed = zstd.decompress(packed)
        rows, columns = _PACKED_DECODER.decode(packed)
        if rows * 8 * len(columns) > limit_bytes:
            raise WireError("packed_spans", f"at most {limit_bytes} bytes of columns", rows * 8 * len(columns))
        merged = [_merged(column, rows, zstd) for column in columns.values()]
        return tuple(columns), _widened(merged, rows)
    except zstandard.ZstdError as error:
        raise WireError("packed_spans", "zstd", error) from None
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError("packed_spans", "packed columns", error) from None


def _merged(column: _PlanedColumn, rows: int, zstd: zstandard.ZstdDecompressor) -> _Packed:
    """Join the byte positions of a column."""
    width, order, base, unit, planes = column
    size_bytes = _WIDTHS[width].itemsize
    if len(planes) != size_bytes:
        raise WireError("packed_spans", f"{size_bytes} bytes a number of {width}", len(planes))
    plain = []
    for plane in planes:
        size = len(plane) if rows < _FEW else zstandard.frame_content_size(plane)
        if size != rows:
            raise WireError("packed_spans", f"{rows} bytes, one a row", size)
        plain.append(plane if rows < _FEW else zstd.decompress(plane))
    if size_bytes == 1:
        return _Packed(width, order, base, plain[0], unit)
    joined: Any = np.empty((rows, size_bytes), np.uint8)
    for position, values in enumerate(plain):
        joined[:, position] = np.frombuffer(values, np.uint8)
    return _Packed(width, order, base, joined.data, unit)


def _widened(columns: Sequence[_Packed], rows: int) -> Ints:
    """Build a table of columns with `rows` values each."""
    table = np.empty((len(columns), rows), np.int64)
    summed = [index for index, column in enumerate(columns) if column.order]
    if rows < _FEW:
        by_width: dict[str, list[int]] = {}
        for index, column in enumerate(columns):
            by_width.setdefault(column.width, []).append(index)
        for width, indexes in by_width.items():
            values = np.frombuffer(b"".join([columns[index].values for index in indexes]), _WIDTHS[width])
            table[indexes] = values.reshape(len(indexes), rows)
        table *= np.array([column.unit for column in columns], np.int64)[:, None]
        table[summed] = np.add.accumulate(table[summed], axis=1)
        table += np.array([column.base for column in columns], np.int64)[:, None]
        return table
    # For many rows a pass takes longer than its call, and most columns need few passes.
    zeros = bytes(rows)
    for row, column in zip(table, columns, strict=True):
        if column.values == zeros:
            row[:] = column.base
            continue
        values = np.frombuffer(column.values, _WIDTHS[column.width])
        if column.order:
            np.add.accumulate(values, dtype=np.int64, out=row)
        else:
            row[:] = values
        if column.unit != 1:
            np.multiply(row, column.unit, out=row)
        if column.base:
            np.add(row, column.base, out=row)
    return table


def _narrowed(columns: Sequence[Ints] | Ints) -> Iterator[tuple[str, int, int, npt.NDArray[Any], int]]:
    """Yield each column's width, order, base, values in that width, and unit.

    A column is `base` plus `unit` times the values (order 0) or times their running sum (order 1). Arithmetic wraps at
    64 bits, in both directions.
    """
    table = np.array(columns)
    if not table.shape[1]:
        for column in table:
            yield "<i1", 0, 0, column.astype("<i1"), 1
        return
    bases = table[:, 0].tolist()
    table -= table[:, :1].copy()
    varies: npt.NDArray[np.bool_] = (table != 0).any(axis=1)
    varying = _narrowed_offsets(table if varies.all() else table[varies])
    zeros = np.zeros(table.shape[1], "<i1")
    for base, column_varies in zip(bases, varies.tolist(), strict=True):
        width, order, values, unit = next(varying) if column_varies else ("<i1", 0, zeros, 1)
        yield width, order, base, values, unit


def _narrowed_offsets(table: Ints) -> Iterator[tuple[str, int, npt.NDArray[Any], int]]:
    """Yield width, order, values and unit of columns that begin with 0 and are not all 0."""
    if not len(table):
        return
    quotients = table // _UNIT
    whole = (quotients * _UNIT == table).all(axis=1)
    offsets = quotients if whole.all() else np.where(whole[:, None], quotients, table)
    differences = np.empty_like(offsets)
    differences[:, 0] = 0
    np.subtract(offsets[:, 1:], offsets[:, :-1], out=differences[:, 1:])
    reach, rise = _reach(offsets), _reach(differences)
    widths = np.searchsorted(_BEYOND, [reach, rise], side="right")
    smaller = (widths[1] < widths[0]) | ((widths[1] == widths[0]) & (_spread(differences) < _spread(offsets)))
    units = np.where(whole, _UNIT, 1).tolist()
    for index, (order, choices) in enumerate(zip(smaller.tolist(), widths.T.tolist(), strict=True)):
        width = [*_WIDTHS][choices[order]]
        values = (differences if order else offsets)[index]
        yield width, int(order), values.astype(_WIDTHS[width]), units[index]


def _reach(table: Ints) -> Ints:
    """Return each row's largest distance from zero; a negative n counts as -1 - n."""
    reach: Ints = np.maximum(table.max(axis=1), ~table.min(axis=1))
    return reach


def _spread(table: Ints) -> npt.NDArray[np.float64]:
    """Estimate each row's variance times its count from a sample: less variation takes fewer bits, at any offset."""
    plain = table[:, :: table.shape[1] // _SAMPLE + 1].astype(np.float64)
    spread: npt.NDArray[np.float64] = (plain * plain).sum(axis=1) - plain.sum(axis=1) ** 2 / plain.shape[1]
    return spread
