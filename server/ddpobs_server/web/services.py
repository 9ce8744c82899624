"""The parts of a running collector, for its routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from anyio import CapacityLimiter
from fastapi import Depends, FastAPI, Request
from prometheus_client import Gauge

from ddpobs_server.settings import Settings
from ddpobs_server.store import Store
from ddpobs_server.web.fair_slots import FairSlots
from ddpobs_server.web.problems import Problem

if TYPE_CHECKING:  # Only their types: a route asks for the parts that it knows.
    from ddpobs_server.figures.pictures import Pictures
    from ddpobs_server.ingest.admission import Admission
    from ddpobs_server.ingest.memory_budget import IngestMemoryBudget
    from ddpobs_server.ingest.writer import Writer
    from ddpobs_server.metrics.scrapes import Scrapes
    from ddpobs_server.operations.fleet_totals import FleetTotals
    from ddpobs_server.operations.health_monitor import HealthMonitor
    from ddpobs_server.operations.retention import RetentionJob
    from ddpobs_server.operations.webhook_job import WebhookJob
    from ddpobs_server.reports.reports import Reports
    from ddpobs_server.web.authenticator import Authenticator
    from ddpobs_server.web.sign_on import SignOn
    from ddpobs_server.web.workspace_limits import Rates, WorkspaceLimits
    from ddpobs_server.web.workspace_usage import WorkspaceUsages


@dataclass(frozen=True)
class Services:
    """The parts, which `app` makes when the application starts and closes when it ends.

    Attributes:
        read_slots: Places of reads that are computed.
        response_slots: Places of large responses that are sent.
        large_batches: Lets one large batch at a time be decoded.
        import_slots: Places of imports.
        reloaded: Metric: 1 unless the last reload was refused.
    """

    settings: Settings
    store: Store
    authenticator: Authenticator
    sign_on: SignOn
    limits: WorkspaceLimits
    rates: Rates
    usages: WorkspaceUsages
    read_slots: FairSlots
    response_slots: FairSlots
    reports: Reports
    pictures: Pictures
    scrapes: Scrapes
    writer: Writer
    admission: Admission
    memory_budget: IngestMemoryBudget
    large_batches: CapacityLimiter
    import_slots: FairSlots
    health: HealthMonitor
    retention: RetentionJob
    webhook: WebhookJob
    reloaded: Gauge
    fleet: FleetTotals

    def refuse_reads_if_ingest_only(self) -> None:
        """Refuse to read runs.

        Raises:
            Problem: 421 if this collector only takes batches.
        """
        if self.settings.ingest_only:
            other = self.settings.public_url or "another collector on its database"
            detail = f"this collector only takes batches (DDPOBS_SERVER_INGEST_ONLY): read from {other}"
            raise Problem(421, "Misdirected request", detail)


def keep_services(app: FastAPI, services: Services) -> None:
    """Give the application's routes their services."""
    app.state.services = services


def services_of(request: Request) -> Services:
    """Return the services of the application that a request is for."""
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(services_of)]
