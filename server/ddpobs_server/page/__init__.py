"""The page: lists runs and shows one. It draws what the REST says, and loads everything from the collector itself."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse
from starlette.middleware.base import RequestResponseEndpoint
from starlette.staticfiles import StaticFiles
from swagger_ui_bundle import swagger_ui_path

_STATIC = Path(__file__).parent / "static"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# Swagger UI starts from an inline script and styles itself inline.
_DOCS_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'"
)


def install(app: FastAPI) -> None:
    """Add the page, its files, the API's documentation, and the headers that keep a browser honest."""
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    app.mount("/swagger", StaticFiles(directory=swagger_ui_path), name="swagger")

    @app.middleware("http")
    async def _secure(request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        for name, value in _HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    @app.get("/", include_in_schema=False)
    async def _runs() -> FileResponse:
        return FileResponse(_STATIC / "runs.html")

    @app.get("/runs/{run}", include_in_schema=False)
    async def _run(run: str) -> FileResponse:
        return FileResponse(_STATIC / "run.html")

    @app.get("/docs", include_in_schema=False)
    async def _docs() -> HTMLResponse:
        page = get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="ddpobs API",
            swagger_js_url="/swagger/swagger-ui-bundle.js",
            swagger_css_url="/swagger/swagger-ui.css",
            swagger_favicon_url="/static/icon.svg",
        )
        page.headers["Content-Security-Policy"] = _DOCS_POLICY
        return page
