"""Runs of a workspace, and counts of runs and sources. Each read is a single statement, however many runs there are."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Connection, case, func, select

from ddpobs_server.store import schema
from ddpobs_server.store.aggregate_queries import float_sum
from ddpobs_server.store.rows import Run
from ddpobs_server.store.schema import DEFAULT_WORKSPACE

_r, _s = schema.runs.c, schema.sources.c
Conditions = list[ColumnElement[bool]]


def active(workspace: str, since_ns: int, until_ns: int) -> Conditions:
    """Conditions for a workspace's runs with their last batch in that time."""
    return [_r.workspace == workspace, _r.last_seen_ns.between(since_ns, until_ns)]


def named(run_keys: list[str]) -> Conditions:
    """Condition for the runs with these keys."""
    return [_r.run_id.in_(run_keys)]


def where(connection: Connection, conditions: Conditions, limit: int | None = None) -> list[Run]:
    """Runs that meet the conditions, newest first, each with the sums over its latest attempt's sources."""
    p = select(schema.runs).where(*conditions).order_by(_r.created_ns.desc(), _r.run_id).limit(limit).subquery().c
    stepped = _s.last_step_seen_ns > 0
    # A source without a step counts from its first arrival.
    active_ns = case((stepped, _s.last_step_seen_ns), else_=_s.first_seen_ns)
    plain = (p.run_id, p.attempt, p.created_ns, p.last_seen_ns, p.commits)
    query = (
        select(
            *plain,
            func.coalesce(func.max(_s.world_size), 0),
            func.count(_s.source),
            func.coalesce(func.max(case((stepped, _s.last_step + 1), else_=0)), 0),
            func.coalesce(float_sum(_s.emitted), 0),
            func.coalesce(float_sum(_s.dropped), 0),
            func.coalesce(func.max(active_ns), 0),
            func.coalesce(func.sum(case((_s.goodbye, 1), else_=0)), 0),
        )
        .outerjoin(schema.sources, (_s.run_id == p.run_id) & (_s.attempt == p.attempt))
        .group_by(*plain)
        .order_by(p.created_ns.desc(), p.run_id)
    )
    return [Run(*row[:2], *map(int, row[2:])) for row in connection.execute(query)]


def runs(
    connection: Connection, limit: int, cursor: tuple[int, str] | None = None, workspace: str = DEFAULT_WORKSPACE
) -> list[Run]:
    """A workspace's runs, newest first.

    Args:
        connection: To the database.
        limit: Most runs returned.
        cursor: (created_ns, run) of the previous page's last run.
        workspace: The workspace.
    """
    conditions = [_r.workspace == workspace]
    if cursor is not None:
        created_ns, run_id = cursor
        conditions.append((_r.created_ns < created_ns) | ((_r.created_ns == created_ns) & (_r.run_id > run_id)))
    return where(connection, conditions, limit)


def run(connection: Connection, run: str) -> Run | None:
    """The run; None if it does not exist."""
    return next(iter(where(connection, [_r.run_id == run])), None)


def commits(connection: Connection, run: str) -> tuple[int, int]:
    """Creation time of a run and number of writes to it, the key for a cache of its reports; zeros without the run."""
    row = connection.execute(select(_r.created_ns, _r.commits).where(_r.run_id == run)).one_or_none()
    return (row.created_ns, row.commits) if row else (0, 0)


def count_runs(connection: Connection, workspace: str) -> int:
    """Number of runs in a workspace."""
    return connection.execute(select(func.count()).where(_r.workspace == workspace)).scalar_one()


def count_sources(connection: Connection, run: str, source: str) -> tuple[int, bool]:
    """Number of a run's sources, and whether `source` is among them."""
    matches = func.coalesce(func.sum(case((_s.source == source, 1), else_=0)), 0)
    row = connection.execute(select(func.count(), matches).where(_s.run_id == run)).one()
    return row[0], bool(row[1])
