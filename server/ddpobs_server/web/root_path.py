"""Service under a path of a proxy, which may remove the path from requests or pass it on."""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Middleware that removes the path from the beginning of a request's path.

    The page's links are relative. Without its final slash the path is redirected, as they would lead elsewhere.

    Args:
        app: Responds at the root.
        root_path: The path, without a final slash; empty for none.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to a request."""
        root_path = self._root_path
        if root_path and scope["type"] == "http":
            if scope["path"] == root_path:
                await RedirectResponse(f"{root_path}/", 308)(scope, receive, send)
                return
            if scope["path"].startswith(f"{root_path}/"):
                scope = {**scope, "path": scope["path"].removeprefix(root_path)}
        await self._app(scope, receive, send)
