"""Findings about stretches of the run in which a rank was slow, and the extent of a finding about recent steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.evidence import ColumnReader, ColumnsTooLargeError, Evidence
from ddpobs_server.analysis.finding import Finding, Gain, Interval, severity_of
from ddpobs_server.analysis.slow_ranks.lateness import BLOCK_STEPS, gain, lateness
from ddpobs_server.analysis.slow_ranks.lateness_bins import LatenessBins, bins_of
from ddpobs_server.analysis.slow_ranks.stretches import Stretch, bin_width, edge_step, find_stretches, refine
from ddpobs_server.analysis.steps.intervals import StepClock, describe, format_seconds, merged
from ddpobs_server.analysis.steps.joined_steps import JoinedSteps

REMEDIES = {
    "data": "Check this rank's input: its storage, its loader workers, the sizes of its samples.",
    "forward": "Check for longer inputs on this rank, other processes on its host, a slower device.",
    "backward": "Check for longer inputs on this rank, other processes on its host, a slower device.",
    "optimizer": "Check the work that only this rank does after backward: clipping, logging, its own optimizer.",
    "other": "Check the work of this rank between the phases: logging, metrics, checks.",
}
_OVER = " It is over: look at what ran on its host at these times."
_MOST_FINDINGS = 8
_ONGOING_STEPS, _ONGOING_SHARE = 16, 0.05
"""A stretch goes on if fewer steps follow it than this number, or than this share of its own steps."""
_MOSTLY = 0.75
"""Share of the cost in recent steps that stretches must hold to be the extent of a finding."""
_FEWER = 0.7
"""Share of recent steps below which stretches with most of the cost describe a slowness better."""
_MIN_EDGE_BINS = 4
_EXPLAINED_SHARE = 0.8
Bins = Any
"""A boolean array of shape [bins]."""


@dataclass(frozen=True)
class WholeRun:
    """The judged part of a run: its steps in bins, and the stretches in which a rank is slow.

    Attributes:
        joined: The steps whose columns were read.
        bins: These steps in bins, after the rollups of the steps before.
        clock: When steps began and ended.
        columns: Reads around the ends of stretches.
    """

    joined: JoinedSteps
    bins: LatenessBins
    clock: StepClock
    columns: ColumnReader | None = None

    @classmethod
    def of(cls, evidence: Evidence) -> WholeRun:
        """Return the run of some evidence with at least two ranks."""
        joined = evidence.joined if evidence.whole is None else evidence.whole
        bins = bins_of(joined, bin_width(len(joined)))
        earlier = evidence.earlier
        if earlier is not None and len(earlier) and len(bins):
            bins = earlier.select(earlier.last < bins.first[0]).followed_by(bins)
        return cls(joined, bins, evidence.clock, evidence.columns)

    @cached_property
    def stretches(self) -> list[Stretch]:
        """Stretches that chance does not explain."""
        return find_stretches(self.bins)

    def rank(self, stretch: Stretch) -> int:
        """Return the stretch's rank."""
        return int(self.bins.ranks[stretch.index])

    def phase(self, stretch: Stretch) -> str:
        """Return the phase with most of the rank's excess."""
        return wire.OWN_PHASES[int(self.bins.phase_ns[stretch.rows, stretch.index].sum(axis=0).argmax())]

    def range_of(self, stretch: Stretch) -> tuple[int, int]:
        """Return its first and last step: to the step where columns can be read quickly, else to the bin."""
        return self._ranges[stretch]

    @cached_property
    def _ranges(self) -> dict[Stretch, tuple[int, int]]:
        return {stretch: self._find_range(stretch) for stretch in self.stretches}

    def _find_range(self, stretch: Stretch) -> tuple[int, int]:
        first, last = int(self.bins.first[stretch.begin]), int(self.bins.last[stretch.end - 1])
        read_from = int(self.joined.step[0]) if len(self.joined) else last + 1
        begin, end = first, last
        if last >= read_from:
            index = int(np.searchsorted(self.joined.ranks, self.rank(stretch)))
            begin, end = refine(self.joined, index, first, last, bin_width(len(self.joined)))
        rank = self.rank(stretch)
        if len(self.stretches) > _MOST_FINDINGS:
            return begin, end
        if first < read_from:
            width = int(self.bins.last[stretch.begin]) - first + 1
            begin = finer_edge(self.columns, rank, first, width, rises=True)
        if last < read_from:
            width = last - int(self.bins.first[stretch.end - 1]) + 1
            end = finer_edge(self.columns, rank, last + 1, width, rises=False) - 1
        return begin, max(begin, end)

    def covered(self, ranges: Sequence[tuple[int, int]]) -> Bins:
        """Return the bins that hold some of these steps."""
        mask = np.zeros(len(self.bins), bool)
        for first, last in ranges:
            mask |= (self.bins.last >= first) & (self.bins.first <= last)
        return mask

    def intervals(self, ranges: Sequence[tuple[int, int]]) -> tuple[Interval, ...]:
        """Return these steps with their times."""
        return tuple(self.clock.timed(Interval(*bounds)) for bounds in merged(ranges))

    def goes_on(self, last: int, steps: int) -> bool:
        """Whether a stretch of so many steps, up to the step `last`, reaches the latest steps."""
        after = int(self.bins.steps[self.bins.first > last].sum())
        return after < max(_ONGOING_STEPS, _ONGOING_SHARE * steps)

    @property
    def time_ns(self) -> float:
        """Time of all compared steps."""
        return max(1.0, float(self.bins.time_ns.sum()))


