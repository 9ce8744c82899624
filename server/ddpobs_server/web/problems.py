"""Errors as RFC 9457 problem documents, each with a line in the log and a count in the metrics."""

from __future__ import annotations

import logging
import re
import secrets
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CollectorRegistry, Counter
from starlette.exceptions import HTTPException

from ddpobs_server.store import LostDatabaseError, TooManyRowsError, UnavailableError

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
    status: {"description": text, "content": {MEDIA_TYPE: {"schema": _SCHEMA}}}
    for status, text in (("4XX", "The request is at fault."), ("5XX", "Temporary failure; try again."))
}
"""Problem responses that every route may send, for the OpenAPI document."""
_log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = frozenset({"GET", "PUT", "POST", "PATCH", "DELETE"})
_BATCH_PROBLEMS = (
    *((401, "Token needed"), (401, "Wrong token"), (403, "Not allowed"), (409, "Conflict"), (413, "Body too large")),
    *((422, "Malformed batch"), (429, "Too many wrong tokens"), (500, "Internal error"), (503, "Busy")),
    *((408, "Upload too slow"), (410, "Run deleted"), (421, "Misdirected request")),
    *((429, "Too many runs"), (429, "Too many sources")),
    *((503, "Storage lost"), (503, "Storage unavailable"), (507, "Storage full")),
)
"""Counters created at zero, so that the first problem appears as an increase."""
_DATA_PATHS = ("/api/", "/metrics")
_KEY_FIELDS = ("run", "source", "seq")
_MAX_LOGGED = 300
"""Maximum number of characters of a client's text in one field of a log line."""


class Problem(Exception):  # noqa: N818 - the RFC's word
    """An error response.

    Args:
        status: HTTP status.
        title: Kind of problem, in a few words.
        detail: This occurrence: the place, the expected and the actual value, and the remedy.
        headers: Extra headers of the response.
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
    "the database's disk is full and nothing of this request was stored: free space on the disk, delete runs, or set "
    "DDPOBS_SERVER_KEEP_GB to delete old ones, then send it again; reads still work",
    {"Retry-After": "1"},
)
_UNAVAILABLE = Problem(
    503,
    "Storage unavailable",
    "the database does not respond or cannot be written, and nothing of this request was stored: see the collector's "
    "log for the reason; the collector recovers by itself once the database is back, so send it again",
    {"Retry-After": "1"},
)
_LOST = Problem(
    503,
    "Storage lost",
    "the database's file was removed, replaced or damaged, so nothing of this request was stored: see the collector's "
    "log for the place and the remedy; then send it again",
    {"Retry-After": "30"},
)


def install(app: FastAPI, registry: CollectorRegistry) -> None:
    """Turn every error of the application into a problem response that is logged and counted."""
    app.state.problem_counter = Counter(
        "ddpobs_server_problems",
        "Requests that were refused or failed, by status and title of the problem; a PUT is a batch.",
        ["method", "status", "problem"],
        registry=registry,
    )
    for status, title in _BATCH_PROBLEMS:
        app.state.problem_counter.labels("PUT", status, title)

    @app.exception_handler(Problem)
    @app.exception_handler(UnavailableError)
    async def _on_problem(request: Request, error: Problem | UnavailableError) -> JSONResponse:
        return problem_response(request, error)

    @app.exception_handler(TooManyRowsError)
    async def _on_too_many_rows(request: Request, error: TooManyRowsError) -> JSONResponse:
        detail = f"{error}; request fewer steps, or one rank where the route allows it"
        return problem_response(request, Problem(422, "Too many rows", detail))

    @app.exception_handler(HTTPException)
    async def _on_http_exception(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404 and _is_page(request):
            return HTMLResponse(app.state.missing_page, 404)
        title = HTTPStatus(error.status_code).phrase
        return problem_response(
            request, Problem(error.status_code, title, str(error.detail), dict(error.headers or {}))
        )

    @app.exception_handler(RequestValidationError)
    async def _on_invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        return problem_response(request, Problem(422, "Invalid request", f"{field}: {first['msg']}", field=field))

    @app.exception_handler(Exception)
    async def _on_unexpected_error(request: Request, error: Exception) -> JSONResponse:
        detail = f"{type(error).__name__}; see the collector's log for details"
        return problem_response(request, Problem(500, "Internal error", detail))


def _is_page(request: Request) -> bool:
    """Return whether a browser asked for a page, by a wrong address."""
    is_data = request.url.path.startswith(_DATA_PATHS)
    return request.method == "GET" and not is_data and "text/html" in request.headers.get("Accept", "")


def problem_response(request: Request, error: Problem | UnavailableError) -> JSONResponse:
    """Log and count the problem, and return its response.

    `X-Request-ID` is the same in the response and in the log: the client's value, or a random one.
    """
    problem = error if isinstance(error, Problem) else _storage_problem(error)
    client_id = request.headers.get("X-Request-ID", "")
    request_id = client_id if _REQUEST_ID.fullmatch(client_id) else secrets.token_hex(8)
    _record_request(request, problem, request_id)
    headers = {**(problem.headers or {}), "X-Request-ID": request_id}
    return JSONResponse(problem.document, problem.status, headers, MEDIA_TYPE)


def _storage_problem(error: UnavailableError) -> Problem:
    if isinstance(error, LostDatabaseError):
        return _LOST
    return _FULL if error.full else _UNAVAILABLE


def _record_request(request: Request, problem: Problem, request_id: str) -> None:
    method = request.method if request.method in _METHODS else "other"
    key = {name: request.path_params[name] for name in _KEY_FIELDS if name in request.path_params}
    client = request.client.host if request.client else "unknown"
    record_problem(request.app, problem, method, **key, path=request.url.path, request=request_id, client=client)


def record_problem(app: FastAPI, problem: Problem, method: str = "other", **facts: object) -> None:
    """Log and count a problem.

    Args:
        app: Its state holds the counter.
        problem: The problem of the response.
        method: HTTP method, or "other".
        **facts: Further fields of the log line, such as the client and the run.
    """
    status, title = problem.status, problem.document["title"]
    app.state.problem_counter.labels(method, status, title).inc()
    facts |= {"detail": problem.document["detail"], "method": method, "problem": title}
    fields = {name: str(value)[:_MAX_LOGGED] for name, value in facts.items()}
    _log.log(_level(status), "request refused", extra={**fields, "status": status, "kind": title})


def _level(status: int) -> int:
    if status >= 500 and status != 503:
        return logging.ERROR
    return logging.INFO if status in (404, 405) else logging.WARNING
