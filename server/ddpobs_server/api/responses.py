"""Large responses as JSON, without FastAPI's encoder, which checks each number by itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
from fastapi import Response

from ddpobs import wire
from ddpobs_server.web.packed_body import PackedBody, PackedResponse

_MAX_CHARACTERS = 16_000_000
"""Maximum characters of names in a response."""
_EVENTS = 1024
"""Events of a trace that are encoded together."""


def json_response(body: dict[str, Any]) -> Response:
    """Encode plain values, and columns of integers as lists."""
    return Response(msgspec.json.encode(body, enc_hook=_to_list), media_type=wire.JSON)


def trace_response(trace: dict[str, Any]) -> Response:
    """Encode a trace, whose events are an iterator, part by part."""

    def parts() -> Iterator[bytes]:
        rest = {name: value for name, value in trace.items() if name != "traceEvents"}
        separator = b'{"traceEvents":['
        while events := list(islice(trace["traceEvents"], _EVENTS)):
            yield separator + msgspec.json.encode(events)[1:-1]
            separator = b","
        yield (b"" if separator == b"," else separator) + b"]," + msgspec.json.encode(rest)[1:]

    return PackedResponse(PackedBody(parts()), media_type=wire.JSON)


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
