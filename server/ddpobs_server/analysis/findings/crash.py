"""Finding `crash`: the rank that failed first, its exception and place, and the ranks that failed because of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ddpobs import wire
from ddpobs.shared.hang_verdict import Hang
from ddpobs.shared.quantities import time_of_day, time_range
from ddpobs.shared.words import bucket_title, format_ranks
from ddpobs_server.analysis.causes.rank_ends import End, ends_of
from ddpobs_server.analysis.causes.waited_for import bucket_of, bucket_parameters, hang_at, shown_ranks, waited_for
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Interval

CODES = ("crash",)
_DIED = (
    "Look at the kernel's log on that host (dmesg) for out of memory or a segmentation fault, and at the launcher's "
    "log."
)
_TERMINATED = "Look at the launcher's and the scheduler's log, or at the user who sent the signal."
_COMMAND = "Look where the command's output went, and at the kernel's log on that host (dmesg) if a signal ended it."
_CONNECTION = "Look at ranks without telemetry, and at the launcher's log: one of them may have ended first."
_HOSTS = " If every rank was there, look at the connection between the hosts."
_OTHERS = " The other ranks' errors are consequences of it."
_REPEATED = "Correct the error that the traceback shows: another restart ends in the same way."
_MAX_ATTEMPTS = 10
"""Maximum number of attempts that the evidence lists."""
_LONG_NS = 10**9
_NAMED = 2
"""Maximum number of ranks that a verdict names."""


@dataclass(frozen=True)
class CrashFacts(Facts):
    """The first failure, and the ranks that followed.

    Attributes:
        kind: `failed`, `died` or `terminated`.
        error: Class of its exception; None without one.
        signal: Signal that ended its process; None without one.
        exit_status: Exit status of its process; None if it is not known.
        traceback: Its traceback, with the user's own frames; None without one.
        output: Last lines that the command under `ddpobs run` wrote to stderr; None if they are not known.
        place: Innermost lines of the user's code in its traceback; empty if they are not known.
        host: Its host; None if it is not known.
        module: Module of the bucket launched last; -1 if it is not known.
        victims: Error or end of each rank that failed because of it.
        attempts: How the latest attempts ended, oldest first, with this one; empty without an earlier one.
        same_error: Number of latest attempts that this error ended, one after another.
        stacks: Stacks of the hang that the crash ended, by rank.
        threads: Stacks of other threads in the user's code, by rank and by name.
    """

    kind: str
    error: str | None
    signal: str | None
    exit_status: int | None
    traceback: str | None
    host: str | None
    module: int
    victims: dict[int, str]
    output: str | None = None
    place: str = ""
    attempts: list[str] = field(default_factory=list)
    same_error: int = 1
    stacks: dict[int, list[str]] = field(default_factory=dict)
    threads: dict[int, dict[str, list[str]]] = field(default_factory=dict)


FACTS = (CrashFacts,)


def crash(evidence: Evidence) -> Judgement:
    """Report the first failure; without one, the connections that broke."""
    ends = ends_of(evidence.events)
    if not _has_crashed(ends):
        return []
    first = ends[0]
    if (hang := hang_before(evidence)) is not None:
        return [_gave_up(evidence, ends, hang)]
    if first.is_of_command:
        return [_of_command(evidence, ends)]
    if first.was_killed and hang_at(evidence, first.wall_ns) is not None:
        return []  # Somebody killed a run that hung: the hang is the finding.
    victims = sorted({end.rank for end in ends if end.rank != first.rank})
    module, bucket = first.facts.module, first.facts.bucket
    facts = _facts(evidence, first, victims, ends)
    same = f"the same error ended {facts.same_error} attempts" if facts.same_error > 1 else ""
    outside = "outside of the phases" if first.facts.phase == "other" and first.kind == "failed" else ""
    return [
        Finding(
            code="crash",
            severity="critical",
            verdict=f"Rank {first.rank} {_end(first)} {first.place}",
            measure="; ".join(filter(None, (same, _followed(ends)))),
            when=_when(first),
            cause=_cause(first),
            where=evidence.where([first.rank], _bucket(evidence, module, bucket), outside, first.caller),
            remedy=_REPEATED
            if same and first.kind == "failed" and not first.is_consequence
            else _remedy(evidence, ends),
            steps=(first.step, first.step),
            ranks=[first.rank],
            buckets=[bucket] if bucket != wire.UNKNOWN else [],
            phase=first.facts.phase if first.facts.phase in wire.PHASES else None,
            evidence=facts,
            intervals=_moment(first),
        )
    ]


def _of_command(evidence: Evidence, ends: list[End]) -> Finding:
    """Report a command that failed before any rank joined; how many ranks it started is not known."""
    first = ends[0]
    host = evidence.hosts.get(first.rank, "")
    if first.facts.oom_kills:
        cause = "its host ran out of memory"
    elif first.last_line:
        cause = f"not known; its output ends with: {first.last_line}"
    else:
        cause = "not known: no output of it was kept"
    return Finding(
        code="crash",
        severity="critical",
        verdict=f"The {first.of_command}",
        measure=first.of_shell,
        when=_when(first),
        cause=cause,
        where=f"host {host}" if host else "",
        remedy="Read the last lines of its output." if first.facts.output else _COMMAND,
        steps=(0, 0),
        evidence=_facts(evidence, first, [], ends),
        intervals=_moment(first),
    )


def hang_before(evidence: Evidence) -> Hang | None:
    """Return the hang that the crash ended: the first rank gave up waiting for others; None if it did not."""
    ends = ends_of(evidence.events)
    if not _has_crashed(ends) or not ends[0].may_have_given_up:
        return None
    return waited_for(evidence, ends[0].rank, ends[0].wall_ns, {end.rank for end in ends if end.may_have_given_up})


def _has_crashed(ends: list[End]) -> bool:
    return any(end.kind != "terminated" for end in ends) and ends[0].kind != "interrupted"


def _gave_up(evidence: Evidence, ends: list[End], hang: Hang) -> Finding:
    """Name the ranks that did not come to a collective, until the others ended by its timeout or by its end."""
    first = ends[0]
    awaited = [rank for rank in hang.ranks if rank != first.rank] or [
        rank for rank in range(evidence.world_size) if rank not in hang.ranks
    ]
    victims = sorted({end.rank for end in ends} - set(awaited))
    in_bucket = hang.bucket != wire.UNKNOWN
    began_ns, pulses = first.wall_ns - hang.since_ns, evidence.pulses | evidence.stuck_pulses
    is_long = hang.since_ns >= _LONG_NS  # Else a rank went on meanwhile, behind the others.
    shown = [rank for rank in shown_ranks(hang) if rank in pulses]
    facts = replace(
        _facts(evidence, first, victims, ends),
        stacks={rank: list(pulses[rank].stack) for rank in shown if pulses[rank].stack},
        threads={rank: dict(pulses[rank].threads) for rank in shown if pulses[rank].threads},
    )
    return Finding(
        code="crash",
        severity="critical",
        verdict=f"Rank {first.rank} ended in step {first.step}, waiting for {_few(awaited)}",
        measure=first.error if first.kind == "failed" else first.reason,
        when=time_range(began_ns, first.wall_ns, is_dated=True) if is_long else _when(first),
        cause=hang.cause,
        where=evidence.where(awaited, hang.where),
        remedy=hang.remedy,
        steps=(first.step, first.step),
        ranks=awaited,
        buckets=[hang.bucket] if in_bucket else [],
        parameters=list(bucket_parameters(evidence, hang.module, hang.bucket)) if in_bucket else [],
        evidence=facts,
        intervals=(Interval(first.step, first.step, began_ns, first.wall_ns),) if is_long else _moment(first),
    )


def _followed(ends: list[End]) -> str:
    """The ranks that failed after the first one, or that a signal ended."""
    failed = sorted({end.rank for end in ends[1:] if end.kind != "terminated"} - {ends[0].rank})
    ended = sorted({end.rank for end in ends[1:]} - {ends[0].rank, *failed})
    parts = [(failed, "failed because of it"), (ended, "ended by SIGTERM after it")]
    return "; ".join(f"{format_ranks(ranks)} {how}" for ranks, how in parts if ranks)


def _when(end: End) -> str:
    """The time of the end on the rank's wall clock; empty if it is not known."""
    return time_of_day(end.wall_ns) if end.wall_ns else ""


