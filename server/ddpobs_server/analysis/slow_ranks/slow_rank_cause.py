"""Why a slow rank is slow: its counters of the kernel and of the garbage collector, against the other ranks'.

A rank's delay is its own time above the other ranks' median. Each counter of time explains the part of the delay by
which it exceeds the other ranks' median in the same steps. The rest is the rank's own work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ddpobs import wire
from ddpobs.shared.delay import excesses
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import Finding
from ddpobs_server.analysis.slow_ranks.late_bucket import comparison_ranks
from ddpobs_server.analysis.slow_ranks.lateness import step_weights
from ddpobs_server.analysis.steps.joined_steps import Floats

OWN_WORK = "own-work"
MIN_KNOWN_SHARE = 0.5
"""Least share of the rank's late steps in which its counters, and another rank's, must be recorded."""
_FAULT_NS = 20_000_000
"""Longest wait that one page fault explains: a read from a slow disk or over a network."""
_FAULT_RUN_NS = 25_000
"""Longest time on a processor that one page fault explains: its handling took 22 us in a virtual machine."""
_TIMES = ("running_ns", "run_delay_ns", "throttled_ns", "collecting_ns")
_COUNTERS = (*_TIMES, "major_faults", "preemptions", "collections")
_WORDS = {
    "preempted": "preempted by other processes",
    "throttled": "throttled by the processor quota of its control group",
    "paging": "paging: its memory is read from the disk",
    "collecting-garbage": "collecting garbage",
}
_REMEDIES = {
    "preempted": (
        "Give this rank processors of its own: move other programs off its host, start fewer loader workers and "
        "threads, or pin ranks to separate processors (taskset, numactl, a cpuset)."
    ),
    "throttled": (
        "Raise the control group's processor quota (cpu.max; limits.cpu in Kubernetes), or use fewer threads and "
        "loader workers, so that the process stays below it."
    ),
    "paging": (
        "Give the host more memory, or need less of it: smaller caches, fewer loader workers, data read in order "
        "instead of through a memory map."
    ),
    "collecting-garbage": (
        "Call gc.freeze() after start-up, keep fewer Python objects, or call gc.disable() and collect on all ranks in "
        "the same step."
    ),
}
_DEVICE_REMEDY = "Check the device's cooling, power supply and power limit (nvidia-smi -q -d PERFORMANCE)."
_SLOW_CLOCK = 0.9
"""Share of the other devices' median clock below which a device's clock is low."""


@dataclass(frozen=True)
class _Excess:
    """A rank's excess over the other ranks' median, weighted means over its late steps.

    Attributes:
        delay_ns: Own time for equal work.
        own_ns: Own time as measured.
        counters: Each counter; missing where it is not known.
        usual_run_delay: The other ranks' time in the run queue, for each unit of time on a processor.
    """

    delay_ns: float
    own_ns: float
    counters: dict[str, float]
    usual_run_delay: float = 0.0


def with_cause(finding: Finding, evidence: Evidence) -> Finding:
    """Add the cause to the finding of one slow rank, with its figures, or the reason for which it is not known."""
    if len(finding.ranks) != 1 or "excess_ns" not in finding.evidence:
        return finding
    excess = _excess_of(finding, evidence)
    if excess is None:
        return _unknown(finding, "the counters of its late steps are no longer examined")
    absent = [name for name in ("running_ns", "run_delay_ns") if name not in excess.counters]
    if absent:
        rank = finding.ranks[0]
        return _unknown(finding, f"{absent[0]} of rank {rank} and another rank is not recorded: see docs/wire.md")
    return _explained(finding, excess, evidence)


def _unknown(finding: Finding, reason: str) -> Finding:
    return replace(finding, evidence=finding.evidence | {"cause": None, "cause_unknown": reason})


def _explained(finding: Finding, excess: _Excess, evidence: Evidence) -> Finding:
    parts = _parts(excess)
    cause = max(parts, key=parts.__getitem__)
    share = parts[cause] / max(1.0, excess.delay_ns)
    facts = {
        "cause": cause,
        "cause_share": round(share, 4),
        "cause_ns": {name: round(ns) for name, ns in parts.items()},
        "counter_excess": {name: round(value, 2) for name, value in excess.counters.items()},
        "blocked_ns": round(_blocked_ns(excess)),
    }
    unknown = sorted(set(_COUNTERS) - set(excess.counters))
    if unknown:
        facts["not_recorded"] = unknown
    if cause != OWN_WORK:
        verdict = f"{finding.verdict}; cause: {_WORDS[cause]} ({share:.0%} of the delay)"
        return replace(finding, verdict=verdict, remedy=_REMEDIES[cause], evidence=finding.evidence | facts)
    if slowdown := _device_slowdown(finding.ranks[0], evidence):
        verdict = f"{finding.verdict}; cause: throttled: {slowdown}"
        facts |= {"cause": "throttled", "cause_share": None, "device": slowdown}
        return replace(finding, verdict=verdict, remedy=_DEVICE_REMEDY, evidence=finding.evidence | facts)
    return replace(
        finding, verdict=f"{finding.verdict}; {_own_work(excess, unknown)}", evidence=finding.evidence | facts
    )


def _own_work(excess: _Excess, unknown: list[str]) -> str:
    """Describe the delay that no counter explains."""
    runs = excess.counters["running_ns"] >= _blocked_ns(excess)
    kind = "more work of its own" if runs else "its own code waits, for data or a lock, or sleeps"
    return f"cause: {kind}; no counter explains it" + (f" ({', '.join(unknown)} not recorded)" if unknown else "")


def _parts(excess: _Excess) -> dict[str, float]:
    """Split the delay by cause, in ns; the parts are not negative and add up to it.

    Time in the run queue holds the throttled time. A thread with more to compute also spends more time in the run queue
    of a busy host. As much of it as the other ranks spend for the same time on a processor is no preemption of its own.
    A fault explains the time in which the thread neither ran nor was ready to run.
    """
    counters = {name: max(0.0, value) for name, value in excess.counters.items()}
    # The group's time is a sum over its processors, the thread's share of it is part of its own time in the run queue.
    throttled_ns = min(counters.get("throttled_ns", 0.0), counters["run_delay_ns"])
    faults = counters.get("major_faults", 0.0)
    usual_ns = excess.usual_run_delay * counters["running_ns"]
    parts = {
        "throttled": throttled_ns,
        "preempted": max(0.0, counters["run_delay_ns"] - throttled_ns - usual_ns),
        "paging": min(_blocked_ns(excess), _FAULT_NS * faults) + min(counters["running_ns"], _FAULT_RUN_NS * faults),
        "collecting-garbage": counters.get("collecting_ns", 0.0),
    }
    scale = min(1.0, excess.delay_ns / max(1.0, sum(parts.values())))
    parts = {name: scale * ns for name, ns in parts.items()}
    return parts | {OWN_WORK: max(0.0, excess.delay_ns - sum(parts.values()))}


def _blocked_ns(excess: _Excess) -> float:
    """Excess of the time in which the training thread was neither running nor ready to run."""
    return max(0.0, excess.own_ns - excess.counters["running_ns"] - excess.counters["run_delay_ns"])


def _excess_of(finding: Finding, evidence: Evidence) -> _Excess | None:
    """Compare the rank with some others in the steps in which it was late by at least half of its usual excess.

    For a rank that is late in most steps, at most 1.5 times of it: rare long delays have causes of their own.
    """
    joined, rank = evidence.joined, finding.ranks[0]
    rows = np.flatnonzero((joined.step >= finding.steps[0]) & (joined.step <= finding.steps[1]))
    compared = np.isin(joined.ranks, comparison_ranks(rank, joined.ranks))
    index = int(np.flatnonzero(joined.ranks[compared] == rank)[0]) if rank in joined.ranks else -1
    if not len(rows) or index < 0 or compared.sum() < 2:
        return None
    left_out = finding.evidence.get("run_delay_left_out", False)
    all_own_ns = joined.own_ns[rows, :] - (evidence.steps.run_delay_ns[joined.row[rows, :]] if left_out else 0)
    delay_ns = excesses(all_own_ns)[:, compared][:, index]
    usual_ns = finding.evidence["excess_ns"]
    late = delay_ns >= 0.5 * usual_ns
    if finding.evidence["kind"] == "persistent":
        late &= delay_ns <= 1.5 * usual_ns
    if not late.any():
        return None
    rows, delay_ns = rows[late], delay_ns[late]
    weights = step_weights(joined.window_ns)[rows]
    cells = joined.row[rows][:, compared]
    counters = {}
    for name in _COUNTERS:
        value = _mean_excess(getattr(evidence.steps, name)[cells], index, weights)
        if value is not None:
            counters[name] = value
    own_ns = _mean_excess(evidence.steps.own_ns[cells], index, weights) or 0.0
    if left_out:
        own_ns -= counters.get("run_delay_ns", 0.0)
        counters |= dict.fromkeys({"run_delay_ns", "throttled_ns"} & set(counters), 0.0)
    usual_run_delay = _usual_run_delay(evidence.steps.run_delay_ns[cells], evidence.steps.running_ns[cells], index)
    return _Excess(float(np.average(delay_ns, weights=weights)), own_ns, counters, usual_run_delay)


def _usual_run_delay(run_delay_ns: wire.Ints, running_ns: wire.Ints, index: int) -> float:
    """Return the median over the other ranks of time in the run queue over time on a processor."""
    is_known = (run_delay_ns >= 0) & (running_ns > 0)
    sums = np.delete(
        np.stack([np.where(is_known, ns, 0).sum(axis=0) for ns in (run_delay_ns, running_ns)]), index, axis=1
    )
    return float(np.median(sums[0] / np.maximum(1, sums[1])))


def _mean_excess(values: wire.Ints, index: int, weights: Floats) -> float | None:
    """Return a rank's mean excess over the others' median; None if too few steps have both.

    Args:
        values: Shape [steps, ranks]; `UNKNOWN` where not recorded.
        index: Index of the rank.
        weights: Weight of each step.
    """
    measured = np.where(values == wire.UNKNOWN, np.nan, values)
    other_values = np.delete(measured, index, axis=1)
    is_known = ~np.isnan(measured[:, index]) & ~np.isnan(other_values).all(axis=1)
    if is_known.mean() < MIN_KNOWN_SHARE:
        return None
    excess = measured[is_known, index] - np.nanmedian(other_values[is_known], axis=1)
    return float(np.average(excess, weights=weights[is_known]))


def _device_slowdown(rank: int, evidence: Evidence) -> str:
    """Describe a clock of the rank's device that is lowered, and not on most other ranks; empty if there is none."""
    machines = {number: pulse.machine for number, pulse in evidence.pulses.items() if pulse.machine is not None}
    machine_of_rank = machines.pop(rank, None)
    clocks = [machine.device_clock_mhz for machine in machines.values() if machine.device_clock_mhz > 0]
    if machine_of_rank is None or not clocks or machine_of_rank.device_clock_mhz <= 0:
        return ""
    usual_mhz = float(np.median(clocks))
    if machine_of_rank.device_clock_mhz >= _SLOW_CLOCK * usual_mhz:
        return ""
    reasons = f" ({', '.join(machine_of_rank.device_slowdowns)})" if machine_of_rank.device_slowdowns else ""
    return f"its device's clock is {machine_of_rank.device_clock_mhz} MHz{reasons}, the others' {usual_mhz:.0f} MHz"
