"""Large answers as JSON: FastAPI's own way looks at each number by itself."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Response

from ddpobs import wire


def json_answer(body: dict[str, Any]) -> Response:
    """Plain values, and columns of integers as lists."""
    return Response(msgspec.json.encode(body, enc_hook=_listed), media_type=wire.JSON)


def columns_answer(run: str, attempt: str, columns: dict[str, wire.Ints], following: int | None) -> Response:
    """Columns of a page of steps; `following` is the next page's first step."""
    return json_answer({"run": run, "attempt": attempt, "columns": columns, "next": following})


def _listed(values: Any) -> Any:
    return values.tolist()
