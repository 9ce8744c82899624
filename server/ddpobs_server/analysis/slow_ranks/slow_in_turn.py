"""Findings about ranks that are slow in turn: `moving` from rank to rank, or `taking turns` in phases or steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddpobs import wire
from ddpobs.shared.words import format_ranks
from ddpobs_server.analysis.finding import Finding, Gain, severity_of
from ddpobs_server.analysis.slow_ranks.slow_stretches import WholeRun
from ddpobs_server.analysis.slow_ranks.turns import Moving, Turn, find_moving, find_turns, moving_bins, turn_losses_ns
from ddpobs_server.analysis.steps.intervals import describe, format_seconds

_TURN_STEPS = 2048
"""Latest steps in which turns are looked for."""
_MOVES = (
    "Look for work that goes from rank to rank: a job on shared hosts, a cache that fills, samples that are longer on "
    "one rank at a time. The same hosts at these times show which."
)
_TURNS = "Fix each rank in its phase: the ranks hide each other, so that fixing one alone gains little."


def in_turn(run: WholeRun, named: set[int]) -> list[Finding]:
    """Return at most one finding about several ranks that are slow in turn.

    Args:
        run: The run.
        named: Ranks that are slow by themselves. With any of them, slowness does not move.
    """
    if not named:
        bins = moving_bins(run.joined)
        if (moving := find_moving(bins)) is not None:
            return [_moving_finding(run, bins, moving)]
    recent = run.joined.latest(_TURN_STEPS)
    indices = {int(index) for index in np.flatnonzero(np.isin(recent.ranks, list(named)))}
    turns = find_turns(recent, indices)
    return [_turns_finding(run, recent, turns)] if turns else []


def _moving_finding(run: WholeRun, bins: Any, moving: Moving) -> Finding:
    owners = np.array([index for index, _, _ in moving.stretches])
    lost_ns = np.array([bins.lost_ns[begin:end, index].sum() for index, begin, end in moving.stretches])
    phase_ns = sum(bins.phase_ns[begin:end, index].sum(axis=0) for index, begin, end in moving.stretches)
    steps = np.array([bins.steps[begin:end].sum() for _, begin, end in moving.stretches])
    phase = wire.OWN_PHASES[int(np.argmax(phase_ns))]
    by_rank = np.bincount(owners, lost_ns, len(bins.ranks))
    present = np.flatnonzero(np.bincount(owners, minlength=len(bins.ranks)))
    order = present[np.argsort(-by_rank[present], kind="stable")]
    total = float(lost_ns.sum())
    first, last = int(bins.first[moving.begin]), int(bins.last[moving.end - 1])
    intervals = run.intervals([(first, last)])
    time_ns = max(1.0, float(bins.time_ns[moving.begin : moving.end].sum()))
    ranks = [int(bins.ranks[index]) for index in order]
    goes_on = run.goes_on(last, last - first + 1)
    return Finding(
        code="straggler",
        severity=severity_of(total / (time_ns if goes_on else run.time_ns)),
        verdict=(
            f"A slowness in {phase} moves from rank to rank about every {round(float(np.median(steps)))} steps "
            f"{describe(intervals)}: {format_seconds(total)} lost, {total / time_ns:.0%} of these steps' time, on "
            f"{_shares(ranks, by_rank[order] / max(1.0, total))}"
        ),
        remedy=_MOVES,
        steps=(first, last),
        ranks=sorted(ranks),
        phase=phase,
        intervals=intervals,
        evidence={
            "kind": "moving",
            "stretches": len(moving.stretches),
            "stretch_steps": round(float(np.median(steps))),
            "shares": {
                str(rank): round(float(by_rank[index] / max(1.0, total)), 4)
                for rank, index in zip(ranks, order, strict=True)
            },
            "lost_ns": round(total),
            "lost_share": round(total / time_ns, 4),
            "run_share": round(total / run.time_ns, 4),
            "steps_used": int(bins.steps[moving.begin : moving.end].sum()),
        },
        gain=_gain(lost_ns, time_ns, int(bins.steps[moving.begin : moving.end].sum())) if goes_on else None,
    )


def _gain(parts_ns: Any, time_ns: float, steps: int) -> Gain:
    """Return the saving if no rank were slow; the error is that of a sum of independent parts."""
    total = max(1.0, float(np.sum(parts_ns)))
    error = float(np.std(parts_ns) * np.sqrt(len(parts_ns))) / total
    return Gain(step_ns=round(total / max(1, steps)), ratio=round(total / time_ns, 4), error_ratio=round(error, 4))


def _shares(ranks: list[int], shares: Any) -> str:
    """Return the words for the ranks' shares, at most four of them."""
    named = [f"rank {rank} ({share:.0%} of the loss)" for rank, share in list(zip(ranks, shares, strict=True))[:4]]
    return ", ".join(named) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def _turns_finding(run: WholeRun, recent: Any, turns: list[Turn]) -> Finding:
    losses_ns = turn_losses_ns(recent, turns)
    total = sum(losses_ns)
    first, last = int(recent.step[0]), int(recent.step[-1])
    intervals = run.intervals([(first, last)])
    rows = run.covered([(first, last)])
    time_ns = max(1.0, float(run.bins.time_ns[rows].sum()))
    ranks = sorted({int(recent.ranks[turn.index]) for turn in turns})
    parts = [
        f"rank {recent.ranks[turn.index]} in {turn.phase} in {turn.late.mean():.0%} of the steps" for turn in turns[:4]
    ]
    largest = turns[int(np.argmax(losses_ns))]
    return Finding(
        code="straggler",
        severity=severity_of(total / time_ns),
        verdict=(
            f"{format_ranks(ranks).capitalize()} are slow in turn: {', '.join(parts)}; {format_seconds(total)} lost "
            f"{describe(intervals)}, {total / time_ns:.0%} of these steps' time"
        ),
        remedy=_TURNS,
        steps=(first, last),
        ranks=ranks,
        phase=largest.phase,
        intervals=intervals,
        evidence={
            "kind": "taking turns",
            "turns": [
                {
                    "rank": int(recent.ranks[turn.index]),
                    "phase": turn.phase,
                    "late_share": round(float(turn.late.mean()), 4),
                    "excess_ns": round(turn.excess_ns),
                    "share": round(loss_ns / max(1.0, total), 4),
                    "lost_ns": round(loss_ns),
                    "chance": round(turn.chance, 4),
                }
                for turn, loss_ns in zip(turns, losses_ns, strict=True)
            ],
            "lost_ns": round(total),
            "lost_share": round(total / time_ns, 4),
            "run_share": round(total / run.time_ns, 4),
            "steps_used": len(recent),
        },
        gain=_gain(losses_ns, time_ns, len(recent)),
    )