def _moment(end: End) -> tuple[Interval, ...]:
    """The end as an interval without length: its step has no row from which a time could be read."""
    step = max(0, end.step)
    return (Interval(step, step, end.wall_ns, end.wall_ns),) if end.wall_ns else ()


def _few(ranks: list[int]) -> str:
    return format_ranks(ranks) if len(ranks) <= _NAMED else f"{len(ranks)} ranks"


def _bucket(evidence: Evidence, module: int, bucket: int) -> str:
    if bucket == wire.UNKNOWN:
        return ""
    if module == wire.UNKNOWN:
        return f"bucket {bucket} of a module that is not known"
    return bucket_title(module, bucket, bucket_of(evidence, module, bucket))


def _end(first: End) -> str:
    if first.kind == "terminated":
        return "was terminated"
    if first.kind == "died":
        is_killed = first.facts.signal or first.facts.oom_kills
        return "was killed" if is_killed else "ended without an error"
    if first.is_consequence:
        return "did not connect" if first.facts.stage else "lost its connection"
    return "failed"


def _cause(first: End) -> str:
    if first.kind == "terminated":
        return first.facts.signal or "a signal"
    if first.kind != "died":
        unknown = "not known: no rank reported an error of its own, this one " if first.is_consequence else ""
        return f"{unknown}{first.error}"
    if first.facts.oom_kills:
        return "its host ran out of memory"
    if first.facts.signal:
        return first.facts.signal
    status = first.facts.exit_status
    return f"exit status {status}" if status is not None else "not known: it was killed, or crashed outside of Python"


