"""Metrics of runs, from the store's rollups.

No metric has both a rank and a bucket label: there would be too many series.

A scrape takes a fixed number of statements for all runs and ranks, each joined and summed by `run_id`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from ddpobs.wire import PHASES
from ddpobs_server.reports.run_state import state_of_run
from ddpobs_server.store import Aggregates, BucketRollup, Run
from ddpobs_server.store.schema import STEP_BOUNDS_S

END = b"# EOF\n"
"""Last line of OpenMetrics; it must appear once, after all families."""
Render = Callable[[CollectorRegistry], bytes]
_RANK, _HANG = ("rank", "run"), ("place", "ranks", "run")
_PLACE_CHARACTERS, _RANKS = 160, 8
"""Longest place, and most ranks, in a label."""
# Labels are in alphabetical order, as prometheus_client writes them.
_COUNTERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("steps", "Steps finished.", _RANK),
    ("phase_seconds", "Time by phase; the phases of a step add up to its wall time.", ("phase", *_RANK)),
    ("comm_seconds", "Time with communication in progress.", _RANK),
    ("comm_exposed_seconds", "Communication that backward did not hide.", _RANK),
    ("comm_wait_seconds", "Time spent waiting for the last rank.", _RANK),
    ("allreduce_bytes", "Bytes of gradient buckets reduced.", _RANK),
    ("bucket_ready_seconds", "From the previous bucket's readiness to this one's.", ("bucket", "run")),
    ("bucket_comm_seconds", "From launch to completion.", ("bucket", "run")),
    ("bucket_exposed_seconds", "Communication after the step's last gradient.", ("bucket", "run")),
    (
        "compared_steps",
        "Steps in which the ranks were compared; delay, waiting and lateness are counted over these.",
        _RANK,
    ),
    ("rank_delay_seconds", "Delay that this rank caused while it was last.", _RANK),
    ("straggler_steps", "Steps in which this rank was last by more than a tenth of the step.", ("phase", *_RANK)),
    ("telemetry_dropped", "Records lost before they reached the collector.", _RANK),
)
_GAUGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("run_info", "1; the run's facts are labels.", ("attempt", "backend", "device", "run", "torch", "world_size")),
    ("bucket_bytes", "Size of a bucket.", ("bucket", "run")),
    ("unused_parameters", "Parameters without a gradient on some rank.", ("run",)),
    ("last_step", "Number of the last step.", _RANK),
    ("last_step_timestamp_seconds", "Time at which the collector received the last step, Unix time.", _RANK),
    ("findings", "Findings by code and severity.", ("code", "run", "severity")),
    ("run_state", "1; the run's state is a label.", ("run", "state")),
    ("hang_info", "1 while the run hangs; the ranks that the others wait for and their place are labels.", _HANG),
)
_LAST_SCRAPES_NS = 60_000_000_000
"""Time a finished run stays, so that its last values are scraped."""


class _Families:
    """All families of the runs. Samples are formatted here: prometheus_client takes ten times as long."""

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
                pairs = ",".join(f'{label}="%s"' for label in labels)
                self._formats[name] = f"ddpobs_{name}{suffix}{{{pairs}}} %r\n"
                self._lines[name] = []

    def add(self, name: str, labels: Iterable[object], value: float) -> None:
        """Add a sample; `labels` are escaped values in the family's order."""
        self._lines[name].append(self._formats[name] % (*labels, value))

    def text(self, render: Render) -> bytes:
        """Render all families, empty ones too, so that their names are known from the first scrape on."""
        blocks = []
        for name, family in self._families.items():
            blocks += [_render_family(render, family), "".join(self._lines[name]).encode()]
        return b"".join([*blocks, _render_family(render, self.durations)])


class _SingleFamily(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    @override
    def collect(self) -> Iterable[Metric]:
        return [self._family]


def _render_family(render: Render, family: Metric) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_SingleFamily(family))
    return render(registry).removesuffix(END)


def run_metrics(state: Any, workspace: str, render: Render) -> bytes:
    """Render the active runs of a workspace; a finished or quiet run has no series.

    Args:
        state: The application's, with `store`, `reports` and `settings`.
        workspace: Workspace of the runs.
        render: Writes a registry in the requested format.
    """
    now_ns = time.time_ns()
    quiet_ns = int(state.settings.quiet_after_s * 1e9)
    # The wall clock may be set back, so a run may have been seen in the future.
    totals = state.store.aggregates(now_ns - quiet_ns, now_ns + quiet_ns, workspace)
    runs = {run.run: run for run in totals.runs if not run.is_over or abs(now_ns - run.last_seen_ns) < _LAST_SCRAPES_NS}
    families = _Families()
    _add_ranks(families, runs, totals)
    _add_last_steps(families, runs, totals)
    _add_delays(families, runs, totals)
    _add_runs(families, runs, totals)
    for run in runs.values():
        families.add("run_state", (run.name, state_of_run(run, state.settings, now_ns)), 1)
    _add_buckets(families, runs, totals)
    _add_unused(families, runs, totals)
    _add_findings(families, runs, state.reports.recent_diagnostics(list(runs.values())))
    return families.text(render)


