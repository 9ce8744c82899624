"""The collector as an application, and the `ddpobs-server` command."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from anyio import CapacityLimiter
from fastapi import Depends, FastAPI
from fastapi.concurrency import run_in_threadpool
from prometheus_client import CollectorRegistry, Gauge
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

import ddpobs
from ddpobs_server import api, metrics, page, signals
from ddpobs_server.api import concurrency
from ddpobs_server.api.openapi import describe
from ddpobs_server.figures.pictures import Pictures
from ddpobs_server.ingest import file_import, route, series_ledger, upload
from ddpobs_server.ingest.admission import Admission
from ddpobs_server.ingest.memory_budget import IngestMemoryBudget
from ddpobs_server.ingest.series_ledger import SeriesLedger
from ddpobs_server.ingest.writer import Writer
from ddpobs_server.metrics.scrape import RunRenderer
from ddpobs_server.metrics.scrapes import Scrapes
from ddpobs_server.operations import logs, self_check
from ddpobs_server.operations.commands import cli, open_store, print_error
from ddpobs_server.operations.fleet_totals import FleetTotals
from ddpobs_server.operations.health_monitor import HealthMonitor
from ddpobs_server.operations.limit_usage import LimitUsage
from ddpobs_server.operations.reload import Reload
from ddpobs_server.operations.retention import RetentionJob
from ddpobs_server.operations.webhook_job import WebhookJob
from ddpobs_server.operations.wrong_settings import unknown_settings
from ddpobs_server.reports.reports import Reports
from ddpobs_server.settings import Settings
from ddpobs_server.store import Store
from ddpobs_server.store.database import database_lock
from ddpobs_server.web import listening, memory, problems, security_headers, serving
from ddpobs_server.web.authenticator import Authenticator
from ddpobs_server.web.bounded_protocol import BoundedHttpProtocol
from ddpobs_server.web.fair_slots import FairSlots
from ddpobs_server.web.query_parameters import refuse_unknown
from ddpobs_server.web.root_path import RootPath
from ddpobs_server.web.run_faults import RunFaults
from ddpobs_server.web.services import Services, keep_services
from ddpobs_server.web.sign_on import KeepPeer, SignOn
from ddpobs_server.web.workspace_limits import Rates, WorkspaceLimits
from ddpobs_server.web.workspace_usage import WorkspaceUsages

_log = logging.getLogger(__name__)
_DRAIN_S = 10
"""Seconds that open requests may take after SIGTERM."""
_CLOSE_S, _STORE_S = 12, 1
"""Seconds to close first the background threads, then the store's connections."""


class _Collector(FastAPI):
    @override
    def openapi(self) -> dict[str, Any]:
        """Add the schemas of batches and the fields' descriptions to FastAPI's document."""
        document = super().openapi()
        document["components"]["schemas"] |= upload.SCHEMAS
        document["paths"] = dict(sorted(document["paths"].items()))
        describe(document)
        if root_path := self.state.settings.root_path:
            document["servers"] = [{"url": root_path}]
        return document

    @override
    def build_middleware_stack(self) -> ASGIApp:
        """Wrap the whole stack, so that responses to internal errors carry the security headers too.

        FastAPI creates those responses outside of every middleware.
        """
        stack: ASGIApp = security_headers.Headers(super().build_middleware_stack())
        stack = RootPath(stack, self.state.settings.root_path)
        if trusted := self.state.settings.trusted_proxies:
            stack = ProxyHeadersMiddleware(stack, trusted)  # type: ignore[arg-type, assignment]
        return KeepPeer(stack)


def create_app(settings: Settings) -> FastAPI:
    """Create the application. The database is opened when the application starts."""
    registry = CollectorRegistry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        services = await _open(settings, registry)
        keep_services(app, services)
        lag = asyncio.create_task(services.health.measure_lag())
        yield
        lag.cancel()
        _close(services)

    app = _Collector(
        title="ddpobs collector",
        version=ddpobs.__version__,
        lifespan=lifespan,
        docs_url=None,
        redirect_slashes=False,
        redoc_url=None,
        dependencies=[Depends(refuse_unknown)],
        responses=problems.RESPONSES,
        generate_unique_id_function=lambda route: route.name,
        summary="Which rank is slow, why, and what each remedy would gain.",
    )
    app.openapi_version = "3.0.3"  # The newest version that the bundled Swagger UI renders.
    app.state.settings = settings
    problems.install(app, registry)
    for package in (api, route, metrics, page):
        package.install(app)
    return app