def finer_edge(columns: ColumnReader | None, rank: int, step: int, width: int, *, rises: bool) -> int:
    """Return the step at which a rank becomes slow, or is slow no more, from ever finer bins around it.

    Args:
        columns: Reads the bins; None leaves the step as it is.
        rank: The rank.
        step: Where a bin of `width` steps begins.
        width: Steps of a bin.
        rises: Whether the rank becomes slow.
    """
    while columns is not None and width > 1:
        try:
            bins = columns.lateness(max(0, step - width), step + width - 1)
        except ColumnsTooLargeError:
            break
        if bins is None or len(bins) < _MIN_EDGE_BINS or rank not in bins.ranks:
            break
        step = edge_step(bins, int(np.searchsorted(bins.ranks, rank)), step, rises=rises)
        finer = int(np.median(bins.last - bins.first + 1))
        if finer >= width:
            break
        width = finer
    return step


def with_extent(finding: Finding, run: WholeRun) -> Finding | None:
    """Add to a finding about recent steps in which steps of the whole run the rank was slow in that phase.

    Returns:
        None if a stretch describes the slowness better: it holds most of its cost in fewer steps.
    """
    first, last = finding.steps
    own = [s for s in run.stretches if run.rank(s) == finding.ranks[0] and run.phase(s) == finding.phase]
    ranges = [run.range_of(stretch) for stretch in own]
    index, recent = int(np.searchsorted(run.bins.ranks, finding.ranks[0])), run.covered([(first, last)])
    cost_ns = run.bins.cost_ns[:, index]
    inside = recent & run.covered(ranges)
    if not ranges or cost_ns[inside].sum() < _MOSTLY * cost_ns[recent].sum():
        ranges.append(finding.steps)
    elif run.bins.steps[inside].sum() < _FEWER * run.bins.steps[recent].sum() or finding.evidence["since_step"]:
        return None
    intervals = run.intervals(ranges)
    # Bins hold no delays below a tenth of the step, those of a rank that is slow in every step are in its gain.
    lost_ns = _lost_ns(run, finding.ranks[0], run.covered(ranges))
    if finding.gain is not None:
        lost_ns = max(lost_ns, finding.gain.step_ns * finding.evidence["steps_used"])
    evidence = finding.evidence | {"lost_ns": round(lost_ns), "run_share": round(lost_ns / run.time_ns, 4)}
    verdict = f"{finding.verdict}; {format_seconds(lost_ns)} lost {describe(intervals)}"
    return replace(finding, verdict=verdict, intervals=intervals, evidence=evidence)


def past_findings(
    run: WholeRun, named: Sequence[Finding], in_turn: Sequence[Finding], hosts: dict[int, str]
) -> list[Finding]:
    """Return a finding for each rank and phase with a slow stretch that no other finding has, the costliest first.

    Args:
        run: The run.
        named: Findings about recent steps, each with its intervals.
        in_turn: Findings about several ranks in turn: their intervals are explained.
        hosts: Host name by rank.
    """
    groups: dict[tuple[int, str], list[Stretch]] = {}
    for stretch in run.stretches:
        key = run.rank(stretch), run.phase(stretch)
        if not any(_holds(finding, run, stretch) for finding in (*named, *in_turn)):
            groups.setdefault(key, []).append(stretch)
    findings = [_past_finding(run, rank, phase, group, hosts) for (rank, phase), group in groups.items()]
    return sorted(findings, key=lambda finding: -finding.evidence["lost_ns"])[:_MOST_FINDINGS]


