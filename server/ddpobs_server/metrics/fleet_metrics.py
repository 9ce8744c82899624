"""The metrics of a workspace's fleet, from its last figures."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from ddpobs_server.metrics.metric import END, Render
from ddpobs_server.reports.fleet_figures import FleetOutline

_MAX_HOSTS = 100
_LABEL_CHARACTERS = 128


def render_fleet(outline: FleetOutline | None, render: Render) -> bytes:
    """Lines of the fleet; names without values before the first figures."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FleetMetrics(outline))
    return render(registry).removesuffix(END)


class _FleetMetrics(Collector):
    def __init__(self, outline: FleetOutline | None) -> None:
        self._outline = outline

    @override
    def collect(self) -> Iterable[Metric]:
        total = GaugeMetricFamily("ddpobs_fleet_rank_seconds", "Time of all ranks of the runs of twelve weeks.")
        lost = GaugeMetricFamily("ddpobs_fleet_lost_seconds", "Lost time of these ranks.", labels=["cause"])
        slow = GaugeMetricFamily(
            "ddpobs_fleet_slow_host_ratio",
            "Lateness, as a share of a step, of a host that is the slowest of its jobs more often than by chance.",
            labels=["host"],
        )
        compared = GaugeMetricFamily("ddpobs_fleet_compared_runs", "Runs of these weeks whose hosts were compared.")
        if self._outline is not None:
            total.add_metric([], self._outline.rank_s)
            compared.add_metric([], self._outline.compared_runs)
            for cause, lost_s in self._outline.lost_s.items():
                lost.add_metric([cause], lost_s)
            by_label = {host[:_LABEL_CHARACTERS]: ratio for host, ratio in self._outline.late_ratios.items()}
            for label, ratio in list(by_label.items())[:_MAX_HOSTS]:
                slow.add_metric([label], ratio)
        yield from (total, lost, slow, compared)
