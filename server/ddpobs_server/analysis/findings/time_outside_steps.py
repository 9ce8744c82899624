"""Finding `time-outside-steps`: the run's wall time goes into something else than steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ddpobs.shared.quantities import duration
from ddpobs.shared.words import format_ranks, percent
from ddpobs_server.analysis.account.parts import START_UP, TITLES, Parts, added, group_of
from ddpobs_server.analysis.account.rank_account import Process
from ddpobs_server.analysis.account.run_account import RunAccount
from ddpobs_server.analysis.evidence import MIN_STEPS, Evidence, Judgement
from ddpobs_server.analysis.finding import Facts, Finding, Gain, Interval, NotJudged, severity_of

CODES = ("time-outside-steps",)
OUTSIDE_SHARE = 0.1
"""Maximum share of the run's wall time outside of steps that is no finding."""
_ORDINARY_NS = 60 * 10**9
"""Start-up, and time after the last step, that does not count: the shorter the run, the larger its share."""
_MIN_NS = 10**9
_WAITS = ("waiting", "waiting_in_steps")
_START_WAIT = "start_waiting"
"""A part of the start-up in which a rank waits for another one's."""
_MAX_INTERVALS = 32


@dataclass(frozen=True)
class TimeOutsideStepsFacts(Facts):
    """The account of the run's wall time.

    Attributes:
        wall_ns: Wall time of a rank.
        lost_ns: Time that the cause and the waits for it take, as the mean of the ranks.
        goodput: Share of the wall time in steps that no restart repeated; None if it is not known.
        shares_of_run: Share of each part.
        titles: Title of each part.
    """

    wall_ns: int
    lost_ns: int
    goodput: float | None
    shares_of_run: dict[str, float]
    titles: dict[str, str]


FACTS = (TimeOutsideStepsFacts,)


class _Cause(NamedTuple):
    """A cause of time outside of steps.

    Attributes:
        parts: Its parts of the account.
        does: Activity of a rank, and of several. A subject and a verb for what no rank does.
        remedy: Remedy, as a sentence.
        kinds: Kinds of `wire.Outside` with its intervals.
    """

    parts: tuple[str, ...]
    does: tuple[str, str] | str
    remedy: str
    kinds: tuple[str, ...] = ()

    @property
    def own(self) -> tuple[str, ...]:
        """Its parts in which a rank does not wait for another."""
        return tuple(part for part in self.parts if part != _START_WAIT)


_CAUSES = (
    _Cause(
        ("checkpoint",),
        ("saves checkpoints", "save checkpoints"),
        "Save less often, or in the background (torch.distributed.checkpoint.async_save)",
        ("checkpoint", "after_checkpoint"),
    ),
    _Cause(
        ("evaluation",),
        ("evaluates", "evaluate"),
        "Evaluate less often, or on fewer batches",
        ("evaluation",),
    ),
    _Cause(
        ("unexplained",),
        ("works between steps", "work between steps"),
        "Look at the code between two steps: logging, uploads, sampling from the model",
    ),
    _Cause(
        ("restart", "repeated_steps"),
        "Restarts and repeated steps take",
        "Save checkpoints more often, and see why the attempts ended (`crash`)",
    ),
    _Cause(
        START_UP,
        ("starts up", "start up"),
        "Make the start cheaper: see the account for its parts",
    ),
    _Cause(
        ("finish",),
        ("works on after the last step", "work on after the last step"),
        "Look at the code after the training loop",
    ),
)


