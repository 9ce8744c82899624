"""Prometheus metrics: aggregates of the active runs, and the collector's own metrics."""

from __future__ import annotations

import asyncio
import gzip
import logging
import time
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from typing_extensions import override

from ddpobs_server.metrics.metric import END, Render
from ddpobs_server.metrics.scrape import Scrape
from ddpobs_server.metrics.scrapes import WAIT_S
from ddpobs_server.web.auth import needs
from ddpobs_server.web.authenticator import Caller
from ddpobs_server.web.fair_slots import FairSlots
from ddpobs_server.web.placed_route import PlacedRoute
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.services import Services, ServicesDep
from ddpobs_server.web.workspace_limits import Limits
from ddpobs_server.web.workspace_usage import Usage, UsageMetrics

_log = logging.getLogger(__name__)
_GZIP_LEVEL = 1
"""The lines repeat so much that higher levels save little and cost several times as long."""


class _ScrapeRoute(PlacedRoute):
    @staticmethod
    @override
    def places(services: Services) -> FairSlots:
        """Return the places of large scrapes."""
        return services.scrapes.places


router = APIRouter(tags=["metrics"], route_class=_ScrapeRoute)


def install(app: FastAPI) -> None:
    """Add `/metrics`."""
    app.include_router(router)


OnlyQuery = Annotated[
    Literal["runs", "collector"] | None,
    Query(description="With several collectors on one database: `runs` from one of them, `collector` from each."),
]


@router.get("/metrics", response_class=Response)
async def get_metrics(
    request: Request,
    services: ServicesDep,
    caller: Annotated[Caller, Depends(needs("read"))],
    only: OnlyQuery = None,
) -> Response:
    """The collector's own metrics and the metrics of the caller's runs; of one that only takes batches, its own."""
    if only == "runs":
        services.refuse_reads_if_ingest_only()
    elif services.settings.ingest_only:
        only = "collector"
    began = time.monotonic()
    render, content_type = choose_encoder(request.headers.get("Accept", ""))
    body = b"" if only == "collector" else await _render_runs(services, caller.workspace, render)
    services.scrapes.seconds.set(time.monotonic() - began)
    body += await run_in_threadpool(_render_own, services, caller, render, only)
    headers = {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    if _accepts_gzip(request.headers.get("Accept-Encoding", "")):
        headers["Content-Encoding"] = "gzip"
        body = await run_in_threadpool(gzip.compress, body, _GZIP_LEVEL)
    return Response(body, headers=headers)


def _render_own(services: Services, caller: Caller, render: Render, only: str | None) -> bytes:
    """The collector's own metrics, and the usage of the workspaces that the caller may see."""
    if only == "runs":
        return render(CollectorRegistry())
    registry = CollectorRegistry(auto_describe=False)
    registry.register(UsageMetrics(_usage(services, caller)))
    return render(registry).removesuffix(END) + render(services.scrapes.registry)


def _usage(services: Services, caller: Caller) -> dict[str, tuple[Limits, Usage]]:
    """Usage by workspace; empty without a database, so that the collector's own metrics remain readable."""
    if services.health.database_answers:
        try:
            return services.usages.visible_to(caller)
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


async def _render_runs(services: Services, workspace: str, render: Render) -> bytes:
    """The metrics of the runs.

    Raises:
        Problem: 503 if they cannot be read. A response without runs would keep `up` at 1 and resolve their alerts.
    """
    if not services.health.database_answers:
        raise _failure(services, str(services.health.problem))
    try:
        async with asyncio.timeout(WAIT_S):
            await services.scrapes.slots.acquire(workspace)
        try:
            scrape: Scrape = await run_in_threadpool(services.scrapes.renderer.render, workspace, render)
            if scrape.left_out:
                services.scrapes.runs_left_out.inc(scrape.left_out)
            return scrape.text
        finally:
            services.scrapes.slots.release(workspace)
    except Exception as error:
        raise _failure(services, f"{type(error).__name__}: {error}") from error


def _failure(services: Services, reason: str) -> Problem:
    services.scrapes.failures.inc()
    _log.error("the runs' metrics cannot be read: %s", reason)
    detail = "the runs' metrics cannot be read: see the collector's log; ?only=collector returns the collector's own"
    return Problem(503, "Scrape failed", detail, {"Retry-After": "5"})
