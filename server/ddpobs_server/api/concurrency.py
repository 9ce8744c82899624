"""Limits concurrent reads: each takes a thread and memory, and ingest needs threads too.

A response occupies memory until the client has read it, so unsent responses are limited as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from ddpobs_server.web.auth import refresh_tokens_for

_READS, _UNSENT_RESPONSES = 4, 16
"""Reads computed at the same time, and responses that are computed or sent; a large response takes 16 MB."""


def install(app: FastAPI) -> None:
    """Create the slots."""
    app.state.read_slots = asyncio.Semaphore(_READS)
    app.state.response_slots = asyncio.Semaphore(_UNSENT_RESPONSES)


class ConcurrencyLimitedRoute(APIRoute):
    """A route that holds one of four read slots while its response is computed; it waits on the event loop.

    The slot is free before the response is sent, so slow clients do not block reads until 16 responses are unsent.
    """

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler with a read slot."""
        handle = super().get_route_handler()

        async def handle_in_slot(request: Request) -> Response:
            async with request.app.state.read_slots:
                return await handle(request)

        return handle_in_slot

    @override
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request in a response slot; `web.bounded_protocol` aborts responses that stay unread."""
        await refresh_tokens_for(Request(scope))
        async with scope["app"].state.response_slots:
            await super().handle(scope, receive, send)