def time_outside_steps(evidence: Evidence) -> Judgement:
    """Judge a run of whose wall time more than 10 % is outside of steps, on the mean of its ranks.

    A start-up and an end of less than a minute do not count, nor does the time of a hang, which is its own finding.
    """
    account = evidence.account
    if account is None or not any(attempt.by_rank for attempt in account.attempts):
        return []  # Clients before version 0.1 send no account.
    missing: list[NotJudged] = []
    if reasons := account.attempts[-1].missing:
        by_reason: dict[str, list[int]] = {}
        for rank, reason in reasons.items():
            by_reason.setdefault(reason, []).append(rank)
        missing = [
            NotJudged("time-outside-steps", f"not known for {format_ranks(ranks)}, because {reason}")
            for reason, ranks in by_reason.items()
        ]
    if account.rank_ns <= 0 or sum(attempt.steps for attempt in account.attempts) < MIN_STEPS:
        return [NotJudged("time-outside-steps", f"fewer than {MIN_STEPS} steps"), *missing]
    losses = _losses(account)
    share = sum(losses.values()) / account.rank_ns
    waits_ns = sum(account.parts.get(part, 0) for part in _WAITS)
    share += waits_ns / account.rank_ns
    if share <= OUTSIDE_SHARE or share * account.rank_ns < _MIN_NS * _ranks(account):
        return missing
    return [_finding(evidence, account, losses, share), *missing]


def _losses(account: RunAccount) -> dict[_Cause, int]:
    """Return the rank time that each cause takes, without the waits of other ranks."""
    losses = {}
    for cause in _CAUSES:
        lost_ns = sum(account.parts.get(part, 0) for part in cause.parts)
        ordinary_ns = _ORDINARY_NS * _ranks(account) if cause.parts in (START_UP, ("finish",)) else 0
        if lost_ns > ordinary_ns:
            losses[cause] = lost_ns
    return losses


def _ranks(account: RunAccount) -> int:
    return max(len(attempt.by_rank) + len(attempt.missing) for attempt in account.attempts) or 1


def _finding(evidence: Evidence, account: RunAccount, losses: dict[_Cause, int], share: float) -> Finding:
    by_rank = _by_rank(account)
    waits_ns = sum(account.parts.get(part, 0) for part in _WAITS)
    # Waits of the start-up are in its cause, but are of the ranks that do not cause it.
    # The worst cause on one rank: a thousand ranks may wait for the checkpoint of a single one.
    main = max(losses, key=lambda cause: max(_taken(parts, cause.own) for parts in by_rank.values()), default=None)
    worst_ns = max((_taken(parts, main.own) for parts in by_rank.values()), default=0) if main else 0
    waits = (*_WAITS, _START_WAIT) if main is not None and main.parts == START_UP else _WAITS
    waiting_ns = max((_taken(parts, waits) for parts in by_rank.values()), default=0)
    explains = main is not None and worst_ns >= waiting_ns / 2
    ranks = _leaders(by_rank, main.own if main is not None and explains else waits)
    wall_ns = account.rank_ns / _ranks(account)
    if main is not None and explains:
        does, taken_ns = main.does, worst_ns
        if isinstance(does, str):
            ranks, taken_ns = sorted(by_rank), losses[main] // _ranks(account)
        others = _others_wait(len(by_rank) - len(ranks)) if waiting_ns > worst_ns / 10 else ""
        remedy = main.remedy
        if waits != _WAITS and len(ranks) < len(by_rank):
            others += _start_wait_place(evidence.processes, ranks)
            remedy = "Prepare data once, before the job, or on each rank a part of it"
        if len(ranks) < len(by_rank) and main.kinds:
            remedy += ", or divide the work over all ranks"
        lost_ns = losses[main] + waits_ns
    else:
        does, taken_ns, others = ("waits at collectives", "wait at collectives"), waiting_ns, ""
        remedy = "Find out which rank arrives late at the collectives between steps"
        lost_ns = waits_ns
    saved = lost_ns / account.rank_ns
    steps = max(1, *(attempt.steps for attempt in account.attempts))
    intervals = _intervals(evidence.processes, main.kinds if main and explains else ("waiting",), ranks)
    held_steps = [(interval["from"], interval["to"]) for interval in intervals]
    steps_share = account.share(*(part for part in account.parts if group_of(part) == "steps"))
    return Finding(
        code="time-outside-steps",
        severity=severity_of(share),
        verdict=_verdict(ranks, len(by_rank), does, taken_ns / wall_ns),
        measure=f"{duration(taken_ns)} of {duration(wall_ns)}{others}; steps take {percent(steps_share)}",
        where=evidence.where(ranks),
        remedy=f"{remedy}.",
        steps=(min(first for first, _ in held_steps), max(last for _, last in held_steps))
        if held_steps
        else evidence.step_range,
        ranks=ranks,
        evidence=TimeOutsideStepsFacts(
            wall_ns=round(wall_ns),
            lost_ns=round(lost_ns / _ranks(account)),
            goodput=None if account.goodput is None else round(account.goodput, 4),
            shares_of_run={part: round(account.share(part), 4) for part in account.parts},
            titles={part: TITLES[part] for part in account.parts},
        ),
        gain=Gain(
            round(lost_ns / _ranks(account) / steps),
            round(saved, 4),
            1.0,
            whole="run",
            run_ns=round(lost_ns / _ranks(account)),
        ),
        intervals=tuple(
            Interval(bounds["from"], bounds["to"], bounds["began_ns"], bounds["ended_ns"]) for bounds in intervals
        ),
    )


