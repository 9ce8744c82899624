"""Sends large responses in chunks: a connection buffers all it is given, and a client may read slowly or never."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

CHUNK_BYTES = 2**18


class ChunkedResponses:
    """Middleware that sends a large response in chunks, each after the client has read most of the previous ones.

    A route's send therefore returns only when the client has read nearly the whole response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""

        async def send_in_chunks(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= CHUNK_BYTES:
                await send(message)
                return
            for begin in range(0, len(body), CHUNK_BYTES):
                chunk, end = body[begin : begin + CHUNK_BYTES], begin + CHUNK_BYTES
                await send({**message, "body": chunk, "more_body": end < len(body) or message.get("more_body", False)})

        await self._app(scope, receive, send_in_chunks if scope["type"] == "http" else send)
