"""A route whose large responses take places: a response occupies memory until the client has read it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send
from typing_extensions import override

from ddpobs_server.web import problems
from ddpobs_server.web.auth import refresh_tokens_for, workspace_of
from ddpobs_server.web.fair_slots import FairSlots
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.services import Services, services_of

SMALL_BYTES, SMALL_TOTAL_BYTES = 2**16, 2**25
"""Size of a response that is sent without a place, and most bytes of such responses that are unread."""
_MAX_WAITING = 4
"""Large responses that may wait for a place; further ones are refused."""
_small_unread_bytes = 0


class PlacedRoute(APIRoute):
    """Sends small responses at once, and large ones in a place. `web.bounded_protocol` aborts unread responses.

    Slow readers of large responses therefore never delay a small one.
    """

    @staticmethod
    @abstractmethod
    def places(services: Services) -> FairSlots:
        """Return the places of this kind of route."""

    @override
    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. Without a valid token the route itself refuses it."""
        request = Request(scope)
        await refresh_tokens_for(request)
        workspace = workspace_of(request)
        if workspace is None:
            await super().handle(scope, receive, send)
            return
        try:
            await services_of(request).rates.wait_to_read(workspace)
        except Problem as problem:
            await problems.problem_response(request, problem)(scope, receive, send)
            return
        places = self.places(services_of(request))
        await super().handle(scope, receive, _PlacedSend(request, receive, send, places, workspace).send)


class _PlacedSend:
    """Sends a response once its size is known."""

    def __init__(self, request: Request, receive: Receive, send: Send, places: FairSlots, workspace: str) -> None:
        self._request, self._receive, self._send = request, receive, send
        self._places, self._workspace = places, workspace
        self._start: Any = None

    async def send(self, message: Message) -> None:
        global _small_unread_bytes  # noqa: PLW0603 - the event loop's thread alone changes it
        if message["type"] != "http.response.body" or message.get("more_body"):
            self._start = message
            return
        size = len(message.get("body", b""))
        if size <= SMALL_BYTES and _small_unread_bytes + size <= SMALL_TOTAL_BYTES:
            _small_unread_bytes += size
            try:
                await self._send_both(message)
            finally:
                _small_unread_bytes -= size
        elif self._places.waiting() >= _MAX_WAITING:
            detail = "large responses that clients read slowly occupy all places; read faster, or try again"
            response = problems.problem_response(
                self._request, Problem(503, "Too many large responses", detail, {"Retry-After": "2"})
            )
            await response(self._request.scope, self._receive, self._send)
        else:
            async with self._places.place(self._workspace):
                await self._send_both(message)

    async def _send_both(self, message: Message) -> None:
        await self._send(self._start)
        await self._send(message)
