"""The metrics of runs, from the store's rollups. Rank and bucket never become a label pair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ddpobs.wire import PHASES
from ddpobs_server.store import Aggregates, BucketRollup, Run
from ddpobs_server.store.schema import STEP_BOUNDS_S

END = b"# EOF\n"
"""Ends OpenMetrics, and comes once."""
Render = Callable[[CollectorRegistry], bytes]
_RANK = ("rank", "run")
# Labels are in the order of the alphabet, as prometheus_client writes them.
_COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("steps", "Steps finished.", _RANK),
    ("phase_seconds", "Time by phase; the phases of a step add up to its wall time.", ("phase", *_RANK)),
    ("comm_seconds", "Time with communication under way.", _RANK),
    ("comm_exposed_seconds", "Communication that backward did not hide.", _RANK),
    ("comm_wait_seconds", "Time spent waiting for the last rank.", _RANK),
    ("allreduce_bytes", "Bytes of gradient buckets reduced.", _RANK),
    ("bucket_ready_seconds", "From the previous bucket's readiness to this one's.", ("bucket", "run")),
    ("bucket_comm_seconds", "From launch to completion.", ("bucket", "run")),
    ("bucket_exposed_seconds", "Communication after the step's last gradient.", ("bucket", "run")),
    ("compared_steps", "Steps in which the ranks were compared: those that delay, waiting and lateness are of.", _RANK),
    ("rank_delay_seconds", "Delay that this rank caused while it was last.", _RANK),
    ("straggler_steps", "Steps in which this rank was last by more than a tenth of the step.", ("phase", *_RANK)),
    ("telemetry_dropped", "Records lost before they reached the collector.", _RANK),
)
_GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("run_info", "1; the run's facts are labels.", ("attempt", "backend", "device", "run", "torch", "world_size")),
    ("bucket_bytes", "Size of a bucket.", ("bucket", "run")),
    ("unused_parameters", "Parameters without a gradient on some rank.", ("run",)),
    ("last_step", "Number of the last step.", _RANK),
    ("last_step_timestamp_seconds", "When the collector saw it, Unix time.", _RANK),
    ("findings", "Findings by code and severity.", ("code", "run", "severity")),
)
_LAST_SCRAPES_NS = 60_000_000_000
"""An ended run stays for a minute, so that its last figures are scraped."""


class _Families:
    """Every family once. Samples are kept as lines: prometheus_client takes ten times as long to write them."""

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}
        self._formats: dict[str, str] = {}
        self._lines: dict[str, list[str]] = {}
        self.durations = HistogramMetricFamily(
            "ddpobs_step_duration_seconds", "Wall time of steps, all ranks.", labels=["run"]
        )
        for kind, suffix, families in ((CounterMetricFamily, "_total", _COUNTERS), (GaugeMetricFamily, "", _GAUGES)):
            for name, help_text, labels in families:
                self._families[name] = kind(f"ddpobs_{name}", help_text, labels=labels)
                marks = ",".join(f'{label}="%s"' for label in labels)
                self._formats[name] = f"ddpobs_{name}{suffix}{{{marks}}} %r\n"
                self._lines[name] = []

    def add(self, name: str, labels: Iterable[object], value: float) -> None:
        """One sample; `labels` are values in the family's order, of text that needs no escaping."""
        self._lines[name].append(self._formats[name] % (*labels, value))

    def text(self, render: Render) -> bytes:
        """All families, empty ones too, so that their names are known from the first scrape on."""
        parts = []
        for name, family in self._families.items():
            parts += [_rendered(render, family), "".join(self._lines[name]).encode()]
        return b"".join([*parts, _rendered(render, self.durations)])


class _One(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return [self._family]


def _rendered(render: Render, family: Metric) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_One(family))
    return render(registry).removesuffix(END)


def run_metrics(state: Any, workspace: str, render: Render) -> bytes:
    """The active runs of a workspace; a run that has ended or gone quiet has no series.

    Args:
        state: The application's, with `store`, `reports` and `settings`.
        workspace: Whose runs.
        render: Writes a registry in the format asked for.
    """
    now_ns = time.time_ns()
    quiet_ns = int(state.settings.quiet_after_s * 1e9)
    found = state.store.aggregates(now_ns - quiet_ns, now_ns + quiet_ns, workspace)  # Clocks are set back, too.
    runs = {run.run: run for run in found.runs if not run.finished or abs(now_ns - run.last_seen_ns) < _LAST_SCRAPES_NS}
    families = _Families()
    _add_ranks(families, runs, found)
    _add_buckets(families, runs, found)
    _add_unused(families, runs, found)
    for run, told in zip(runs.values(), state.reports.recent_diagnostics(list(runs.values())), strict=True):
        counts: dict[tuple[str, str], int] = {}
        for finding in told["findings"] if told else ():
            key = (finding["code"], finding["severity"])
            counts[key] = counts.get(key, 0) + 1
        for (code, severity), count in counts.items():
            families.add("findings", (code, run.name, severity), count)
    return families.text(render)