def _add_ranks(families: _Families, runs: dict[str, Run], totals: Aggregates) -> None:
    for key, run in runs.items():
        for rank, (steps, comm_ns, *phases_ns) in totals.phases.get(key, {}).items():
            labels = (rank, run.name)
            by_phase = dict(zip(PHASES, phases_ns, strict=True))
            families.add("steps", labels, steps)
            families.add("comm_seconds", labels, comm_ns / 1e9)
            families.add("comm_exposed_seconds", labels, by_phase["exposed_comm"] / 1e9)
            for phase, total_ns in by_phase.items():
                families.add("phase_seconds", (phase, *labels), total_ns / 1e9)


def _add_last_steps(families: _Families, runs: dict[str, Run], totals: Aggregates) -> None:
    for key, rank, step, at_ns, dropped in totals.last_seen:
        if key in runs:
            labels = (rank, runs[key].name)
            if at_ns:  # Zero until the first step.
                families.add("last_step", labels, step)
                families.add("last_step_timestamp_seconds", labels, at_ns / 1e9)
            families.add("telemetry_dropped", labels, dropped)


def _add_delays(families: _Families, runs: dict[str, Run], totals: Aggregates) -> None:
    for key, total in totals.peers:
        if key in runs:
            labels = (total.rank, runs[key].name)
            families.add("compared_steps", labels, total.steps)
            families.add("rank_delay_seconds", labels, total.delay_ns / 1e9)
            families.add("comm_wait_seconds", labels, total.wait_ns / 1e9)
            for phase, steps in total.straggler_steps.items():
                families.add("straggler_steps", (phase, *labels), steps)


def _add_runs(families: _Families, runs: dict[str, Run], totals: Aggregates) -> None:
    bounds = [*map(str, STEP_BOUNDS_S), "+Inf"]
    for key, run in runs.items():
        hello = totals.hellos.get(key)
        backend, device, torch = (hello.backend, hello.device, hello.versions.get("torch", "")) if hello else [""] * 3
        facts = (run.attempt, _escape(backend), _escape(device), run.name, _escape(torch), run.world_size)
        families.add("run_info", facts, 1)
        counts = totals.histograms.get(key, [0] * len(bounds))
        cumulative = [sum(counts[: index + 1]) for index in range(len(counts))]
        wall_ns = sum(sum(phases_ns) for _, _, *phases_ns in totals.phases.get(key, {}).values())
        families.durations.add_metric([run.name], list(zip(bounds, cumulative, strict=True)), wall_ns / 1e9)


def _add_buckets(families: _Families, runs: dict[str, Run], totals: Aggregates) -> None:
    layouts = {(key, layout.module, layout.revision): layout for key, layout in totals.layouts}
    sums: dict[tuple[str, str], list[int]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for key, row in totals.buckets:
        if key not in runs:
            continue
        layout = layouts.get((key, row.module, row.revision))
        labels = (_bucket_label(row), runs[key].name)
        bucket_sums = sums.setdefault(labels, [0, 0, 0])
        for index, duration_ns in enumerate((row.compute_ns, row.comm_ns, row.exposed_ns)):
            bucket_sums[index] += duration_ns
        # Rows are ordered by revision, so the latest layout's size remains.
        sizes[labels] = layout.buckets[row.bucket].size_bytes if layout and row.bucket < len(layout.buckets) else 0
    for labels, bucket_sums in sums.items():
        for name, total_ns in zip(("ready", "comm", "exposed"), bucket_sums, strict=True):
            families.add(f"bucket_{name}_seconds", labels, total_ns / 1e9)
        families.add("bucket_bytes", labels, sizes[labels])
    for key, rank, total_bytes in totals.reduced_bytes:
        if key in runs:
            families.add("allreduce_bytes", (rank, runs[key].name), total_bytes)


def _add_unused(families: _Families, runs: dict[str, Run], totals: Aggregates) -> None:
    latest = {(key, rank, record.module): record for key, rank, record in totals.unused}
    names: dict[str, set[tuple[int, str]]] = {key: set() for key in runs}
    for (key, _, module), record in latest.items():
        if key in runs:
            names[key] |= {(module, name) for name in record.locally}
    for key, run in runs.items():
        families.add("unused_parameters", (run.name,), len(names[key]))


def _add_findings(families: _Families, runs: dict[str, Run], diagnostics: list[Any]) -> None:
    for run, diagnosis in zip(runs.values(), diagnostics, strict=True):
        findings = diagnosis["findings"] if diagnosis else ()
        counts = Counter((finding["code"], finding["severity"]) for finding in findings)
        for (code, severity), count in counts.items():
            families.add("findings", (code, run.name, severity), count)
        hang = next((f for f in findings if f["code"] == "hang" and f["severity"] == "critical"), None)
        if hang is not None:
            families.add("hang_info", (_escape(_place(hang)), _ranks(hang), run.name), 1)


def _ranks(hang: Any) -> str:
    """The ranks that the others wait for: `1`, `0, 2`; a long list is cut."""
    ranks = hang["ranks"]
    return ", ".join(map(str, ranks[:_RANKS])) + (f" and {len(ranks) - _RANKS} more" if len(ranks) > _RANKS else "")


def _place(hang: Any) -> str:
    """Place of the first of these ranks: lines of Python, else its phase, else the kind of hang."""
    places = hang["evidence"]["places"]
    place = next((places[rank] for rank in hang["ranks"] if places.get(rank)), "")
    return str(place or hang["phase"] or hang["evidence"]["kind"])[:_PLACE_CHARACTERS]


def _bucket_label(row: BucketRollup) -> str:
    return str(row.bucket) if row.module == 0 else f"{row.module}.{row.bucket}"


def _escape(text: str) -> str:
    """Escape a label's value for the exposition formats."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
