"""The collector as an application, and the `ddpobs-server` command."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from anyio import CapacityLimiter
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

import ddpobs
from ddpobs_server import api, checks, ingest, metrics, page, problems, serving
from ddpobs_server.auth import DEFAULT, SCOPES, Doorkeeper, new_token
from ddpobs_server.heads import BoundedHead
from ddpobs_server.ingest import Writer
from ddpobs_server.limits import Admission, UnderWay
from ddpobs_server.reports import Reports
from ddpobs_server.retention import Keeper
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
        app.state.doorkeeper = Doorkeeper(settings, store)
        app.state.reports = Reports(store)
        app.state.writer = Writer(store, settings.queue_batches, app.state.registry)
        app.state.writer.start()
        app.state.admission = Admission(settings, store)
        app.state.large_batches = CapacityLimiter(1)
        app.state.under_way = UnderWay(int(settings.max_under_way_mb * 1e6), app.state.registry)
        app.state.keeper = Keeper(settings, store, app.state.registry)
        app.state.keeper.start()
        yield
        app.state.keeper.close()
        app.state.writer.close()
        store.close()

    app = FastAPI(
        title="ddpobs collector",
        version=ddpobs.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=problems.RESPONSES,
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
    _no_open_door(settings)
    serving.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_level="info",
        access_log=False,
        http=BoundedHead,
        timeout_graceful_shutdown=_DRAIN_S,
    )


def _no_open_door(settings: Settings) -> None:
    if settings.on_loopback:
        return
    store = _store(settings.database_url)
    doorkeeper = Doorkeeper(settings, store)
    doorkeeper.look()
    store.close()
    if doorkeeper.open:
        typer.echo(
            f"ddpobs-server: host {settings.host} is not loopback, and there is no token: anyone could read and write. "
            "Set --token (DDPOBS_SERVER_TOKEN), make tokens with `ddpobs-server token create`, or listen on 127.0.0.1",
            err=True,
        )
        raise typer.Exit(2)


tokens = typer.Typer(help="Who may call: tokens, each for a workspace and some of ingest, read and admin.")
cli.add_typer(tokens, name="token")

DatabaseOption = Annotated[str | None, typer.Option(help="SQLAlchemy URL of the database.")]


@tokens.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="Whose it is; shown by `token list`.")],
    scope: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SCOPES)}; may be repeated.")] = None,
    workspace: Annotated[str, typer.Option(help="Whose runs: letters, digits and dashes, at most 32.")] = DEFAULT,
    database_url: DatabaseOption = None,
) -> None:
    """Make a token and print it, this once: only its hash is kept."""
    scopes = scope or ["ingest", "read"]
    if unknown := sorted(set(scopes) - set(SCOPES)):
        raise typer.BadParameter(f"expected some of {', '.join(SCOPES)}, got {', '.join(unknown)}")
    if not re.fullmatch(r"[a-z0-9-]{1,32}", workspace):
        raise typer.BadParameter(f"workspace: expected 1 to 32 of a-z, 0-9 and -, got {workspace!r}")
    token, kept = new_token(name[:128], workspace, scopes)
    store = _store(_database(database_url))
    store.add_token(kept)
    store.close()
    typer.echo(token)


@tokens.command("list")
def list_tokens(database_url: DatabaseOption = None) -> None:
    """Show every token but its secret."""
    store = _store(_database(database_url))
    for token in store.tokens():
        made = datetime.fromtimestamp(token.created_ns / 1e9, UTC).isoformat(timespec="seconds")
        ended = " revoked" if token.revoked_ns is not None else ""
        typer.echo(f"{token.token_id}  {token.workspace}  {','.join(token.scopes)}  {made}  {token.name}{ended}")
    store.close()


@tokens.command("revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(help="As `token list` shows it.")], database_url: DatabaseOption = None
) -> None:
    """Have a token work no more, within five seconds."""
    store = _store(_database(database_url))
    found = store.revoke_token(token_id, time.time_ns())
    store.close()
    if not found:
        typer.echo(f"ddpobs-server: no token {token_id} that works", err=True)
        raise typer.Exit(1)


@cli.command()
def check(database_url: DatabaseOption = None) -> None:
    """Say whether a collector could run here: settings, database, schema, disk, clock. Ends with 1 where not."""
    problems_found = 0
    for name, answer, fine in checks.run(_database(database_url)):
        typer.echo(f"{'ok  ' if fine else 'FAIL'}  {name}: {answer}")
        problems_found += not fine
    if problems_found:
        raise typer.Exit(1)


@cli.command()
def bench(
    ranks: Annotated[int, typer.Option(help="A job of so many ranks; 0 floods the collector instead.")] = 0,
    seconds: Annotated[float, typer.Option(help="How long the job lasts.")] = 60.0,
    batches: Annotated[int, typer.Option(help="Batches of 5,000 spans a client, when flooding.")] = 100,
    clients: Annotated[int, typer.Option(help="Processes that send.")] = 8,
    database_url: Annotated[
        str | None, typer.Option(help="A database for it alone; default: a new SQLite file.")
    ] = None,
) -> None:
    """Measure what a collector takes on this machine, the clients being here too."""
    from ddpobs_server import bench as benchmark

    load = benchmark.job(ranks, seconds, clients) if ranks else benchmark.flood(clients, batches)
    found = benchmark.measure(load, database_url)
    for name, value in found.items():
        typer.echo(f"{name:>16}  {value:,.2f}")
    if found["lost"]:
        raise typer.Exit(1)


@cli.command()
def distribute(
    database_url: DatabaseOption = None,
    show: Annotated[bool, typer.Option("--show", help="Print the statements and run none.")] = False,
) -> None:
    """Spread the tables over a Citus cluster by run; once, on its coordinator."""
    store = Store(_database(database_url))
    for statement in store.distribution():
        typer.echo(f"{statement};")
    if not show:
        store.migrate()
        store.distribute()
    store.close()


def _store(url: str) -> Store:
    store = Store(url)
    store.migrate()
    return store


def _database(given: str | None) -> str:
    settings: dict[str, Any] = {}
    return given or Settings(**settings).database_url


def main() -> None:
    """Console script; `ddpobs-server --port 0` means `ddpobs-server serve --port 0`."""
    if len(sys.argv) > 1 and sys.argv[1].startswith("-") and sys.argv[1] != "--help":
        sys.argv.insert(1, "serve")
    cli()


if __name__ == "__main__":
    main()
