"""The REST reads: the store's contents and the reports, as JSON."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from ddpobs_server.web.chunked_responses import ChunkedResponses

MODULES = tuple(f"{__name__}.{module.name}" for module in iter_modules(__path__))
"""Names of this folder's files."""


class _HeadAsGet:
    """Serves HEAD as GET (RFC 9110, section 9.3.2), which load balancers use; uvicorn omits the content."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def install(app: FastAPI) -> None:
    """Add the routes of each file of this folder that has a `router`."""
    app.add_middleware(_HeadAsGet)
    app.add_middleware(ChunkedResponses)
    for module in map(import_module, MODULES):
        if hasattr(module, "router"):
            app.include_router(module.router)
