"""Errors as RFC 9457 problem documents."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ddpobs_server.store import UnavailableError

MEDIA_TYPE = "application/problem+json"
_SCHEMA = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
    },
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": what, "content": {MEDIA_TYPE: {"schema": _SCHEMA}}}
    for status, what in (("4XX", "The request is at fault."), ("5XX", "Not now; try again."))
}
"""What every route may also answer, for the OpenAPI document."""


class Problem(Exception):  # noqa: N818 - the RFC's word
    """An answer that says what went wrong.

    Args:
        status: HTTP status.
        title: What kind of problem, in a few words.
        detail: This one: where, what was expected, what came, what to do.
        headers: Extra headers of the answer.
        **facts: Extension members of the document.
    """

    def __init__(
        self, status: int, title: str, detail: str, headers: dict[str, str] | None = None, **facts: Any
    ) -> None:
        super().__init__(detail)
        self.status, self.headers = status, headers
        self.document = {"type": "about:blank", "title": title, "status": status, "detail": detail, **facts}


_FULL = Problem(
    507,
    "Storage full",
    "the database has no room left and nothing of this was stored: free space on its disk, or have old runs removed "
    "(DDPOBS_SERVER_KEEP_GB), and send it again; reads go on",
    {"Retry-After": "1"},
)
_AWAY = Problem(
    503,
    "Storage unavailable",
    "the database does not answer or takes no writing, and nothing of this was stored: the collector's log says why; "
    "it goes on by itself once the database is back, so send it again",
    {"Retry-After": "1"},
)


def install(app: FastAPI) -> None:
    """Have every error of the application answered as a problem."""

    @app.exception_handler(Problem)
    async def _problem(_: Request, problem: Problem) -> JSONResponse:
        return _answer(problem)

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> JSONResponse:
        return _answer(Problem(error.status_code, str(error.detail), str(error.detail), dict(error.headers or {})))

    @app.exception_handler(RequestValidationError)
    async def _validation(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        return _answer(Problem(422, "Invalid request", f"{field}: {first['msg']}", field=field))

    @app.exception_handler(UnavailableError)
    async def _unavailable(_: Request, error: UnavailableError) -> JSONResponse:
        return _answer(_FULL if error.full else _AWAY)

    @app.exception_handler(Exception)
    async def _unexpected(_: Request, error: Exception) -> JSONResponse:
        return _answer(Problem(500, "Internal error", f"{type(error).__name__}; the collector's log says more"))


def _answer(problem: Problem) -> JSONResponse:
    return JSONResponse(problem.document, problem.status, problem.headers, MEDIA_TYPE)
