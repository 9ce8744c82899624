"""The page: lists runs and shows one. It draws what the REST says, and loads everything from the collector itself."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from swagger_ui_bundle import swagger_ui_path

_STATIC = Path(__file__).parent / "static"
_POLICY = "Content-Security-Policy"
_HEADERS = {
    _POLICY: (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_PAIRS = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
_CACHE = b"cache-control"
_RUNS = ("/api/", "/metrics")
"""Answers about runs are kept by nobody; files may be kept, but are asked about each time: an upgrade changes them."""
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


class Headers:
    """Puts `_HEADERS`, and who may keep it, on every answer that has none of its own; costs a batch next to nothing."""

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


def install(app: FastAPI) -> None:
    """Add the page, its files and the API's documentation."""
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    app.mount("/swagger", StaticFiles(directory=swagger_ui_path), name="swagger")

    @app.get("/", include_in_schema=False)
    async def _runs() -> FileResponse:
        return FileResponse(_STATIC / "runs.html")

    @app.get("/runs/{run}", include_in_schema=False)
    async def _run(run: str) -> FileResponse:
        return FileResponse(_STATIC / "run.html")

    docs, policy = _documentation()

    @app.get("/docs", include_in_schema=False)
    async def _docs() -> HTMLResponse:
        return HTMLResponse(docs, headers={_POLICY: policy})


def _documentation() -> tuple[bytes, str]:
    """The API's documentation as a page, and what a browser may do there."""
    page = bytes(
        get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="ddpobs API",
            swagger_js_url="/swagger/swagger-ui-bundle.js",
            swagger_css_url="/swagger/swagger-ui.css",
            swagger_favicon_url="/static/icon.svg",
        ).body
    )
    (script,) = _INLINE_SCRIPT.findall(page)
    # Swagger UI starts from one inline script, known by its hash.
    known = f"script-src 'sha256-{b64encode(sha256(script).digest()).decode()}'"
    return page, _HEADERS[_POLICY].replace("script-src", known)
