"""How each source ended, and whether it is stuck: two columns of `sources`, so that a list of runs needs no events.

| `ended` | the source sent | stands above |
|---|---|---|
| `died` | nothing; a surviving process, or the next attempt, sent its event `died` | |
| `finished` | `goodbye` | `died` |
| `terminated` | `terminated`: a launcher sent SIGTERM | the two before |
| `failed` | `failed`: an exception ended the training | all others |

A batch may arrive late from a spool, so an end replaces only the ends that it stands above.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, case, func, literal_column, update

from ddpobs import wire
from ddpobs.wire.hang import RankState
from ddpobs.wire.text import NONCE
from ddpobs_server.store import schema

_s = schema.sources.c
_KINDS = {"died": "died", "goodbye": "finished", "terminated": "terminated", "failed": "failed"}
"""End of a source by the kind of its event, the weakest first."""
ENDS = tuple(_KINDS.values())
_WEIGHTS = {end: weight for weight, end in enumerate(ENDS, start=1)}
FAILURES = ("failed", "died")


def end_of(batch: wire.Batch) -> str:
    """How the batch's source ended; empty if the batch has no such event."""
    kinds = {event.kind for event in batch.events if dead_source(batch, event) is None}
    return next((end for kind, end in reversed(_KINDS.items()) if kind in kinds), "")


def stuck_ns(batch: wire.Batch) -> int:
    """Time without progress at the batch's pulse; 0 if the rank may still go on by itself."""
    pulse = batch.pulse
    if pulse is None or not pulse.patience_ns or RankState(batch.rank, pulse).progresses:
        return 0
    return pulse.idle_ns


def stronger_end(new: Any) -> Any:
    """SQL: the new end if it stands above the stored one, else the stored one."""
    return case((_weight(new) > _weight(_s.ended), new), else_=_s.ended)


def _weight(column: Any) -> Any:
    """SQL without parameters, because an insert of many rows passes the rows' values alone."""
    weights: list[tuple[Any, Any]] = [
        (column == literal_column(f"'{end}'"), literal_column(str(weight))) for end, weight in _WEIGHTS.items()
    ]
    return case(*weights, else_=literal_column("0"))


def counts() -> tuple[Any, Any, Any]:
    """SQL: the number of sources that ended, that failed or died, and that were terminated."""
    return count_where(_s.ended != ""), count_where(_s.ended.in_(FAILURES)), count_where(_s.ended == "terminated")


def count_where(condition: Any) -> Any:
    """SQL: the number of rows that meet the condition."""
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)


def dead_source(batch: wire.Batch, event: wire.Event) -> str | None:
    """The source whose death another source reports; None for any other event."""
    source = event.detail.get("source")
    if event.kind != "died" or source == batch.source or not isinstance(source, str):
        return None
    return source if re.fullmatch(NONCE, source) else None


def mark_dead(connection: Connection, batches: Sequence[wire.Batch]) -> None:
    """Mark the sources as dead that other sources report so, if they belong to the attempt and sent no end."""
    reports = {
        (batch.run, source, batch.attempt)
        for batch in batches
        for event in batch.events
        if (source := dead_source(batch, event)) is not None
    }
    for run, source, attempt in sorted(reports):
        same = (_s.run_id == run, _s.source == source, _s.attempt == attempt, _s.ended == "")
        connection.execute(update(schema.sources).where(*same).values(ended="died"))
