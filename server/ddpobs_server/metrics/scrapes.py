"""The places of scrapes, and the metrics about them."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from ddpobs_server.metrics.scrape import RunRenderer
from ddpobs_server.web.fair_slots import FairSlots

_SCRAPES, WAIT_S = 2, 5.0
"""Scrapes that read runs at the same time, each on its own connection, and the seconds further ones wait.

Scrapes do not take the reads' slots, so slow reads do not delay them.
"""
_UNSENT_SCRAPES = 4
"""Large responses that are sent; each may take 64 MB, and more clients than that are rare."""


class Scrapes:
    """The places of scrapes, and the metrics about them.

    Args:
        renderer: Renders the runs.
        registry: The collector's own metrics.
        share: A workspace's part of the places.
    """

    def __init__(self, renderer: RunRenderer, registry: CollectorRegistry, share: Callable[[str], float]) -> None:
        self.renderer, self.registry = renderer, registry
        self.slots, self.places = FairSlots(_SCRAPES, share), FairSlots(_UNSENT_SCRAPES, share)
        self.seconds = Gauge("ddpobs_server_scrape_seconds", "Duration of the last scrape.", registry=registry)
        self.failures = Counter(
            "ddpobs_server_scrape_failures",
            "Scrapes that ended with 503: the runs could not be read.",
            registry=registry,
        )
        self.runs_left_out = Counter(
            "ddpobs_server_scrape_runs_left_out",
            "Runs that did not fit into a response of /metrics.",
            registry=registry,
        )
