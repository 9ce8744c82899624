"""Large answers go out as they are read: a connection takes whatever it is given, and its reader need not read."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PIECE_BYTES = 2**18


class ChunkedResponses:
    """Sends a large answer in pieces, each once what was before it is read; so whoever sends it knows when it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def in_pieces(message: Message) -> None:
            body = message.get("body", b"")
            if len(body) <= _PIECE_BYTES:
                await send(message)
                return
            for begin in range(0, len(body), _PIECE_BYTES):
                piece, end = body[begin : begin + _PIECE_BYTES], begin + _PIECE_BYTES
                await send({**message, "body": piece, "more_body": end < len(body) or message.get("more_body", False)})

        await self._app(scope, receive, in_pieces if scope["type"] == "http" else send)
