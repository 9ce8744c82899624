"""Ranks that are slow in turn: the slowness moves from rank to rank, or they take turns in phases or steps."""

from __future__ import annotations

import numpy as np

from ddpobs import wire
from ddpobs_server.analysis.finding import Gain, severity_of
from ddpobs_server.analysis.slow_ranks.facts import MovingFacts, RankTurn, TakingTurnsFacts
from ddpobs_server.analysis.slow_ranks.lateness_bins import LatenessBins
from ddpobs_server.analysis.slow_ranks.slow_rank import SlowInTurn, SlowRank
from ddpobs_server.analysis.slow_ranks.turns import (
    MOVING_WIDTH,
    Moving,
    Turn,
    find_moving,
    find_turns,
    turn_losses_ns,
)
from ddpobs_server.analysis.slow_ranks.whole_run import WholeRun
from ddpobs_server.analysis.steps.joined_steps import Floats, JoinedSteps

_TURN_STEPS = 2048
"""Latest steps in which turns are looked for."""


def slow_in_turn(run: WholeRun, recent: list[SlowRank]) -> list[SlowInTurn]:
    """Return at most one slowness of several ranks in turn.

    Args:
        run: The run.
        recent: Ranks that are slow in the latest steps. With any that is slow by itself, slowness does not move.
    """
    named = [slow.rank for slow in recent if not _may_be_a_turn(slow)]
    if not named:
        bins = run.bins_of_columns(MOVING_WIDTH)
        if (moving := find_moving(bins)) is not None:
            return [_moving(run, bins, moving)]
    latest = run.joined.latest(_TURN_STEPS)
    turns = find_turns(latest, set(np.flatnonzero(np.isin(latest.ranks, named)).tolist()))
    return [_taking_turns(run, latest, turns)] if turns else []


def _may_be_a_turn(slow: SlowRank) -> bool:
    """Whether other ranks are late in other phases of the same steps."""
    return max(slow.phase_excess_ns.values(), default=0) > 2 * slow.excess_ns


def _moving(run: WholeRun, bins: LatenessBins, moving: Moving) -> SlowInTurn:
    owners = np.array([index for index, _, _ in moving.stretches])
    lost_ns = np.array([bins.lost_ns[begin:end, index].sum() for index, begin, end in moving.stretches])
    phase_ns = np.sum([bins.phase_ns[begin:end, index].sum(axis=0) for index, begin, end in moving.stretches], axis=0)
    lengths = np.array([bins.steps[begin:end].sum() for _, begin, end in moving.stretches])
    by_rank = np.bincount(owners, lost_ns, len(bins.ranks))
    present = np.flatnonzero(np.bincount(owners, minlength=len(bins.ranks)))
    order = present[np.argsort(-by_rank[present], kind="stable")]
    total_ns, part = float(lost_ns.sum()), bins.select(slice(moving.begin, moving.end))
    first, last = int(part.first[0]), int(part.last[-1])
    steps, time_ns = int(part.steps.sum()), max(1.0, float(part.time_ns.sum()))
    goes_on = run.goes_on(last, last - first + 1)
    shares = {int(bins.ranks[index]): float(by_rank[index]) / max(1.0, total_ns) for index in order}
    return SlowInTurn(
        facts=MovingFacts(
            stretches=len(moving.stretches),
            stretch_steps=round(float(np.median(lengths))),
            shares={str(rank): round(share, 4) for rank, share in shares.items()},
            lost_ns=round(total_ns),
            lost_share=round(total_ns / time_ns, 4),
            run_share=round(total_ns / run.time_ns, 4),
            steps_used=steps,
        ),
        ranks=sorted(shares),
        phase=wire.OWN_PHASES[int(phase_ns.argmax())],
        steps=(first, last),
        intervals=run.intervals([(first, last)]),
        severity=severity_of(total_ns / (time_ns if goes_on else run.time_ns)),
        is_over=not goes_on,
        gain=_gain(lost_ns, time_ns, steps) if goes_on else None,
    )


def _taking_turns(run: WholeRun, latest: JoinedSteps, turns: list[Turn]) -> SlowInTurn:
    losses_ns = turn_losses_ns(latest, turns)
    total_ns = sum(losses_ns)
    first, last = int(latest.step[0]), int(latest.step[-1])
    time_ns = max(1.0, float(run.bins.time_ns[run.covered([(first, last)])].sum()))
    return SlowInTurn(
        facts=TakingTurnsFacts(
            turns=[
                RankTurn(
                    rank=int(latest.ranks[turn.index]),
                    phase=turn.phase,
                    late_share=round(float(turn.late.mean()), 4),
                    excess_ns=round(turn.excess_ns),
                    share=round(loss_ns / max(1.0, total_ns), 4),
                    lost_ns=round(loss_ns),
                    chance=round(turn.chance, 4),
                )
                for turn, loss_ns in zip(turns, losses_ns, strict=True)
            ],
            lost_ns=round(total_ns),
            lost_share=round(total_ns / time_ns, 4),
            run_share=round(total_ns / run.time_ns, 4),
            steps_used=len(latest),
        ),
        ranks=sorted({int(latest.ranks[turn.index]) for turn in turns}),
        phase=turns[int(np.argmax(losses_ns))].phase,
        steps=(first, last),
        intervals=run.intervals([(first, last)]),
        severity=severity_of(total_ns / time_ns),
        is_over=False,
        gain=_gain(np.array(losses_ns), time_ns, len(latest)),
    )


def _gain(parts_ns: Floats, time_ns: float, steps: int) -> Gain:
    """Return the saving if no rank were slow; the error is that of a sum of independent parts."""
    total_ns = max(1.0, float(parts_ns.sum()))
    error = float(parts_ns.std() * np.sqrt(len(parts_ns))) / total_ns
    return Gain(
        step_ns=round(total_ns / max(1, steps)), ratio=round(total_ns / time_ns, 4), error_ratio=round(error, 4)
    )