def _holds(finding: Finding, run: WholeRun, stretch: Stretch) -> bool:
    """Whether a finding about this rank has some of the stretch's steps: their loss is claimed already."""
    if run.rank(stretch) not in finding.ranks:
        return False
    rows = run.covered([(interval.first, interval.last) for interval in finding.intervals])
    return bool(rows[stretch.rows].any())


def _past_finding(run: WholeRun, rank: int, phase: str, group: list[Stretch], hosts: dict[int, str]) -> Finding:
    index = group[0].index
    rows = np.zeros(len(run.bins), bool)
    for stretch in group:
        rows[stretch.rows] = True
    part = run.bins.select(rows)
    ranges = [run.range_of(stretch) for stretch in group]
    intervals = run.intervals(ranges)
    steps, late = int(part.steps.sum()), float(part.late[:, index].sum())
    excess_ns = float(part.cost_ns[:, index].sum()) / max(1.0, late)
    lost_ns, cost_ns = _lost_ns(run, rank, rows), float(part.cost_ns[:, index].sum())
    goes_on = run.goes_on(ranges[-1][1], steps)
    share = cost_ns / max(1.0, float(part.time_ns.sum()))
    step_ns, late_share = float(part.time_ns.sum()) / steps, late / steps
    every = "every step" if late_share > 0.98 else f"{late_share:.0%} of these steps"
    return Finding(
        code="straggler",
        severity=severity_of(share if goes_on else cost_ns / run.time_ns),
        verdict=(
            f"Rank {rank} {'is' if goes_on else 'was'} slow in {phase} "
            f"{describe(intervals, goes_on=goes_on and ranges[0][0] > run.bins.first[0])}: "
            f"{format_seconds(lost_ns)} lost, {excess_ns / 1e6:.1f} ms more than the other ranks in {every}, "
            f"of a step of {step_ns / 1e6:.1f} ms"
        ),
        remedy=REMEDIES[phase] + ("" if goes_on else _OVER),
        steps=(ranges[0][0], ranges[-1][1]),
        ranks=[rank],
        phase=phase,
        intervals=intervals,
        evidence={
            "kind": "persistent" if late_share >= 0.6 else "intermittent",
            "host": hosts.get(rank),
            "since_step": ranges[-1][0] if goes_on else None,
            "late_share": round(late_share, 4),
            "lost_share": round(share, 4),
            "chance": round(max(stretch.chance for stretch in group), 4),
            "excess_ns": round(excess_ns),
            "step_ns": round(step_ns),
            "phase_excess_ns": _phase_excess_ns(part, index, late),
            "steps_used": steps,
            "lost_ns": round(lost_ns),
            "run_share": round(lost_ns / run.time_ns, 4),
        },
        gain=_present_gain(run, rank, ranges[-1]) if goes_on else None,
    )


def _present_gain(run: WholeRun, rank: int, bounds: tuple[int, int]) -> Gain | None:
    """Return the gain of a stretch that goes on, over its steps with columns."""
    part, index = run.joined.between(*bounds), int(np.searchsorted(run.joined.ranks, rank))
    return gain(part, lateness(part), index) if len(part) >= BLOCK_STEPS else None


def _lost_ns(run: WholeRun, rank: int, rows: Bins) -> float:
    index = int(np.searchsorted(run.bins.ranks, rank))
    return float(run.bins.lost_ns[rows, index].sum())


def _phase_excess_ns(part: LatenessBins, index: int, late: float) -> dict[str, int]:
    """Return the phases that explain at least 80 % of the rank's mean excess over its late steps, the largest first."""
    excess = part.phase_ns[:, index].sum(axis=0) / max(1.0, late)
    total = max(1.0, float(excess[excess > 0].sum()))
    explained: dict[str, int] = {}
    for phase in np.argsort(-excess).tolist():
        if excess[phase] <= 0 or sum(explained.values()) >= _EXPLAINED_SHARE * total:
            break
        explained[wire.OWN_PHASES[phase]] = round(float(excess[phase]))
    return explained
