"""Finding `hang`: no rank makes progress. The ranks' own log uses the same verdict, `ddpobs.shared.hang_verdict`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial

from ddpobs import wire
from ddpobs.shared.hang_verdict import LINK_REMEDY, MISMATCH_REMEDY, Hang, judge
from ddpobs.shared.judged_rank import JudgedRank
from ddpobs.shared.quantities import time_of_day, time_range
from ddpobs.shared.words import format_ranks
from ddpobs.wire.facts import DUMPED, DumpFacts, StuckFacts, facts_of
from ddpobs_server.analysis.causes.rank_ends import End, ends_of
from ddpobs_server.analysis.causes.waited_for import bucket_of, bucket_parameters, hang_at, shown_ranks, spanned_ns
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Interval
from ddpobs_server.analysis.findings.crash import hang_before

CODES = ("hang",)
_WAITS = {"bucket", "collective"}
_Stuck = list[tuple[int, wire.Event]]
_DUMP_REMEDIES = {
    "absent": "Look at the line of that rank's last call, and at what it runs after it: another branch, fewer batches, "
    "an error, a lock. The dump does not show where it is now.",
    "mismatch": MISMATCH_REMEDY,
    "link": LINK_REMEDY,
    "unknown": "Import the dumps of all ranks together: a rank without one may be the rank that the others wait for.",
}


@dataclass(frozen=True)
class HangFacts(Facts):
    """A hang; one that is over has its length alone.

    Attributes:
        kind: As the table of `ddpobs.shared.hang_verdict`; `over` and `ended` are past, and `unknown` are dumps of a
            hang without that of some rank.
        since_ns: Time since the run's last progress; None if the hang is over.
        waiting: Ranks that wait in a collective.
        module: Module of the bucket in which they wait, `UNKNOWN` where it is no bucket; None if the hang is over.
        hosts: Host by rank.
        activities: What each rank does.
        in_step: Step in which each rank is.
        places: Place in the code by rank.
        stacks: Stack by rank.
        threads: Stacks of other threads in the user's code, by rank and by name.
        length_ns: Time without progress of the longest hang that is past; None if the hang goes on.
        times: Reports of hangs that are over; None if the hang goes on.
    """

    kind: str
    since_ns: int | None = None
    waiting: list[int] = field(default_factory=list)
    module: int | None = None
    hosts: dict[int, str] = field(default_factory=dict)
    activities: dict[int, str] = field(default_factory=dict)
    in_step: dict[int, int] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    stacks: dict[int, list[str]] = field(default_factory=dict)
    threads: dict[int, dict[str, list[str]]] = field(default_factory=dict)
    length_ns: int | None = None
    times: int | None = None


FACTS = (HangFacts,)


def hang(evidence: Evidence) -> Judgement:
    """Report the hang that the latest pulses show or the run's end ended, and hangs that are over."""
    if dumped := [(rank, event) for rank, event in evidence.events if event.kind == DUMPED]:
        return [_dumped(evidence, *dumped[0])]
    ends = ends_of(evidence.events)
    if not ends:
        return [*_present(evidence), *_past(evidence, None)]
    until_ns = ends[0].wall_ns
    if hang_before(evidence) is not None:
        return _past(evidence, until_ns)  # The crash has the hang's sentence.
    if (verdict := hang_at(evidence, until_ns)) is not None:
        return [_ended(evidence, verdict, ends[0]), *_past(evidence, until_ns)]
    return [*_present(evidence), *_past(evidence, None)]


def rank_states(evidence: Evidence) -> list[JudgedRank]:
    """One state per rank of the world, from the latest pulses."""
    processes = {rank: state for pulse in evidence.pulses.values() for rank, state in pulse.process_states.items()}
    return [
        JudgedRank(
            rank=rank,
            pulse=evidence.pulses.get(rank),
            silent_ns=max(0, evidence.silent_ns.get(rank, 0)),
            ended=evidence.ended.get(rank, ""),
            process=processes.get(rank, ""),
            host=evidence.hosts.get(rank, ""),
        )
        for rank in range(evidence.world_size)
    ]


