"""Columns of 64-bit integers as few bytes: in the narrowest width, as differences where these are smaller."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from ddpobs.errors import WireError

Ints = npt.NDArray[np.int64]
UNPACKED_BYTES = 64_000_000
"""Most that packed columns may take, unless said otherwise."""
_UNIT = 1000
_WINDOW_BYTES = 2**24
"""Most memory that zstd's own window may take."""
_SAMPLE = 512
_FEW = 2048
"""Rows below which a frame for each byte's place costs more than it saves."""
_WIDTHS = {width: np.dtype(width) for width in ("<i1", "<i2", "<i4", "<i8")}


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)


_of_thread = _OfThread()
_PackedColumn = tuple[
    Literal["<i1", "<i2", "<i4", "<i8"],
    Annotated[int, msgspec.Meta(ge=0, le=1)],
    int,
    Literal[1, 1000],
    list[bytes],
]
_PACKED_DECODER = msgspec.msgpack.Decoder(
    tuple[
        Annotated[int, msgspec.Meta(ge=0, le=2**32)], Annotated[dict[str, _PackedColumn], msgspec.Meta(max_length=64)]
    ]
)


def decompressor() -> zstandard.ZstdDecompressor:
    """This thread's: to make one takes longer than most of what it is used for, and threads must not share one."""
    return _of_thread.decompressor


def pack(columns: Mapping[str, Ints]) -> bytes:
    """Columns of one length, compressed: byte by byte of the numbers, since high bytes vary less than low ones.

    Each byte's place is a frame of its own, with its own statistics; where there are few rows all share one.
    """
    compressor = zstandard.ZstdCompressor(1)
    rows = len(next(iter(columns.values()), ()))
    packed: dict[str, list[Any]] = {}
    for name, column in columns.items():
        width, order, base, narrow, unit = _narrowed(column)
        planes = [plane.tobytes() for plane in narrow.view(np.uint8).reshape(len(narrow), narrow.itemsize).T]
        packed[name] = [width, order, base, unit, planes if rows < _FEW else [*map(compressor.compress, planes)]]
    body = msgspec.msgpack.encode([rows, packed])
    return compressor.compress(body) if rows < _FEW else body


def unpack(packed: bytes, limit_bytes: int = UNPACKED_BYTES) -> dict[str, Ints]:
    """What `pack` packed.

    Raises:
        WireError: It is no such thing, or columns that take more than `limit_bytes`.
    """
    zstd = decompressor()
    try:
        if packed.startswith(zstandard.FRAME_HEADER):
            if not 0 <= zstandard.frame_content_size(packed) <= limit_bytes:
                raise WireError("packed_spans", f"a zstd frame of at most {limit_bytes} bytes", "another one")
            packed = zstd.decompress(packed)
        rows, columns = _PACKED_DECODER.decode(packed)
        if rows * 8 * len(columns) > limit_bytes:
            raise WireError("packed_spans", f"at most {limit_bytes} bytes of columns", rows * 8 * len(columns))
        return {name: _from_planes(column, rows, zstd) for name, column in columns.items()}
    except zstandard.ZstdError as error:
        raise WireError("packed_spans", "zstd", error) from None
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError("packed_spans", "packed columns", error) from None


def _narrow(values: Ints) -> tuple[str, npt.NDArray[Any]]:
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    bits = max((-1 - low if low < 0 else low).bit_length(), (-1 - high if high < 0 else high).bit_length()) + 1
    width = "<i1" if bits <= 8 else "<i2" if bits <= 16 else "<i4" if bits <= 32 else "<i8"
    return width, values.astype(_WIDTHS[width])


def _narrowed(column: Ints) -> tuple[str, int, int, npt.NDArray[Any], int]:
    """A column's width, order, base, values in that width, and unit.

    The values times `unit`, as they are (order 0) or summed up (order 1), added to `base` give the column. Arithmetic
    wraps at 64 bits, both ways.
    """
    base = int(column[0]) if len(column) else 0
    offsets = column - np.int64(base)
    if not offsets.any():
        return "<i1", 0, base, offsets.astype("<i1"), 1
    unit = 1 if (offsets % _UNIT).any() else _UNIT
    if unit != 1:
        offsets //= unit
    differences = np.zeros_like(offsets)
    np.subtract(offsets[1:], offsets[:-1], out=differences[1:])
    candidates = [_narrow(offsets), _narrow(differences)]
    size = [(narrow.itemsize, _spread(narrow)) for _, narrow in candidates]
    order = int(size[1] < size[0])
    width, narrow = candidates[order]
    return width, order, base, narrow, unit


def _spread(values: npt.NDArray[Any]) -> float:
    """The variance times the count: what varies less takes fewer bits, wherever it lies. Some of the rows tell."""
    plain = values[:: len(values) // _SAMPLE + 1].astype(np.float64)
    return float(plain @ plain - plain.sum() ** 2 / len(plain))


def _widened(values: npt.NDArray[Any], order: int, base: int, unit: int) -> Ints:
    # In place: at these sizes new memory costs more than the arithmetic.
    wide = values.astype(np.int64)
    if unit != 1:
        wide *= unit
    if order:
        np.add.accumulate(wide, out=wide)
    wide += base
    return wide


def pack_column(column: Ints) -> list[Any]:
    """A column as ``[width, order, base, bytes, unit]``, in the narrowest little-endian width."""
    width, order, base, narrow, unit = _narrowed(column)
    return [width, order, base, narrow.tobytes(), unit]


def unpack_column(packed: Any) -> Ints:
    """What `pack_column` packed, or a plain list of integers.

    Raises:
        ValueError: It is neither.
    """
    match packed:
        case [str() as width, (0 | 1) as order, int() as base, bytes() as data, *units] if (
            width in _WIDTHS and -(2**63) <= base < 2**63 and units in ([], [1], [_UNIT])
        ):
            if len(data) % _WIDTHS[width].itemsize:
                raise ValueError(f"Expected whole {width} values, got {len(data)} bytes")
            return _widened(np.frombuffer(data, _WIDTHS[width]), order, base, units[0] if units else 1)
        case list() if set(map(type, packed)) <= {int}:
            try:
                return np.array(packed, np.int64)
            except OverflowError:
                raise ValueError("Expected 64-bit integers, got a larger one") from None
    raise ValueError("Expected a column of integers")


def _from_planes(column: _PackedColumn, rows: int, zstd: zstandard.ZstdDecompressor) -> Ints:
    width, order, base, unit, planes = column
    whole = np.empty((rows, _WIDTHS[width].itemsize), np.uint8)
    if not -(2**63) <= base < 2**63:
        raise WireError("packed_spans", "64-bit integers", base)
    if len(planes) != whole.shape[1]:
        raise WireError("packed_spans", f"{whole.shape[1]} bytes a number of {width}", len(planes))
    for place, plane in enumerate(planes):
        size = len(plane) if rows < _FEW else zstandard.frame_content_size(plane)
        if size != rows:
            raise WireError("packed_spans", f"{rows} bytes, one a row", size)
        values = plane if rows < _FEW else zstd.decompress(plane)
        whole[:, place] = np.frombuffer(values, np.uint8)
    return _widened(whole.reshape(-1).view(_WIDTHS[width]), order, base, unit)
