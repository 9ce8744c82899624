"""The collector as an application, and the `ddpobs-server` command."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from anyio import CapacityLimiter
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

import ddpobs
from ddpobs_server import api, metrics, page
from ddpobs_server.ingest import route, upload
from ddpobs_server.ingest.admission import Admission
from ddpobs_server.ingest.memory_budget import IngestMemoryBudget
from ddpobs_server.ingest.writer import Writer
from ddpobs_server.operations import logs, self_check
from ddpobs_server.operations.commands import cli, open_store, print_error
from ddpobs_server.operations.health_monitor import HealthMonitor
from ddpobs_server.operations.retention import RetentionJob
from ddpobs_server.reports.reports import Reports
from ddpobs_server.settings import Settings, unknown
from ddpobs_server.store import Store
from ddpobs_server.web import problems, security_headers, serving
from ddpobs_server.web.auth import Authenticator
from ddpobs_server.web.bounded_protocol import BoundedHttpProtocol

_log = logging.getLogger(__name__)
_DRAIN_S = 10
"""How long open requests may take after SIGTERM."""
_CLOSE_S, _STORE_S = 12, 1
"""And then all that writes or reads on its own, and the store's connections."""


class _Collector(FastAPI):
    def openapi(self) -> dict[str, Any]:
        """FastAPI's own, with the schemas of what ranks send."""
        document = super().openapi()
        document["components"]["schemas"] |= upload.SCHEMAS
        return document

    def build_middleware_stack(self) -> ASGIApp:
        """FastAPI's own, with headers on what is answered to an error of ours too, which no middleware sees."""
        return security_headers.Headers(super().build_middleware_stack())


def create_app(settings: Settings) -> FastAPI:
    """The application; nothing is opened before it starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        store = Store(settings.database_url, keep_free_bytes=int(settings.keep_free_mb * 1e6))
        store.migrate()
        app.state.store = store
        app.state.authenticator = Authenticator(settings, store)
        app.state.reports = Reports(store)
        app.state.writer = Writer(store, settings.queue_batches, app.state.registry)
        app.state.writer.start()
        app.state.admission = Admission(settings, store)
        app.state.large_batches = CapacityLimiter(1)
        app.state.under_way = IngestMemoryBudget(int(settings.max_under_way_mb * 1e6), app.state.registry)
        app.state.retention = RetentionJob(settings, store, app.state.registry)
        app.state.retention.start()
        app.state.watch = HealthMonitor(store, app.state.registry)
        await run_in_threadpool(app.state.watch.start)
        lag = asyncio.create_task(app.state.watch.measure_lag())
        _log.info("collector started", extra={"version": ddpobs.__version__, "database": settings.database})
        yield
        lag.cancel()
        state = app.state
        serving.close(_CLOSE_S, state.watch.close, state.retention.close, state.writer.close, state.reports.close)
        serving.close(_STORE_S, store.close)
        _log.info("collector ended: what was accepted is written")

    app = _Collector(
        title="ddpobs collector",
        version=ddpobs.__version__,
        lifespan=lifespan,
        docs_url=None,
        redirect_slashes=False,
        redoc_url=None,
        responses=problems.RESPONSES,
        summary="Which rank is slow, why, and what each remedy would gain.",
    )
    app.openapi_version = "3.0.3"  # the newest that the Swagger UI shipped with us can draw
    app.state.settings = settings
    app.state.registry = CollectorRegistry()
    problems.install(app)
    for part in (api, route, metrics, page):
        part.install(app)
    return app


@cli.callback(invoke_without_command=True)
def _default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        serve()


@cli.command()
def serve(
    *,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on, else 127.0.0.1; without a token loopback only.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on, else 8321; 0 takes a free one.")] = None,
    database_url: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL of the database, else sqlite:///ddpobs.db.")
    ] = None,
    token: Annotated[str | None, typer.Option(help="Bearer token asked for under /api and /metrics.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM: HTTPS instead of HTTP.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key, PEM.")] = None,
    trusted_proxies: Annotated[str | None, typer.Option(help="Proxies whose X-Forwarded-For is believed.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="json, text, or auto: text on a terminal.")] = None,
) -> None:
    """Run the collector until SIGTERM or Ctrl-C; what was accepted is written first.

    Each option is also DDPOBS_SERVER_NAME in the environment; docs/operations.md has all settings.
    """
    settings = Settings(**{name: value for name, value in locals().items() if value is not None})
    logs.configure(settings.log_level, settings.log_format)
    for line in unknown(os.environ):
        _log.warning(line)
    if (wrong := self_check.tls_problem(settings)) is not None:
        raise _refusal(wrong)
    _refuse_public_without_token(settings)
    if (wrong := self_check.address_problem(settings.host, settings.port)) is not None:
        raise _refusal(wrong, 1)
    serving.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        http=BoundedHttpProtocol,
        ws="none",
        log_config=None,
        log_level=settings.log_level,
        access_log=settings.access_log,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=_DRAIN_S,
    )


def _refusal(why: str, code: int = 2) -> typer.Exit:
    print_error(why)
    return typer.Exit(code)


def _refuse_public_without_token(settings: Settings) -> None:
    """Look into the database before a server is started: what is wrong with it is then said in a line, too."""
    store = open_store(settings)
    wrong = self_check.access_problem(settings, bool(store.tokens()))
    store.close()
    if wrong is not None:
        raise _refusal(wrong)


def main() -> None:
    """Console script; `ddpobs-server --port 0` means `ddpobs-server serve --port 0`."""
    os.umask(0o077)  # What runs tell, and tokens' digests, are for the collector's user alone.
    if len(sys.argv) > 1 and sys.argv[1].startswith("-") and sys.argv[1] != "--help":
        sys.argv.insert(1, "serve")
    cli()


if __name__ == "__main__":
    main()
