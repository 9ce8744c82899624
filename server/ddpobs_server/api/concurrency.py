"""Limits concurrent reads: each takes a thread and memory, and ingest needs threads too.

A response occupies memory until the client has read it, so unsent large responses are limited as well. Each workspace
may use a part of the places, so that its slow readers do not stop another workspace's reads.

Four reads run in threads at a time; the others wait on the event loop, so that ingest always finds a thread. Readers of
SQLite see the last commit: they never wait for the writer, nor the writer for them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from typing_extensions import override

from ddpobs_server.web.auth import refresh_tokens_for, workspace_of
from ddpobs_server.web.fair_slots import FairSlots
from ddpobs_server.web.placed_route import PlacedRoute
from ddpobs_server.web.services import Services, services_of

_READS, _UNSENT_RESPONSES = 4, 16
"""Reads computed at the same time, and large responses that are sent; each takes 16 MB or more."""


def slots(share: Callable[[str], float]) -> tuple[FairSlots, FairSlots]:
    """Create the places of reads and of large responses; `share` is a workspace's part of them."""
    return FairSlots(_READS, share), FairSlots(_UNSENT_RESPONSES, share)


class ConcurrencyLimitedRoute(PlacedRoute):
    """A route that holds one of four read slots while its response is computed; it waits on the event loop."""

    @staticmethod
    @override
    def places(services: Services) -> FairSlots:
        """Return the places of large responses."""
        return services.response_slots

    @override
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler with a read slot. Without a valid token the handler refuses the request at once."""
        handle = super().get_route_handler()

        async def handle_in_slot(request: Request) -> Response:
            await refresh_tokens_for(request)
            if (workspace := workspace_of(request)) is None:
                return await handle(request)
            services_of(request).refuse_reads_if_ingest_only()
            async with services_of(request).read_slots.place(workspace):
                return await handle(request)

        return handle_in_slot
