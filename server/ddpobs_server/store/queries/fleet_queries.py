"""Totals by host of a workspace's runs, compared hosts, and the runs whose totals are to be made anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from sqlalchemy import Connection, select

from ddpobs_server.store import schema
from ddpobs_server.store.queries.run_labels import decoded_tags
from ddpobs_server.store.rows import ComparedHost, HostTotal

_h, _r = schema.host_totals.c, schema.runs.c
_COLUMNS = ("attempt", "host", "commits", "began_ns", "wall_ns", "ranks", "has_rank_zero", "torch", "excess_ratio")
_READ_ROWS = 1000
"""Rows that the driver holds at once."""


def fleet_totals(
    connection: Connection, workspace: str, since_ns: int, max_runs: int
) -> Iterator[tuple[str, HostTotal]]:
    """(run, total) of the runs with a batch since a time, newest first; the totals of a run follow each other.

    Tags are those that a person gave to the run, else those of the training.

    Args:
        connection: To the database.
        workspace: Workspace of the runs.
        since_ns: The time.
        max_runs: Maximum number of runs, the newest ones.
    """
    active = select(_r.run_id, _r.last_seen_ns, _r.tags).where(_r.workspace == workspace, _r.last_seen_ns >= since_ns)
    p = active.order_by(_r.last_seen_ns.desc(), _r.run_id).limit(max_runs).subquery().c
    query = select(p.run_id, p.tags.label("given_tags"), *(_h[name] for name in _COLUMNS), _h.tags, _h.parts)
    query = query.join(schema.host_totals, _h.run_id == p.run_id).order_by(
        p.last_seen_ns.desc(), p.run_id, _h.attempt, _h.host
    )
    decode_tags = msgspec.json.Decoder(tuple[str, ...]).decode
    decode_parts = msgspec.json.Decoder(dict[str, float]).decode
    for run, given, *plain, tags, parts in connection.execute(query.execution_options(yield_per=_READ_ROWS)):
        values: dict[str, Any] = dict(zip(_COLUMNS, plain, strict=True))
        values["has_rank_zero"] = bool(values["has_rank_zero"])
        values["tags"] = decode_tags(tags) if given is None else decoded_tags(given)
        yield run, HostTotal(parts=decode_parts(parts), **values)


def compared_hosts(
    connection: Connection, workspace: str, since_ns: int, until_ns: int
) -> Iterator[tuple[str, ComparedHost]]:
    """(run, host) of the runs with their last batch in that time and with totals of all batches, the oldest run first.

    The attempts of a run follow each other, the oldest first.

    Args:
        connection: To the database.
        workspace: Workspace of the runs.
        since_ns: Begin of the time.
        until_ns: Its end.
    """
    ended = (_r.workspace == workspace) & (_r.last_seen_ns >= since_ns) & (_r.last_seen_ns < until_ns)
    columns = (_h.attempt, _h.host, _h.ranks, _h.has_rank_zero, _h.excess_ratio)
    query = select(_r.run_id, *columns).join(schema.host_totals, _h.run_id == _r.run_id)
    query = query.where(ended, _h.commits == _r.commits)
    query = query.order_by(_r.last_seen_ns, _r.run_id, _h.began_ns, _h.attempt, _h.host)
    for run, attempt, host, ranks, has_rank_zero, ratio in connection.execute(
        query.execution_options(yield_per=_READ_ROWS)
    ):
        yield run, ComparedHost(attempt, host, ranks, bool(has_rank_zero), ratio)


def without_totals(
    connection: Connection, silent_ns: int, made_ns: int, before_ns: int, limit: int
) -> list[tuple[str, str, int]]:
    """(run, latest attempt, last batch) of runs without totals of that attempt and all their batches, newest first.

    Args:
        connection: To the database.
        silent_ns: A run with a batch after this time goes on: its totals may miss the latest batches.
        made_ns: They are then due if they were made before this time.
        before_ns: Only runs whose last batch arrived before this time.
        limit: Maximum number of runs.
    """
    same = (_h.run_id == _r.run_id) & (_h.attempt == _r.attempt)
    is_current = (_h.commits == _r.commits) | ((_r.last_seen_ns > silent_ns) & (_h.made_ns > made_ns))
    made = select(_h.host).where(same, is_current).correlate(schema.runs).exists()
    query = select(_r.run_id, _r.attempt, _r.last_seen_ns).where(_r.last_seen_ns < before_ns, ~made)
    rows = connection.execute(query.order_by(_r.last_seen_ns.desc(), _r.run_id).limit(limit))
    return [(run, attempt, last_seen_ns) for run, attempt, last_seen_ns in rows]
