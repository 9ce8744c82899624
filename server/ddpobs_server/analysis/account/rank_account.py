"""The account of one rank: the parts of its processes, and its waits for a rank that is outside of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpobs import wire
from ddpobs_server.analysis.account.parts import PARTS, WAITING, Parts, added

_OUTSIDE_KINDS = {
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "after_checkpoint": "checkpoint",
    "waiting": "waiting",
    "resting": "resting",
}

_WAITS = {
    "waiting_in_steps": ("evaluation", "checkpoint", "waiting", "unexplained"),
    "waiting_for_compile": ("recompile",),
}
"""Parts that are waits in steps, and the parts of another rank that cause them."""


@dataclass(frozen=True)
class Process:
    """A process of an attempt.

    Attributes:
        rank: Its rank.
        account: Its latest account; None if none arrived.
        wall_offset_ns: Its wall clock less its monotonic clock.
        stuck_ns: Time without progress at its latest pulse, 0 if it goes on.
        failed: It ended in another way than in order, so its last step did not end.
        reason: Why there is no account; empty if there is one.
        host: Its host; empty if it is not known.
    """

    rank: int
    account: wire.Account | None
    wall_offset_ns: int = 0
    stuck_ns: int = 0
    failed: bool = False
    reason: str = ""
    host: str = ""

    @property
    def began_ns(self) -> int:
        """Start of the process on its wall clock, or of its imports if that is not known."""
        assert self.account is not None
        account = self.account
        return self.wall_offset_ns + (account.imported_ns if account.started_ns is None else account.started_ns)

    @property
    def ready_ns(self) -> int:
        """Time at which its module was ready, on its wall clock."""
        assert self.account is not None
        return self.wall_offset_ns + self.account.ready_ns

    @property
    def until_ns(self) -> int:
        """End of its account on its wall clock."""
        assert self.account is not None
        return max(self.began_ns, self.wall_offset_ns + self.account.until_ns)


def parts_of_rank(processes: Sequence[Process], window_ns: int, kept_steps: int | None) -> Parts:
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
    in_step_ns = min(process.stuck_ns, account.open_step_ns)
    saved_ns = min(_work_after_save(account), process.stuck_ns - in_step_ns)
    parts["stuck"] = in_step_ns + saved_ns
    parts["checkpoint"] = parts.get("checkpoint", 0) - saved_ns
    last_step_ns = account.open_step_ns - in_step_ns
    if kept_steps is not None:
        parts["repeated_steps"] = parts.get("repeated_steps", 0) + last_step_ns
    else:
        parts["unfinished_step" if process.failed else "open_step"] = last_step_ns
    remainder = "finish" if account.finished else "unexplained"
    return _fitted(parts, process.until_ns - process.began_ns, remainder)


def _work_after_save(account: wire.Account) -> int:
    """Time since the latest save if at most the open step followed it: a rank that hangs then does not save."""
    intervals = [(interval, each.kind) for each in account.outside for interval in each.intervals]
    latest, kind = max(intervals, key=lambda item: item[0].ended_ns, default=(None, ""))
    is_open = (
        latest is not None and latest.ended_ns >= account.until_ns - account.open_step_ns and kind == "after_checkpoint"
    )
    return latest.ended_ns - latest.began_ns if latest is not None and is_open else 0


def _start_up(account: wire.Account) -> Parts:
    """Return the parts of the start-up that are no part of the steps, and the first batch."""
    began_ns = account.imported_ns if account.started_ns is None else account.started_ns
    return {
        "import": max(0, account.imported_ns - began_ns),
        "model": max(0, account.ready_ns - account.imported_ns - account.model_wait_ns),
        "prepare": max(0, account.prepare_ns - account.prepare_wait_ns),
        "start_waiting": account.model_wait_ns + account.prepare_wait_ns,
        "first_batch": account.first_batch_ns,
    }


def _steps(account: wire.Account) -> Parts:
    """Return the phases without the first batch and without compilation."""
    parts = dict(zip(wire.PHASES, account.phases_ns, strict=True))
    parts["data"] = max(0, parts["data"] - account.first_batch_ns)
    compile_ns = 0
    for phase, compiled_ns in zip(wire.PHASES, account.compile_phases_ns or _guessed(account, parts), strict=False):
        taken_ns = min(compiled_ns, parts[phase])
        parts[phase] -= taken_ns
        compile_ns += taken_ns
    parts["recompile"] = min(account.recompile_ns, compile_ns)
    parts["compile"] = compile_ns - parts["recompile"]
    return parts


def _guessed(account: wire.Account, parts: Parts) -> list[int]:
    """Return the time in torch.compile by phase for clients that do not report it so: it is in forward first."""
    left_ns, taken_ns = account.compile_ns, dict.fromkeys(wire.PHASES, 0)
    for phase in ("forward", "backward", "other"):
        taken_ns[phase] = min(left_ns, parts[phase])
        left_ns -= taken_ns[phase]
    return list(taken_ns.values())


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


def attribute_waits(by_rank: dict[int, Parts]) -> None:
    """Move waits for a rank that is outside of its steps, or compiles, out of the others' exposed communication.

    In synchronous training all ranks take the same time. If a rank spends more outside of its steps than another, the
    other waits for it, at a collective between steps or in its next step. The wait is at most the difference outside of
    steps, and at most the difference in exposed communication. The same holds for compilations in mid-run.
    """
    if len(by_rank) < 2:
        return
    for waits, causes in _WAITS.items():
        caused = {rank: sum(parts.get(part, 0) for part in causes) for rank, parts in by_rank.items()}
        last = max(caused, key=lambda rank: (caused[rank], -rank))
        base_ns = by_rank[last].get("exposed_comm", 0)
        for rank, parts in by_rank.items():
            exposed_ns = parts.get("exposed_comm", 0)
            wait_ns = min(caused[last] - caused[rank], exposed_ns - base_ns)
            if wait_ns > 0:
                parts["exposed_comm"] = exposed_ns - wait_ns
                parts[waits] = wait_ns


def split_communication(by_rank: Mapping[int, Parts], moving_ns: Mapping[int, float]) -> None:
    """Divide the ranks' exposed communication into waiting for later ranks and moving data.

    Args:
        by_rank: Parts of each rank, which are changed.
        moving_ns: Time in which data moved, by rank, as the ranks measured it. A rank without it moved data for as long
            as the rank with the least exposed communication: that is at most too long if ranks are late in turn.
    """
    least_ns = min((parts.get("exposed_comm", 0) for parts in by_rank.values()), default=0)
    for rank, parts in by_rank.items():
        exposed_ns = parts.get("exposed_comm", 0)
        waiting_ns = max(0, exposed_ns - round(moving_ns.get(rank, least_ns)))
        if waiting_ns > 0:
            parts["exposed_comm"], parts[WAITING] = exposed_ns - waiting_ns, waiting_ns