async def _open(settings: Settings, registry: CollectorRegistry) -> Services:
    """Open the database and start the background threads."""
    store = Store(
        settings.database_url,
        keep_free_bytes=int(settings.keep_free_mb * 1e6),
        prepare_threshold=settings.statement_threshold,
    )
    store.migrate()
    reports = Reports(store, settings, faults=RunFaults(registry))
    limits = WorkspaceLimits(settings, store)
    await run_in_threadpool(limits.start)
    series = SeriesLedger(settings, limits, store)
    writer = Writer(store, settings.queue_batches, limits, series, registry)
    writer.start()
    memory_budget = IngestMemoryBudget(int(settings.max_under_way_mb * 1e6), limits, registry)
    # Of work that another collector does this one has no metrics: their alerts would fire.
    work_registry = CollectorRegistry() if settings.ingest_only else registry
    retention = RetentionJob(settings, store, work_registry, reports.faults)
    fleet = FleetTotals(store, reports, work_registry)
    webhook = WebhookJob(settings, store, reports, work_registry)
    usage = LimitUsage(settings, limits, store, registry)
    usage.watch("queue_batches", writer.used_ratio)
    usage.watch("max_under_way_mb", memory_budget.used_ratio)
    for limit in series_ledger.LIMITS:
        usage.watch(limit, partial(series.used_ratio, limit))
    health = HealthMonitor(store, registry, usage.measure, settings.public_url, settings.grafana_url)
    await run_in_threadpool(health.start)
    slots = concurrency.slots(limits.share)
    reloaded = Gauge("ddpobs_server_last_reload_successful", "1 unless the last reload was refused.", registry=registry)
    reloaded.set(1)
    for job in () if settings.ingest_only else (retention, fleet, webhook):
        job.start()
    return Services(
        settings=settings,
        store=store,
        authenticator=Authenticator(settings, store),
        sign_on=SignOn(settings),
        limits=limits,
        rates=Rates(limits),
        usages=WorkspaceUsages(store, limits, series=series, memory_budget=memory_budget, writer=writer, slots=slots),
        read_slots=slots[0],
        response_slots=slots[1],
        reports=reports,
        pictures=Pictures(store, reports, settings),
        scrapes=Scrapes(RunRenderer(settings, store, reports), registry, limits.share),
        writer=writer,
        admission=Admission(settings, limits, store),
        memory_budget=memory_budget,
        large_batches=CapacityLimiter(1),
        import_slots=FairSlots(file_import.IMPORTS, limits.share),
        health=health,
        retention=retention,
        webhook=webhook,
        reloaded=reloaded,
        fleet=fleet,
    )


def _close(services: Services) -> None:
    jobs = () if services.settings.ingest_only else (services.retention, services.webhook, services.fleet)
    threads = (services.limits, services.health, *jobs, services.writer, services.reports)
    serving.close(_CLOSE_S, *(thread.close for thread in threads))
    serving.close(_STORE_S, services.store.close)
    _log.info("collector stopped: all accepted batches are written")


@cli.callback(invoke_without_command=True)
def _default(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        serve()


@cli.command()
def serve(
    *,
    host: Annotated[
        str | None,
        typer.Option(
            help="Addresses to listen on, separated by commas; default 127.0.0.1. Without a token: loopback only."
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default 8321; 0 selects a free port.")] = None,
    database_url: Annotated[
        str | None, typer.Option(help="SQLAlchemy URL of the database; default sqlite:///ddpobs.db.")
    ] = None,
    token: Annotated[str | None, typer.Option(help="Bearer token required under /api and /metrics.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM); enables HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate (PEM).")] = None,
    root_path: Annotated[str | None, typer.Option(help="Path under which a proxy serves the collector.")] = None,
    trusted_proxies: Annotated[str | None, typer.Option(help="Proxies whose X-Forwarded-For is trusted.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[
        str | None, typer.Option(help="json, text, or auto: text on a terminal, JSON elsewhere.")
    ] = None,
) -> None:
    """Run the collector until SIGTERM or Ctrl-C. Accepted batches are written before it ends.

    Each option is also an environment variable DDPOBS_SERVER_NAME; docs/operations/install.md lists all settings.
    """
    read_settings = partial(Settings, **{name: value for name, value in locals().items() if value is not None})
    settings = read_settings()
    logs.configure(settings.log_level, settings.log_format)
    for warning in unknown_settings(os.environ):
        _log.warning(warning)
    if (problem := self_check.tls_problem(settings)) is not None:
        raise _refusal(problem)
    with ExitStack() as locks:
        if (file := settings.database_file) is not None:
            locks.enter_context(database_lock.held(file, alone=False))
        _serve(settings, read_settings)


def _serve(settings: Settings, read_settings: Callable[[], Settings]) -> None:
    has_tokens = _refuse_public_without_token(settings)
    try:
        sockets = listening.bind(settings.hosts, settings.port)
    except listening.AddressError as error:
        raise _refusal(str(error), 1) from None
    app = create_app(settings)
    serving.run(
        app,
        sockets,
        on_start=lambda url: _log_address(url, settings, has_tokens),
        on_reload=Reload(app, read_settings),
        timeout_keep_alive=settings.keep_alive_s,
        http=BoundedHttpProtocol,
        ws="none",
        log_config=None,
        access_log=settings.access_log,
        proxy_headers=False,  # The application has them, after it kept the peer's own address.
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        timeout_graceful_shutdown=_DRAIN_S,
    )


def _refusal(reason: str, code: int = 2) -> typer.Exit:
    print_error(reason)
    return typer.Exit(code)


def _refuse_public_without_token(settings: Settings) -> bool:
    """Check before the server starts that other machines need a token; return whether a token exists.

    The database is opened here, so that its errors also appear as one line.
    """
    store = open_store(settings)
    has_tokens = settings.has_token or bool(store.tokens())
    store.close()
    if (problem := self_check.access_problem(settings, has_tokens)) is not None:
        raise _refusal(problem)
    return has_tokens


def _log_address(url: str, settings: Settings, has_tokens: bool) -> None:
    access = "token needed" if has_tokens else "no token needed (loopback only)"
    _log.info(
        "ddpobs-server: %s, database %s, %s", url, settings.database, access, extra={"version": ddpobs.__version__}
    )
    if (weakness := self_check.token_problem(settings)) is not None:
        _log.warning(weakness)


def main() -> None:
    """Run the console script. `ddpobs-server --port 0` means `ddpobs-server serve --port 0`."""
    signals.install()
    memory.limit_arenas()
    os.umask(0o077)  # The database holds run data and token digests: only the collector's user may read it.
    if len(sys.argv) > 1 and sys.argv[1].startswith("-") and sys.argv[1] != "--help":
        sys.argv.insert(1, "serve")
    cli()


if __name__ == "__main__":
    main()
