"""Usage of each workspace, beside its limits: for metrics and the REST response."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import TypedDict, override

from ddpobs_server.store import DEFAULT_WORKSPACE, Store
from ddpobs_server.store import WorkspaceUsage as StoredUsage
from ddpobs_server.web.authenticator import Caller
from ddpobs_server.web.fair_slots import FairSlots
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.workspace_limits import Limits, WorkspaceLimits

if TYPE_CHECKING:
    from ddpobs_server.ingest.memory_budget import IngestMemoryBudget
    from ddpobs_server.ingest.series_ledger import SeriesLedger
    from ddpobs_server.ingest.writer import Writer

_GAUGES: dict[str, str] = {
    "runs": "Stored runs of a workspace.",
    "series": "Series of a workspace's active runs.",
    "stored_bytes": "Stored bytes of a workspace: chunks, layouts, unused sets, events and bucket sums.",
    "under_way_bytes": "Memory of a workspace's batches from arrival to commit.",
    "waiting_batches": "Batches of a workspace that wait for the writer.",
    "reads": "Reads of a workspace that are computed, and large responses that are sent.",
}
_LIMITS = ("max_runs", "max_series", "keep_gb", "batches_per_s", "mb_per_s", "reads_per_s", "keep_runs_days", "share")


class Usage(TypedDict):
    """Usage of a workspace; `refused` counts batches by the problem's title.

    Attributes:
        runs: Number of stored runs.
        series: Time series of the metrics.
        stored_bytes: Size of the stored data, in bytes.
        under_way_bytes: Size of the batches that are arriving, in bytes.
        waiting_batches: Batches that wait to be stored.
        reads: Reads in progress.
        refused: Refused batches, by problem.
    """

    runs: int
    series: int
    stored_bytes: int
    under_way_bytes: int
    waiting_batches: int
    reads: int
    refused: dict[str, int]


class WorkspaceUsages:
    """Reads the usage from the parts that enforce the limits.

    Args:
        store: Holds the stored runs.
        limits: The limits.
        series: Counts the series of active runs.
        memory_budget: Counts the bytes under way.
        writer: Its queue holds the batches that wait.
        slots: Places of reads and of their responses.
    """

    def __init__(
        self,
        store: Store,
        limits: WorkspaceLimits,
        *,
        series: SeriesLedger,
        memory_budget: IngestMemoryBudget,
        writer: Writer,
        slots: Sequence[FairSlots],
    ) -> None:
        self._store, self._limits, self._series = store, limits, series
        self._memory_budget, self._writer, self._slots = memory_budget, writer, slots
        self._refused: dict[str, Counter[str]] = {}

    def count_refusal(self, workspace: str, problem: Problem) -> None:
        """Count a refused batch. Used only on the event loop's thread."""
        self._refused.setdefault(workspace, Counter())[problem.document["title"]] += 1

    def visible_to(self, caller: Caller) -> dict[str, tuple[Limits, Usage]]:
        """Limits and usage of the caller's workspace. Administrators of the default workspace see all workspaces."""
        stored = self._store.workspace_usage()
        sees_all = caller.workspace == DEFAULT_WORKSPACE and "admin" in caller.scopes
        names = {caller.workspace, *(stored if sees_all else ()), *(self._refused if sees_all else ())}
        series = self._series.series()
        return {
            name: (self._limits.of(name), self._usage(name, stored.get(name), series.get(name, 0)))
            for name in sorted(names)
        }

    def _usage(self, name: str, stored: StoredUsage | None, series: int) -> Usage:
        return {
            "runs": stored.runs if stored else 0,
            "series": series,
            "stored_bytes": stored.size_bytes if stored else 0,
            "under_way_bytes": self._memory_budget.in_use.get(name, 0),
            "waiting_batches": self._writer.queue.size_of(name),
            "reads": sum(slots.in_use.get(name, 0) for slots in self._slots),
            "refused": dict(self._refused.get(name, {})),
        }


class UsageMetrics(Collector):
    """The usage as metrics.

    Args:
        rows: As `WorkspaceUsages.visible_to` returns them.
    """

    def __init__(self, rows: dict[str, tuple[Limits, Usage]]) -> None:
        self._rows = rows

    @override
    def collect(self) -> Iterable[Metric]:
        """All families."""
        for name, text in _GAUGES.items():
            family = GaugeMetricFamily(f"ddpobs_server_workspace_{name}", text, labels=["workspace"])
            for workspace, (_, usage) in self._rows.items():
                family.add_metric([workspace], usage[name])  # type: ignore[literal-required]
            yield family
        limits = GaugeMetricFamily(
            "ddpobs_server_workspace_limit", "Limits of a workspace.", labels=["workspace", "limit"]
        )
        refused = CounterMetricFamily(
            "ddpobs_server_workspace_refused_batches",
            "Batches of a workspace that were refused, by problem.",
            labels=["workspace", "problem"],
        )
        for workspace, (of_workspace, usage) in self._rows.items():
            for name in _LIMITS:
                if (value := getattr(of_workspace, name)) is not None:
                    limits.add_metric([workspace, name], value)
            for problem, count in usage["refused"].items():
                refused.add_metric([workspace, problem], count)
        yield from (limits, refused)
