"""Prometheus metrics: aggregates of the active runs, and the collector's own metrics."""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.exposition import choose_encoder

from ddpobs_server.metrics.families import END, Render
from ddpobs_server.metrics.scrape import Scrape
from ddpobs_server.web.auth import Caller, needs
from ddpobs_server.web.fair_slots import FairSlots
from ddpobs_server.web.placed_route import PlacedRoute
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.workspace_limits import Limits
from ddpobs_server.web.workspace_usage import Usage, UsageMetrics, WorkspaceUsages

_log = logging.getLogger(__name__)
_SCRAPES, _WAIT_S = 2, 5.0
"""Scrapes that read runs at the same time, each on its own connection, and the seconds further ones wait.

Scrapes do not take the reads' slots, so slow reads do not delay them.
"""
_UNSENT_SCRAPES = 4
"""Large answers that are sent; each may take 64 MB, and more clients than that are rare."""
_GZIP_LEVEL = 1
"""The lines repeat so much that higher levels save little and cost several times as long."""


class _ScrapeRoute(PlacedRoute):
    places = "scrape_places"


router = APIRouter(tags=["metrics"], route_class=_ScrapeRoute)


def install(app: FastAPI) -> None:
    """Add `/metrics`."""
    app.include_router(router)
    registry = app.state.registry

    def share(workspace: str) -> float:
        return float(app.state.workspace_limits.share(workspace))

    app.state.scrape_slots = FairSlots(_SCRAPES, share)
    app.state.scrape_places = FairSlots(_UNSENT_SCRAPES, share)
    app.state.scrape_seconds = Gauge("ddpobs_server_scrape_seconds", "Duration of the last scrape.", registry=registry)
    app.state.scrape_failures = Counter(
        "ddpobs_server_scrape_failures", "Scrapes answered with 503: the runs could not be read.", registry=registry
    )
    app.state.runs_left_out = Counter(
        "ddpobs_server_scrape_runs_left_out", "Runs that did not fit into an answer of /metrics.", registry=registry
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
    body += await run_in_threadpool(_render_own, state, caller, render, only)
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    if _accepts_gzip(request.headers.get("Accept-Encoding", "")):
        headers["Content-Encoding"] = "gzip"
        body = await run_in_threadpool(gzip.compress, body, _GZIP_LEVEL)
    return Response(body, headers=headers)


def _render_own(state: Any, caller: Caller, render: Render, only: str | None) -> bytes:
    """The collector's own metrics, and the usage of the workspaces that the caller may see."""
    if only == "runs":
        return render(CollectorRegistry())
    registry = CollectorRegistry(auto_describe=False)
    registry.register(UsageMetrics(_usage(state, caller)))
    return render(registry).removesuffix(END) + render(state.registry)


def _usage(state: Any, caller: Caller) -> dict[str, tuple[Limits, Usage]]:
    """Usage by workspace; empty without a database, so that the collector's own metrics remain readable."""
    if state.health_monitor.database_answers:
        try:
            usages: WorkspaceUsages = state.workspace_usage
            return usages.visible_to(caller)
        except Exception as error:
            _log.error("the usage of workspaces cannot be read: %s: %s", type(error).__name__, error)
    return {}


def _accepts_gzip(accept_encoding: str) -> bool:
    """Whether a client's `Accept-Encoding` allows gzip (RFC 9110, section 12.5.3)."""
    for item in accept_encoding.lower().split(","):
        coding, _, quality = item.partition(";")
        if coding.strip() in ("gzip", "*"):
            return quality.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


async def _render_runs(state: Any, workspace: str, render: Render) -> bytes:
    """The metrics of the runs.

    Raises:
        Problem: 503 if they cannot be read. An answer without runs would keep `up` at 1 and resolve their alerts.
    """
    if not state.health_monitor.database_answers:
        raise _failure(state, str(state.health_monitor.problem))
    try:
        async with asyncio.timeout(_WAIT_S):
            await state.scrape_slots.acquire(workspace)
        try:
            scrape: Scrape = await run_in_threadpool(state.run_renderer.render, workspace, render)
            if scrape.left_out:
                state.runs_left_out.inc(scrape.left_out)
            return scrape.text
        finally:
            state.scrape_slots.release(workspace)
    except Exception as error:
        raise _failure(state, f"{type(error).__name__}: {error}") from error


def _failure(state: Any, reason: str) -> Problem:
    state.scrape_failures.inc()
    _log.error("the runs' metrics cannot be read: %s", reason)
    detail = "the runs' metrics cannot be read: see the collector's log; ?only=collector returns the collector's own"
    return Problem(503, "Scrape failed", detail, {"Retry-After": "5"})
