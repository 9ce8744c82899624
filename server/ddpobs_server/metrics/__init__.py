"""Prometheus metrics: aggregates of the active runs, and the collector's own."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import Gauge
from prometheus_client.exposition import choose_encoder

from ddpobs_server.auth import Caller, needs
from ddpobs_server.metrics.runs import run_metrics

router = APIRouter(tags=["metrics"])


def install(app: FastAPI) -> None:
    """Add `/metrics`."""
    app.include_router(router)
    registry = app.state.registry
    size = Gauge("ddpobs_server_store_bytes", "What the database takes on disk.", registry=registry)
    size.set_function(lambda: app.state.store.size_bytes())  # noqa: PLW0108 - there is no store before the start
    app.state.scrape_seconds = Gauge(
        "ddpobs_server_scrape_seconds", "How long the last scrape took.", registry=registry
    )


@router.get("/metrics", response_class=Response)
def get_metrics(request: Request, caller: Annotated[Caller, Depends(needs("read"))]) -> Response:
    """The collector's own metrics and the caller's runs', read from the store and rendered off the event loop."""
    began = time.monotonic()
    render, content_type = choose_encoder(request.headers.get("Accept", ""))
    body = run_metrics(request.app.state, caller.workspace, render) + render(request.app.state.registry)
    request.app.state.scrape_seconds.set(time.monotonic() - began)
    return Response(body, headers={"Content-Type": content_type})
