"""The metrics of runs, from the store's rollups. Rank and bucket never become a label pair."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ddpobs_server.reports import Reports
from ddpobs_server.store import BucketRollup, Run, Store
from ddpobs_server.store.schema import STEP_BOUNDS_S

_RANK = ("run", "rank")


class _Families:
    """Every family once, filled run by run."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        for name, help_text, labels in _COUNTERS:
            self.by_name[name] = CounterMetricFamily(f"ddpobs_{name}", help_text, labels=labels)
        for name, help_text, labels in _GAUGES:
            self.by_name[name] = GaugeMetricFamily(f"ddpobs_{name}", help_text, labels=labels)
        self.durations = HistogramMetricFamily(
            "ddpobs_step_duration_seconds", "Wall time of steps, all ranks.", labels=["run"]
        )

    def add(self, name: str, labels: Iterable[object], value: float) -> None:
        self.by_name[name].add_metric([str(label) for label in labels], value)

    def __iter__(self) -> Iterator[Metric]:
        yield from self.by_name.values()
        yield self.durations


_COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("steps", "Steps finished.", _RANK),
    ("phase_seconds", "Time by phase; the phases of a step add up to its wall time.", (*_RANK, "phase")),
    ("comm_seconds", "Time with communication under way.", _RANK),
    ("comm_exposed_seconds", "Communication that backward did not hide.", _RANK),
    ("comm_wait_seconds", "Time spent waiting for the last rank.", _RANK),
    ("allreduce_bytes", "Bytes of gradient buckets reduced.", _RANK),
    ("bucket_ready_seconds", "From the previous bucket's readiness to this one's.", ("run", "bucket")),
    ("bucket_comm_seconds", "From launch to completion.", ("run", "bucket")),
    ("bucket_exposed_seconds", "Communication after the step's last gradient.", ("run", "bucket")),
    ("rank_delay_seconds", "Delay that this rank caused while it was last.", _RANK),
    ("straggler_steps", "Steps in which this rank was late by more than a tenth.", (*_RANK, "phase")),
    ("telemetry_dropped", "Records lost before they reached the collector.", _RANK),
)
_GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("run_info", "1; the run's facts are labels.", ("run", "attempt", "world_size", "backend", "device", "torch")),
    ("bucket_bytes", "Size of a bucket.", ("run", "bucket")),
    ("unused_parameters", "Parameters without a gradient on some rank.", ("run",)),
    ("last_step", "Number of the last step.", _RANK),
    ("last_step_timestamp_seconds", "When the collector saw it, Unix time.", _RANK),
    ("findings", "Findings by code and severity.", ("run", "code", "severity")),
)


class RunMetrics(Collector):
    """Reads the active runs at each scrape; a run that has ended or gone quiet has no series.

    Args:
        state: The application's, with `store`, `reports` and `settings`.
        workspace: Whose runs.
    """

    def __init__(self, state: Any, workspace: str) -> None:
        self._state, self._workspace = state, workspace

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are checked by the tests, and the store is not open yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families; empty ones too, so that their names are known from the first scrape on."""
        families = _Families()
        since_ns = time.time_ns() - int(self._state.settings.quiet_after_s * 1e9)
        for run in self._state.store.active_runs(since_ns, self._workspace):
            ended = run.ranks > 0 and run.goodbyes >= run.ranks
            if not ended or run.last_seen_ns > time.time_ns() - _LAST_SCRAPES_NS:
                _add_run(families, run, self._state.store, self._state.reports)
        yield from families


_LAST_SCRAPES_NS = 60_000_000_000
"""An ended run stays for a minute, so that its last figures are scraped."""


def _add_run(families: _Families, run: Run, store: Store, reports: Reports) -> None:
    _add_ranks(families, run, store)
    _add_buckets(families, run, store)
    for total in store.peer_totals(run.run, run.attempt):
        families.add("rank_delay_seconds", (run.name, total.rank), total.delay_ns / 1e9)
        families.add("comm_wait_seconds", (run.name, total.rank), total.wait_ns / 1e9)
        for phase, steps in total.straggler_steps.items():
            families.add("straggler_steps", (run.name, total.rank, phase), steps)
    latest = {(rank, record.module): record for rank, record in store.unused(run.run, run.attempt)}
    names = {(module, name) for (_, module), record in latest.items() for name in record.locally}
    families.add("unused_parameters", (run.name,), len(names))
    counts: dict[tuple[str, str], int] = {}
    for finding in reports.diagnostics(run.run, run.attempt)["findings"]:
        key = (finding["code"], finding["severity"])
        counts[key] = counts.get(key, 0) + 1
    for (code, severity), count in counts.items():
        families.add("findings", (run.name, code, severity), count)


def _add_ranks(families: _Families, run: Run, store: Store) -> None:
    wall_ns = 0
    for rollup in store.rollups(run.run, run.attempt):
        labels = (run.name, rollup.rank)
        families.add("steps", labels, rollup.steps)
        families.add("comm_seconds", labels, rollup.comm_ns / 1e9)
        families.add("comm_exposed_seconds", labels, rollup.phases_ns["exposed_comm"] / 1e9)
        for phase, total_ns in rollup.phases_ns.items():
            families.add("phase_seconds", (*labels, phase), total_ns / 1e9)
        wall_ns += rollup.wall_ns
    hello = None
    for source in store.sources(run.run, run.attempt):
        labels = (run.name, source.rank)
        families.add("last_step", labels, source.last_step)
        families.add("last_step_timestamp_seconds", labels, source.last_step_seen_ns / 1e9)
        families.add("telemetry_dropped", labels, source.dropped)
        hello = hello or source.hello
    facts = (hello.backend, hello.device, hello.versions.get("torch", "")) if hello else ("", "", "")
    families.add("run_info", (run.name, run.attempt, run.world_size, *facts), 1)
    counts = store.histogram(run.run, run.attempt)
    cumulated = [sum(counts[: index + 1]) for index in range(len(counts))]
    bounds = [*map(str, STEP_BOUNDS_S), "+Inf"]
    families.durations.add_metric([run.name], list(zip(bounds, cumulated, strict=True)), wall_ns / 1e9)


def _add_buckets(families: _Families, run: Run, store: Store) -> None:
    layouts = {(layout.module, layout.revision): layout for layout in store.layouts(run.run, run.attempt)}
    rows = store.bucket_rollups(run.run, run.attempt)
    bytes_by_rank: dict[int, int] = {}
    sums: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for row in rows:
        layout = layouts.get((row.module, row.revision))
        size = layout.buckets[row.bucket].size_bytes if layout and row.bucket < len(layout.buckets) else 0
        bytes_by_rank[row.rank] = bytes_by_rank.get(row.rank, 0) + size * row.steps
        total = sums.setdefault(_bucket_label(row), [0, 0, 0])
        for place, value in enumerate((row.compute_ns, row.comm_ns, row.exposed_ns)):
            total[place] += value
        # Rows come by revision: the latest layout's size stays.
        sizes[_bucket_label(row)] = size
    for rank, total_bytes in bytes_by_rank.items():
        families.add("allreduce_bytes", (run.name, rank), total_bytes)
    for bucket, totals in sums.items():
        for name, total_ns in zip(("ready", "comm", "exposed"), totals, strict=True):
            families.add(f"bucket_{name}_seconds", (run.name, bucket), total_ns / 1e9)
        families.add("bucket_bytes", (run.name, bucket), sizes[bucket])


def _bucket_label(row: BucketRollup) -> str:
    return str(row.bucket) if row.module == 0 else f"{row.module}.{row.bucket}"
