"""Reads take turns: each takes a thread and memory, and ingest needs a thread as well.

An answer takes memory until its reader has read it, so that those under way are bounded too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from ddpobs_server.web.auth import refresh_tokens_for

_AT_ONCE, _UNSENT = 4, 16
"""Reads that have a turn, and those whose answer is being made or sent: a large one takes 16 MB."""


def install(app: FastAPI) -> None:
    """Make the turns."""
    app.state.turns = asyncio.Semaphore(_AT_ONCE)
    app.state.unsent = asyncio.Semaphore(_UNSENT)


class ConcurrencyLimitedRoute(APIRoute):
    """A route that waits for its turn without a thread, and has it until its answer is made.

    So whoever reads slowly takes no turn from the others, unless too many do.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own, in turn."""
        handle = super().get_route_handler()

        async def in_turn(request: Request) -> Response:
            async with request.app.state.turns:
                return await handle(request)

        return in_turn

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """FastAPI's own, once few enough answers are under way; `heads` ends those that nobody reads."""
        await refresh_tokens_for(Request(scope))
        async with scope["app"].state.unsent:
            await super().handle(scope, receive, send)
