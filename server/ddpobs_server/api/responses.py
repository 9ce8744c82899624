"""Large responses as JSON, without FastAPI's encoder, which checks each number by itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from fastapi import Response

from ddpobs import wire
from ddpobs_server.web.packed_body import PackedBody, PackedResponse

_MAX_CHARACTERS = 16_000_000
"""Maximum characters of names in a response."""
_NUMBERS, _ITEMS = 2**16, 1024
"""Numbers of a column, and items of an iterator, that are encoded together."""


def json_response(body: dict[str, Any]) -> Response:
    """Encode plain values, and columns and iterators as lists, part by part."""
    return PackedResponse(PackedBody(_encoded(body)), media_type=wire.JSON)


def _encoded(value: Any) -> Iterator[bytes]:
    """Iterate over the parts of the JSON text; only what is large, is divided."""
    if isinstance(value, dict):
        separator = b"{"
        for name, item in value.items():
            yield separator + msgspec.json.encode(str(name)) + b":"
            yield from _encoded(item)
            separator = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, np.ndarray | Iterator):
        separator = b"["
        for block in _blocks(value):
            yield separator + msgspec.json.encode(block)[1:-1]
            separator = b","
        yield b"[]" if separator == b"[" else b"]"
    else:
        yield msgspec.json.encode(value, enc_hook=_to_list)


def _blocks(values: Any) -> Iterator[list[Any]]:
    if isinstance(values, np.ndarray):
        rows = max(1, _NUMBERS * len(values) // max(1, values.size))
        for begin in range(0, len(values), rows):
            yield values[begin : begin + rows].tolist()
    else:
        while block := list(islice(values, _ITEMS)):
            yield block


def columns_response(run: str, attempt: str, columns: dict[str, wire.Ints], next_step: int | None) -> Response:
    """Encode the columns of a page of steps; `next_step` is the next page's first step."""
    return json_response({"run": run, "attempt": attempt, "columns": columns, "next": next_step})


def within_response(sets: list[tuple[int, wire.Unused]]) -> tuple[list[tuple[int, wire.Unused]], int]:
    """The latest unused sets that fit into a response, and the number of the others.

    In memory most ranks' sets share their names, in a response each set repeats them.
    """
    remaining = _MAX_CHARACTERS
    sizes: dict[int, int] = {}
    fitting: set[int] = set()
    for index in sorted(range(len(sets)), key=lambda index: -sets[index][1].step):
        record = sets[index][1]
        for names in (record.locally, record.globally):
            if id(names) not in sizes:
                sizes[id(names)] = sum(map(len, names)) + 3 * len(names)
            remaining -= sizes[id(names)]
        if remaining < 0 and fitting:
            break
        fitting.add(index)
    return [row for index, row in enumerate(sets) if index in fitting], len(sets) - len(fitting)


def _to_list(column: Any) -> Any:
    return column.tolist()
