"""The metrics of runs: a row each, from the store's rollups or from what is current."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, compress
from math import fsum
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from ddpobs.wire import OWN_PHASES, PHASES
from ddpobs.wire.states import RunState
from ddpobs_server.metrics.metric import (
    Block,
    BlockTexts,
    Families,
    Metric,
    RankMetric,
    RankSeries,
    Render,
    escape,
    gauge,
    histogram,
)
from ddpobs_server.metrics.run_totals import RunTotals, totals_by_run
from ddpobs_server.reports.outline import PLACE_CHARACTERS, STRAGGLER, DiagnosisOutline, Explanation, FindingOutline
from ddpobs_server.store import Aggregates, Run
from ddpobs_server.store.schema import STEP_BOUNDS_S

_BOUNDS = (*map(str, STEP_BOUNDS_S), "+Inf")
_EXPLANATION_CHARACTERS = 400
"""Maximum length of a cause, a place or a remedy in a label."""
_Rows = Iterator[tuple[object, ...]]


@dataclass(frozen=True)
class Present:
    """What changes without a commit: a run's state, and its last diagnosis, None before the first."""

    state: RunState
    diagnosis: DiagnosisOutline | None


class RunText(NamedTuple):
    """Lines of a run by metric, and the texts of its blocks of ranks, which the next scrape may use."""

    families: Families
    blocks: Mapping[Block, bytes]


def _phases(name: str) -> Callable[[RunTotals], Iterator[RankSeries]]:
    return lambda run: iter([("", run.phases.rank, getattr(run.phases, name))])


def _peers(name: str) -> Callable[[RunTotals], Iterator[RankSeries]]:
    return lambda run: iter([("", run.peers.rank, getattr(run.peers, name))])


def _last_seen(name: str) -> Callable[[RunTotals], Iterator[RankSeries]]:
    return lambda run: iter([("", run.last_seen.rank, getattr(run.last_seen, name))])


def _of_last_step(name: str) -> Callable[[RunTotals], Iterator[RankSeries]]:
    """Of each rank with a step: the arrival time is zero until the first step."""

    def values(run: RunTotals) -> Iterator[RankSeries]:
        has_step = run.last_seen.seen_ns
        yield "", (*compress(run.last_seen.rank, has_step),), (*compress(getattr(run.last_seen, name), has_step),)

    return values


def _seconds(value_ns: float) -> float:
    return value_ns / 1e9


def _bucket_seconds(name: str) -> Callable[[RunTotals], _Rows]:
    return lambda run: ((bucket.label, getattr(bucket, name) / 1e9) for bucket in run.buckets)


def _phase_seconds(run: RunTotals) -> Iterator[RankSeries]:
    for phase in PHASES:
        yield f'phase="{phase}",', run.phases.rank, getattr(run.phases, f"{phase}_ns")


def _straggler_steps(run: RunTotals) -> _Rows:
    columns = (getattr(run.peers, f"straggler_{phase}") for phase in OWN_PHASES)
    for rank, *counts in zip(run.peers.rank, *columns, strict=True):
        yield from ((phase, rank, int(count)) for phase, count in zip(OWN_PHASES, counts, strict=True))


def _info(run: RunTotals) -> _Rows:
    backend, device, torch = map(escape, run.facts)
    yield run.run.attempt, backend, device, torch, run.run.world_size, 1


def _durations(run: RunTotals) -> _Rows:
    counts = list(accumulate(run.histogram or [0] * len(_BOUNDS)))
    for bound, count in zip(_BOUNDS, counts, strict=True):
        yield "_bucket", f'le="{bound}",', float(count)
    yield "_count", "", float(counts[-1])
    yield "_sum", "", fsum(chain(*(getattr(run.phases, f"{phase}_ns") for phase in PHASES))) / 1e9


def _finding_counts(present: Present) -> _Rows:
    counts = present.diagnosis.counts if present.diagnosis else {}
    yield from ((code, severity, count) for (code, severity), count in counts.items())


def _gains(present: Present) -> _Rows:
    """Labels and gain of each finding; of findings with the same labels, the largest gain."""
    gains: dict[tuple[object, ...], float] = {}
    for finding in present.diagnosis.findings if present.diagnosis else ():
        labels = (finding.code, finding.phase, finding.ranks, finding.severity, escape(finding.verdict))
        gain = finding.gain["ratio"] if finding.gain else 0.0
        gains[labels] = max(gain, gains.get(labels, 0.0))
    yield from ((*labels, gain) for labels, gain in gains.items())


