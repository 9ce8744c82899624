"""Slow ranks in words and figures: the only place that makes the text of the finding `straggler`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddpobs.shared.quantities import duration, time_range
from ddpobs.shared.words import format_ranks, percent
from ddpobs_server.analysis.evidence import Evidence
from ddpobs_server.analysis.finding import Finding, Interval, how_often, waiting_text
from ddpobs_server.analysis.slow_ranks.facts import MovingFacts, RankTurn, SlowRankFacts, TakingTurnsFacts
from ddpobs_server.analysis.slow_ranks.slow_rank import Cause, DeviceClock, SlowInTurn, SlowRank
from ddpobs_server.analysis.steps.intervals import format_intervals
from ddpobs_server.analysis.steps.pipeline import Stage
from ddpobs_server.analysis.steps.rank_groups import RankGroup

_UNKNOWN_CAUSE = (
    "look first for other processes on its host (top), then for longer inputs or more work on this rank, then for a "
    "slower device."
)
_PHASE_REMEDIES = {
    "data": "compare its input with the other ranks': first the storage, then the loader's workers, then the samples.",
    "forward": _UNKNOWN_CAUSE,
    "backward": _UNKNOWN_CAUSE,
    "optimizer": "look for work that only this rank does after backward: clipping, logging, its own optimizer.",
    "other": "look for work that only this rank does between the phases: logging, metrics, checks.",
}
"""What to do in each phase if the cause is not known."""
_WORK_REMEDIES = _PHASE_REMEDIES | dict.fromkeys(
    ("forward", "backward"),
    "compare the sizes of its inputs with the other ranks', then its layers, hooks and checks.",
)
"""The same if the rank runs longer on a processor."""
_OVER = "It is over: look at what ran on its host at these times."
_COUNTERS = {"running_ns": "the processor time", "run_delay_ns": "the wait for a processor"}
_NOT_ALONE = "Other ranks are late in the same steps: most of the gain needs them to be fixed too."
_CAUSES = {
    "preempted": "preempted by other processes",
    "throttled": "throttled by the processor quota of its control group",
    "paging": "paging: its memory is read from the disk",
    "collecting-garbage": "collecting garbage",
}
_WORK = {
    "queued": "more work of its own on a busy processor",
    "runs": "more work of its own",
    "waits": "its own code waits for data or a lock, or sleeps",
}
_CAUSE_REMEDIES = {
    "preempted": (
        "give it processors of its own: move other programs off its host, start fewer loader workers and "
        "threads, or pin ranks to separate processors (taskset, numactl, a cpuset)."
    ),
    "throttled": (
        "raise the control group's processor quota (cpu.max; limits.cpu in Kubernetes), or use fewer threads and "
        "loader workers, so that the process stays below it."
    ),
    "paging": (
        "give the host more memory, or need less of it: smaller caches, fewer loader workers, data read in order "
        "instead of through a memory map."
    ),
    "collecting-garbage": (
        "call gc.freeze() after start-up, keep fewer Python objects, or call gc.disable() and collect on all ranks in "
        "the same step."
    ),
}
_DEVICE_REMEDY = "check the device's cooling, power supply and power limit (nvidia-smi -q -d PERFORMANCE)."
_THREAD_REMEDY = (
    "let this thread do less in Python, or work in a process of its own: saving, logging, compressing. No other rank "
    "has one like it."
)
_MOVING_REMEDY = (
    "Look for work that goes from rank to rank: a job on shared hosts, a cache that fills, samples that are longer on "
    "one rank at a time. The same hosts at these times show which."
)
_TURNS_REMEDY = "Fix each rank in its phase: the ranks hide each other, so that fixing one alone gains little."
_MAIN_PHASE_SHARE = 0.9
"""Share of the delay below which the measure states the delay in the main phase, too."""
_QUEUED_SHARE = 0.5
"""Share of the delay from which time in the run queue is named beside the work that causes it."""
_MAX_RANKS = 4
"""Maximum number of ranks in turn that are named with their figures."""


def describe_slow_rank(slow: SlowRank, evidence: Evidence, part: Stage | RankGroup | None) -> Finding:
    """Return the finding; `part` holds the compared ranks of a pipeline or of a process group."""
    since = "" if slow.since_step is None else f" since step {slow.since_step}"
    bucket = slow.bucket
    return Finding(
        code="straggler",
        severity=slow.severity,
        verdict=f"Rank {slow.rank} {'was' if slow.is_over else 'is'} slow in {slow.phase}{since}",
        measure=_measure(slow, evidence, part),
        when=_when(slow.intervals, slow.since_step),
        cause=_cause(slow),
        where=evidence.where([slow.rank], bucket.where if bucket else ""),
        remedy=_remedy(slow, evidence),
        steps=slow.steps,
        ranks=[slow.rank],
        buckets=[bucket.index] if bucket else [],
        parameters=list(bucket.parameters) if bucket else [],
        phase=slow.phase,
        intervals=slow.intervals,
        evidence=_facts(slow, evidence, part),
        gain=slow.gain,
    )


def _measure(slow: SlowRank, evidence: Evidence, part: Stage | RankGroup | None) -> str:
    """The delay, its share of a step, how often it occurs, and the time lost.

    Between two averages of the replicas lie several steps: a share of one would exceed what it is a share of.
    """
    phase_ns = next(iter(slow.phase_excess_ns.values()), slow.excess_ns)
    step = "between two averages" if evidence.averages_apart else f"a {'step' if slow.is_persistent else 'late step'}"
    words = [f"+{duration(slow.excess_ns)} {step}"]
    if phase_ns < _MAIN_PHASE_SHARE * slow.excess_ns:
        words.append(f"({duration(phase_ns)} in {slow.phase})")
    if slow.without_queue:
        words.append("without time in the run queue")
    if part is not None:
        words.append(f"over the other {part.members}")
    share = percent(slow.excess_ns / max(1, slow.step_ns))
    step_again = "the step" if slow.without_queue else "it"
    whole = step_again if slow.is_persistent else "a usual step"
    lost = waiting_text(slow.lost_ns, len(evidence.joined.ranks))
    if evidence.averages_apart:
        return f"{' '.join(words)}, {percent(slow.late_share)} of the times; {lost}"
    since = "" if slow.since_step is None else " since then"
    return f"{' '.join(words)}, {share} of {whole}; {how_often(slow.late_share)}{since}; {lost}"


def _when(intervals: Sequence[Interval], since_step: int | None) -> str:
    """The steps and their times; of a single interval whose begin the verdict names, the times."""
    if len(intervals) > 1 or since_step is None:
        return format_intervals(intervals)
    began_ns, ended_ns = intervals[0].began_ns, intervals[0].ended_ns
    return "" if began_ns is None or ended_ns is None else time_range(began_ns, ended_ns)


def _cause(slow: SlowRank) -> str:
    cause = slow.cause
    if cause.device is not None:
        return f"throttled: {_clock(cause.device)}"
    if cause.name in _CAUSES:
        return f"{_CAUSES[cause.name]} ({percent(cause.share or 0.0)} of the delay)"
    if cause.thread is not None:
        runs = f"its thread {cause.thread.name} runs for {percent(cause.thread.running_share)} of the time"
        return f"{runs}, and shares the interpreter lock with training"
    return _reason(slow) if cause.name is None else _own_work(slow)


def _reason(slow: SlowRank) -> str:
    """The cause without its figures: they differ from look to look, as the text of a metric's label must not."""
    cause = slow.cause
    if cause.name is None:
        return f"not known, because {_unknown(slow)}"
    if cause.device is not None:
        return "throttled: its device's clock is lower than the others'"
    if cause.thread is not None:
        return f"its thread {cause.thread.name} shares the interpreter lock with training"
    return _CAUSES.get(cause.name) or _WORK[_kind_of_work(cause)]