def _add_ranks(families: _Families, runs: dict[str, Run], found: Aggregates) -> None:
    wall_ns = dict.fromkeys(runs, 0)
    for key, run in runs.items():
        for rank, (steps, comm_ns, *phases_ns) in found.phases.get(key, {}).items():
            labels = (rank, run.name)
            by_phase = dict(zip(PHASES, phases_ns, strict=True))
            families.add("steps", labels, steps)
            families.add("comm_seconds", labels, comm_ns / 1e9)
            families.add("comm_exposed_seconds", labels, by_phase["exposed_comm"] / 1e9)
            for phase, total_ns in by_phase.items():
                families.add("phase_seconds", (phase, *labels), total_ns / 1e9)
            wall_ns[key] += sum(phases_ns)
    for key, rank, step, at_ns, dropped in found.last_seen:
        if key in runs:
            labels = (rank, runs[key].name)
            if at_ns:  # Else it has no step yet.
                families.add("last_step", labels, step)
                families.add("last_step_timestamp_seconds", labels, at_ns / 1e9)
            families.add("telemetry_dropped", labels, dropped)
    for key, total in found.peers:
        if key in runs:
            labels = (total.rank, runs[key].name)
            families.add("compared_steps", labels, total.steps)
            families.add("rank_delay_seconds", labels, total.delay_ns / 1e9)
            families.add("comm_wait_seconds", labels, total.wait_ns / 1e9)
            for phase, steps in total.straggler_steps.items():
                families.add("straggler_steps", (phase, *labels), steps)
    bounds = [*map(str, STEP_BOUNDS_S), "+Inf"]
    for key, run in runs.items():
        hello = found.hellos.get(key)
        backend, device, torch = (hello.backend, hello.device, hello.versions.get("torch", "")) if hello else [""] * 3
        facts = (run.attempt, _escaped(backend), _escaped(device), run.name, _escaped(torch), run.world_size)
        families.add("run_info", facts, 1)
        counts = found.histograms.get(key, [0] * len(bounds))
        cumulated = [sum(counts[: index + 1]) for index in range(len(counts))]
        families.durations.add_metric([run.name], list(zip(bounds, cumulated, strict=True)), wall_ns[key] / 1e9)


def _add_buckets(families: _Families, runs: dict[str, Run], found: Aggregates) -> None:
    layouts = {(key, layout.module, layout.revision): layout for key, layout in found.layouts}
    sums: dict[tuple[str, str], list[int]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for key, row in found.buckets:
        if key not in runs:
            continue
        layout = layouts.get((key, row.module, row.revision))
        labels = (_bucket_label(row), runs[key].name)
        total = sums.setdefault(labels, [0, 0, 0])
        for place, value in enumerate((row.compute_ns, row.comm_ns, row.exposed_ns)):
            total[place] += value
        # Rows come by revision: the latest layout's size stays.
        sizes[labels] = layout.buckets[row.bucket].size_bytes if layout and row.bucket < len(layout.buckets) else 0
    for labels, totals in sums.items():
        for name, total_ns in zip(("ready", "comm", "exposed"), totals, strict=True):
            families.add(f"bucket_{name}_seconds", labels, total_ns / 1e9)
        families.add("bucket_bytes", labels, sizes[labels])
    for key, rank, total_bytes in found.reduced_bytes:
        if key in runs:
            families.add("allreduce_bytes", (rank, runs[key].name), total_bytes)


def _add_unused(families: _Families, runs: dict[str, Run], found: Aggregates) -> None:
    latest = {(key, rank, record.module): record for key, rank, record in found.unused}
    names: dict[str, set[tuple[int, str]]] = {key: set() for key in runs}
    for (key, _, module), record in latest.items():
        if key in runs:
            names[key] |= {(module, name) for name in record.locally}
    for key, run in runs.items():
        families.add("unused_parameters", (run.name,), len(names[key]))


def _bucket_label(row: BucketRollup) -> str:
    return str(row.bucket) if row.module == 0 else f"{row.module}.{row.bucket}"


def _escaped(text: str) -> str:
    """A label's value, as the exposition formats want it."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