def _remedy(evidence: Evidence, ends: list[End]) -> str:
    first = ends[0]
    if first.kind == "died":
        return _DIED
    if first.kind == "terminated":
        return _TERMINATED
    if not first.is_consequence:
        return "Correct the error that the traceback shows." + _OTHERS * (len(ends) > 1)
    if first.facts.stage and (own := _own_error_before(evidence)):
        return f"Correct the error of {own} first. The ranks of a restart may fail to connect because of it."
    known = {end.rank for end in ends}
    if silent := [rank for rank in range(evidence.world_size) if rank not in known and not evidence.ended.get(rank)]:
        return f"Look at the log of {format_ranks(silent)} first: no end has been reported from there."
    return _CONNECTION if len(set(evidence.hosts.values())) == 1 else _CONNECTION + _HOSTS


def _own_error_before(evidence: Evidence) -> str:
    """Return the latest earlier attempt in which a rank failed by itself, with its error; empty without one."""
    own = [
        f"attempt {number}, {end.reason},"
        for number, end in enumerate(_earlier(evidence), start=1)
        if end is not None and end.kind == "failed" and not end.is_consequence
    ]
    return own[-1] if own else ""


def _earlier(evidence: Evidence) -> list[End | None]:
    """Return how each earlier attempt ended, oldest first; None where no end was reported."""
    return [next(iter(ends_of(events)), None) for events in evidence.earlier_ends]


def _reason(end: End | None) -> str:
    if end is None:
        return "no end was reported"
    return end.reason if end.is_of_command else f"rank {end.rank}: {end.reason}"


def _facts(evidence: Evidence, first: End, victims: list[int], ends: list[End]) -> CrashFacts:
    earlier = _earlier(evidence)
    attempts = [*earlier, first]
    listed = [f"attempt {number}: {_reason(end)}" for number, end in enumerate(attempts, start=1)]
    differs = (number for number, end in enumerate(reversed(earlier)) if end is None or not end.is_same_error(first))
    return CrashFacts(
        kind=first.kind,
        error=first.facts.error or None,
        signal=first.facts.signal or None,
        exit_status=first.facts.exit_status,
        traceback=first.facts.traceback or None,
        output=first.facts.output or None,
        host=evidence.hosts.get(first.rank),
        module=first.facts.module,
        victims={end.rank: end.error if end.kind == "failed" else end.kind for end in ends if end.rank in victims},
        place=first.facts.place,
        attempts=listed[-_MAX_ATTEMPTS:] if earlier else [],
        same_error=1 + next(differs, len(earlier)),
    )
