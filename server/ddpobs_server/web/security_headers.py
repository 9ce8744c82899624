"""Security headers of every response, and how long a browser may cache it."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "Content-Security-Policy"


HEADERS = {
    POLICY: (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


_PAIRS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]


_CACHE = b"cache-control"


_RUNS = ("/api/", "/metrics")
"""Answers about runs are kept by nobody; files may be kept, but are asked about each time: an upgrade changes them."""


class Headers:
    """Puts `HEADERS`, and who may keep it, on every answer that has none of its own; costs a batch next to nothing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                kept = (_CACHE, b"no-store" if scope["path"].startswith(_RUNS) else b"no-cache")
                pairs = (pair for pair in (*_PAIRS, kept) if pair[0] not in given)
                message["headers"] = [*message["headers"], *pairs]
            await send(message)

        await self._app(scope, receive, secured if scope["type"] == "http" else send)
