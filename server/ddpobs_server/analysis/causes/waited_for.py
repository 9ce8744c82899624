"""For which ranks the others waited at a moment of the past: when one of them gave up, or when the run was ended.

Each rank's state at that moment is its last pulse in which it was stuck, its latest pulse, or its own record of a time
without progress that spans it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

import msgspec

from ddpobs import wire
from ddpobs.shared.hang_verdict import Hang, judge, verdict_on
from ddpobs.shared.judged_rank import JudgedRank
from ddpobs.shared.silence import PULSE_SILENCE_NS
from ddpobs.wire.facts import StuckFacts, facts_of
from ddpobs_server.analysis.evidence import Evidence

_PULSE_NS = 5 * 10**9
"""A pulse shows the state up to this much before it; the record of a time without progress also after its end."""
_STACKS = 8
"""Maximum number of ranks whose stacks the evidence lists."""


def hang_at(evidence: Evidence, at_ns: int) -> Hang | None:
    """Return the hang in which the run was at a moment; None if it went on, or if that is not known.

    Args:
        evidence: The run.
        at_ns: The moment, on the ranks' wall clocks.
    """
    moment, states = _Moment(evidence, at_ns), []
    terminated = {rank for rank, event in evidence.events if event.kind == "terminated"}
    for rank in range(evidence.world_size):
        has_ended = evidence.ended.get(rank) == "finished" and rank not in terminated
        pulse, silent_ns = moment.pulse(rank), moment.silent_ns(rank)
        if pulse is None and not has_ended:
            return None
        if silent_ns > PULSE_SILENCE_NS:
            states.append(JudgedRank(rank, evidence.pulses[rank], silent_ns, is_past=True))
        else:
            states.append(JudgedRank(rank, pulse, 0, "finished" if has_ended else "", is_past=True))
    return judge(states, partial(bucket_of, evidence))


def waited_for(evidence: Evidence, rank: int, at_ns: int, gave_up: Collection[int]) -> Hang | None:
    """Return for which ranks a rank waited until it gave up; None if that is not known.

    Args:
        evidence: The run.
        rank: The rank that gave up first.
        at_ns: Time of its end, on its wall clock.
        gave_up: Ranks whose end is a consequence of another's.
    """
    moment = _Moment(evidence, at_ns)
    if (first := moment.stuck(rank) or evidence.pulses.get(rank)) is None:
        return None
    states = []
    for each in range(evidence.world_size):
        pulse = moment.pulse(each, first)
        has_ended = each not in gave_up and bool(evidence.ended.get(each))
        if pulse is None and not has_ended:
            return None
        silent_ns = 0 if each in gave_up else max(0, evidence.silent_ns.get(each, 0))
        states.append(
            JudgedRank(each, pulse, silent_ns, evidence.ended.get(each, "") if has_ended else "", is_past=True)
        )
    verdict = verdict_on(states, partial(bucket_of, evidence))
    return verdict if rank in verdict.waiting and set(verdict.ranks) != set(range(evidence.world_size)) else None


def shown_ranks(hang: Hang) -> list[int]:
    """Return the ranks whose stacks the evidence lists: first those that the others wait for."""
    return [*hang.ranks, *(rank for rank in hang.waiting if rank not in hang.ranks)][:_STACKS]


class _Moment:
    """What the ranks did at a moment, on their wall clocks."""

    def __init__(self, evidence: Evidence, at_ns: int) -> None:
        self._evidence, self._at_ns = evidence, at_ns
        self._offsets_ns = {process.rank: process.wall_offset_ns for process in evidence.processes}
        self._events: dict[int, list[wire.Event]] = {}
        for rank, event in evidence.events:
            if event.kind == "stuck":
                self._events.setdefault(rank, []).append(event)

    def pulse(self, rank: int, first: wire.Pulse | None = None) -> wire.Pulse | None:
        """Return what a rank did; None if it is not known.

        Args:
            rank: The rank.
            first: What a rank that waited did: another rank that was seen behind it only later was so before, too.
        """
        pulse, offset_ns, at_ns = self._evidence.pulses.get(rank), self._offsets_ns.get(rank), self._at_ns
        if pulse is None or offset_ns is None:
            return None
        if stuck := self.stuck(rank):
            return stuck
        began_ns = offset_ns + pulse.at_ns - pulse.idle_ns
        if began_ns <= at_ns:
            return msgspec.structs.replace(pulse, idle_ns=at_ns - began_ns)
        recorded = (_stuck_at(event, at_ns, pulse) for event in self._events.get(rank, ()))
        if stuck := next(filter(None, recorded), None):
            return stuck
        is_at_moment = offset_ns + pulse.at_ns <= at_ns + _PULSE_NS
        return pulse if is_at_moment or (first is not None and _is_behind(pulse, first)) else None

    def stuck(self, rank: int) -> wire.Pulse | None:
        """Return a rank's last pulse in which it was stuck, with the time until the moment; None if it went on."""
        stuck, offset_ns, at_ns = self._evidence.stuck_pulses.get(rank), self._offsets_ns.get(rank), self._at_ns
        if stuck is None or offset_ns is None or at_ns < offset_ns + stuck.at_ns - stuck.idle_ns:
            return None
        latest = self._evidence.pulses.get(rank, stuck)
        if latest.at_ns > stuck.at_ns:
            went_on = offset_ns + latest.at_ns - latest.idle_ns <= at_ns
            is_soon = at_ns <= offset_ns + stuck.at_ns + _PULSE_NS
            spans = any(spanned_ns(event, at_ns) is not None for event in self._events.get(rank, ()))
            if went_on or not (is_soon or spans):
                return None
        return msgspec.structs.replace(stuck, idle_ns=at_ns - offset_ns - stuck.at_ns + stuck.idle_ns)

    def silent_ns(self, rank: int) -> int:
        """Return the time since the rank's latest pulse; 0 if that came later, or if it is not known."""
        pulse, offset_ns = self._evidence.pulses.get(rank), self._offsets_ns.get(rank)
        return 0 if pulse is None or offset_ns is None else max(0, self._at_ns - offset_ns - pulse.at_ns)


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


def bucket_of(evidence: Evidence, module: int, bucket: int) -> wire.Bucket | None:
    """Return a bucket of the module's latest layout; None if it is not known."""
    layouts: Iterable[wire.Layout] = evidence.columns.layouts() if evidence.columns is not None else []
    latest = max((layout for layout in layouts if layout.module == module), key=lambda o: o.revision, default=None)
    return latest.buckets[bucket] if latest is not None and 0 <= bucket < len(latest.buckets) else None


def bucket_parameters(evidence: Evidence, module: int, bucket: int) -> tuple[str, ...]:
    """Return the names of that bucket's parameters."""
    found = bucket_of(evidence, module, bucket)
    return () if found is None else tuple(parameter.name for parameter in found.parameters)