def _present(evidence: Evidence) -> Judgement:
    if not any(pulse.patience_ns for pulse in evidence.pulses.values()):
        return []  # Clients before version 0.1 send no activity.
    if any(end in ("failed", "interrupted") for end in evidence.ended.values()):
        return []  # The others wait for the rank that failed or was interrupted.

    verdict = judge(rank_states(evidence), cache(partial(bucket_of, evidence)))
    return [] if verdict is None else [_finding(evidence, verdict, _facts(evidence, verdict, evidence.pulses))]


def _ended(evidence: Evidence, verdict: Hang, end: End) -> Finding:
    """The hang in which the run was until a rank ended, with the stacks of the last pulses before."""
    began_ns, ended_ns = end.wall_ns - verdict.since_ns, end.wall_ns
    facts = _facts(evidence, verdict, evidence.pulses | evidence.stuck_pulses)
    facts = replace(facts, since_ns=None, length_ns=verdict.since_ns)
    finding = _finding(evidence, verdict, facts)
    until = end.facts.signal or f"rank {end.rank} {'failed' if end.kind == 'failed' else 'ended'}"
    return replace(
        finding,
        verdict=verdict.verdict.replace("hangs", "hung", 1),
        measure=f"{verdict.measure}, until {until}",
        when=time_range(began_ns, ended_ns, is_dated=True),
        intervals=(Interval(*finding.steps, began_ns, ended_ns),),
    )


def _finding(evidence: Evidence, verdict: Hang, facts: HangFacts) -> Finding:
    in_bucket = verdict.bucket != wire.UNKNOWN
    step = max(0, verdict.step if verdict.step != wire.UNKNOWN else evidence.step_range[1])
    parameters = bucket_parameters(evidence, verdict.module, verdict.bucket) if in_bucket else ()
    return Finding(
        code="hang",
        severity="critical",
        verdict=verdict.verdict,
        measure=verdict.measure,
        cause=verdict.cause,
        where=evidence.where(verdict.ranks, verdict.where),
        remedy=verdict.remedy,
        steps=(step, step),
        ranks=verdict.ranks,
        buckets=[verdict.bucket] if in_bucket else [],
        parameters=list(parameters),
        phase=verdict.phase,
        evidence=facts,
    )


def _dumped(evidence: Evidence, rank: int, event: wire.Event) -> Finding:
    """The hang that imported dumps show, in the words of the import; a dump's clock is the wall clock."""
    facts = facts_of(event, DumpFacts)
    kind = {"entered": "link"}.get(facts.kind, facts.kind)
    ranks, waiting = _numbers(facts.ranks), _numbers(facts.waiting)
    return Finding(
        code="hang",
        severity="critical",
        verdict=facts.verdict,
        when=f"the last call of rank {rank} was at {time_of_day(event.at_ns)}" if event.at_ns else "",
        cause=facts.cause,
        remedy=_DUMP_REMEDIES.get(kind, _DUMP_REMEDIES["unknown"]),
        steps=(0, 0),
        ranks=ranks,
        evidence=HangFacts(
            kind=kind,
            waiting=waiting,
            activities={rank: evidence.pulses[rank].activity for rank in waiting if rank in evidence.pulses},
            places={rank: evidence.pulses[rank].place for rank in waiting if rank in evidence.pulses},
            stacks={rank: list(evidence.pulses[rank].stack) for rank in waiting if rank in evidence.pulses},
        ),
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.isdecimal()]


