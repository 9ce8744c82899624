"""Reads take turns: each takes a thread and memory, and ingest needs a thread as well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute

from ddpobs_server.auth import look_for

_AT_ONCE = 4


def install(app: FastAPI) -> None:
    """Make the turns."""
    app.state.turns = asyncio.Semaphore(_AT_ONCE)


class InTurn(APIRoute):
    """A route that waits for its turn without a thread, and has it until its answer is made, not until it is sent."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own, in turn."""
        handle = super().get_route_handler()

        async def in_turn(request: Request) -> Response:
            await look_for(request)
            async with request.app.state.turns:
                return await handle(request)

        return in_turn
