"""The other findings: each a function of the evidence that gives findings, or says what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.findings import Finding, Missing, named, severity_of
from ddpobs_server.analysis.joins import Floats, Joined, ranks_of
from ddpobs_server.analysis.stragglers import weights

MIN_STEPS = 20
COMM_SHARE = 0.3
"""Exposed communication above this share of the step is an alarm."""
DATA_SHARE = 0.3
LOST_SHARE = 0.01
"""Of the records, or of the batches of ranks that ended: findings may be wrong with more of them lost."""
_FIFTHS = 5
LATEST_SETS = 8
"""Of each rank's unused sets of a module so many of the latest tell one that stays from those that alternate."""
_SHOWN = 50
_AHEAD_NS = 60 * 10**9


@dataclass(frozen=True)
class Evidence:
    """Everything a finding may rest on.

    Attributes:
        rank: Of each row of `steps`.
        steps: The steps looked at, all ranks.
        joined: Those in which all ranks can be compared.
        unused: (rank, unused set) as told: the last of those that name parameters, if any, and `LATEST_SETS`.
        settings: The reducer's settings.
        emitted: Records emitted, by rank.
        dropped: Records dropped, by rank.
        missing_batches: How many have not arrived of ranks that said goodbye, by rank.
        sent_batches: By those ranks together.
        events: (rank, event) as told.
        ahead_ns: How far each rank's wall clock is ahead of the collector's.
        absent: Ranks of the world that are not among the joined ones.
        apart: Why the ranks do not wait for each other, empty where they do.
        gaps: Whether a batch of any rank is missing before another; looked at with `find_unused_parameters` only.
    """

    rank: wire.Ints
    steps: wire.Steps
    joined: Joined
    unused: list[tuple[int, wire.Unused]]
    settings: dict[str, wire.Scalar]
    emitted: dict[int, int]
    dropped: dict[int, int]
    missing_batches: dict[int, int]
    sent_batches: int
    events: list[tuple[int, wire.Event]] = field(default_factory=list)
    ahead_ns: dict[int, int] = field(default_factory=dict)
    absent: list[int] = field(default_factory=list)
    apart: str = ""
    gaps: bool = False

    @property
    def seen(self) -> tuple[int, int]:
        """First and last step looked at."""
        return (int(self.steps.step.min()), int(self.steps.step.max())) if len(self.steps.step) else (0, 0)

    @cached_property
    def last_steps(self) -> dict[int, int]:
        """Each rank's last step, by its own numbers."""
        ranks, place = ranks_of(self.rank)
        last = np.full(len(ranks), wire.UNKNOWN, np.int64)
        np.maximum.at(last, place, self.steps.step)
        return dict(zip(ranks.tolist(), last.tolist(), strict=True))


Judgement = list[Finding] | Missing


def comm_bound(evidence: Evidence) -> Judgement:
    """Exposed communication above 30 % of the steps; waiting for a late rank is told apart from moving bytes.

    Times are means over ranks and steps, none of which counts for more than a few median ones.
    """
    joined = evidence.joined
    # What a step's end waits for, as at a barrier, shows in the own times of the step after it.
    rows = np.flatnonzero(joined.followed)
    if len(rows) < MIN_STEPS:
        return Missing("comm-bound", f"{len(rows)} of {MIN_STEPS} steps in which all ranks can be compared")
    counts = weights(joined.window_ns[rows])  # One that holds a stall is as long as thousands.

    def mean(times_ns: Floats) -> float:
        return float(np.average(times_ns.mean(axis=1), weights=counts))

    exposed_ns, wall_ns = mean(joined.exposed_ns[rows]), mean(joined.wall_ns[rows])
    share = exposed_ns / wall_ns
    if share <= COMM_SHARE:
        return []
    if evidence.absent or evidence.apart:
        return [_unsplit(evidence, share, exposed_ns, len(rows))]
    waiting_ns = mean(_waiting_ns(joined, rows))
    moving = (exposed_ns - waiting_ns) / wall_ns
    mostly_waiting = waiting_ns > exposed_ns / 2
    reason = "most of it waiting for the last rank" if mostly_waiting else "most of it moving bytes"
    waits, moves = (
        "Find out why a rank is late",
        "Compress gradients, accumulate over several micro-batches with no_sync",
    )
    if not mostly_waiting:
        remedy = f"{moves}, or use a faster link."
    elif moving > COMM_SHARE:
        remedy = f"{waits}. {moves}, or use a faster link: the bytes alone take {moving:.0%}."
    else:
        remedy = f"{waits}: a faster network would not help."
    return [
        Finding(
            code="comm-bound",
            severity="info" if mostly_waiting and moving <= COMM_SHARE else severity_of(moving),
            title=f"{share:.0%} of every step is exposed communication, {reason}",
            remedy=remedy,
            steps=evidence.seen,
            phase="exposed_comm",
            evidence={
                "exposed_share": round(share, 4),
                "exposed_ns": round(exposed_ns),
                "waiting_ns": round(waiting_ns),
                "moving_ns": round(exposed_ns - waiting_ns),
                "steps_used": len(rows),
            },
        )
    ]


