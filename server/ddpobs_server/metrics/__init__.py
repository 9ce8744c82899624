"""Prometheus metrics: aggregates of the active runs, and the collector's own."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import choose_encoder

from ddpobs_server.metrics.runs import run_metrics
from ddpobs_server.web.auth import Caller, needs

_log = logging.getLogger(__name__)
_AT_ONCE, _PATIENCE_S = 2, 5.0
"""Scrapes that read runs, each on a connection; slow reads do not hold them up, and how long others wait for a turn."""

router = APIRouter(tags=["metrics"])


def install(app: FastAPI) -> None:
    """Add `/metrics`."""
    app.include_router(router)
    registry = app.state.registry
    app.state.scrapes = asyncio.Semaphore(_AT_ONCE)
    app.state.scrape_seconds = Gauge(
        "ddpobs_server_scrape_seconds", "How long the last scrape took.", registry=registry
    )
    app.state.scrape_failures = Counter(
        "ddpobs_server_scrape_failures", "Scrapes without the runs: the database did not answer.", registry=registry
    )


OnlyQuery = Annotated[
    Literal["runs", "collector"] | None,
    Query(description="Several collectors on one database: `runs` from one of them, `collector` from each."),
]


@router.get("/metrics", response_class=Response)
async def get_metrics(
    request: Request, caller: Annotated[Caller, Depends(needs("read"))], only: OnlyQuery = None
) -> Response:
    """The collector's own metrics and the caller's runs', read from the store and rendered off the event loop."""
    began = time.monotonic()
    state = request.app.state
    render, content_type = choose_encoder(request.headers.get("Accept", ""))
    body = b"" if only == "collector" else await _runs(state, caller.workspace, render)
    state.scrape_seconds.set(time.monotonic() - began)
    body += await run_in_threadpool(render, CollectorRegistry() if only == "runs" else state.registry)
    return Response(body, headers={"Content-Type": content_type})


async def _runs(state: Any, workspace: str, render: Callable[[CollectorRegistry], bytes]) -> bytes:
    """The runs' metrics; nothing without a database, so that the collector's own can still be read."""
    if not state.watch.database_answers:
        state.scrape_failures.inc()
        return b""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await state.scrapes.acquire()
        try:
            return await run_in_threadpool(run_metrics, state, workspace, render)
        finally:
            state.scrapes.release()
    except Exception as error:
        state.scrape_failures.inc()
        _log.error("the runs' metrics cannot be read: %s: %s", type(error).__name__, error)
        return b""
