"""For which ranks the others waited when one of them gave up: by a collective's timeout or a closed connection.

Each rank's state at that moment is its latest pulse, or its own record of a time without progress that spans it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

import msgspec

from ddpobs import wire
from ddpobs.shared.hang_verdict import Hang, verdict_on
from ddpobs.shared.judged_rank import JudgedRank
from ddpobs.wire.facts import StuckFacts, facts_of
from ddpobs_server.analysis.evidence import Evidence

_PULSE_NS = 5 * 10**9
"""A pulse shows the state up to this much before it; the record of a time without progress also after its end."""


def waited_for(evidence: Evidence, rank: int, at_ns: int, gave_up: Collection[int]) -> Hang | None:
    """Return for which ranks a rank waited until it gave up; None if that is not known.

    Args:
        evidence: The run.
        rank: The rank that gave up first.
        at_ns: Time of its end, on its wall clock.
        gave_up: Ranks whose end is a consequence of another's.
    """
    offsets_ns = {process.rank: process.wall_offset_ns for process in evidence.processes}
    first = evidence.pulses.get(rank)
    if first is None:
        return None
    stuck: dict[int, list[wire.Event]] = {}
    for of_rank, event in evidence.events:
        if event.kind == "stuck":
            stuck.setdefault(of_rank, []).append(event)
    states = []
    for each in range(evidence.world_size):
        pulse = _pulse_at(evidence.pulses.get(each), stuck.get(each, ()), at_ns, offsets_ns.get(each), first)
        has_ended = each not in gave_up and bool(evidence.ended.get(each))
        if pulse is None and not has_ended:
            return None
        silent_ns = 0 if each in gave_up else max(0, evidence.silent_ns.get(each, 0))
        states.append(JudgedRank(each, pulse, silent_ns, evidence.ended.get(each, "") if has_ended else ""))
    verdict = verdict_on(states, partial(bucket_parameters, evidence))
    return verdict if rank in verdict.waiting and set(verdict.ranks) != set(range(evidence.world_size)) else None


def _pulse_at(
    pulse: wire.Pulse | None, events: Iterable[wire.Event], at_ns: int, offset_ns: int | None, first: wire.Pulse
) -> wire.Pulse | None:
    """Return what a rank did at a moment; None if it is not known."""
    if pulse is None or offset_ns is None:
        return None
    began_ns = offset_ns + pulse.at_ns - pulse.idle_ns
    if began_ns <= at_ns:
        return msgspec.structs.replace(pulse, idle_ns=at_ns - began_ns)
    if stuck := next(filter(None, (_stuck_at(event, at_ns, pulse) for event in events)), None):
        return stuck
    is_at_moment = offset_ns + pulse.at_ns <= at_ns + _PULSE_NS
    return pulse if is_at_moment or _is_behind(pulse, first) else None


def _stuck_at(event: wire.Event, at_ns: int, later: wire.Pulse) -> wire.Pulse | None:
    """Return what a rank did in a time without progress that spans the moment; its bucket is that of a later pulse."""
    idle_ns = spanned_ns(event, at_ns)
    if idle_ns is None:
        return None
    facts, is_same = facts_of(event, StuckFacts), later.step == event.step
    return wire.Pulse(
        at_ns=event.at_ns,
        phase="other",
        step=event.step,
        module=later.module if is_same else wire.UNKNOWN,
        bucket=later.bucket if is_same else wire.UNKNOWN,
        idle_ns=idle_ns,
        patience_ns=facts.patience_ns or 0,
        activity=facts.activity,
        waits_in=facts.waits_in,
        synchronised=facts.synchronised,
        place=facts.place,
    )


def spanned_ns(event: wire.Event, at_ns: int) -> int | None:
    """Return how long a rank had been stuck at a moment, by its record of it; None if it was not.

    Args:
        event: A record of kind `stuck`.
        at_ns: Time on the rank's wall clock.
    """
    facts = facts_of(event, StuckFacts)
    if facts.wall_ns is None or not facts.idle_ns:
        return None
    began_ns = facts.wall_ns - facts.idle_ns
    return at_ns - began_ns if began_ns <= at_ns <= facts.wall_ns + _PULSE_NS else None


def _is_behind(pulse: wire.Pulse, first: wire.Pulse) -> bool:
    """Whether a rank has not yet come to where the first waited, so that the first would still wait for it."""
    if first.activity == "bucket":
        return pulse.synchronised < first.synchronised
    return pulse.collectives < first.collectives


def bucket_parameters(evidence: Evidence, module: int, bucket: int) -> tuple[str, ...]:
    """Return the names of a bucket's parameters in the module's latest layout."""
    layouts: Iterable[wire.Layout] = evidence.columns.layouts() if evidence.columns is not None else []
    latest = max((layout for layout in layouts if layout.module == module), key=lambda o: o.revision, default=None)
    if latest is None or not 0 <= bucket < len(latest.buckets):
        return ()
    return tuple(parameter.name for parameter in latest.buckets[bucket].parameters)
