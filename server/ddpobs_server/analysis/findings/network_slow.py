"""Finding `network-slow`: transfers take longer than the run's own link did earlier, in an interval of steps.

Waiting is excluded, so a late rank does not look like a slow link. Computation that slows too is another cause.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddpobs import wire
from ddpobs.shared.words import format_ranks
from ddpobs_server.analysis.communication import link_model
from ddpobs_server.analysis.communication.transfers import Transfers, read_transfers
from ddpobs_server.analysis.evidence import MIN_STEPS, ColumnReader, ColumnsTooLargeError, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, NotJudged, severity_of
from ddpobs_server.analysis.statistics.level_shifts import level_segments
from ddpobs_server.analysis.steps.joined_steps import Floats

CODES = ("network-slow",)
SLOWER = 1.3
"""Minimum ratio of the transfers' time to that of the run's own link before."""
_COMPUTES_SLOWER = 1.15
"""Ratio of a rank's own time to its earlier one above which the link is not blamed."""
_PART_OF_SLOWDOWN = 0.05
"""Computation that takes longer by less than this part of what communication takes longer does not explain it."""
_REMEDY = (
    "Look at the hosts' links in these steps: errors and speed of the interfaces (ethtool -S), other traffic, a "
    "switch. The ranks arrived together, and their computation did not slow down."
)


@dataclass(frozen=True)
class NetworkSlowFacts(Facts):
    """Transfers in the slow steps, and in the earlier steps that show the run's own link.

    Attributes:
        bytes_per_s: Bytes a second in the slow steps.
        earlier_bytes_per_s: Bytes a second in the earlier steps.
        earlier_steps: First and last of the earlier steps.
        ratio: Relative time of the transfers: measured over expected, median.
        bytes_a_step: Bytes of the gradients.
        waiting_ns: Median wait for the last rank in a slow step.
        steps_used: Number of slow steps.
    """

    bytes_per_s: int
    earlier_bytes_per_s: int
    earlier_steps: list[int]
    ratio: float
    bytes_a_step: int
    waiting_ns: int
    steps_used: int


FACTS = (NetworkSlowFacts,)


@dataclass(frozen=True)
class _Interval:
    """Steps with slow transfers, and the steps of the run's own link: [first, end) into the joined steps."""

    slow: tuple[int, int]
    reference: tuple[int, int]

    @property
    def slow_rows(self) -> wire.Ints:
        return np.arange(*self.slow)

    @property
    def reference_rows(self) -> wire.Ints:
        return np.arange(*self.reference)


def network_slow(evidence: Evidence) -> Judgement:
    """Judge the intervals in which the least communication time over the ranks is above its earlier level."""
    joined = evidence.joined
    if len(joined.ranks) < 2 or len(joined) < 2 * MIN_STEPS or evidence.separate_groups_reason:
        return []
    comm_ns = _least_comm_ns(evidence)
    interval = None if comm_ns is None else _slowest_interval(comm_ns, joined.step_ns)
    if comm_ns is None or interval is None or evidence.columns is None:
        return []
    reason = _other_cause(evidence, interval, comm_ns)
    if reason:
        return [NotJudged("network-slow", f"transfers slowed down, but {reason}")]
    try:
        return _confirmed(evidence, evidence.columns, interval)
    except ColumnsTooLargeError as error:
        return [NotJudged("network-slow", str(error))]


def _other_cause(evidence: Evidence, interval: _Interval, comm_ns: npt.NDArray[np.float64]) -> str:
    """Return why the network cannot be blamed; empty if it can."""
    if evidence.absent_ranks:
        return "ranks without telemetry may have arrived later"
    if _is_one_host(evidence):
        return "all ranks are on one host: they cross no network"
    slowed = _ranks_that_compute_slower(evidence, interval, comm_ns)
    return f"so did the computation of {format_ranks(slowed)}" if slowed else ""


def _least_comm_ns(evidence: Evidence) -> Floats | None:
    """Return the least communication time over the ranks, shape [steps]; None if it is not recorded.

    The last rank to arrive waits least.
    """
    joined, steps = evidence.joined, evidence.steps
    is_compared = np.isin(steps.collective, joined.collective) & np.isin(evidence.rank, joined.ranks)
    comm_ns = steps.comm_ns[joined.row]
    if np.count_nonzero(is_compared) != joined.row.size or (comm_ns < 0).any():
        return None
    return np.asarray(comm_ns.min(axis=1), np.float64)


def _slowest_interval(comm_ns: Floats, step_ns: Floats) -> _Interval | None:
    """Return the interval that loses most against the fastest one before it."""
    segments = [
        part for part in level_segments(np.minimum(comm_ns, 4 * np.median(comm_ns))) if _length(part) >= MIN_STEPS
    ]
    levels = [float(np.median(comm_ns[first:end])) for first, end in segments]
    worst, lost_ns = None, 0.0
    for index in range(1, len(segments)):
        reference = int(np.argmin(levels[:index]))
        excess_ns = levels[index] - levels[reference]
        is_slow = levels[index] >= SLOWER * levels[reference] and excess_ns >= 0.03 * float(np.median(step_ns))
        if is_slow and excess_ns * _length(segments[index]) > lost_ns:
            worst, lost_ns = _Interval(segments[index], segments[reference]), excess_ns * _length(segments[index])
    return worst


