"""Finding `hang`: no rank makes progress. The ranks' own log uses the same verdict, `ddpobs.shared.hang_verdict`."""

from __future__ import annotations

from functools import cache
from typing import Any

from ddpobs import wire
from ddpobs.shared.hang_verdict import Hang, RankState, judge
from ddpobs.shared.words import format_ranks
from ddpobs_server.analysis.evidence import Evidence, Judgement
from ddpobs_server.analysis.finding import Finding
from ddpobs_server.analysis.findings.crash import End, interrupt_of

CODES = ("hang",)
_WAITS = {"bucket", "collective"}
_Stuck = list[tuple[int, wire.Event]]
_STACKS = 8
"""Most ranks whose stacks the evidence lists."""


def hang(evidence: Evidence) -> Judgement:
    """Report the hang that the latest pulses show, and hangs that are over."""
    return [*_present(evidence), *_past(evidence)]


def rank_states(evidence: Evidence) -> list[RankState]:
    """One state per rank of the world, from the latest pulses."""
    processes = {
        int(rank): state
        for pulse in evidence.pulses.values()
        for rank, state in pulse.processes.items()
        if rank.isdecimal()
    }
    return [
        RankState(
            rank=rank,
            pulse=evidence.pulses.get(rank),
            silent_ns=max(0, evidence.silent_ns.get(rank, 0)),
            ended=evidence.ended.get(rank, ""),
            process=processes.get(rank, ""),
        )
        for rank in range(evidence.world_size)
    ]


def _present(evidence: Evidence) -> Judgement:
    if not any(pulse.patience_ns for pulse in evidence.pulses.values()):
        return []  # Clients before version 0.1 send no activity.
    if any(end in ("failed", "interrupted") for end in evidence.ended.values()):
        return []  # The others wait for the rank that failed or was interrupted.

    @cache
    def parameters(module: int, bucket: int) -> tuple[str, ...]:
        return _parameters(evidence, module, bucket)

    verdict = judge(rank_states(evidence), parameters)
    if verdict is None:
        return []
    in_bucket = verdict.bucket != wire.UNKNOWN
    step = max(0, verdict.step if verdict.step != wire.UNKNOWN else evidence.step_range[1])
    return [
        Finding(
            code="hang",
            severity="critical",
            verdict=verdict.title,
            remedy=verdict.remedy,
            steps=(step, step),
            ranks=verdict.ranks,
            buckets=[verdict.bucket] if in_bucket else [],
            parameters=list(parameters(verdict.module, verdict.bucket)) if in_bucket else [],
            phase=verdict.phase,
            evidence=_facts(evidence, verdict),
        )
    ]


def _facts(evidence: Evidence, verdict: Hang) -> dict[str, Any]:
    pulses = evidence.pulses
    shown = [*verdict.ranks, *(rank for rank in verdict.waiting if rank not in verdict.ranks)][:_STACKS]
    return {
        "kind": verdict.kind,
        "since_ns": verdict.since_ns,
        "waiting": verdict.waiting,
        "module": verdict.module,
        "hosts": {rank: evidence.hosts[rank] for rank in verdict.ranks if rank in evidence.hosts},
        "activities": {rank: pulse.activity for rank, pulse in pulses.items()},
        "in_step": {rank: pulse.step for rank, pulse in pulses.items()},
        "places": {rank: pulses[rank].place for rank in shown if rank in pulses},
        "stacks": {rank: pulses[rank].stack for rank in shown if rank in pulses},
    }


def _past(evidence: Evidence) -> Judgement:
    """Hangs that are over: each rank reports how long it was stuck once it goes on, fails or is ended by a signal."""
    interrupt = interrupt_of(evidence.events)
    stuck = [
        (rank, event) for rank, event in evidence.events if event.kind == "stuck" and not _began_after(interrupt, event)
    ]
    ended = [(rank, event) for rank, event in stuck if event.detail.get("outcome") == "ended"]
    went_on = [item for item in stuck if item not in ended]
    findings = [_ended(ended)] if ended else []
    return [*findings, *([_overcome(went_on)] if went_on else [])]


def _began_after(interrupt: End | None, event: wire.Event) -> bool:
    """Whether the rank became stuck only after the run was interrupted: it waited for the interrupted rank."""
    wall_ns, patience_ns = event.detail.get("wall_ns"), event.detail.get("patience_ns")
    if interrupt is None or not isinstance(wall_ns, int) or not isinstance(patience_ns, int):
        return False
    return wall_ns - _length_ns(event) + patience_ns > interrupt.wall_ns


def _ended(stuck: _Stuck) -> Finding:
    named, length_ns, event, location = _longest(stuck)
    return Finding(
        code="hang",
        severity="critical",
        verdict=f"The run hung in step {event.step} for {length_ns / 1e9:.0f} s, until it was ended: {location}",
        remedy="Look at the place above. The next run that hangs shows its stacks with `ddpobs stacks`.",
        steps=(event.step, event.step),
        ranks=_ranks(named),
        evidence={"kind": "ended", "length_ns": length_ns},
    )


def _overcome(stuck: _Stuck) -> Finding:
    named, length_ns, event, location = _longest(stuck)
    steps = [stuck_event.step for _, stuck_event in named]
    return Finding(
        code="hang",
        severity="info",
        verdict=f"The run stood still for {length_ns / 1e9:.0f} s in step {event.step} and went on: {location}",
        remedy="Look at the place above if this comes back.",
        steps=(min(steps), max(steps)),
        ranks=_ranks(named),
        evidence={"kind": "over", "length_ns": length_ns, "times": len(steps)},
    )


def _longest(stuck: _Stuck) -> tuple[_Stuck, int, wire.Event, str]:
    """The ranks that did not wait for others, and the longest hang's length, event and place."""
    named = [(rank, event) for rank, event in stuck if event.detail.get("activity") not in _WAITS] or stuck
    rank, event = max(named, key=lambda item: _length_ns(item[1]))
    where = f" ({event.detail['place']})" if event.detail.get("place") else ""
    activity = event.detail.get("activity")
    activity = "its own code" if activity == "code" else activity
    location = f"{format_ranks([rank])} was in {activity}{where}{_waiting(stuck, named)}"
    return named, _length_ns(event), event, location


def _waiting(stuck: _Stuck, named: _Stuck) -> str:
    """The ranks that waited for others, and in what the first of them did."""
    waiting = [(rank, event) for rank, event in stuck if (rank, event) not in named]
    if not waiting:
        return ""
    detail = waiting[0][1].detail
    collective = (
        "a bucket's reduction" if detail.get("activity") == "bucket" else detail.get("waits_in") or "a collective"
    )
    return f", while {format_ranks(_ranks(waiting))} waited in {collective}"


def _ranks(stuck: _Stuck) -> list[int]:
    return sorted({rank for rank, _ in stuck})


def _length_ns(event: wire.Event) -> int:
    return int(event.detail.get("idle_ns") or 0)


def _parameters(evidence: Evidence, module: int, bucket: int) -> tuple[str, ...]:
    """Names of a bucket's parameters in the module's latest layout."""
    layouts = evidence.columns.layouts() if evidence.columns is not None else []
    latest = max((layout for layout in layouts if layout.module == module), key=lambda o: o.revision, default=None)
    if latest is None or not 0 <= bucket < len(latest.buckets):
        return ()
    return tuple(parameter.name for parameter in latest.buckets[bucket].parameters)
