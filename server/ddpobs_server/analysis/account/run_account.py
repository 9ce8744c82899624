"""The account of a run: where its wall time went, by rank, attempt and part. The parts add up exactly.

An attempt lasts from its first process's start to its last process's latest account; each of its ranks has that wall
time. Between attempts lies a restart, which each rank of the later attempt has. All sums are rank time: of eight ranks
over one hour, eight hours. Processes are placed by their own wall clocks. Building a DDP module is collective, so all
ranks are ready at one time; a rank whose wall clock differs from this by more than a minute is placed by it.

*Goodput* is the time in steps that no restart repeated, over the wall time, as in "Measuring the effectiveness of ML
training: ML Productivity Goodput" (Google Cloud, 2024), there called productive time over total time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median_low

from ddpobs_server.analysis.account.parts import Parts, added, group_of, is_productive
from ddpobs_server.analysis.account.rank_account import (
    Process,
    attribute_waits,
    parts_of_rank,
    split_communication,
)

_CLOCK_ERROR_NS = 60 * 10**9
"""Maximum difference between the times at which two ranks are ready that is not an error of their wall clocks."""


@dataclass(frozen=True)
class Launch:
    """An attempt, as input.

    Attributes:
        attempt: Its id.
        ordinal: Its number.
        world_size: Number of ranks.
        processes: Its processes.
        completed: All its ranks ended in order: a later attempt repeats none of its steps.
        moving_ns: Mean time of a step in which data moved and the rank did not wait, by rank, where it is known.
    """

    attempt: str
    ordinal: int
    world_size: int
    processes: Sequence[Process]
    completed: bool = True
    moving_ns: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Total:
    """Parts that add up to `ranks` times the wall time."""

    began_ns: int
    until_ns: int
    rank_ns: int
    parts: Parts

    def share(self, *parts: str) -> float:
        """Return the share of these parts in the rank time."""
        return sum(self.parts.get(part, 0) for part in parts) / self.rank_ns if self.rank_ns else 0.0

    def group_shares(self) -> dict[str, float]:
        """Return the share of each group of parts in the rank time."""
        shares: dict[str, float] = {}
        for part in self.parts:
            shares[group_of(part)] = shares.get(group_of(part), 0.0) + self.share(part)
        return shares

    @property
    def goodput(self) -> float | None:
        """Time in steps that no restart repeated, over the wall time; None if nothing is known."""
        known_ns = self.rank_ns - self.parts.get("not_known", 0)
        if known_ns <= 0:
            return None
        return sum(ns for part, ns in self.parts.items() if is_productive(part)) / known_ns


@dataclass(frozen=True)
class AttemptAccount(Total):
    """Account of one attempt.

    Attributes:
        attempt: Its id.
        ordinal: Its number.
        steps: Steps that ended, on the rank with the most.
        repeated_steps: Of them those that a later attempt repeated.
        by_rank: Parts of each rank; they add up to the attempt's wall time.
        missing: Reason for each rank without an account.
        hosts: Host by rank, where it is known.
        gap_ns: Time since the end of the earlier attempts; 0 for the first.
    """

    attempt: str
    ordinal: int
    steps: int
    repeated_steps: int
    by_rank: dict[int, Parts]
    missing: dict[int, str] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    gap_ns: int = 0


@dataclass(frozen=True)
class RunAccount(Total):
    """Account of a training of a run over its attempts, oldest first."""

    attempts: list[AttemptAccount]


def account_of(launches: Sequence[Launch]) -> RunAccount:
    """Return the account of one training.

    A failed attempt's steps after its last checkpoint count as repeated if a later attempt made a step. If no
    checkpoint was seen, all its steps do.

    Args:
        launches: Its attempts, oldest first, without those of earlier trainings under the same name. An attempt
            without any account is left out of the sums.
    """
    attempts: list[AttemptAccount] = []
    parts: Parts = {}
    rank_ns, restart_ns = 0, 0
    for index, launch in enumerate(launches):
        attempt = _attempt(launch, is_repeated=not launch.completed and any(map(_has_steps, launches[index + 1 :])))
        if attempts and attempt.rank_ns:
            gap_ns = max(0, attempt.began_ns - max(earlier.until_ns for earlier in attempts))
            restart_ns += gap_ns * max(1, launch.world_size)
            attempt = replace(attempt, gap_ns=gap_ns)
        if attempt.rank_ns or not attempts:
            rank_ns += attempt.rank_ns
            parts = added([parts, attempt.parts])
        attempts.append(attempt)
    if restart_ns:
        parts["restart"] = restart_ns
    reporting = [attempt for attempt in attempts if attempt.rank_ns]
    began_ns = min((attempt.began_ns for attempt in reporting), default=0)
    until_ns = max((attempt.until_ns for attempt in reporting), default=0)
    return RunAccount(began_ns, until_ns, rank_ns + restart_ns, parts, attempts)


def _has_steps(launch: Launch) -> bool:
    return any(process.account is not None and process.account.steps > 0 for process in launch.processes)


def _attempt(launch: Launch, *, is_repeated: bool) -> AttemptAccount:
    reporting: dict[int, list[Process]] = {}
    missing: dict[int, str] = {}
    for process in _with_common_clock(launch.processes):
        if process.account is not None:
            reporting.setdefault(process.rank, []).append(process)
        else:
            missing[process.rank] = process.reason
    missing = {rank: reason for rank, reason in missing.items() if rank not in reporting}
    processes = [process for ranks in reporting.values() for process in ranks]
    began_ns = min((process.began_ns for process in processes), default=0)
    until_ns = max((process.until_ns for process in processes), default=0)
    window_ns = until_ns - began_ns
    kept_steps = _kept_steps(processes) if is_repeated else None
    by_rank = {rank: parts_of_rank(reporting[rank], window_ns, kept_steps) for rank in sorted(reporting)}
    attribute_waits(by_rank)
    if len(by_rank) >= launch.world_size:  # Waiting for a rank without telemetry looks like moving data.
        split_communication(by_rank, _moving_ns(launch, reporting, kept_steps))
    ranks = max(launch.world_size, len(by_rank) + len(missing))
    sums = added([*by_rank.values(), {"not_known": window_ns * (ranks - len(by_rank))}])
    steps = max((process.account.steps for process in processes if process.account), default=0)
    return AttemptAccount(
        began_ns=began_ns,
        until_ns=until_ns,
        rank_ns=window_ns * ranks,
        parts=sums,
        attempt=launch.attempt,
        ordinal=launch.ordinal,
        steps=steps,
        repeated_steps=0 if kept_steps is None else max(0, steps - kept_steps),
        by_rank=by_rank,
        missing=missing,
        hosts={process.rank: process.host for process in launch.processes if process.host},
    )


def _moving_ns(launch: Launch, reporting: Mapping[int, Sequence[Process]], kept_steps: int | None) -> dict[int, float]:
    """Return the time in which data moved in the steps that no later attempt repeated, by rank, where it is known."""
    steps = {rank: sum(p.account.steps for p in processes if p.account) for rank, processes in reporting.items()}
    kept = {rank: count if kept_steps is None else min(count, kept_steps) for rank, count in steps.items()}
    return {rank: ns * kept[rank] for rank, ns in launch.moving_ns.items() if rank in kept}


def _with_common_clock(processes: Sequence[Process]) -> list[Process]:
    """Return the processes with corrected wall clocks: a host's clock may be wrong, or set while ranks start."""
    reporting = sorted((p for p in processes if p.account is not None), key=lambda p: (p.rank, p.ready_ns))
    ready_ns = {rank: next(of_rank).ready_ns for rank, of_rank in groupby(reporting, key=lambda p: p.rank)}
    if not ready_ns:
        return list(processes)
    common_ns = median_low(ready_ns.values())
    errors = {rank: ns - common_ns for rank, ns in ready_ns.items() if abs(ns - common_ns) > _CLOCK_ERROR_NS}
    return [replace(p, wall_offset_ns=p.wall_offset_ns - errors.get(p.rank, 0)) for p in processes]


def _kept_steps(processes: Sequence[Process]) -> int:
    """Return the steps of a failed attempt that a later attempt continues from."""
    return max((max(0, process.account.checkpoint_step) for process in processes if process.account), default=0)