def _length(segment: tuple[int, int]) -> int:
    return segment[1] - segment[0]


def _is_one_host(evidence: Evidence) -> bool:
    """Whether all ranks compute on the processors of one host, and exchange gradients through its memory."""
    hellos = evidence.hellos.values()
    return (
        bool(hellos) and len({hello.host for hello in hellos}) == 1 and all(hello.device == "cpu" for hello in hellos)
    )


def _ranks_that_compute_slower(evidence: Evidence, interval: _Interval, comm_ns: npt.NDArray[np.float64]) -> list[int]:
    """Ranks whose computation slowed down enough for busy processors to be the cause of both."""
    own_ns = evidence.joined.own_ns
    before_ns, during_ns = (np.median(own_ns[rows], axis=0) for rows in (interval.reference_rows, interval.slow_rows))
    more_comm_ns = np.median(comm_ns[interval.slow_rows]) - np.median(comm_ns[interval.reference_rows])
    is_much = during_ns - before_ns > _PART_OF_SLOWDOWN * more_comm_ns
    slow: npt.NDArray[np.bool_] = (during_ns > _COMPUTES_SLOWER * before_ns) & is_much
    return [int(rank) for rank in evidence.joined.ranks[slow]]


def _confirmed(evidence: Evidence, columns: ColumnReader, interval: _Interval) -> Judgement:
    """Compare the transfers of both intervals, bucket by bucket, with the link that the first one fits."""
    before = read_transfers(evidence, columns, interval.reference_rows).latest_layout
    during = read_transfers(evidence, columns, interval.slow_rows).latest_layout
    if before.steps < MIN_STEPS or during.steps < MIN_STEPS:
        return [NotJudged("network-slow", "transfers slowed down, but the bucket spans of these steps are not stored")]
    model = link_model.fit_transfers(before)
    expected_ns = during.by_step(model.time_ns(during.size_bytes.astype(np.float64)))
    ratios = during.by_step(during.moving_ns) / np.maximum(1.0, expected_ns)
    # A slow link slows every step. Processes that compete for a processor leave some steps as fast as before.
    if float(np.quantile(ratios, 0.1)) < SLOWER:
        return []
    return [_finding(evidence, interval, (before, during), float(np.median(ratios)))]


def _finding(evidence: Evidence, interval: _Interval, parts: tuple[Transfers, Transfers], ratio: float) -> Finding:
    joined = evidence.joined
    rates = [part.bytes_a_step / max(1.0, float(np.median(part.by_step(part.moving_ns)))) for part in parts]
    steps = int(joined.step[interval.slow[0]]), int(joined.step[interval.slow[1] - 1])
    saving = _gain(evidence, interval)
    return Finding(
        code="network-slow",
        severity=severity_of(saving.ratio) if saving else "info",
        verdict=f"The network was slow in steps {steps[0]} to {steps[1]}",
        measure=f"{rates[1]:.2g} GB/s instead of {rates[0]:.2g}; transfers took {ratio:.1f} times as long",
        cause="not known: no rank arrived late, and no computation slowed down",
        where=evidence.where(joined.ranks.tolist()),
        remedy=_REMEDY,
        steps=steps,
        phase="exposed_comm",
        gain=saving,
        evidence=NetworkSlowFacts(
            bytes_per_s=round(rates[1] * 1e9),
            earlier_bytes_per_s=round(rates[0] * 1e9),
            earlier_steps=[int(joined.step[interval.reference[0]]), int(joined.step[interval.reference[1] - 1])],
            ratio=round(ratio, 2),
            bytes_a_step=round(parts[1].bytes_a_step),
            waiting_ns=round(float(np.median(parts[1].by_step(parts[1].waiting_ns.mean(axis=1))))),
            steps_used=_length(interval.slow),
        ),
    )


def _gain(evidence: Evidence, interval: _Interval) -> Gain | None:
    """Return the exposed time that these steps lose against the run's own link; None if it is lost in the noise."""
    exposed_ns = evidence.joined.exposed_ns.min(axis=1)
    before, during = exposed_ns[interval.reference_rows], exposed_ns[interval.slow_rows]
    step_ns = float(np.median(evidence.joined.step_ns[interval.slow_rows]))
    lost_ns = float(np.median(during) - np.median(before))
    error_ns = sum(1.25 * float(np.std(part)) / np.sqrt(len(part)) for part in (before, during))
    if lost_ns - error_ns < 0.03 * step_ns:
        return None
    return Gain(round(lost_ns), round(lost_ns / step_ns, 4), round(error_ns / lost_ns, 4))
