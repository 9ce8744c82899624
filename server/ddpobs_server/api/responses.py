"""Large responses as JSON, without FastAPI's encoder, which checks each number by itself."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Response

from ddpobs import wire


def json_response(body: dict[str, Any]) -> Response:
    """Encode plain values, and columns of integers as lists."""
    return Response(msgspec.json.encode(body, enc_hook=_to_list), media_type=wire.JSON)


def columns_response(run: str, attempt: str, columns: dict[str, wire.Ints], next_step: int | None) -> Response:
    """Encode the columns of a page of steps; `next_step` is the next page's first step."""
    return json_response({"run": run, "attempt": attempt, "columns": columns, "next": next_step})


def _to_list(column: Any) -> Any:
    return column.tolist()