def _failures(present: Present) -> _Rows:
    """Labels of each crash, of a lost run, and of ranks that train apart, once."""
    rows = dict.fromkeys(
        (cause, finding.code, finding.ranks, remedy, finding.severity, escape(finding.verdict), when, where)
        for finding, (cause, where, remedy, when) in _explained(present)
        if finding.code != STRAGGLER
    )
    yield from ((*labels, 1) for labels in rows)


def _slow_ranks(present: Present) -> _Rows:
    """Labels of each finding about slow ranks, once."""
    rows = dict.fromkeys(
        (cause, finding.phase, finding.ranks, remedy, finding.severity, where)
        for finding, (cause, where, remedy, _) in _explained(present)
        if finding.code == STRAGGLER
    )
    yield from ((*labels, 1) for labels in rows)


def _explained(present: Present) -> Iterator[tuple[FindingOutline, Explanation]]:
    """The findings with an explanation, each with its texts as labels."""
    for finding in present.diagnosis.findings if present.diagnosis else ():
        if finding.explanation is not None:
            yield finding, Explanation(*(escape(part, _EXPLANATION_CHARACTERS) for part in finding.explanation))


def _goodput(present: Present) -> _Rows:
    if present.diagnosis and present.diagnosis.goodput is not None:
        yield (present.diagnosis.goodput,)


def _time_shares(present: Present) -> _Rows:
    if present.diagnosis and present.diagnosis.goodput is not None:
        yield from present.diagnosis.time_shares.items()


def _overhead(name: str) -> Callable[[Present], _Rows]:
    return lambda present: (
        iter([(present.diagnosis.telemetry[name],)]) if present.diagnosis and present.diagnosis.telemetry else iter(())
    )


def _hang(present: Present) -> _Rows:
    if present.diagnosis and present.diagnosis.hang is not None:
        place, ranks, *explained = present.diagnosis.hang
        yield escape(place, PLACE_CHARACTERS), ranks, *(escape(part, _EXPLANATION_CHARACTERS) for part in explained), 1


def _rank_seconds(
    name: str,
    text: str,
    values: Callable[[RunTotals], Iterator[RankSeries]],
    kind: type[Family] = CounterMetricFamily,
) -> Metric[RunTotals]:
    """A row of the times of ranks."""
    return RankMetric(name, text, _RANK, values, kind, sample=_seconds)


