"""How each attempt of a run went: its outcome, the reason, and the rank that failed first."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from ddpobs import wire
from ddpobs.wire.states import RunState
from ddpobs_server.analysis.causes.rank_ends import End, ends_of
from ddpobs_server.reports.run_times import span_of_attempt
from ddpobs_server.store import AttemptSummary, AttemptTimes, Run, Store

Outcome = Literal["running", "finished", "interrupted", "failed", "superseded", "hung", "lost"]
_LATEST: dict[RunState, Outcome] = {"running": "running", "stalled": "running", "hung": "hung", "lost": "lost"}
_OPEN = ("running", "hung")


@dataclass(frozen=True)
class AttemptOutcome:
    """An attempt of a run.

    Attributes:
        attempt: Id of the attempt: 16 hexadecimal digits.
        ordinal: Number of the attempt, from 0.
        outcome: How the attempt went. `failed`: a rank failed or died, or all have ended and some were terminated.
            `superseded`: a later attempt began, and this one sent no end.
        reason: The reason in one line; empty if the attempt runs or finished.
        first_rank: Rank that failed, died, was terminated or interrupted first; None if none did, or the command
            ended before any rank joined.
        began_ns: Start of the lowest rank's process on its wall clock, as Unix time, in nanoseconds; the arrival of the
            attempt's first batch if that is earlier, or the start is not known. Of imported files their first time;
            None if they lack it.
        ended_ns: Time of its last batch on its rank's wall clock, as Unix time, in nanoseconds; the arrival of that
            batch if it is earlier, or the start is not known; None while it runs. Of imported files their last time;
            None if they lack it or show a hang.
        world_size: Number of ranks that the training has.
        ranks: Number of ranks that have reported.
        steps: Number of steps.
    """

    attempt: str
    ordinal: int
    outcome: Outcome
    reason: str
    first_rank: int | None
    began_ns: int | None
    ended_ns: int | None
    world_size: int
    ranks: int
    steps: int


def attempt_outcomes(store: Store, run: Run, state: RunState, hang: str) -> list[AttemptOutcome]:
    """Return the outcomes of a run's attempts, oldest first.

    Args:
        store: Source of the rows.
        run: The run.
        state: Its state, which is its latest attempt's.
        hang: The hang in which the latest attempt is, or was when it ended; empty without one.
    """
    events: dict[str, list[tuple[int, wire.Event]]] = defaultdict(list)
    for attempt, rank, event in store.end_events(run.run):
        events[attempt].append((rank, event))
    result, known = [], store.attempt_times([run.run])[run.run]
    held = store.imported_steps([run.run]) if any(times.imported for times in known.values()) else {}
    for summary in store.attempt_summaries(run.run):
        ends = ends_of(events[summary.attempt])
        outcome = _outcome(summary, state if summary.attempt == run.attempt else None)
        began_ns, ended_ns = _times(summary, outcome, known.get(summary.attempt))
        first = ends[0] if ends and outcome in ("failed", "interrupted") else None
        result.append(
            AttemptOutcome(
                attempt=summary.attempt,
                ordinal=summary.ordinal,
                outcome=outcome,
                reason=_reason(outcome, first, hang if summary.attempt == run.attempt else ""),
                first_rank=first.rank if first and not first.is_of_command else None,
                began_ns=began_ns,
                ended_ns=ended_ns,
                world_size=summary.world_size,
                ranks=summary.ranks,
                steps=held.get((run.run, summary.attempt), summary.steps),
            )
        )
    return result


def _times(summary: AttemptSummary, outcome: Outcome, times: AttemptTimes | None) -> tuple[int | None, int | None]:
    """Begin and end of an attempt: of imported files as they have them, because their upload says nothing of either."""
    if times is None:
        times = AttemptTimes(summary.first_seen_ns, summary.last_seen_ns, None, summary.last_seen_ns)
    span = span_of_attempt(times)
    if times.imported and (not span.is_dated or outcome == "hung"):
        return None, None
    return span.began_ns, None if outcome in _OPEN and not summary.is_over else span.latest_ns


def _outcome(summary: AttemptSummary, state: RunState | None) -> Outcome:
    """The outcome of an attempt.

    Args:
        summary: Its sums.
        state: The run's state if the attempt is the latest, else None.
    """
    if state == "hung":  # Of imported dumps, too, which have ended.
        return "hung"
    if summary.interrupted:
        return "interrupted"
    if summary.failed or (summary.is_over and summary.terminated):
        return "failed"
    if summary.is_over:
        return "finished"
    return "superseded" if state is None else _LATEST.get(state, "running")


def _reason(outcome: Outcome, first: End | None, hang: str) -> str:
    if first is not None:
        return f"{hang}; {first.reason}" if hang else first.reason
    reasons = {"hung": hang, "lost": "no rank sends any more", "superseded": "a later attempt took its place"}
    return reasons.get(outcome, "")
