"""Prometheus metrics: aggregates of the active runs, and the collector's own metrics."""

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
from ddpobs_server.web.problems import Problem

_log = logging.getLogger(__name__)
_SCRAPES, _WAIT_S = 2, 5.0
"""Scrapes that read runs at the same time, each on its own connection, and the seconds further ones wait.

Scrapes do not take the reads' slots, so slow reads do not delay them.
"""

router = APIRouter(tags=["metrics"])


def install(app: FastAPI) -> None:
    """Add `/metrics`."""
    app.include_router(router)
    registry = app.state.registry
    app.state.scrape_slots = asyncio.Semaphore(_SCRAPES)
    app.state.scrape_seconds = Gauge("ddpobs_server_scrape_seconds", "Duration of the last scrape.", registry=registry)
    app.state.scrape_failures = Counter(
        "ddpobs_server_scrape_failures", "Scrapes answered with 503: the runs could not be read.", registry=registry
    )


OnlyQuery = Annotated[
    Literal["runs", "collector"] | None,
    Query(description="With several collectors on one database: `runs` from one of them, `collector` from each."),
]


@router.get("/metrics", response_class=Response)
async def get_metrics(
    request: Request, caller: Annotated[Caller, Depends(needs("read"))], only: OnlyQuery = None
) -> Response:
    """The collector's own metrics and the metrics of the caller's runs."""
    began = time.monotonic()
    state = request.app.state
    render, content_type = choose_encoder(request.headers.get("Accept", ""))
    body = b"" if only == "collector" else await _render_runs(state, caller.workspace, render)
    state.scrape_seconds.set(time.monotonic() - began)
    body += await run_in_threadpool(render, CollectorRegistry() if only == "runs" else state.registry)
    return Response(body, headers={"Content-Type": content_type})


async def _render_runs(state: Any, workspace: str, render: Callable[[CollectorRegistry], bytes]) -> bytes:
    """The metrics of the runs.

    Raises:
        Problem: 503 if they cannot be read. An answer without runs would keep `up` at 1 and resolve their alerts.
    """
    if not state.health_monitor.database_answers:
        raise _failure(state, str(state.health_monitor.problem))
    try:
        async with asyncio.timeout(_WAIT_S):
            await state.scrape_slots.acquire()
        try:
            return await run_in_threadpool(run_metrics, state, workspace, render)
        finally:
            state.scrape_slots.release()
    except Exception as error:
        raise _failure(state, f"{type(error).__name__}: {error}") from error


def _failure(state: Any, reason: str) -> Problem:
    state.scrape_failures.inc()
    _log.error("the runs' metrics cannot be read: %s", reason)
    detail = "the runs' metrics cannot be read: see the collector's log; ?only=collector returns the collector's own"
    return Problem(503, "Scrape failed", detail, {"Retry-After": "5"})