_COMPARED = "Steps in which the ranks were compared; delay, waiting, moving and lateness are counted over these."
_FINDING = ("code", "phase", "ranks", "severity", "title")
_RANK, _BUCKET = ("rank",), ("bucket",)
STORED: tuple[Metric[RunTotals], ...] = (
    RankMetric("steps", "Steps finished.", _RANK, _phases("steps")),
    RankMetric(
        "phase_seconds",
        "Time by phase; the phases of a step add up to its wall time.",
        ("phase", "rank"),
        _phase_seconds,
        sample=_seconds,
    ),
    _rank_seconds("comm_seconds", "Time with communication in progress.", _phases("comm_ns")),
    _rank_seconds("comm_exposed_seconds", "Communication that backward did not hide.", _phases("exposed_comm_ns")),
    _rank_seconds("comm_wait_seconds", "Time spent waiting for the last rank.", _peers("wait_ns")),
    _rank_seconds(
        "comm_moving_seconds",
        "Exposed communication in which data moved: without waiting for the last rank.",
        _peers("moving_ns"),
    ),
    RankMetric(
        "allreduce_bytes",
        "Bytes of gradient buckets reduced, or of a sharded model's units gathered and reduced.",
        _RANK,
        lambda run: [("", (*run.reduced_bytes.keys(),), (*run.reduced_bytes.values(),))],
    ),
    Metric(
        "bucket_ready_seconds",
        "From the previous bucket's readiness to this one's; of a unit's collective with the ones between.",
        _BUCKET,
        _bucket_seconds("compute_ns"),
    ),
    Metric(
        "bucket_comm_seconds",
        "From launch to completion of a bucket or a unit's collective.",
        _BUCKET,
        _bucket_seconds("comm_ns"),
    ),
    Metric(
        "bucket_exposed_seconds",
        "Communication after the step's last gradient; of a unit's collective the time in which training waits.",
        _BUCKET,
        _bucket_seconds("exposed_ns"),
    ),
    RankMetric("compared_steps", _COMPARED, _RANK, _peers("steps")),
    _rank_seconds("rank_delay_seconds", "Delay that this rank caused while it was last.", _peers("delay_ns")),
    Metric(
        "straggler_steps",
        "Steps in which this rank was last by more than a tenth of the step.",
        ("phase", "rank"),
        _straggler_steps,
    ),
    RankMetric("telemetry_dropped", "Records lost before they reached the collector.", _RANK, _last_seen("dropped")),
    gauge("run_info", "1; the run's facts are labels.", ("attempt", "backend", "device", "torch", "world_size"), _info),
    gauge(
        "bucket_bytes",
        "Size of a bucket, or of what a unit's collective moves.",
        _BUCKET,
        lambda run: ((bucket.label, bucket.size_bytes) for bucket in run.buckets),
    ),
    gauge("unused_parameters", "Parameters without a gradient on some rank.", (), lambda run: [(run.unused,)]),
    RankMetric("last_step", "Number of the last step.", _RANK, _of_last_step("step"), GaugeMetricFamily),
    _rank_seconds(
        "last_step_timestamp_seconds",
        "Time at which the collector received the last step, Unix time.",
        _of_last_step("seen_ns"),
        GaugeMetricFamily,
    ),
    histogram("step_duration_seconds", "Wall time of steps, all ranks.", _durations),
)
PRESENT: tuple[Metric[Present], ...] = (
    gauge("findings", "Findings by code and severity.", ("code", "severity"), _finding_counts),
    gauge(
        "finding_gain_ratio",
        "Gain that a finding predicts, as a share of the step or run; 0 if none.",
        _FINDING,
        _gains,
    ),
    gauge(
        "failure_info",
        "1; a crash, a lost run, or ranks that train apart, with cause, time, place and remedy as labels.",
        ("cause", "code", "ranks", "remedy", "severity", "title", "when", "where"),
        _failures,
    ),
    gauge(
        "straggler_info",
        "1; slow ranks, with cause, place and remedy as labels.",
        ("cause", "phase", "ranks", "remedy", "severity", "where"),
        _slow_ranks,
    ),
    gauge("goodput_ratio", "Time in steps that no restart repeated, as a share of the run's wall time.", (), _goodput),
    gauge("time_share_ratio", "Share of a group of the account in the run's wall time.", ("group",), _time_shares),
    gauge(
        "telemetry_overhead_ratio",
        "What telemetry adds to a step, as a share of a step in which it rested.",
        (),
        _overhead("cost_ratio"),
    ),
    gauge("telemetry_overhead_low_ratio", "Lower bound of its 95 % interval.", (), _overhead("low_ratio")),
    gauge("telemetry_overhead_high_ratio", "Upper bound of its 95 % interval.", (), _overhead("high_ratio")),
    gauge("run_state", "1; the run's state is a label.", ("state",), lambda present: [(present.state, 1)]),
    gauge(
        "hang_info",
        "1 while the run hangs; the ranks that the others wait for, their host and place, and the remedy are labels.",
        ("place", "ranks", "remedy", "where"),
        _hang,
    ),
)


def render_runs(totals: Aggregates, before: Mapping[str, Mapping[Block, bytes]]) -> dict[str, RunText]:
    """Lines of each changed run.

    Args:
        totals: Data of the runs.
        before: Texts of the blocks of ranks at the scrape before, by run.
    """
    rendered = {}
    for run in totals_by_run(totals):
        texts = BlockTexts(before.get(run.run.run, {}))
        families = {metric.name: metric.lines(run.run.name, run, texts) for metric in STORED}
        rendered[run.run.run] = RunText(families, texts.kept)
    return rendered


def render_present(run: Run, state: RunState, diagnosis: DiagnosisOutline | None) -> Families:
    """Lines that change without a commit: a run's state, its findings, its goodput, and the place of its hang."""
    present, texts = Present(state, diagnosis), BlockTexts({})
    return {metric.name: metric.lines(run.name, present, texts) for metric in PRESENT}


@cache
def headers(render: Render) -> dict[str, bytes]:
    """Help and type of each metric in the requested format, in the order of the response."""
    metrics: tuple[Metric[Any], ...] = (*STORED, *PRESENT)
    return {metric.name: metric.header(render) for metric in metrics}
