"""Runs of a workspace, and counts of runs and sources. The statements do not grow with the runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, case, false, func, or_, select, true

from ddpobs.shared.silence import PULSE_SILENCE_NS
from ddpobs.wire.endings import IMPORTED
from ddpobs_server.store import endings, schema
from ddpobs_server.store.database.sql import execute_built, float_sum
from ddpobs_server.store.queries.attempt_queries import imported_steps
from ddpobs_server.store.queries.run_labels import decoded_tags, folded
from ddpobs_server.store.rows import Run, RunVersion, WantedRuns
from ddpobs_server.store.schema import DEFAULT_WORKSPACE
from ddpobs_server.store.selected_sources import ACTIVE_RUNS

_r, _s = schema.runs.c, schema.sources.c
ALL = WantedRuns()
Conditions = list[ColumnElement[bool]]


def active(workspace: str, since_ns: int, until_ns: int) -> Conditions:
    """Conditions for a workspace's runs with their last batch in that time."""
    return [_r.workspace == workspace, _r.last_seen_ns.between(since_ns, until_ns)]


def named(run_keys: Sequence[str]) -> Conditions:
    """Condition for the runs with these keys."""
    return [_r.run_id.in_(run_keys)]


def without(run_keys: Sequence[str]) -> Conditions:
    """Condition for the runs with other keys."""
    return [_r.run_id.not_in(run_keys)] if run_keys else []


def where(
    connection: Connection, conditions: Conditions, limit: int | None = None, *, only: str | None = None
) -> list[Run]:
    """Runs that meet the conditions, newest first, each with the sums over its latest attempt's sources.

    If `only` names the only run, a cluster reads a single node.
    """
    found = _runs(connection.execute(_query(conditions, limit, only)))
    imported = [run.run for run in found if run.imported]
    held = imported_steps(connection, imported) if imported else {}
    return [replace(run, steps=held.get((run.run, run.attempt), run.steps)) for run in found]


def active_runs(connection: Connection, workspace: str, since_ns: int, until_ns: int) -> list[Run]:
    """A workspace's runs with their last batch in that time, newest first."""
    values = {"workspace": workspace, "since_ns": since_ns, "until_ns": until_ns}
    return _runs(execute_built(connection, _query, ACTIVE_RUNS, values=values))


def _query(conditions: Sequence[ColumnElement[bool]], limit: int | None = None, only: str | None = None) -> Select[Any]:
    p = select(schema.runs).where(*conditions).order_by(_r.created_ns.desc(), _r.run_id).limit(limit).subquery().c
    plain = (p.run_id, p.attempt, p.tags, p.note, p.created_ns, p.last_seen_ns, p.commits)
    goes_on = (_s.stuck_ns == 0) & (_s.ended == "") & (_s.last_seen_ns >= p.last_seen_ns - PULSE_SILENCE_NS)
    columns: list[Any] = [*plain, *_sums(), endings.count_where(goes_on)]
    return (
        select(*columns)
        .outerjoin(schema.sources, (_s.run_id == (only or p.run_id)) & (_s.attempt == p.attempt))
        .group_by(*plain)
        .order_by(p.created_ns.desc(), p.run_id)
    )


def _runs(rows: Iterable[Any]) -> list[Run]:
    return [replace(Run(*row[:2], *map(int, row[4:])), tags=decoded_tags(row.tags), note=row.note) for row in rows]


@cache
def _sums() -> tuple[Any, ...]:
    """Sums over a run's sources, in the order of `Run`."""
    stepped = _s.last_step_seen_ns > 0
    # A source without a step counts from its first arrival.
    active_ns = case((stepped, _s.last_step_seen_ns), else_=_s.first_seen_ns)
    return (
        func.coalesce(func.max(_s.world_size), 0),
        func.count(_s.source),
        func.coalesce(func.max(case((stepped, _s.last_step + 1), else_=0)), 0),
        func.coalesce(float_sum(_s.emitted), 0),
        func.coalesce(float_sum(_s.dropped), 0),
        func.coalesce(func.max(active_ns), 0),
        *endings.counts(),
        endings.count_where(_s.ended == IMPORTED),
        endings.count_where((_s.stuck_ns > 0) & ((_s.ended == "") | (_s.ended == IMPORTED))),
    )


def runs(
    connection: Connection,
    limit: int,
    cursor: tuple[int, str] | None = None,
    workspace: str = DEFAULT_WORKSPACE,
    wanted: WantedRuns = ALL,
) -> list[Run]:
    """A workspace's runs, newest first.

    Args:
        connection: To the database.
        limit: Most runs returned.
        cursor: (created_ns, run) of the previous page's last run.
        workspace: The workspace.
        wanted: The only runs.
    """
    conditions = [_r.workspace == workspace, *_wanted(wanted)]
    if cursor is not None:
        created_ns, run_id = cursor
        conditions.append((_r.created_ns < created_ns) | ((_r.created_ns == created_ns) & (_r.run_id > run_id)))
    return where(connection, conditions, limit)