def _kind_of_work(cause: Cause) -> str:
    """What a rank does for longer than the others: it runs `queued` on a busy processor, it `runs`, or it `waits`."""
    running_ns, queue_ns = (cause.counter_excess.get(name, 0.0) for name in ("running_ns", "run_delay_ns"))
    if queue_ns >= _QUEUED_SHARE * sum(cause.parts_ns.values()) > 0:
        return "queued"
    return "runs" if running_ns >= cause.blocked_ns else "waits"


def _own_work(slow: SlowRank) -> str:
    """What the rank does for longer than the others, as its counters show it."""
    cause, kind = slow.cause, _kind_of_work(slow.cause)
    running_ns, queue_ns = (cause.counter_excess.get(name, 0.0) for name in ("running_ns", "run_delay_ns"))
    unknown = f" ({', '.join(cause.not_recorded)} not recorded)" if cause.not_recorded else ""
    if kind == "queued":
        queued = f"it runs {duration(max(0.0, running_ns))} longer, and waits {duration(queue_ns)} for it"
        return f"{_WORK[kind]}: {queued}{unknown}"
    if kind == "runs":
        return f"{_WORK[kind]}: it runs {duration(running_ns)} longer on a processor{unknown}"
    return f"its own code waits {duration(cause.blocked_ns)}, for data or a lock, or sleeps{unknown}"


