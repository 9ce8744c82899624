"""The other findings: each a function of the evidence that gives findings, or says what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.findings import Finding, Missing, severity_of
from ddpobs_server.analysis.joins import Joined

MIN_STEPS = 20
COMM_SHARE = 0.3
"""Exposed communication above this share of the step is an alarm."""
DATA_SHARE = 0.3
_SHOWN = 50
_AHEAD_NS = 60 * 10**9


@dataclass(frozen=True)
class Evidence:
    """Everything a finding may rest on.

    Attributes:
        rank: Of each row of `steps`.
        steps: The steps looked at, all ranks.
        joined: Those in which all ranks can be compared.
        unused: (rank, unused set) as told.
        settings: The reducer's settings.
        emitted: Records emitted, by rank.
        dropped: Records dropped, by rank.
        missing_batches: Gaps in the sequence numbers, by rank.
        events: (rank, event) as told.
        ahead_ns: How far each rank's wall clock is ahead of the collector's.
    """

    rank: wire.Ints
    steps: wire.Steps
    joined: Joined
    unused: list[tuple[int, wire.Unused]]
    settings: dict[str, wire.Scalar]
    emitted: dict[int, int]
    dropped: dict[int, int]
    missing_batches: dict[int, int]
    events: list[tuple[int, wire.Event]] = field(default_factory=list)
    ahead_ns: dict[int, int] = field(default_factory=dict)

    @property
    def seen(self) -> tuple[int, int]:
        """First and last step looked at."""
        return (int(self.steps.step.min()), int(self.steps.step.max())) if len(self.steps.step) else (0, 0)


Judgement = list[Finding] | Missing


def comm_bound(evidence: Evidence) -> Judgement:
    """Exposed communication above 30 % of the step; waiting for a late rank is told apart from moving bytes."""
    joined = evidence.joined
    if len(joined) < MIN_STEPS:
        return Missing("comm-bound", f"{len(joined)} of {MIN_STEPS} steps in which all ranks can be compared")
    share = float(np.median(joined.exposed_ns.sum(axis=0) / joined.wall_ns.sum(axis=0)))
    if share <= COMM_SHARE:
        return []
    exposed_ns = float(joined.exposed_ns.mean())
    waits = joined.own_ns.max(axis=1, keepdims=True) - joined.own_ns
    waiting_ns = float(np.minimum(waits, joined.exposed_ns).mean())
    mostly_waiting = waiting_ns > exposed_ns / 2
    reason = "most of it waiting for the last rank" if mostly_waiting else "most of it moving bytes"
    remedy = (
        "Find out why a rank is late: a faster network would not help."
        if mostly_waiting
        else "Compress gradients, accumulate over several micro-batches with no_sync, or use a faster link."
    )
    return [
        Finding(
            code="comm-bound",
            severity=severity_of(share - waiting_ns / float(joined.wall_ns.mean())) if not mostly_waiting else "info",
            title=f"{share:.0%} of every step is exposed communication, {reason}",
            remedy=remedy,
            steps=evidence.seen,
            phase="exposed_comm",
            evidence={
                "exposed_share": round(share, 4),
                "exposed_ns": round(exposed_ns),
                "waiting_ns": round(waiting_ns),
                "moving_ns": round(exposed_ns - waiting_ns),
                "steps_used": len(joined),
            },
        )
    ]


def input_bound(evidence: Evidence) -> Judgement:
    """The data phase is the largest, and above 30 % of the step, on the median rank."""
    steps = evidence.steps
    if len(np.unique(steps.step)) < MIN_STEPS:
        return Missing("input-bound", f"fewer than {MIN_STEPS} steps")
    ranks = np.unique(evidence.rank)
    sums = np.array([[float(getattr(steps, f"{p}_ns")[evidence.rank == r].sum()) for p in wire.PHASES] for r in ranks])
    shares = sums / np.maximum(1.0, sums.sum(axis=1, keepdims=True))
    # The lower median: of two ranks both must be held up, else it is one rank's trouble and a straggler's.
    middle = shares[np.argsort(shares[:, 0])[(len(ranks) - 1) // 2]]
    if middle[0] <= DATA_SHARE or middle.argmax() != 0:
        return []
    return [
        Finding(
            code="input-bound",
            severity=severity_of(float(middle[0])),
            title=f"{middle[0]:.0%} of every step is spent waiting for data",
            remedy="Give the loader more workers (num_workers, prefetch_factor), or make samples cheaper to prepare.",
            steps=evidence.seen,
            phase="data",
            evidence={"shares": {p: round(float(s), 4) for p, s in zip(wire.PHASES, middle, strict=True)}},
        )
    ]


def unused_parameters(evidence: Evidence) -> Judgement:
    """Parameters that some backward left out, by name."""
    latest = {(rank, record.module): record for rank, record in evidence.unused}
    findings = []
    for module in sorted({module for _, module in latest}):
        records = {rank: record for (rank, of), record in latest.items() if of == module and record.locally}
        if not records:
            continue
        locally = {rank: set(record.locally) for rank, record in records.items()}
        everyone = len(records) == len(np.unique(evidence.rank))
        nobody = set.intersection(*locally.values()) if everyone else set()
        names = sorted(set().union(*locally.values()))
        where = "on every rank" if nobody == set(names) else f"on rank {', '.join(map(str, sorted(records)))}"
        findings.append(
            Finding(
                code="unused-parameters",
                severity="warning" if nobody else "info",
                title=f"{len(names)} parameters get no gradient {where}, {names[0]} among them",
                remedy=(
                    "Freeze or remove what no rank uses: it is reduced for nothing."
                    if nobody
                    else "Some ranks skip a branch: find_unused_parameters=True is needed, and costs an all-reduce."
                ),
                steps=(min(record.step for record in records.values()), evidence.seen[1]),
                ranks=sorted(records),
                parameters=names[:_SHOWN],
                evidence={"module": module, "globally": sorted(nobody)[:_SHOWN], "locally": len(names)},
            )
        )
    return findings


def find_unused_needless(evidence: Evidence) -> Judgement:
    """`find_unused_parameters` is on, and nothing was ever unused."""
    if not evidence.settings.get("find_unused_parameters"):
        return []
    if len(np.unique(evidence.steps.step)) < MIN_STEPS:
        return Missing("find-unused-needless", f"fewer than {MIN_STEPS} steps")
    if any(evidence.dropped.values()):
        return Missing("find-unused-needless", "records were dropped, an unused set perhaps among them")
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
    return [
        Finding(
            code="telemetry-loss",
            severity="warning" if dropped / emitted > 0.01 else "info",
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
