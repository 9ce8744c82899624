"""Errors as RFC 9457 problem documents, each with a line in the log and a count in the metrics."""

from __future__ import annotations

import logging
import re
import secrets
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import Counter
from starlette.exceptions import HTTPException

from ddpobs_server.store import TooManyRowsError, UnavailableError

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
_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset({"GET", "PUT", "DELETE"})
_BATCHES_REFUSED = (
    *((401, "Token needed"), (401, "Wrong token"), (403, "Not allowed"), (409, "Conflict"), (413, "Body too large")),
    *((422, "Malformed batch"), (429, "Too many wrong tokens"), (500, "Internal error"), (503, "Busy")),
    *((503, "Storage unavailable"), (507, "Storage full")),
)
"""Counted from zero, so that the first of them is seen as an increase."""
_KEY = ("run", "source", "seq")
_SHOWN = 300
"""Most characters of a client's text in one field of a log line."""


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
    "the database has no room left and nothing of this was stored: free space on its disk, delete runs, or have old "
    "ones removed (DDPOBS_SERVER_KEEP_GB), and send it again; reads go on",
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
    """Have every error of the application answered as a problem, logged and counted."""
    app.state.problems = Counter(
        "ddpobs_server_problems",
        "Requests that were not served, by what the answer said; a PUT is a batch.",
        ["method", "status", "problem"],
        registry=app.state.registry,
    )
    for status, title in _BATCHES_REFUSED:
        app.state.problems.labels("PUT", status, title)

    @app.exception_handler(Problem)
    @app.exception_handler(UnavailableError)
    async def _known(request: Request, error: Problem | UnavailableError) -> JSONResponse:
        return answer(request, error)

    @app.exception_handler(TooManyRowsError)
    async def _too_many(request: Request, error: TooManyRowsError) -> JSONResponse:
        detail = f"{error}; ask for fewer steps, or for one rank's where you may"
        return answer(request, Problem(422, "Too many rows", detail))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        title = HTTPStatus(error.status_code).phrase
        return answer(request, Problem(error.status_code, title, str(error.detail), dict(error.headers or {})))

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        return answer(request, Problem(422, "Invalid request", f"{field}: {first['msg']}", field=field))

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        detail = f"{type(error).__name__}; the collector's log says more"
        return answer(request, Problem(500, "Internal error", detail))


def answer(request: Request, error: Problem | UnavailableError) -> JSONResponse:
    """The answer, which names the request as the log does; the client's own name for it where it gave one."""
    problem = error if isinstance(error, Problem) else _FULL if error.full else _AWAY
    given = request.headers.get("X-Request-ID", "")
    request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
    _note(request, problem, request_id)
    headers = {**(problem.headers or {}), "X-Request-ID": request_id}
    return JSONResponse(problem.document, problem.status, headers, MEDIA_TYPE)


def _note(request: Request, problem: Problem, request_id: str) -> None:
    method = request.method if request.method in _METHODS else "other"
    key = {name: request.path_params[name] for name in _KEY if name in request.path_params}
    client = request.client.host if request.client else "unknown"
    note(request.app, problem, method, **key, path=request.url.path, request=request_id, client=client)


def note(app: FastAPI, problem: Problem, method: str = "other", **facts: object) -> None:
    """Log and count a problem; `facts` say whose it is."""
    status, title = problem.status, problem.document["title"]
    app.state.problems.labels(method, status, title).inc()
    facts |= {"detail": problem.document["detail"], "method": method, "problem": title}
    shown = {name: str(value)[:_SHOWN] for name, value in facts.items()}
    _log.log(_level(status), "request refused", extra={**shown, "status": status, "kind": title})


def _level(status: int) -> int:
    if status >= 500 and status != 503:
        return logging.ERROR
    return logging.INFO if status in (404, 405) else logging.WARNING