def _unknown(slow: SlowRank) -> str:
    counter = slow.cause.missing_counter
    if not counter:
        return "the counters of its late steps are no longer examined"
    return f"{_COUNTERS.get(counter, counter)} of rank {slow.rank} or of the others is not recorded"


def _clock(device: DeviceClock) -> str:
    reasons = f" ({', '.join(device.reasons)})" if device.reasons else ""
    return f"its device's clock is {device.mhz} MHz{reasons}, the others' {device.usual_mhz:.0f} MHz"


def _remedy(slow: SlowRank, evidence: Evidence) -> str:
    """The place, and what to do there about the cause."""
    is_alone = slow.gain is None or slow.gain.ratio >= 0.5 * slow.lost_share
    remedy = f"{_place(slow, evidence)}: {_action(slow, evidence)}"
    return " ".join([remedy, *[_OVER] * slow.is_over, *[_NOT_ALONE] * (not is_alone)])


def _place(slow: SlowRank, evidence: Evidence) -> str:
    """The rank with its process, and the part of its step: `Rank 2 on vm (pid 4711), backward of b.5 to b.4`."""
    host, hello = evidence.hosts.get(slow.rank), evidence.hellos.get(slow.rank)
    process = (f" on {host}" if host else "") + (f" (pid {hello.pid})" if hello else "")
    modules = [name.rpartition(".")[0] or name for name in slow.bucket.parameters] if slow.bucket else []
    ends = list(dict.fromkeys([*modules[:1], *modules[-1:]]))
    return f"Rank {slow.rank}{process}, {slow.phase}" + (f" of {' to '.join(ends)}" if ends else "")


def _action(slow: SlowRank, evidence: Evidence) -> str:
    cause = slow.cause
    if cause.device is not None:
        return _DEVICE_REMEDY
    if cause.thread is not None:
        return _THREAD_REMEDY
    if cause.name in _CAUSE_REMEDIES:
        return _CAUSE_REMEDIES[cause.name]
    if cause.name is None:
        return _PHASE_REMEDIES[slow.phase]
    running_ns = cause.counter_excess.get("running_ns", 0.0)
    if slow.phase == "data" or slow.is_over or running_ns >= cause.blocked_ns:
        return _WORK_REMEDIES[slow.phase]
    hello = evidence.hellos.get(slow.rank)
    dump = f"`py-spy dump --pid {hello.pid}`" if hello else "`py-spy dump`"
    shows = f"while it runs, {dump} there shows the line that waits."
    return f"{shows} Look for a lock, a sleep, a read, or a copy to a device."


