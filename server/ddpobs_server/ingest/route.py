"""The ingest route: takes one batch and acknowledges it after its commit.

Batches bypass the framework's routing (`BatchFastPath`), which would cost as much as the work itself.
"""

from __future__ import annotations

import time

from anyio import CapacityLimiter, to_thread
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from ddpobs import wire
from ddpobs_server.ingest import file_import, upload
from ddpobs_server.ingest.body import read_body
from ddpobs_server.ingest.memory_budget import decoded_bytes
from ddpobs_server.ingest.upload import Upload
from ddpobs_server.store import DeletedRunError, Outcome, UnavailableError, UnstorableBatchError
from ddpobs_server.web import problems
from ddpobs_server.web.auth import BEARER, needs
from ddpobs_server.web.authenticator import Caller
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.services import Services, services_of

_LARGE_BYTES = 1_000_000
_RETRYABLE = (400, 408, 429, 503)
"""Statuses after which a client sends again; 400 is a client that disconnected within a body."""
_ROUTE = "/runs/{run}/sources/{source}/batches/{seq}"
_PATH = compile_path(f"/api/v1{_ROUTE}")[0]
_authorize_ingest = needs("ingest", people=False)

router = APIRouter(prefix="/api/v1", tags=["ingest"])


@router.put(
    _ROUTE,
    status_code=201,
    dependencies=[Depends(BEARER)],
    responses={
        201: {"description": "Stored.", "content": {wire.JSON: {"schema": upload.ACKNOWLEDGEMENT}}},
        200: {"description": "Already stored.", "content": {wire.JSON: {"schema": upload.ACKNOWLEDGEMENT}}},
        409: {"description": "Another batch has this key."},
        410: {"description": "The run was deleted while this process trained."},
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
    """Store one batch and acknowledge it after its commit. The same body under the same key is stored once."""
    received_ns = time.time_ns()
    caller = await _authorize_ingest(request)
    services = services_of(request)
    try:
        await services.rates.wait_to_send(caller.workspace)
        key, outcome = await _store_batch(request, services, caller, received_ns)
    except Problem as problem:
        services.writer.batches.labels("busy" if problem.status in _RETRYABLE else "refused").inc()
        services.usages.count_refusal(caller.workspace, problem)
        raise
    except DeletedRunError as error:
        raise Problem(410, "Run deleted", str(error)) from None
    except UnstorableBatchError as error:
        raise Problem(422, "Malformed batch", str(error)) from None
    if outcome is Outcome.CONFLICT:
        raise Problem(409, "Conflict", f"another batch is stored under source {key['source']}, seq {key['seq']}")
    repeated = outcome is Outcome.REPEATED
    acknowledgement = wire.Acknowledgement(source=key["source"], seq=int(key["seq"]), repeated=repeated)
    return Response(wire.pack_json(acknowledgement), 200 if repeated else 201, media_type=wire.JSON)


async def _store_batch(
    request: Request, services: Services, caller: Caller, received_ns: int
) -> tuple[dict[str, str], Outcome]:
    """Return the batch's key and the outcome of its commit."""
    with services.memory_budget.reserve(caller.workspace) as reservation:
        key, (content_type, encoding) = upload.batch_key(request.path_params), upload.content_format(request)
        run = caller.key(key["run"])
        body = await read_body(request, reservation, services.settings)
        services.rates.count_bytes(caller.workspace, len(body))
        received = Upload(run, key, body, content_type, encoding, received_ns, services.settings)
        reservation.add(decoded_bytes(received.plain_bytes))
        await _admit(services, caller.workspace, run, key["source"])
        if received.plain_bytes > _LARGE_BYTES:
            await _decode(received, services.large_batches)
        outcome = await services.writer.submit(received, caller.workspace)
        services.admission.remember(run, key["source"])
    return key, outcome


async def _admit(services: Services, workspace: str, run: str, source: str) -> None:
    try:
        await services.admission.check(workspace, run, source)
    except UnavailableError:  # The writer counts its own failures, and this batch never reaches it.
        services.writer.batches.labels("failed").inc()
        raise


async def _decode(large: Upload, limiter: CapacityLimiter) -> None:
    """Decode a large batch on a thread of its own, so that it delays no other batch.

    Only one is decoded at a time: a malformed body may use much memory before it is refused.
    """
    await to_thread.run_sync(lambda: large.arrival, limiter=limiter)  # `arrival` is cached.


class BatchFastPath:
    """Middleware that passes batches to `put_batch` directly: FastAPI's routing takes as long as `put_batch` itself.

    Args:
        app: Responds to every other request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""
        match = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" and scope["method"] == "PUT" else None
        if match is None or scope["query_string"]:  # The route itself refuses unknown parameters.
            await self._app(scope, receive, send)
            return
        scope["path_params"] = match.groupdict()
        request = Request(scope, receive, send)
        try:
            response = await put_batch(request)
        except (Problem, UnavailableError) as error:
            response = problems.problem_response(request, error)
        await response(scope, receive, send)


def install(app: FastAPI) -> None:
    """Add the routes, and the fast path of batches."""
    app.include_router(router)
    app.include_router(file_import.router)
    app.add_middleware(BatchFastPath)
