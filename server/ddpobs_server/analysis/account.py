"""The account of a run: where its wall time went, by rank, attempt and part. The parts add up exactly.

An attempt lasts from its first process's start to its last process's latest account; each of its ranks has that wall
time. Between attempts lies a restart, which each rank of the later attempt has. All sums are rank time: of eight ranks
over one hour, eight hours. Processes are placed by their own wall clocks.

*Goodput* is the time in steps that no restart repeated, over the wall time, as in "Measuring the effectiveness of ML
training: ML Productivity Goodput" (Google Cloud, 2024), there called productive time over total time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpobs import wire

START_UP = ("import", "model", "prepare", "first_batch", "compile")
STEPS = wire.PHASES
OUTSIDE = ("evaluation", "checkpoint", "waiting", "waiting_in_steps", "unexplained")
RESTARTS = ("restart", "repeated_steps")
REST = ("open_step", "stuck", "finish", "idle", "unrecorded", "not_known")
PARTS = (*STEPS, *OUTSIDE, *START_UP, *RESTARTS, *REST)
"""All parts of the wall time."""
_GROUPS = {
    **dict.fromkeys(STEPS, "steps"),
    "open_step": "steps",
    **dict.fromkeys(OUTSIDE, "outside"),
    **dict.fromkeys(START_UP, "start_up"),
    **dict.fromkeys(RESTARTS, "restarts"),
    **dict.fromkeys(("stuck", "finish", "idle"), "idle"),
    **dict.fromkeys(("unrecorded", "not_known"), "not_known"),
}
TITLES = {
    "data": "steps: waiting for data",
    "forward": "steps: forward",
    "backward": "steps: backward",
    "exposed_comm": "steps: exposed communication",
    "optimizer": "steps: optimizer",
    "other": "steps: other",
    "open_step": "the step under way",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "waiting": "waiting at collectives between steps",
    "waiting_in_steps": "waiting in steps for a rank that is outside of its own",
    "unexplained": "between steps, not explained",
    "import": "start-up: interpreter and imports",
    "model": "start-up: process group, data sets and model",
    "prepare": "start-up: from the model to the first step",
    "first_batch": "start-up: first batch",
    "compile": "start-up: torch.compile",
    "restart": "between attempts",
    "repeated_steps": "steps that a restart repeated",
    "stuck": "stuck",
    "finish": "after the last step",
    "idle": "other ranks' start or end",
    "unrecorded": "dropped steps",
    "not_known": "not known",
}
_PRODUCTIVE = {*STEPS, "open_step"}
_OUTSIDE_KINDS = {
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "after_checkpoint": "checkpoint",
    "waiting": "waiting",
}

Parts = dict[str, int]
"""Nanoseconds by part; parts without time are left out."""


def group_of(part: str) -> str:
    """Return the group of a part: `steps`, `outside`, `start_up`, `restarts`, `idle` or `not_known`."""
    return _GROUPS[part]


def is_productive(part: str) -> bool:
    """Whether the part counts as goodput."""
    return part in _PRODUCTIVE


@dataclass(frozen=True)
class Process:
    """A process of an attempt.

    Attributes:
        rank: Its rank.
        account: Its latest account; None if none arrived.
        wall_offset_ns: Its wall clock less its monotonic clock.
        stuck_ns: Time without progress at its latest pulse, 0 if it goes on.
        reason: Why there is no account; empty if there is one.
    """

    rank: int
    account: wire.Account | None
    wall_offset_ns: int = 0
    stuck_ns: int = 0
    reason: str = ""

    @property
    def began_ns(self) -> int:
        """Start of the process on its wall clock, or of its imports if that is not known."""
        assert self.account is not None
        account = self.account
        return self.wall_offset_ns + (account.imported_ns if account.started_ns is None else account.started_ns)

    @property
    def until_ns(self) -> int:
        """End of its account on its wall clock."""
        assert self.account is not None
        return max(self.began_ns, self.wall_offset_ns + self.account.until_ns)


@dataclass(frozen=True)
class Launch:
    """An attempt, as input.

    Attributes:
        attempt: Its id.
        ordinal: Its number.
        world_size: Number of ranks.
        processes: Its processes.
        completed: All its ranks ended in order: a later attempt repeats none of its steps.
    """

    attempt: str
    ordinal: int
    world_size: int
    processes: Sequence[Process]
    completed: bool = True


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
    """

    attempt: str
    ordinal: int
    steps: int
    repeated_steps: int
    by_rank: dict[int, Parts]
    missing: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunAccount(Total):
    """Account of a run over its attempts, oldest first."""

    attempts: list[AttemptAccount]


def account_of(launches: Sequence[Launch]) -> RunAccount:
    """Return the account of a run.

    A failed attempt's steps after its last checkpoint count as repeated if a later attempt exists. If no checkpoint was
    seen, all its steps do.

    Args:
        launches: Its attempts, oldest first. An attempt without any account is left out of the sums.
    """
    attempts: list[AttemptAccount] = []
    parts: Parts = {}
    rank_ns, restart_ns = 0, 0
    for index, launch in enumerate(launches):
        attempt = _attempt(launch, is_last=index == len(launches) - 1)
        if attempts and attempt.rank_ns:
            gap_ns = max(0, attempt.began_ns - max(earlier.until_ns for earlier in attempts))
            restart_ns += gap_ns * max(1, launch.world_size)
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


def added(all_parts: Iterable[Mapping[str, int]]) -> Parts:
    """Return sums by part, in the order of `PARTS`."""
    sums: Parts = dict.fromkeys(PARTS, 0)
    for parts in all_parts:
        for part, ns in parts.items():
            sums[part] += ns
    return {part: ns for part, ns in sums.items() if ns}