def _waiting_ns(joined: Joined, rows: wire.Ints) -> Floats:
    """How much of these steps' exposed communication is waiting for the last rank, shape [steps, ranks].

    In a step's own, and what is left of it where the next step's own does not hold what that waits.
    """
    waits = joined.own_ns.max(axis=1, keepdims=True) - joined.own_ns
    within = np.minimum(waits, joined.exposed_ns)
    left, beyond = joined.exposed_ns - within, waits - within
    return np.asarray(within[rows] + np.minimum(left[rows], beyond[rows + 1]))


def _unsplit(evidence: Evidence, share: float, exposed_ns: float, steps_used: int) -> Finding:
    """Waiting for a rank that is not seen looks like moving bytes: neither is claimed."""
    one_by_one = "Look at each process group by itself: what a rank waits for is not seen across groups."
    telemetry_first = (
        f"Get the telemetry of rank {named(evidence.absent)} first: waiting for a rank that is not seen looks like "
        "moving bytes."
    )
    return Finding(
        code="comm-bound",
        severity="info",
        title=f"{share:.0%} of every step is exposed communication; whether a rank is waited for cannot be told",
        remedy=one_by_one if evidence.apart else telemetry_first,
        steps=evidence.seen,
        phase="exposed_comm",
        evidence={
            "exposed_share": round(share, 4),
            "exposed_ns": round(exposed_ns),
            "steps_used": steps_used,
        },
    )