def _verdict(ranks: list[int], count: int, does: tuple[str, str] | str, share: float) -> str:
    if isinstance(does, str):
        return f"{does} {percent(share)} of the run"
    subject = "All ranks" if len(ranks) == count > 1 else format_ranks(ranks).capitalize()
    return f"{subject} {does[len(ranks) > 1]} for {percent(share)} of the run"


def _others_wait(count: int) -> str:
    return {0: "", 1: " while the other rank waits"}.get(count, " while the other ranks wait")


def _start_wait_place(processes: Sequence[Process], starting: list[int]) -> str:
    """Where another rank waited longest for those that were still starting up; empty if it is not known."""
    others = [process.account for process in processes if process.account and process.rank not in starting]
    waited = max(others, key=lambda account: account.model_wait_ns + account.prepare_wait_ns, default=None)
    return f" ({waited.start_wait_place})" if waited is not None and waited.start_wait_place else ""


def _by_rank(account: RunAccount) -> dict[int, Parts]:
    """Return the parts of each rank over all attempts; each rank has the whole time between attempts."""
    ranks = {rank for attempt in account.attempts for rank in attempt.by_rank}
    restart_ns = account.parts.get("restart", 0) // _ranks(account)
    return {
        rank: added([*(attempt.by_rank.get(rank, {}) for attempt in account.attempts), {"restart": restart_ns}])
        for rank in sorted(ranks)
    }


def _taken(parts: Parts, names: Sequence[str]) -> int:
    return sum(parts.get(name, 0) for name in names)


def _leaders(by_rank: dict[int, Parts], names: Sequence[str]) -> list[int]:
    """Return the ranks with at least half of the largest time in these parts."""
    taken = {rank: _taken(parts, names) for rank, parts in by_rank.items()}
    most = max(taken.values(), default=0)
    return [rank for rank, ns in taken.items() if 2 * ns >= most > 0]


def _intervals(processes: Sequence[Process], kinds: Sequence[str], ranks: list[int]) -> list[dict[str, int]]:
    """Return where the first of these ranks was outside of its steps: steps, and times on its wall clock."""
    found = [
        {
            "from": interval.first_step,
            "to": interval.last_step,
            "began_ns": interval.began_ns + process.wall_offset_ns,
            "ended_ns": interval.ended_ns + process.wall_offset_ns,
        }
        for process in processes
        if process.account is not None and ranks and process.rank == ranks[0]
        for outside in process.account.outside
        if outside.kind in kinds
        for interval in outside.intervals
    ]
    return _joined(sorted(found, key=lambda interval: interval["began_ns"]))[-_MAX_INTERVALS:]


def _joined(intervals: list[dict[str, int]]) -> list[dict[str, int]]:
    """Join intervals that follow each other: a save, and the work after it."""
    joined: list[dict[str, int]] = []
    for interval in intervals:
        if joined and interval["began_ns"] <= joined[-1]["ended_ns"] + 10**6 and interval["from"] <= joined[-1]["to"]:
            joined[-1] = joined[-1] | {
                "to": max(joined[-1]["to"], interval["to"]),
                "ended_ns": max(joined[-1]["ended_ns"], interval["ended_ns"]),
            }
        else:
            joined.append(dict(interval))
    return joined
