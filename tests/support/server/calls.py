"""A request of each route."""

from __future__ import annotations

from tests.support.server.batches import batch, path

CALLS = {
    "ingest": [("PUT", path(batch("a-run", seq=1))), ("POST", "/api/v1/runs/a-run/import")],
    "read": [
        ("GET", "/api/v1/runs"),
        ("GET", "/api/v1/workspaces"),
        ("GET", "/api/v1/fleet"),
        ("GET", "/api/v1/figures"),
        ("GET", "/metrics"),
        *(
            ("GET", f"/api/v1/runs/a-run{route}")
            for route in (
                *("", "/attempts", "/ranks", "/layout", "/steps", "/spans", "/buckets"),
                *("/unused", "/stragglers", "/diagnostics", "/account", "/trace", "/pipeline", "/whatif"),
                *("/compare?with=a-run", "/figures/account", "/figures/account.html", "/report.html"),
            )
        ),
    ],
    "ingest and read": [("PATCH", "/api/v1/runs/a-run"), ("POST", "/api/v1/host-checks")],
    "admin": [("DELETE", "/api/v1/runs/a-run"), ("GET", "/api/v1/audit")],
    "": [
        *(("GET", where) for where in ("/healthz", "/readyz", "/", "/fleet", "/runs/a-run", "/docs", "/openapi.json")),
        *(("GET", where) for where in ("/static/style.css", "/swagger/swagger-ui.css", "/compare", "/help/crash")),
        *(("GET", where) for where in ("/bokeh/bokeh.min.js", "/figures/none.js", "/perfetto/index.html")),
    ],
}
"""Requests by the scope they need; '' for public routes."""