def input_bound(evidence: Evidence) -> Judgement:
    """The data phase is the largest, and above 30 % of the time, on the median rank and in most of the run."""
    steps = evidence.steps
    if len(np.unique(steps.step)) < MIN_STEPS:
        return Missing("input-bound", f"fewer than {MIN_STEPS} steps")
    shares = _phase_shares(evidence.rank, steps)
    # The lower median: of two ranks both must be held up, else it is one rank's trouble and a straggler's.
    middle = shares[np.argsort(shares[:, 0])[(len(shares) - 1) // 2]]
    if middle[0] <= DATA_SHARE or middle.argmax() != 0:
        return []
    return [
        Finding(
            code="input-bound",
            severity=severity_of(float(middle[0])),
            title=f"{middle[0]:.0%} of the time is spent waiting for data",
            remedy="Give the loader more workers (num_workers, prefetch_factor), or make samples cheaper to prepare.",
            steps=evidence.seen,
            phase="data",
            evidence={"shares": {p: round(float(s), 4) for p, s in zip(wire.PHASES, middle, strict=True)}},
        )
    ]


def _phase_shares(rank: wire.Ints, steps: wire.Steps) -> Floats:
    """What share of the time each phase takes on each rank: the median over fifths of its steps.

    One slow fetch, as the first is, changes one fifth; workers that deliver in bursts, whose median step waits for
    nothing, count in all of them.

    Returns:
        Shape [ranks, phases].
    """
    ranks, place = ranks_of(rank)
    counts = np.bincount(place, minlength=len(ranks))
    order = np.argsort(place, kind="stable")
    number = np.arange(len(rank)) - np.repeat(np.cumsum(counts) - counts, counts)
    part = place[order] * _FIFTHS + number * _FIFTHS // counts[place[order]]
    times = [getattr(steps, f"{phase}_ns")[order] for phase in wire.PHASES]
    sums = np.stack([np.bincount(part, ns, len(ranks) * _FIFTHS) for ns in times], axis=1)
    shares = sums / np.maximum(1.0, sums.sum(axis=1, keepdims=True))
    return np.asarray(np.median(shares.reshape(len(ranks), _FIFTHS, -1), axis=1))


def unused_parameters(evidence: Evidence) -> Judgement:
    """Parameters that some backward left out, by name; those left out always are told apart."""
    told: dict[int, dict[int, list[wire.Unused]]] = {}
    for rank, record in evidence.unused:
        told.setdefault(record.module, {}).setdefault(rank, []).append(record)
    findings = []
    for module, by_rank in sorted(told.items()):
        lately = {
            rank: _in_force(records, evidence.last_steps.get(rank, evidence.seen[1]))
            for rank, records in by_rank.items()
        }
        lately = {rank: records for rank, records in lately.items() if any(record.locally for record in records)}
        if lately:
            findings.append(_left_out(module, lately, evidence))
    return findings


def _left_out(module: int, lately: dict[int, list[wire.Unused]], evidence: Evidence) -> Finding:
    """What the sets of some ranks say of a module, each rank's not all empty."""
    sets = {rank: [set(record.locally) for record in records] for rank, records in lately.items()}
    always = {rank: _always(of_rank) for rank, of_rank in sets.items()}
    ever = {rank: set.union(*of_rank) for rank, of_rank in sets.items()}
    everyone = sets.keys() >= evidence.last_steps.keys()
    nobody = set.intersection(*always.values()) if everyone else set()
    names = sorted(set().union(*ever.values()))
    sometimes = sorted(set().union(*(ever[rank] - always[rank] for rank in sets)))
    all_alike = everyone and all(of_rank == set(names) for of_rank in ever.values())
    where = "on every rank" if all_alike else f"on rank {named(sorted(sets))}"
    when = " in some steps" if len(sometimes) == len(names) else ""
    skip = "Some steps skip" if sometimes else "Some ranks skip"
    return Finding(
        code="unused-parameters",
        severity="warning" if nobody else "info",
        title=f"{len(names)} parameters get no gradient {where}{when}, {names[0]} among them",
        remedy=(
            "Freeze or remove what no rank uses: it is reduced for nothing."
            if nobody
            else f"{skip} a branch: find_unused_parameters=True is needed, and costs an all-reduce."
        ),
        steps=(min(one.step for records in lately.values() for one in records if one.locally), evidence.seen[1]),
        ranks=sorted(sets),
        parameters=names[:_SHOWN],
        evidence={
            "module": module,
            "globally": sorted(nobody)[:_SHOWN],
            "locally": len(names),
            "sometimes": sometimes[:_SHOWN],
        },
    )


def _always(sets: list[set[str]]) -> set[str]:
    """What all of a rank's sets name; nothing where one of the others was trained under a single one of them.

    What was drawn once may stand for many that were not drawn yet, as of experts or of heads that take turns: the
    chance of something new is about the share of what was seen once (Good, Biometrika 40, 1953).
    """
    always, ever = set.intersection(*sets), set.union(*sets)
    once = any(sum(name not in one for one in sets) == 1 for name in ever - always)
    return set() if once else always


def _in_force(told: list[wire.Unused], last: int) -> list[wire.Unused]:
    """The sets that held in the latest steps: in `MIN_STEPS`, or where sets come back in twice as many as one held.

    So a set whose turn it is, however long that is, is not taken for one that stays.

    Args:
        told: One rank's sets of a module in the order in which it told them, each valid until the next.
        last: The rank's last step.
    """
    told = told[-LATEST_SETS:]
    turns = [following.step - record.step for record, following in pairwise(told)]
    come_back = len({tuple(record.locally) for record in told}) < len(told)
    first = last + 1 - max([MIN_STEPS, *(2 * turn for turn in turns if come_back)])
    earlier = [record for record, following in pairwise(told) if following.step > first]
    return [*earlier, told[-1]]


def find_unused_needless(evidence: Evidence) -> Judgement:
    """`find_unused_parameters` is on, and nothing was ever unused."""
    if not evidence.settings.get("find_unused_parameters"):
        return []
    if len(np.unique(evidence.steps.step)) < MIN_STEPS:
        return Missing("find-unused-needless", f"fewer than {MIN_STEPS} steps")
    if any(evidence.dropped.values()) or evidence.gaps:
        return Missing(
            "find-unused-needless", "records were dropped, or have not arrived, an unused set perhaps among them"
        )
    if evidence.absent:
        return Missing("find-unused-needless", f"nothing is known of rank {named(evidence.absent)}")
    if any(record.locally for _, record in evidence.unused):
        return []
    return [
        Finding(
            code="find-unused-needless",
            severity="info",
            title="find_unused_parameters is on, but every parameter took part in every step",
            remedy="Leave find_unused_parameters out: it costs an all-reduce a step, and torch's reducer a graph walk.",
            steps=evidence.seen,
        )
    ]


def epoch_not_set(evidence: Evidence) -> Judgement:
    """A DistributedSampler that shuffles drew the same order again: `set_epoch` was forgotten."""
    told = [(rank, event) for rank, event in evidence.events if event.kind == "sampler_without_set_epoch"]
    if not told:
        return []
    first = min((event for _, event in told), key=lambda event: event.step)
    sampler, dataset = (first.detail.get(name, "unknown") for name in ("sampler", "dataset"))
    epoch = first.detail.get("epoch", 0)
    return [
        Finding(
            code="epoch-not-set",
            severity="warning",
            title=f"Every epoch sees the data in one and the same order: {sampler} of {dataset} stays at epoch {epoch}",
            remedy="Call sampler.set_epoch(epoch) before each epoch's loop over the loader.",
            steps=(first.step, max(first.step, evidence.seen[1])),
            ranks=sorted({rank for rank, _ in told}),
            evidence={"sampler": sampler, "dataset": dataset, "epoch": epoch},
        )
    ]


def telemetry_loss(evidence: Evidence) -> Judgement:
    """Records were dropped on a rank, or batches are missing here: always said."""
    lossy = sorted(
        {rank for rank, count in evidence.dropped.items() if count}
        | {rank for rank, count in evidence.missing_batches.items() if count}
    )
    if not lossy:
        return []
    dropped, emitted = sum(evidence.dropped.values()), max(1, sum(evidence.emitted.values()))
    gaps = sum(evidence.missing_batches.values())
    lost_share = max(dropped / emitted, gaps / max(1, evidence.sent_batches))
    return [
        Finding(
            code="telemetry-loss",
            severity="warning" if lost_share > LOST_SHARE else "info",
            title=f"{dropped} of {emitted} records were dropped and {gaps} batches have not arrived",
            remedy="Look at the collector's load; send what is left in a spool with `ddpobs push`.",
            steps=evidence.seen,
            ranks=lossy,
            evidence={"dropped": evidence.dropped, "missing_batches": evidence.missing_batches},
        )
    ]


def clock_skew(evidence: Evidence) -> Judgement:
    """A wall clock is ahead of the collector's by more than a minute; one behind cannot be told from late delivery."""
    ahead = {rank: by for rank, by in evidence.ahead_ns.items() if by > _AHEAD_NS}
    if not ahead:
        return []
    ranks = sorted(ahead)
    return [
        Finding(
            code="clock-skew",
            severity="info",
            title=f"Wall clocks are up to {max(ahead.values()) / 1e9:.0f} s ahead of the collector's",
            remedy="Set the clocks of these hosts, or the collector's. Step times use neither: only dates are wrong.",
            steps=evidence.seen,
            ranks=ranks,
            evidence={"ahead_ns": ahead},
        )
    ]


CATALOGUE: tuple[Callable[[Evidence], Judgement], ...] = (
    comm_bound,
    input_bound,
    unused_parameters,
    find_unused_needless,
    epoch_not_set,
    telemetry_loss,
    clock_skew,
)
