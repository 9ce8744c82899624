"""A batch in, an acknowledgement out after commit: one writer thread, many batches a transaction."""

from __future__ import annotations

import logging
import time

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from ddpobs import wire
from ddpobs_server.ingest import upload
from ddpobs_server.ingest.body import read_body
from ddpobs_server.ingest.memory_budget import memory_bytes
from ddpobs_server.ingest.upload import Upload
from ddpobs_server.store import Outcome, UnavailableError, UnstorableBatchError
from ddpobs_server.web import problems
from ddpobs_server.web.auth import BEARER, needs
from ddpobs_server.web.problems import Problem

_log = logging.getLogger(__name__)
_LARGE_BYTES = 1_000_000
_RETRIED = (400, 408, 429, 503)
"""400 is a client that went away in the middle of a body."""
_ROUTE = "/runs/{run}/sources/{source}/batches/{seq}"
_PATH = compile_path(f"/api/v1{_ROUTE}")[0]
_may_ingest = needs("ingest")


router = APIRouter(prefix="/api/v1", tags=["ingest"])


@router.put(
    _ROUTE,
    status_code=201,
    dependencies=[Depends(BEARER)],
    responses={
        201: {"description": "Stored.", "content": {wire.JSON: {"schema": upload.ACKNOWLEDGEMENT}}},
        200: {"description": "Stored before.", "content": {wire.JSON: {"schema": upload.ACKNOWLEDGEMENT}}},
        409: {"description": "Another batch has this key."},
    },
    openapi_extra={
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": upload.KEY[name]} for name in upload.KEY
        ],
        "requestBody": {
            "required": True,
            "content": {
                wire.MSGPACK: {"schema": {"type": "string", "format": "binary"}},
                wire.JSON: {"schema": upload.BATCH},
            },
        },
    },
)
async def put_batch(request: Request) -> Response:
    """Take one batch; the acknowledgement comes after commit. The same body under the same key is stored once."""
    received_ns = time.time_ns()
    caller = await _may_ingest(request)
    state = request.app.state
    try:
        with state.under_way.hold() as held:
            key, (content_type, encoding) = upload.key(request.path_params), upload.form(request)
            run = caller.key(key["run"])
            body = await read_body(request, held, state.settings)
            received = Upload(run, key, body, content_type, encoding, received_ns, state.settings)
            held.add(memory_bytes(received.plain_bytes))
            await _admit(request.app, caller.workspace, run, key["source"])
            if received.plain_bytes > _LARGE_BYTES:
                await _open(received, state.large_batches)
            outcome = await state.writer.submit(received)
            state.admission.remember(run, key["source"])
    except Problem as problem:
        state.writer.batches.labels("busy" if problem.status in _RETRIED else "refused").inc()
        raise
    except UnstorableBatchError as error:
        raise Problem(422, "Malformed batch", str(error)) from None
    if outcome is Outcome.CONFLICT:
        raise Problem(409, "Conflict", f"another batch is stored under source {key['source']}, seq {key['seq']}")
    repeated = outcome is Outcome.REPEATED
    answer = wire.Acknowledgement(source=key["source"], seq=int(key["seq"]), repeated=repeated)
    return Response(wire.pack_json(answer), 200 if repeated else 201, media_type=wire.JSON)


async def _admit(app: FastAPI, workspace: str, run: str, source: str) -> None:
    try:
        await app.state.admission.check(workspace, run, source)
    except UnavailableError:  # The writer, which counts those that fail there, never sees this one.
        app.state.writer.batches.labels("failed").inc()
        raise


async def _open(upload: Upload, limiter: CapacityLimiter) -> None:
    """Decode what would hold up everyone else, one at a time: rubbish may take much memory until it is known."""

    def look() -> None:
        upload.arrival  # noqa: B018 - keeps it

    await to_thread.run_sync(look, limiter=limiter)


class BatchFastPath:
    """Batches go to `put_batch` from here; the way through the framework's layers takes as long as that itself.

    Args:
        app: Answers every other request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        found = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "PUT" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["path_params"] = found.groupdict()
        request = Request(scope, receive, send)
        try:
            response = await put_batch(request)
        except (Problem, UnavailableError) as error:
            response = problems.answer(request, error)
        await response(scope, receive, send)


def install(app: FastAPI) -> None:
    """Take batches in."""
    app.include_router(router)
    app.add_middleware(BatchFastPath)
