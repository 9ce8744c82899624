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
_ENCODED = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
_CACHE = b"cache-control"
_UNCACHED = ("/api/", "/metrics")
"""Paths whose responses a browser must not cache. It revalidates the page's files, since an upgrade changes them."""


class Headers:
    """Middleware that adds `HEADERS` and `Cache-Control` unless the response sets them.

    It costs a batch almost nothing.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                cache = (_CACHE, b"no-store" if scope["path"].startswith(_UNCACHED) else b"no-cache")
                missing = (header for header in (*_ENCODED, cache) if header[0] not in names)
                message["headers"] = [*message["headers"], *missing]
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)
