"""Why a slow rank is slow: its counters of the kernel and of the garbage collector, against the other ranks'.

A rank's delay is its own time above the other ranks' median. Each counter of time explains the part of the delay by
which it exceeds the other ranks' median in the same steps. The rest is the rank's own work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ddpobs import wire
from ddpobs.shared.delay import excess_of
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.slow_ranks.bucket import comparison_ranks
from ddpobs_server.analysis.slow_ranks.lateness import step_weights
from ddpobs_server.analysis.slow_ranks.slow_rank import BusyThread, Cause, DeviceClock, SlowRank
from ddpobs_server.analysis.steps.joined_steps import Floats

OWN_WORK = "own-work"
MIN_KNOWN_SHARE = 0.5
"""Minimum share of the rank's late steps in which its counters, and another rank's, must be recorded."""
_FAULT_NS = 20_000_000
"""Longest wait that one page fault explains: a read from a slow disk or over a network."""
_FAULT_RUN_NS = 25_000
"""Longest time on a processor that one page fault explains: its handling took 22 us in a virtual machine."""
_TIMES = ("running_ns", "run_delay_ns", "throttled_ns", "collecting_ns")
_COUNTERS = (*_TIMES, "major_faults", "preemptions", "collections")
_MIN_RUNNING = 0.5
"""Minimum time of a thread on a processor, as a part of the time that the rank loses, that explains the loss."""
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


def with_cause(slow: SlowRank, evidence: Evidence) -> SlowRank:
    """Add the cause, or what is missing to know it."""
    return replace(slow, cause=_cause_of(slow, evidence))


def _cause_of(slow: SlowRank, evidence: Evidence) -> Cause:
    excess = _excess_of(slow, evidence)
    if excess is None:
        return Cause()
    absent = [name for name in ("running_ns", "run_delay_ns") if name not in excess.counters]
    if absent:
        return Cause(missing_counter=absent[0])
    parts_ns = _parts(excess)
    name = max(parts_ns, key=parts_ns.__getitem__)
    device = _lowered_clock(slow.rank, evidence) if name == OWN_WORK else None
    waits = name == OWN_WORK and _blocked_ns(excess) > excess.counters["running_ns"]
    return Cause(
        name=name if device is None else "throttled",
        share=parts_ns[name] / max(1.0, excess.delay_ns) if device is None else None,
        parts_ns=parts_ns,
        counter_excess=excess.counters,
        blocked_ns=_blocked_ns(excess),
        not_recorded=tuple(sorted(set(_COUNTERS) - set(excess.counters))),
        device=device,
        thread=_busy_thread(slow, evidence) if waits and device is None else None,
    )


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


def _excess_of(slow: SlowRank, evidence: Evidence) -> _Excess | None:
    """Compare the rank with some others in the steps in which it was late by at least half of its usual excess.

    For a rank that is late in most steps, at most 1.5 times of it: rare long delays have causes of their own.
    """
    joined, rank = evidence.joined, slow.rank
    rows = np.flatnonzero((joined.step >= slow.steps[0]) & (joined.step <= slow.steps[1]))
    compared = np.isin(joined.ranks, comparison_ranks(rank, joined.ranks))
    index = int(np.flatnonzero(joined.ranks[compared] == rank)[0]) if rank in joined.ranks else -1
    if not len(rows) or index < 0 or compared.sum() < 2:
        return None
    own_ns = joined.own_ns[rows] - (evidence.steps.run_delay_ns[joined.row[rows]] if slow.without_queue else 0)
    delay_ns = excess_of(own_ns, int(np.searchsorted(joined.ranks, rank)))
    late = delay_ns >= 0.5 * slow.excess_ns
    if slow.is_persistent:
        late &= delay_ns <= 1.5 * slow.excess_ns
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
    own_excess_ns = _mean_excess(evidence.steps.own_ns[cells], index, weights) or 0.0
    if slow.without_queue:
        own_excess_ns -= counters.get("run_delay_ns", 0.0)
        counters |= dict.fromkeys({"run_delay_ns", "throttled_ns"} & set(counters), 0.0)
    usual_run_delay = _usual_run_delay(evidence.steps.run_delay_ns[cells], evidence.steps.running_ns[cells], index)
    return _Excess(float(np.average(delay_ns, weights=weights)), own_excess_ns, counters, usual_run_delay)


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


def _busy_thread(slow: SlowRank, evidence: Evidence) -> BusyThread | None:
    """Return a Python thread of a rank that waits, if it runs for as long, and no thread of another rank does.

    Python threads run one at a time: while this one holds the interpreter lock, the training thread waits.
    """
    threads = {rank: pulse.machine.threads for rank, pulse in evidence.pulses.items() if pulse.machine is not None}
    own = max(threads.pop(slow.rank, {}).items(), key=lambda thread: thread[1], default=None)
    if own is None:
        return None
    others = max((permille for of_rank in threads.values() for permille in of_rank.values()), default=0)
    least = 1000 * _MIN_RUNNING * slow.lost_share
    return BusyThread(own[0], own[1] / 1000) if own[1] >= max(least, 2 * others) else None


def _lowered_clock(rank: int, evidence: Evidence) -> DeviceClock | None:
    """Return the clock of the rank's device if it is lowered, and not on most other ranks."""
    machines = {number: pulse.machine for number, pulse in evidence.pulses.items() if pulse.machine is not None}
    own = machines.pop(rank, None)
    clocks = [machine.device_clock_mhz for machine in machines.values() if machine.device_clock_mhz > 0]
    if own is None or not clocks or own.device_clock_mhz <= 0:
        return None
    usual_mhz = float(np.median(clocks))
    if own.device_clock_mhz >= _SLOW_CLOCK * usual_mhz:
        return None
    return DeviceClock(own.device_clock_mhz, usual_mhz, tuple(own.device_slowdowns))
