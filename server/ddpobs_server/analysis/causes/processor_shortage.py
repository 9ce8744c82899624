"""Why the ranks of a host wait for a processor: a quota, an allowed set, threads of their own, or other programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddpobs import wire
from ddpobs.shared.processors import format_processors, parse_processors
from ddpobs.shared.words import format_ranks, percent
from ddpobs_server.analysis.evidence import Evidence

_MIN_SHARE = 0.5
"""Minimum share of the waits that a quota explains, and of the busy processor time that other programs take."""
_FULL = 0.9
"""Share of the host's processor time that is in use, above which no processor is free."""

_AT_WORK_NS = 1_000_000_000
"""Time without progress, below which a rank's pulse tells what its training takes."""
_MIN_OF_STEPS = 0.5
"""Minimum processor time in a pulse, as a part of what the training thread takes in the steps, to be of such steps."""


@dataclass(frozen=True)
class ShortageCause:
    """A cause, in words, with its remedy.

    Attributes:
        name: `quota`, `allowed`, `threads`, `others`, or `not-known`.
    """

    name: str
    words: str
    remedy: str


def shortage_cause(
    evidence: Evidence, ranks: Sequence[int], throttled_share: float, running_share: float
) -> ShortageCause:
    """Return why these ranks wait for a processor.

    Args:
        evidence: The run.
        ranks: Ranks of one host, or all.
        throttled_share: Share of their waits in which a quota held them up.
        running_share: Share of these steps in which their training threads ran, as the mean of the ranks.
    """
    machines = {rank: machine for rank in ranks if (machine := _machine(evidence, rank)) is not None}
    return (
        _quota(machines, throttled_share)
        or _allowed(evidence, ranks, machines)
        or _threads(evidence, ranks)
        or _others(_at_work(evidence, machines, running_share))
        or ShortageCause(
            "not-known",
            "not known: no quota, no allowed set and no number of threads explains it",
            "See what else runs on the host (top), and give each rank processors of its own.",
        )
    )


def allowed_processors(evidence: Evidence, rank: int) -> frozenset[int]:
    """Return the processors that a rank's training thread may use, by its latest pulse; none if that is not known."""
    machine, hello = _machine(evidence, rank), evidence.hellos.get(rank)
    allowed = parse_processors(machine.allowed) if machine is not None else frozenset()
    return allowed or (parse_processors(hello.settings.get("processors")) if hello is not None else frozenset())


def _machine(evidence: Evidence, rank: int) -> wire.Machine | None:
    pulse = evidence.pulses.get(rank)
    return pulse.machine if pulse is not None else None


def _quota(machines: dict[int, wire.Machine], throttled_share: float) -> ShortageCause | None:
    if throttled_share < _MIN_SHARE:
        return None
    quotas = [machine.quota_permille for machine in machines.values() if machine.quota_permille > 0]
    limit = f" of {min(quotas) / 1000:.3g} processors" if quotas else ""
    return ShortageCause(
        "quota",
        f"the control group's quota{limit} holds the ranks up for {percent(throttled_share)} of these waits",
        "Raise the quota (the container's or job's CPU limit), or use fewer threads and loader workers.",
    )


def _allowed(evidence: Evidence, ranks: Sequence[int], machines: dict[int, wire.Machine]) -> ShortageCause | None:
    """Name a set of processors that has fewer processors than ranks, while the host has more."""
    sets = {rank: allowed_processors(evidence, rank) for rank in ranks}
    on_host = max((machine.host_processors for machine in machines.values()), default=wire.UNKNOWN)
    for allowed in sorted({each for each in sets.values() if each}, key=len):
        crowd = [rank for rank, own in sets.items() if own and own <= allowed]
        if len(allowed) < min(len(crowd), on_host):
            numbers = f"processor{'s' * (len(allowed) > 1)} {format_processors(allowed)}"
            return ShortageCause(
                "allowed",
                f"{format_ranks(crowd)} may use {numbers} only, of {on_host} of the host",
                "Give each rank processors of its own: find what sets the affinity (the launcher, taskset, numactl, "
                "OMP_PROC_BIND, an import that calls sched_setaffinity).",
            )
    return None


def _threads(evidence: Evidence, ranks: Sequence[int]) -> ShortageCause | None:
    counts = [hello.settings.get("threads") for rank in ranks if (hello := evidence.hellos.get(rank)) is not None]
    processors = frozenset[int]().union(*(allowed_processors(evidence, rank) for rank in ranks))
    threads = sum(count for count in counts if isinstance(count, int))
    if not processors or threads <= len(processors):
        return None
    each = max(1, len(processors) // len(ranks))
    fewer = f"Set OMP_NUM_THREADS={each}" if threads > len(ranks) and each * len(ranks) <= len(processors) else ""
    return ShortageCause(
        "threads",
        f"{len(ranks)} ranks with {threads} threads share {len(processors)} processors",
        f"{fewer}, or start fewer ranks on the host." if fewer else "Start fewer ranks on the host.",
    )


def _at_work(evidence: Evidence, machines: dict[int, wire.Machine], running_share: float) -> list[wire.Machine]:
    """Return what ranks saw of their machine while they trained: a rank that stands still takes no processor."""
    least = max(1.0, 1000 * _MIN_OF_STEPS * running_share)
    return [
        machine
        for rank, machine in machines.items()
        if evidence.pulses[rank].idle_ns < _AT_WORK_NS and machine.process_permille >= least
    ]


def _others(machines: list[wire.Machine]) -> ShortageCause | None:
    """Name other programs if no processor is free, and the ranks' processes take less than half of the time in use.

    Args:
        machines: As ranks saw them that trained meanwhile.
    """
    known = [machine for machine in machines if min(machine.busy_permille, machine.host_processors) > 0]
    if not known:
        return None
    host = known[0]
    in_use = host.busy_permille / 1000 * host.host_processors
    own = sum(machine.process_permille for machine in known) / 1000
    if host.busy_permille < 1000 * _FULL or own > (1 - _MIN_SHARE) * in_use:
        return None
    return ShortageCause(
        "others",
        f"the ranks' processes take {own:.1f} of {in_use:.1f} processors that are in use on the host: other processes "
        "take the rest",
        "See what else runs on the host (top): loader workers, other jobs.",
    )