def _attempt(launch: Launch, *, is_last: bool) -> AttemptAccount:
    reporting: dict[int, list[Process]] = {}
    missing: dict[int, str] = {}
    for process in launch.processes:
        if process.account is not None:
            reporting.setdefault(process.rank, []).append(process)
        else:
            missing[process.rank] = process.reason
    missing = {rank: reason for rank, reason in missing.items() if rank not in reporting}
    processes = [process for ranks in reporting.values() for process in ranks]
    began_ns = min((process.began_ns for process in processes), default=0)
    until_ns = max((process.until_ns for process in processes), default=0)
    window_ns = until_ns - began_ns
    kept_steps = _kept_steps(launch, processes, is_last=is_last)
    by_rank = {rank: _rank(reporting[rank], window_ns, kept_steps) for rank in sorted(reporting)}
    _attribute_waits(by_rank)
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
    )


def _kept_steps(launch: Launch, processes: Sequence[Process], *, is_last: bool) -> int | None:
    """Return the steps of an attempt that a later attempt continues from; None if all of them stay."""
    if launch.completed or is_last:
        return None
    return max((max(0, process.account.checkpoint_step) for process in processes if process.account), default=0)


def _rank(processes: Sequence[Process], window_ns: int, kept_steps: int | None) -> Parts:
    """Return the parts of one rank, which add up to the attempt's wall time."""
    parts = added(_process(process, kept_steps) for process in processes)
    return _fitted(parts, window_ns, "idle")


def _process(process: Process, kept_steps: int | None) -> Parts:
    """Return the parts of one process, which add up to the time from its start to the end of its account."""
    account = process.account
    assert account is not None
    parts = _start_up(account) | _steps(account)
    if kept_steps is not None and account.steps > kept_steps:
        parts |= _repeated(parts, (account.steps - kept_steps) / account.steps)
    for outside in account.outside:
        kind = _OUTSIDE_KINDS[outside.kind]
        parts[kind] = parts.get(kind, 0) + outside.total_ns
    parts["unexplained"], parts["unrecorded"] = account.between_ns, account.unrecorded_ns
    parts["stuck"] = min(process.stuck_ns, account.open_step_ns)
    parts["open_step"] = account.open_step_ns - parts["stuck"]
    if kept_steps is not None:
        parts["repeated_steps"] = parts.get("repeated_steps", 0) + parts.pop("open_step")
    remainder = "finish" if account.finished else "unexplained"
    return _fitted(parts, process.until_ns - process.began_ns, remainder)


def _start_up(account: wire.Account) -> Parts:
    """Return the parts of the start-up that are no part of the steps, and the first batch."""
    began_ns = account.imported_ns if account.started_ns is None else account.started_ns
    return {
        "import": max(0, account.imported_ns - began_ns),
        "model": max(0, account.ready_ns - account.imported_ns),
        "prepare": account.prepare_ns,
        "first_batch": account.first_batch_ns,
    }


def _steps(account: wire.Account) -> Parts:
    """Return the phases without the first batch and without compilation, which ran in forward or in backward."""
    parts = dict(zip(wire.PHASES, account.phases_ns, strict=True))
    parts["data"] = max(0, parts["data"] - account.first_batch_ns)
    compile_ns = account.compile_ns
    for phase in ("forward", "backward", "other"):
        taken_ns = min(compile_ns, parts[phase])
        parts[phase] -= taken_ns
        compile_ns -= taken_ns
    parts["compile"] = account.compile_ns - compile_ns
    return parts


def _repeated(parts: Parts, share: float) -> Parts:
    """Move a share of each phase to the steps that were repeated."""
    moved = {phase: int(parts[phase] * share) for phase in wire.PHASES}
    return {phase: parts[phase] - moved[phase] for phase in wire.PHASES} | {"repeated_steps": sum(moved.values())}


def _fitted(parts: Mapping[str, int], wall_ns: int, remainder: str) -> Parts:
    """Return parts that add up to the wall time: `rest` gets a remainder, and the last parts lose an excess."""
    fitted: Parts = {}
    left_ns = max(0, wall_ns)
    for part in PARTS:
        fitted[part] = min(max(0, parts.get(part, 0)), left_ns)
        left_ns -= fitted[part]
    fitted[remainder] += left_ns
    return {part: ns for part, ns in fitted.items() if ns}


def _attribute_waits(by_rank: dict[int, Parts]) -> None:
    """Move waits for a rank that is outside of its steps out of the other ranks' exposed communication.

    In synchronous training all ranks take the same time. If a rank spends more outside of its steps than another, the
    other waits for it, at a collective between steps or in its next step. The wait is at most the difference outside of
    steps, and at most the difference in exposed communication.
    """
    if len(by_rank) < 2:
        return
    outside = {rank: _outside_ns(parts) for rank, parts in by_rank.items()}
    last = max(outside, key=lambda rank: (outside[rank], -rank))
    base_ns = by_rank[last].get("exposed_comm", 0)
    for rank, parts in by_rank.items():
        exposed_ns = parts.get("exposed_comm", 0)
        wait_ns = min(outside[last] - outside[rank], exposed_ns - base_ns)
        if wait_ns > 0:
            parts["exposed_comm"] = exposed_ns - wait_ns
            parts["waiting_in_steps"] = wait_ns


def _outside_ns(parts: Parts) -> int:
    return sum(parts.get(part, 0) for part in ("evaluation", "checkpoint", "waiting", "unexplained"))
