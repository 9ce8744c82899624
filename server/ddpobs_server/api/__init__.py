"""The REST reads: what the store holds and what the reports say, as JSON."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from ddpobs_server.api import concurrency, diagnosis, health, runs
from ddpobs_server.web.chunked_responses import ChunkedResponses


class _Head:
    """Answers HEAD as GET (RFC 9110, section 9.3.2), which load balancers ask with; uvicorn leaves the content out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def install(app: FastAPI) -> None:
    """Add the routes."""
    app.add_middleware(_Head)
    app.add_middleware(ChunkedResponses)
    concurrency.install(app)
    for module in (health, runs, diagnosis):
        app.include_router(module.router)
