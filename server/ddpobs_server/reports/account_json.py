"""The account of a run: its attempts' processes from the store, and the response with hours and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs.shared.words import own_cost_text
from ddpobs.wire.endings import IMPORTED
from ddpobs_server.analysis.account.parts import GROUP_TITLES, PARTS, TITLES, group_of, is_lost, is_productive
from ddpobs_server.analysis.account.rank_account import Process
from ddpobs_server.analysis.account.run_account import AttemptAccount, Launch, Total, account_of
from ddpobs_server.analysis.account.summary import account_summary
from ddpobs_server.analysis.own_cost import own_cost
from ddpobs_server.analysis.steps.joined_steps import index_ranks
from ddpobs_server.analysis.steps.waiting import waiting_ns
from ddpobs_server.reports.liveness import world_size_of
from ddpobs_server.store import Attempt, AttemptSummary, Source, Store

_NS_PER_HOUR = 3600 * 10**9
_ATTEMPTS, _RANKS = 1000, 16_384
"""Maximum number of attempts of an account, and of ranks of all its attempts, with ranks that sent nothing."""
_MOVING_ROWS = 20_000
"""Rows of steps up to which they are read for an account."""
_NO_BATCH = "no batch has arrived from it"
_NO_ACCOUNT = "no account has arrived: an end before the first step, or an old version of ddpobs"


def _stuck_ns(source: Source) -> int:
    """Time without progress at the process's end, or at its latest pulse; the signal that ends a hang ends the wait."""
    pulse, stuck = source.pulse, source.stuck_pulse
    was_ended = source.ended in {"terminated", "died"}
    if was_ended and not source.stuck_ns and pulse is not None and stuck is not None and pulse.step <= stuck.step + 1:
        return stuck.idle_ns
    return source.stuck_ns


def processes_of(sources: Sequence[Source]) -> list[Process]:
    """Return the processes of an attempt, and one without an account for each rank that sent no batch."""
    processes = [
        Process(
            rank=source.rank,
            account=source.account,
            wall_offset_ns=source.anchor.wall_ns - source.anchor.monotonic_ns,
            stuck_ns=_stuck_ns(source),
            failed=source.ended not in {"", "finished", "interrupted", IMPORTED},
            reason="" if source.account else _NO_ACCOUNT,
            host=source.hello.host if source.hello else "",
        )
        for source in sources
    ]
    absent = set(range(world_size_of(list(sources)))) - {source.rank for source in sources}
    return processes + [Process(rank, None, reason=_NO_BATCH) for rank in sorted(absent)]


def attempts_of_training(attempts: Sequence[AttemptSummary], attempt: str) -> list[AttemptSummary]:
    """Return the attempts of the training that an attempt belongs to; `attempts` are a run's, oldest first.

    After an orderly end, the next attempt begins another training under the name of the run.
    """
    training: list[AttemptSummary] = []
    for known in attempts:
        if training and training[-1].has_finished:
            if any(each.attempt == attempt for each in training):
                break
            training = []
        training.append(known)
    return training


def attempts_within_limits(attempts: Sequence[AttemptSummary], attempt: str) -> list[AttemptSummary]:
    """Return the attempts that an account covers, oldest first: the latest ones, as many as fit its limits.

    If the requested attempt is not among them, the account covers the attempts up to that one.
    """
    covered = _latest(attempts)
    if attempt not in [known.attempt for known in covered]:
        end = next((n for n, known in enumerate(attempts, 1) if known.attempt == attempt), len(attempts))
        covered = _latest(attempts[:end])
    return covered


def _latest(attempts: Sequence[AttemptSummary]) -> list[AttemptSummary]:
    ranks, covered = 0, list[AttemptSummary]()
    for attempt in reversed(attempts[-_ATTEMPTS:]):
        ranks += max(attempt.world_size, attempt.ranks)
        if covered and ranks > _RANKS:
            break
        covered.append(attempt)
    return covered[::-1]


def moving_ns_a_step(rank: wire.Ints, steps: wire.Steps) -> dict[int, float]:
    """Return the mean time of a step in which data moved, by rank, from all steps of an attempt."""
    ranks, index = index_ranks(rank)
    moving_ns = np.bincount(index, steps.exposed_comm_ns - waiting_ns(steps))
    return dict(zip(ranks.tolist(), (moving_ns / np.bincount(index)).tolist(), strict=True))


def has_few_steps(sources: Sequence[Source]) -> bool:
    """Whether an attempt's steps are read for its account: the ranks compare themselves from some ten steps on only."""
    return sum(source.last_step + 1 for source in sources) <= _MOVING_ROWS