def _facts(slow: SlowRank, evidence: Evidence, part: Stage | RankGroup | None) -> SlowRankFacts:
    cause: Cause = slow.cause
    known = cause.name is not None
    return SlowRankFacts(
        kind="persistent" if slow.is_persistent else "intermittent",
        host=evidence.hosts.get(slow.rank),
        stages=_stages(part),
        since_step=slow.since_step,
        run_delay_left_out=slow.without_queue,
        steps_used=slow.steps_used,
        late_share=round(slow.late_share, 4),
        lost_share=round(slow.lost_share, 4),
        lost_ns=round(slow.lost_ns),
        run_share=round(slow.run_share, 4),
        chance=round(slow.chance, 4),
        excess_ns=slow.excess_ns,
        step_ns=slow.step_ns,
        phase_excess_ns=slow.phase_excess_ns,
        own_ns=slow.own_ns or None,
        module=slow.bucket.module if slow.bucket else None,
        cause=cause.name,
        reason=_reason(slow),
        cause_unknown=None if known else _unknown(slow),
        cause_share=None if cause.share is None else round(cause.share, 4),
        cause_ns={name: round(ns) for name, ns in cause.parts_ns.items()} if known else None,
        counter_excess={name: round(value, 2) for name, value in cause.counter_excess.items()} if known else None,
        blocked_ns=round(cause.blocked_ns) if known else None,
        not_recorded=list(cause.not_recorded),
        device=_clock(cause.device) if cause.device else None,
        thread=cause.thread.name if cause.thread else None,
    )


def _stages(part: Stage | RankGroup | None) -> list[int] | None:
    return list(part.held) if isinstance(part, Stage) else None


def describe_in_turn(slow: SlowInTurn, evidence: Evidence, part: Stage | RankGroup | None) -> Finding:
    """Return the finding; `part` holds the compared ranks of a pipeline or of a process group."""
    facts = slow.facts
    moves = isinstance(facts, MovingFacts)
    lost = f"{waiting_text(facts.lost_ns, len(evidence.joined.ranks))}, {percent(facts.lost_share)} of these steps"
    return Finding(
        code="straggler",
        severity=slow.severity,
        verdict=_moving_verdict(slow) if moves else _turns_verdict(slow),
        measure=f"{lost}, {_shares(facts)}" if isinstance(facts, MovingFacts) else f"{_turns(facts.turns)}; {lost}",
        when=format_intervals(slow.intervals),
        cause="not known, because counters are compared for one slow rank only",
        where=evidence.where(slow.ranks, part.members if part else ""),
        remedy=_MOVING_REMEDY if moves else _TURNS_REMEDY,
        steps=slow.steps,
        ranks=slow.ranks,
        phase=slow.phase,
        intervals=slow.intervals,
        evidence=replace(facts, stages=_stages(part)),
        gain=slow.gain,
    )


def _moving_verdict(slow: SlowInTurn) -> str:
    return f"A slowness in {slow.phase} {'moved' if slow.is_over else 'moves'} from rank to rank"


def _turns_verdict(slow: SlowInTurn) -> str:
    named = format_ranks(slow.ranks).capitalize() if len(slow.ranks) <= _MAX_RANKS else f"{len(slow.ranks)} ranks"
    phases = {turn.phase for turn in slow.facts.turns} if isinstance(slow.facts, TakingTurnsFacts) else set()
    return f"{named} are slow in turn" + (f" in {slow.phase}" if len(phases) == 1 else "")


def _shares(facts: MovingFacts) -> str:
    """The ranks with the largest shares of the loss, and how long each is slow at a time."""
    named = [f"rank {rank} ({percent(share)} of the loss)" for rank, share in facts.shares.items()]
    return f"on {', '.join(_first(named))}; about {facts.stretch_steps} steps at a time"


def _turns(turns: Sequence[RankTurn]) -> str:
    return ", ".join(
        _first(
            [
                f"rank {turn.rank}: +{duration(turn.excess_ns)} in {turn.phase} in {how_often(turn.late_share)}"
                for turn in turns
            ]
        )
    )


def _first(named: list[str]) -> list[str]:
    more = len(named) - _MAX_RANKS
    return [*named[:_MAX_RANKS], *([f"and {more} more"] if more > 0 else [])]
