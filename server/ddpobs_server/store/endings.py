"""How each source ended, when, and whether it is stuck: columns of `sources`, so that a list of runs needs no events.

`ended` is an end of `ddpobs.wire.endings`, or empty while the source runs. `ended_ns` is its time on the source's wall
clock. A batch may arrive late from a spool, so an end replaces only the weaker ones of the source. A source that trains
again after an interrupt has no end any more, and `ended_ns` is the time at which it went on. An imported source has
ended with its first batch: it is never silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, case, func, literal_column, or_, update

from ddpobs import wire
from ddpobs.shared.judged_rank import JudgedRank
from ddpobs.wire.endings import ENDS, IMPORTED, RESUMED, delay_ns, end_of_event
from ddpobs.wire.facts import EndFacts, facts_of
from ddpobs_server.store import schema

_s = schema.sources.c
_WEIGHTS: dict[str, int] = {end: weight for weight, end in enumerate([*ENDS.values(), IMPORTED], start=1)}
FAILURES = ("failed", "died")
_LATEST_NS = 2**62


def end_of(batch: wire.Batch) -> tuple[str, int]:
    """How the batch's source ended, and when; empty and 0 if the batch has no such event."""
    if batch.hello is not None and IMPORTED in batch.hello.settings:
        return IMPORTED, _within(batch.anchor.wall_ns)
    ended, ended_ns = "", 0
    for event in batch.events:
        if dead_source(batch, event) is not None:
            continue
        if event.kind == RESUMED and ended in ("", "interrupted"):
            ended, ended_ns = "", _moment_ns(batch, event)
        end = end_of_event(event)
        if end is not None and _WEIGHTS[end] > _WEIGHTS.get(ended, 0):
            ended, ended_ns = end, _moment_ns(batch, event)
    return ended, ended_ns


def _moment_ns(batch: wire.Batch, event: wire.Event) -> int:
    """Wall-clock time at which an event counts."""
    anchor = batch.anchor
    return _within(anchor.wall_ns + event.at_ns - anchor.monotonic_ns + delay_ns(event))


def _within(at_ns: int) -> int:
    return min(max(1, at_ns), _LATEST_NS)


def stuck_ns(batch: wire.Batch) -> int:
    """Time without progress at the batch's pulse; 0 if the rank may still go on by itself."""
    pulse = batch.pulse
    if pulse is None or not pulse.patience_ns or JudgedRank(batch.rank, pulse).progresses:
        return 0
    return pulse.idle_ns


def stuck_pulse(batch: wire.Batch) -> wire.Pulse | None:
    """Return the batch's pulse if its rank is stuck: its wait, place and stacks, without figures of the machine."""
    if batch.pulse is None or not stuck_ns(batch):
        return None
    return msgspec.structs.replace(batch.pulse, machine=None, input=None, code=[])


def latest_end(new: Any) -> dict[str, Any]:
    """SQL: the new end and its time if it replaces the stored one, else the stored ones."""
    is_later = new.ended_ns > _s.ended_ns
    replaces = case(
        (_is(new, ""), is_later & (_is(_s, "") | _is(_s, "interrupted"))),
        (_is(new, "interrupted"), is_later & ~_is(_s, "failed")),
        else_=_weight(new.ended) > _weight(_s.ended),
    )
    return {name: case((replaces, new[name]), else_=_s[name]) for name in ("ended", "ended_ns")}


def _is(row: Any, end: str) -> Any:
    return row.ended == literal_column(f"'{end}'")


def _weight(column: Any) -> Any:
    """SQL without parameters, because an insert of many rows passes the rows' values alone."""
    weights: list[tuple[Any, Any]] = [
        (column == literal_column(f"'{end}'"), literal_column(str(weight))) for end, weight in _WEIGHTS.items()
    ]
    return case(*weights, else_=literal_column("0"))


def counts() -> tuple[Any, ...]:
    """SQL: the number of sources that ended, that failed or died, that were terminated, and that were interrupted.

    The last is 0 if a source failed or died before the first interrupt.
    """
    is_interrupted, has_failed = _s.ended == "interrupted", or_(*(_s.ended == end for end in FAILURES))
    first_failure_ns = func.coalesce(func.min(case((has_failed, _s.ended_ns))), _LATEST_NS)
    interrupted = count_where(is_interrupted)
    return (
        count_where(_s.ended != ""),
        count_where(has_failed),
        count_where(_s.ended == "terminated"),
        case((func.min(case((is_interrupted, _s.ended_ns))) <= first_failure_ns, interrupted), else_=0),
    )


def count_where(condition: Any) -> Any:
    """SQL: the number of rows that meet the condition."""
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)


def dead_source(batch: wire.Batch, event: wire.Event) -> str | None:
    """The source whose death another source reports; None for any other event."""
    if event.kind != "died":
        return None
    source = facts_of(event, EndFacts).source
    return source if source not in ("", batch.source) else None


def mark_dead(connection: Connection, batches: Sequence[wire.Batch]) -> None:
    """Mark the sources as dead that other sources report so, if they belong to the attempt and sent no end."""
    reports = {
        (batch.run, source, batch.attempt): _moment_ns(batch, event)
        for batch in batches
        for event in batch.events
        if (source := dead_source(batch, event)) is not None
    }
    for (run, source, attempt), ended_ns in sorted(reports.items()):
        same = (_s.run_id == run, _s.source == source, _s.attempt == attempt, _s.ended == "")
        connection.execute(update(schema.sources).where(*same).values(ended="died", ended_ns=ended_ns))