def counts(connection: Connection, workspace: str, wanted: WantedRuns = ALL) -> tuple[int, int]:
    """Number of a workspace's runs that are wanted, and of all its runs."""
    matching = endings.count_where(and_(true(), *_wanted(wanted)))
    row = connection.execute(select(matching, func.count()).where(_r.workspace == workspace)).one()
    return int(row[0]), row[1]


def _wanted(wanted: WantedRuns) -> Conditions:
    conditions: Conditions = [_r.search_text.contains(word, autoescape=True) for word in folded(wanted.search).split()]
    if wanted.seen_after_ns:
        conditions.append(_r.last_seen_ns > wanted.seen_after_ns)
    if wanted.created_after_ns:
        conditions.append(_r.created_ns > wanted.created_after_ns)
    return conditions


def run(connection: Connection, run: str) -> Run | None:
    """The run; None if it does not exist."""
    return next(iter(where(connection, [_r.run_id == run], only=run)), None)


def version(connection: Connection, run: str) -> RunVersion:
    """The key for a cache of a run's reports; zeros without the run."""
    running = select(_s.source).where(_s.run_id == run, _s.attempt == _r.attempt, _s.ended == "")
    query = select(_r.created_ns, _r.commits, _r.last_seen_ns, ~running.correlate(schema.runs).exists())
    row = connection.execute(query.where(_r.run_id == run)).one_or_none()
    return RunVersion(row[0], row[1], row[2], is_over=bool(row[3])) if row else RunVersion(0, 0, 0, is_over=True)


def going_on(connection: Connection, run_keys: Sequence[str]) -> set[str]:
    """Those of the runs of which a source of the latest attempt has not ended."""
    same = (_s.run_id == _r.run_id) & (_s.attempt == _r.attempt)
    running = select(_s.source).where(same, _s.ended == "").correlate(schema.runs).exists()
    return set(connection.execute(select(_r.run_id).where(_r.run_id.in_(run_keys), running)).scalars())


def urgent(connection: Connection, since_ns: int) -> set[str]:
    """Runs with a batch since a time of which a source of the latest attempt failed, died or is stuck.

    A person looks at them now, so that background work takes them first.
    """
    troubled = _s.ended.in_(endings.FAILURES) | ((_s.stuck_ns > 0) & (_s.ended == ""))
    joined = select(_r.run_id).join(schema.sources, (_s.run_id == _r.run_id) & (_s.attempt == _r.attempt))
    return set(connection.execute(joined.where(_r.last_seen_ns >= since_ns, troubled).distinct()).scalars())


def count_runs(connection: Connection, workspace: str) -> int:
    """Number of runs in a workspace."""
    return connection.execute(select(func.count()).where(_r.workspace == workspace)).scalar_one()


def has_runs(connection: Connection) -> bool:
    """Whether there is any run."""
    return connection.execute(select(_r.run_id).limit(1)).first() is not None


def runs_by_workspace(connection: Connection) -> dict[str, int]:
    """Number of runs in each workspace."""
    return {row[0]: row[1] for row in connection.execute(select(_r.workspace, func.count()).group_by(_r.workspace))}


def most_sources(connection: Connection, since_ns: int) -> tuple[str, int]:
    """The run with the most sources among those with a batch since a time; an empty name and 0 without any."""
    count = func.count(_s.source)
    joined = select(_r.run_id, count).join(schema.sources, _s.run_id == _r.run_id)
    query = joined.where(_r.last_seen_ns > since_ns).group_by(_r.run_id).order_by(count.desc()).limit(1)
    row = connection.execute(query).first()
    return (row[0], row[1]) if row is not None else ("", 0)


def silent_runs_share(connection: Connection, before_ns: Mapping[str, int]) -> float:
    """Share of all runs without a batch since their workspace's time."""
    is_silent = [(_r.workspace == workspace) & (_r.last_seen_ns < limit) for workspace, limit in before_ns.items()]
    silent = endings.count_where(or_(false(), *is_silent))
    row = connection.execute(select(silent, func.count()).select_from(schema.runs)).one()
    return float(row[0]) / max(1.0, float(row[1]))


def silent_bytes_share(connection: Connection, before_ns: int) -> float:
    """Share of the columns' bytes that belongs to runs without a batch since a time."""
    silent = func.coalesce(func.sum(case((_r.last_seen_ns < before_ns, _r.chunk_bytes), else_=0)), 0)
    row = connection.execute(select(silent, func.coalesce(func.sum(_r.chunk_bytes), 0))).one()
    return float(row[0]) / max(1.0, float(row[1]))


def count_sources(connection: Connection, run: str, source: str) -> tuple[int, bool]:
    """Number of a run's sources, and whether `source` is among them."""
    matches = func.coalesce(func.sum(case((_s.source == source, 1), else_=0)), 0)
    row = connection.execute(select(func.count(), matches).where(_s.run_id == run)).one()
    return row[0], bool(row[1])


def with_columns(connection: Connection) -> list[tuple[str, int]]:
    """(run, commits) of the runs that have columns, those with the latest batch first."""
    query = select(_r.run_id, _r.commits).where(_r.chunk_bytes > 0).order_by(_r.last_seen_ns.desc())
    return [(run, commits) for run, commits in connection.execute(query)]