def _facts(evidence: Evidence, verdict: Hang, pulses: Mapping[int, wire.Pulse]) -> HangFacts:
    shown = [rank for rank in shown_ranks(verdict) if rank in pulses]
    return HangFacts(
        kind=verdict.kind,
        since_ns=verdict.since_ns,
        waiting=verdict.waiting,
        module=verdict.module,
        hosts={rank: evidence.hosts[rank] for rank in verdict.ranks if rank in evidence.hosts},
        activities={rank: pulse.activity for rank, pulse in pulses.items()},
        in_step={rank: pulse.step for rank, pulse in pulses.items()},
        places={rank: pulses[rank].place for rank in shown},
        stacks={rank: list(pulses[rank].stack) for rank in shown},
        threads={rank: dict(pulses[rank].threads) for rank in shown if pulses[rank].threads},
    )


def _past(evidence: Evidence, until_ns: int | None) -> list[Finding]:
    """Hangs that are over: each rank reports how long it was stuck once it goes on, fails or is ended by a signal.

    Args:
        evidence: The run.
        until_ns: End of a hang that has a finding of its own; None without one.
    """
    first_end = next(iter(ends_of(evidence.events)), None)
    stuck = [
        (rank, event) for rank, event in evidence.events if event.kind == "stuck" and not _began_after(first_end, event)
    ]
    if until_ns is not None:
        stuck = [(rank, event) for rank, event in stuck if spanned_ns(event, until_ns) is None]
    ended = [(rank, event) for rank, event in stuck if _of(event).outcome == "ended"]
    went_on = [item for item in stuck if item not in ended]
    return [_longest(part, evidence, is_over=part is went_on) for part in (ended, went_on) if part]


def _began_after(first_end: End | None, event: wire.Event) -> bool:
    """Whether the rank became stuck only after a rank failed, died or was interrupted: it waited for that rank."""
    facts = _of(event)
    if first_end is None or facts.wall_ns is None or facts.patience_ns is None:
        return False
    return facts.wall_ns - facts.idle_ns + facts.patience_ns > first_end.wall_ns


def _longest(stuck: _Stuck, evidence: Evidence, *, is_over: bool) -> Finding:
    """The longest of these hangs, with the ranks that did not wait for others."""
    named = [(rank, event) for rank, event in stuck if _of(event).activity not in _WAITS] or stuck
    rank, event = max(named, key=lambda item: _of(item[1]).idle_ns)
    steps = [stuck_event.step for _, stuck_event in named] if is_over else [event.step]
    facts = _of(event)
    place = f" ({facts.place})" if facts.place else ""
    activity = "its own code" if facts.activity in ("code", "") else facts.activity
    does = f"was in {activity}{place}" if activity not in _WAITS else _waited(event)
    step = f"step {event.step}"
    return Finding(
        code="hang",
        severity="info" if is_over else "critical",
        verdict=f"The run stood still in {step} and went on"
        if is_over
        else f"The run hung in {step} until it was ended",
        measure=f"no progress for {facts.idle_ns / 1e9:.0f} s",
        cause=f"{format_ranks([rank])} {does}{_waiting(stuck, named)}",
        where=evidence.where(_ranks(named)),
        remedy="Look at the line above; `ddpobs stacks` shows the rank's last stack.",
        steps=(min(steps), max(steps)),
        ranks=_ranks(named),
        evidence=HangFacts(
            kind="over" if is_over else "ended", length_ns=facts.idle_ns, times=len(steps) if is_over else None
        ),
    )


def _waiting(stuck: _Stuck, named: _Stuck) -> str:
    """The ranks that waited for others, and in what the first of them did."""
    waiting = [(rank, event) for rank, event in stuck if (rank, event) not in named]
    if not waiting:
        return ""
    return f", while {format_ranks(_ranks(waiting))} {_waited(waiting[0][1])}"


def _waited(event: wire.Event) -> str:
    if _of(event).activity == "bucket":
        return "waited in a bucket's reduction"
    return f"waited in {_of(event).waits_in or 'a collective'}"


def _ranks(stuck: _Stuck) -> list[int]:
    return sorted({rank for rank, _ in stuck})


def _of(event: wire.Event) -> StuckFacts:
    return facts_of(event, StuckFacts)
