"""The collector as an application, and the `ddpobs-server` command."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import typer
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

import ddpobs
from ddpobs_server import api, ingest, metrics, page, problems
from ddpobs_server.ingest import Writer
from ddpobs_server.reports import Reports
from ddpobs_server.settings import Settings
from ddpobs_server.store import Store

_DRAIN_S = 10
"""How long open requests may take after SIGTERM."""


def create_app(settings: Settings) -> FastAPI:
    """The application; nothing is opened before it starts."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        store = Store(settings.database_url)
        store.migrate()
        app.state.store = store
        app.state.reports = Reports(store)
        app.state.writer = Writer(store, settings.queue_batches, app.state.registry)
        app.state.writer.start()
        yield
        app.state.writer.close()
        store.close()

    app = FastAPI(
        title="ddpobs collector",
        version=ddpobs.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        summary="Which rank is slow, why, and what each remedy would gain.",
    )
    app.openapi_version = "3.0.3"  # the newest that the Swagger UI shipped with us can draw
    app.state.settings = settings
    app.state.registry = CollectorRegistry()
    problems.install(app)
    app.include_router(ingest.router)
    for part in (api, metrics, page):
        part.install(app)
    return app


cli = typer.Typer(add_completion=False, help="The ddpobs collector.")


@cli.callback(invoke_without_command=True)
def _default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        serve()


@cli.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; without a token loopback only.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    database_url: Annotated[str | None, typer.Option(help="SQLAlchemy URL of the database.")] = None,
    token: Annotated[str | None, typer.Option(help="Bearer token asked for under /api and /metrics.")] = None,
) -> None:
    """Run the collector until SIGTERM or Ctrl-C; what was accepted is written first."""
    given: dict[str, Any] = {"host": host, "port": port, "database_url": database_url, "token": token}
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        for found in error.errors():
            typer.echo(f"ddpobs-server: {'.'.join(map(str, found['loc'])) or 'settings'}: {found['msg']}", err=True)
        raise typer.Exit(2) from None
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level="info",
        access_log=False,
        timeout_graceful_shutdown=_DRAIN_S,
    )


def main() -> None:
    """Console script; `ddpobs-server --port 0` means `ddpobs-server serve --port 0`."""
    if len(sys.argv) > 1 and sys.argv[1].startswith("-") and sys.argv[1] != "--help":
        sys.argv.insert(1, "serve")
    cli()


if __name__ == "__main__":
    main()