def _launch_of(attempt: Attempt, sources: Sequence[Source], measured_ns: Mapping[int, float]) -> Launch:
    """Return an attempt as the account's input; `measured_ns` is of its steps, where they were read."""
    by_ranks_ns = {s.rank: s.moving_ns_a_step for s in sources if s.moving_ns_a_step is not None}
    ranks = {source.rank for source in sources if source.ended in ("finished", IMPORTED)}
    world_size = world_size_of(list(sources))
    is_completed = len(ranks) == world_size
    return Launch(
        attempt.attempt,
        attempt.ordinal,
        world_size,
        processes_of(sources),
        is_completed,
        {**by_ranks_ns, **measured_ns},
    )


def launches_of(
    store: Store,
    run: str,
    attempts: Sequence[Attempt],
    sources: Mapping[str, Sequence[Source]],
    moving_ns: Mapping[str, Mapping[int, float]],
) -> list[Launch]:
    """Return attempts of a run, oldest first.

    Args:
        store: Source of the rows.
        run: Key of the run.
        attempts: The attempts.
        sources: Those that were read already, by attempt.
        moving_ns: The `moving_ns_a_step` of attempts whose steps were read, by attempt.
    """
    unread = [attempt.attempt for attempt in attempts if attempt.attempt not in sources]
    by_attempt = {**sources, **(store.sources_of_attempts(run, unread) if unread else {})}
    return [
        _launch_of(attempt, by_attempt[attempt.attempt], moving_ns.get(attempt.attempt, {})) for attempt in attempts
    ]


def account_json(store: Store, run: str, attempt: str, price: float | None) -> dict[str, Any]:
    """Return the account of a training of a run, with the ranks of one attempt.

    Args:
        store: Source of the rows.
        run: Key of the run.
        attempt: The attempt whose training it is, and whose ranks are listed.
        price: Price of an hour of a GPU, or of a rank where there is none; None if it is not known.
    """
    sources = store.sources(run, attempt)
    training = attempts_of_training(store.attempt_summaries(run), attempt)
    covered = attempts_within_limits(training, attempt)
    moving_ns = moving_ns_a_step(*store.steps(run, attempt)) if has_few_steps(sources) else {}
    account = account_of(launches_of(store, run, covered, {attempt: sources}, {attempt: moving_ns}))
    cost = own_cost_json(processes_of(sources))
    devices = {source.hello.device for source in sources if source.hello}
    return {
        "run": run.rpartition("/")[2],
        "attempt": attempt,
        "unit": "rank-hour" if devices <= {"cpu"} else "gpu-hour",
        "price_per_hour": price,
        **_total_json(account, price),
        "summary": " ".join(
            filter(None, (account_summary(account), f"{own_cost_text(cost).capitalize()}." if cost else ""))
        ),
        "telemetry": cost,
        "attempts_left_out": len(training) - len(covered),
        "attempts": [
            {
                "attempt": part.attempt,
                "ordinal": part.ordinal,
                "steps": part.steps,
                "repeated_steps": part.repeated_steps,
                **_total_json(part, price),
                "ranks": _ranks_json(part) if part.attempt == attempt else [],
            }
            for part in account.attempts
        ],
        "missing": [
            f"attempt {part.ordinal}, rank {rank}: not known, because {reason}"
            for part in account.attempts
            for rank, reason in part.missing.items()
        ],
    }


def own_cost_json(processes: Sequence[Process]) -> dict[str, Any] | None:
    """Return what telemetry adds to a step, as shares of a step without it; None if it is not known."""
    measured = own_cost(processes)
    if measured is None:
        return None
    rank, cost = measured
    bounds = {"cost_ratio": cost.ratio - 1, "low_ratio": cost.low - 1, "high_ratio": cost.high - 1}
    return {**bounds, "rests": cost.pairs, "rank": rank}


def _total_json(total: Total, price: float | None) -> dict[str, Any]:
    lost_ns = sum(ns for part, ns in total.parts.items() if is_lost(part))
    return {
        "began_ns": total.began_ns or None,
        "until_ns": total.until_ns or None,
        "wall_ns": total.until_ns - total.began_ns if total.rank_ns else None,
        "rank_ns": total.rank_ns,
        "goodput": total.goodput,
        "lost_hours": lost_ns / _NS_PER_HOUR,
        "lost_cost": None if price is None else lost_ns / _NS_PER_HOUR * price,
        "parts": [
            {
                "part": part,
                "group": group_of(part),
                "group_title": GROUP_TITLES[group_of(part)],
                "title": TITLES[part],
                "rank_ns": total.parts[part],
                "share": total.share(part),
                "hours": total.parts[part] / _NS_PER_HOUR,
                "cost": None if price is None else total.parts[part] / _NS_PER_HOUR * price,
                "is_goodput": is_productive(part),
                "is_lost": is_lost(part),
            }
            for part in PARTS
            if part in total.parts
        ],
    }


def _ranks_json(attempt: AttemptAccount) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = [
        {"rank": rank, "parts_ns": parts, "reason": None} for rank, parts in attempt.by_rank.items()
    ]
    ranks += [{"rank": rank, "parts_ns": None, "reason": reason} for rank, reason in attempt.missing.items()]
    return sorted(ranks, key=lambda rank: int(rank["rank"]))
