"""Totals by host of a workspace's runs, compared hosts, and the runs whose totals are to be made anew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import Connection, func, select

from ddpobs_server.store import schema
from ddpobs_server.store.queries.run_labels import decoded_tags
from ddpobs_server.store.rows import ComparedHost, HostTotals

_h, _r = schema.host_totals.c, schema.runs.c
_READ_ROWS = 1000
"""Rows that the driver holds at once."""
_PAGE_ROWS = 4000
"""Rows that a page has at least: work on columns costs as much for one row as for a hundred."""
_decode_tags = msgspec.json.Decoder(tuple[str, ...]).decode
_decode_parts = msgspec.json.Decoder(list[dict[str, float]]).decode


def fleet_totals(connection: Connection, workspace: str, since_ns: int, max_runs: int) -> Iterator[HostTotals]:
    """Totals of the runs with a batch since a time, newest first, in pages of whole runs.

    Tags are those that a person gave to the run, else those of the training.

    Args:
        connection: To the database.
        workspace: Workspace of the runs.
        since_ns: The time.
        max_runs: Number of runs, the newest ones; more if their last batches arrived at the same time.
    """
    own = _r.workspace == workspace
    last_seen = select(_r.last_seen_ns).where(own, _r.last_seen_ns >= since_ns).order_by(_r.last_seen_ns.desc())
    oldest_ns = func.coalesce(last_seen.offset(max_runs - 1).limit(1).scalar_subquery(), since_ns)
    columns = (_r.run_id, _h.attempt, _h.host, _h.began_ns, _h.wall_ns, _h.torch, _r.tags.label("given"))
    query = select(*columns, _h.tags, _h.parts).join(schema.host_totals, _h.run_id == _r.run_id)
    query = query.where(own, _r.last_seen_ns >= oldest_ns)
    query = query.order_by(_r.last_seen_ns.desc(), _r.run_id, _h.attempt, _h.host)
    rows: list[Any] = []
    for read in connection.execute(query.execution_options(yield_per=_READ_ROWS)).partitions():
        rows += read
        latest = rows[-1].run_id  # Its other rows may follow.
        if len(rows) >= _PAGE_ROWS and rows[0].run_id != latest:
            end = next(end for end in range(len(rows), 0, -1) if rows[end - 1].run_id != latest)
            yield _page(rows[:end])
            rows = rows[end:]
    if rows:
        yield _page(rows)


def _page(rows: Sequence[Any]) -> HostTotals:
    *columns, given_tags, own_tags, parts = zip(*rows, strict=True)
    texts = list(zip(given_tags, own_tags, strict=True))
    tags = {(given, own): _decode_tags(own) if given is None else decoded_tags(given) for given, own in set(texts)}
    return HostTotals._make([*columns, [tags[text] for text in texts], _decode_parts(f"[{','.join(parts)}]")])


def compared_hosts(connection: Connection, workspace: str, since_ns: int, until_ns: int) -> Iterator[ComparedHost]:
    """Hosts of the runs with their last batch in that time and with totals of all batches, the oldest run first.

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
    for rows in connection.execute(query.execution_options(yield_per=_READ_ROWS)).partitions():
        yield from map(ComparedHost._make, rows)


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
