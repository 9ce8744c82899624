"""Removes rows, run by run. Each transaction locks the run's own row first, so that two of them never deadlock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Exists, Table, exists, func, select, tuple_

from ddpobs_server.store import schema
from ddpobs_server.store.database import database_errors
from ddpobs_server.store.queries import aggregate_queries, unused_queries, workspace_queries
from ddpobs_server.store.upkeep import binned as binned_steps
from ddpobs_server.store.upkeep import turns
from ddpobs_server.store.writing import deleted_attempts, fingerprints

_CHUNKS, _PAGES = 5000, 8192
"""Maximum number of chunks removed and pages returned at once: ingest gets its turns, and SQLite's log stays small."""
_CHUNKS_FOR_ROOM = 500
"""Maximum number of chunks removed at once to make room, so that little more than necessary is removed."""
_PAUSE_S = 0.1
"""The time for which SQLite lets a writer sleep before it tries again."""
_DAY_NS = 86_400 * 10**9
_LATELY_NS = 600 * 10**9
"""A run with a batch in this time may be running. To make room it loses columns only."""
_COLUMN_BYTES = select(func.coalesce(func.sum(schema.runs.c.chunk_bytes), 0))
_Conditions = Sequence[ColumnElement[bool]]
Guard = Callable[[str], AbstractContextManager[None]]
"""Makes a context that contains the errors of a run."""
Lost = Callable[[str, int], None]


def unguarded(_: str) -> AbstractContextManager[None]:
    """Contain no error."""
    return nullcontext()


def _ignore(_run: str, _chunks: int) -> None:
    """Report nothing."""


def _pause() -> None:
    """Leave the database to other writers."""
    time.sleep(_PAUSE_S)


def delete(engine: Engine, run: str) -> bool:
    """Remove a run and return its space; False if it does not exist."""
    existed = delete_run(engine, run)
    vacuum(engine)
    return existed


def delete_run(engine: Engine, run: str, only_if: _Conditions = ()) -> bool:
    """Remove a run; False if its own row does not exist, or does not meet the conditions any more."""
    sum(_delete_chunks(engine, run, only_if=only_if))
    with engine.begin() as connection:
        return delete_rows(connection, run, only_if)


def delete_rows(connection: Connection, run: str, only_if: _Conditions = ()) -> bool:
    """Remove the remaining rows of a run; False likewise."""
    removed = connection.execute(schema.runs.delete().where(schema.runs.c.run_id == run, *only_if)).rowcount
    if only_if and not removed:
        return False
    deleted_attempts.remember(connection, run, time.time_ns())
    for table in schema.metadata.tables.values():
        if table is not schema.runs and table not in schema.REFERENCE_TABLES:
            connection.execute(table.delete().where(table.c.run_id == run))
    return bool(removed)


def expire_chunks(
    engine: Engine,
    before_ns: int,
    limit_ns: int | None = None,
    *,
    guard: Guard = unguarded,
    lost: Lost = _ignore,
) -> int:
    """Remove the columns of batches that arrived before a time, and their items; return their space.

    Items are unused sets, events and fingerprints. Sums stay, and so do the items that metrics and diagnoses read.
    Columns of steps stay until their bins are made.

    Args:
        engine: Of the database.
        before_ns: The time.
        limit_ns: Columns of batches that arrived before this time are removed without bins; None for `before_ns`.
        guard: Contains the errors of a run.
        lost: Called with a run and the number of its chunks that were removed without bins.

    Returns:
        Number of chunks removed.
    """
    runs, c = schema.runs.c, schema.chunks.c
    # A run without columns, silent since a day before that time, has nothing left to remove.
    may_expire = (runs.chunk_bytes > 0) | (runs.last_seen_ns > before_ns - _DAY_NS)
    with engine.connect() as connection:
        older = connection.execute(select(runs.run_id).where(runs.created_ns < before_ns, may_expire)).scalars().all()
    removed = 0
    for run in turns.in_turns(older):
        with guard(run):
            expired = _arrived_before(run, before_ns, c.source, c.seq).correlate(schema.chunks)
            with engine.connect() as connection:  # Most runs have nothing to remove, and need no lock.
                match = connection.execute(select(c.seq).where(c.run_id == run, expired).limit(1)).first()
                binned = binned_steps.are_binned(connection, run) if match is not None else []
            if match is not None:
                removed += sum(_delete_chunks(engine, run, expired, *binned))
            if binned:
                limit = before_ns if limit_ns is None else limit_ns
                late = sum(
                    _delete_chunks(engine, run, _arrived_before(run, limit, c.source, c.seq).correlate(schema.chunks))
                )
                lost(run, late)
                removed += late
            for table in (schema.unused, schema.events, schema.fingerprints):
                _expire_items(engine, table, run, before_ns)
    if removed:
        vacuum(engine)
    return removed


def prune_unused_sets(engine: Engine, before_ns: int) -> None:
    """Remove unused sets of batches that arrived before a time, except those that metrics and diagnoses read.

    If a model's set changes in every step, it sends a set per step and rank, and both readers scan all of them.
    """
    runs = schema.runs.c
    with engine.connect() as connection:
        active = connection.execute(select(runs.run_id).where(runs.last_seen_ns > before_ns)).scalars().all()
    for run in active:
        _expire_items(engine, schema.unused, run, before_ns)


def _arrived_before(run: str, before_ns: int, source: Any, seq: Any) -> Exists:
    c = schema.batches.c
    return exists().where(c.run_id == run, c.source == source, c.seq == seq, c.received_ns < before_ns)


def _expire_items(engine: Engine, table: Table, run: str, before_ns: int) -> None:
    """Remove a run's expired unused sets, events or fingerprints, except those that metrics and diagnoses read."""
    c = table.c
    key = (c.source, c.seq, c.position)
    items = select(*key, *_numbers(table)).where(c.run_id == run).subquery()
    n = items.c
    unread = select(n.source, n.seq, n.position).where(
        _is_unread(table, items), _arrived_before(run, before_ns, n.source, n.seq)
    )
    with engine.connect() as connection:
        if connection.execute(unread.limit(1)).first() is None:
            return
    removed = _CHUNKS
    while removed == _CHUNKS:
        with engine.begin() as connection:
            _lock(connection, run)
            selected = tuple_(*key).in_(unread.limit(_CHUNKS))
            delete = table.delete().where(c.run_id == run, selected).returning(func.length(c.body))
            sizes = connection.execute(delete).scalars().all()
            removed = len(sizes)
            smaller = schema.runs.update().where(schema.runs.c.run_id == run)
            connection.execute(smaller.values(record_bytes=schema.runs.c.record_bytes - sum(sizes)))
        _pause()


def _numbers(table: Table) -> tuple[Any, ...]:
    """The columns by which `_is_unread` selects."""
    if table is schema.unused:
        return (unused_queries.unused_number(),)
    if table is schema.events:
        return (aggregate_queries.event_number(), table.c.kind)
    return fingerprints.sample_numbers()


def _is_unread(table: Table, items: Any) -> Any:
    """Whether metrics and diagnoses do not read an item. Of expired fingerprints the first and the latest stay."""
    n = items.c
    if table is schema.unused:
        return n.number > unused_queries.UNUSED_JUDGED
    if table is schema.events:
        return ~aggregate_queries.is_read(n.kind, n.number)
    return (n.number > 1) & (n.first > 1)


def _delete_chunks(
    engine: Engine,
    run: str,
    *conditions: ColumnElement[bool],
    only_if: _Conditions = (),
    for_room: bool = False,
) -> Iterator[int]:
    """Remove chunks of a run while its own row meets `only_if`, and update the size of the remaining chunks.

    To make room, remove the oldest chunks first, and fewer at once.

    Yields:
        Number of chunks removed, after each transaction.
    """
    runs, c, a = schema.runs.c, schema.chunks.c, schema.attempts.c
    key = (c.source, c.kind, c.seq)
    # In order of arrival: the file's last pages, which SQLite returns first, then enter its list of free pages early.
    order: tuple[Any, ...] = (c.seq,)
    count = _CHUNKS_FOR_ROOM if for_room else _CHUNKS
    if for_room:
        ordinal = select(a.ordinal).where(a.run_id == run, a.attempt == c.attempt).correlate(schema.chunks)
        order = (ordinal.scalar_subquery(), c.last_step)
    selected = select(*key).where(c.run_id == run, *conditions).order_by(*order).limit(count).correlate(None)
    delete = schema.chunks.delete().where(c.run_id == run, tuple_(*key).in_(selected))
    remaining = select(func.coalesce(func.sum(func.length(c.payload)), 0)).where(c.run_id == run)
    while True:
        with engine.begin() as connection:
            if not _lock(connection, run, only_if):
                return
            sizes = connection.execute(delete.returning(func.length(c.payload))).scalars().all()
            last = len(sizes) < count
            size_bytes = int(connection.execute(remaining).scalar_one()) if last else runs.chunk_bytes - sum(sizes)
            connection.execute(schema.runs.update().where(runs.run_id == run).values(chunk_bytes=size_bytes))
        yield len(sizes)
        if last:
            return
        _pause()


def _lock(connection: Connection, run: str, only_if: _Conditions = ()) -> bool:
    """Block other writers to a run until the transaction ends; False if its row is missing or fails the conditions.

    It is an UPDATE without effect, because a SELECT locks nothing on SQLite.
    """
    c = schema.runs.c
    unchanged = schema.runs.update().where(c.run_id == run, *only_if).values(chunk_bytes=c.chunk_bytes)
    return bool(connection.execute(unchanged).rowcount)


def expire_runs(engine: Engine, before_ns: int, workspace: str | None = None) -> int:
    """Remove a workspace's runs, or all, without a batch since a time. Returns their space, and their number."""
    runs = schema.runs.c
    silent = runs.last_seen_ns < before_ns
    of_workspace = [] if workspace is None else [runs.workspace == workspace]
    with engine.connect() as connection:
        older = connection.execute(select(runs.run_id).where(silent, *of_workspace)).scalars().all()
    removed = sum(delete_run(engine, run, [silent]) for run in older)  # A run may have resumed by now.
    if removed:
        vacuum(engine)
    return removed


def shrink(engine: Engine, limit_bytes: int, workspace: str | None = None, *, lost: Lost = _ignore) -> tuple[int, int]:
    """Make room until the used size is below the limit: columns of silent runs, oldest first, then of any run.

    On SQLite, and for a workspace, whole silent runs are removed instead while rows take more room than columns.
    Removing columns then would lose them in vain. Columns of steps without bins are removed once there are no others.

    Args:
        engine: Of the database.
        limit_bytes: The limit.
        workspace: The only workspace to remove from, whose size is compared with the limit. None compares the whole
            database, and removes from the workspace with the most bytes.
        lost: Called with a run and the number of its chunks that were removed without bins.

    Returns:
        Number of chunks, and number of runs removed.
    """
    removed_chunks = removed_runs = 0
    without_binned: set[str] = set()
    while (used := used_bytes(engine) if workspace is None else _sizes(engine).get(workspace, 0)) > limit_bytes:
        victim = workspace if workspace is not None else _largest_workspace(engine)
        whole, runs = _oldest_runs(engine, victim, used)
        if whole is not None:
            removed = int(delete_run(engine, whole, [_silent()]))
            removed_runs += removed
        else:
            removed = _remove_oldest(engine, runs, without_binned, lost)
            removed_chunks += removed
        if not removed:
            break
        _pause()
    if removed_chunks + removed_runs:
        vacuum(engine)
    return removed_chunks, removed_runs


def _remove_oldest(engine: Engine, runs: Sequence[str], without_binned: set[str], lost: Lost) -> int:
    """Remove some columns of the first run that has columns in bins; if none has, of the first run.

    Args:
        engine: Of the database.
        runs: Runs with columns, in the order of removal.
        without_binned: Runs that have no more columns in bins; grows.
        lost: Called with a run and the number of its chunks that were removed without bins.
    """
    for run in runs:
        if run not in without_binned:
            with engine.connect() as connection:
                binned = binned_steps.are_binned(connection, run)
            if removed := next(_delete_chunks(engine, run, *binned, for_room=True), 0):
                return removed
            without_binned.add(run)
    removed = next(_delete_chunks(engine, runs[0], for_room=True), 0) if runs else 0
    if removed:
        lost(runs[0], removed)
    return removed


def _oldest_runs(engine: Engine, workspace: str, used: int) -> tuple[str | None, list[str]]:
    """The run to remove whole, if any, and the runs to remove columns of, in order."""
    runs, silent = schema.runs.c, _silent()
    of_workspace = runs.workspace == workspace
    oldest = select(runs.run_id).where(of_workspace).order_by(runs.last_seen_ns, runs.run_id)
    with_columns = oldest.where(runs.chunk_bytes > 0)
    with engine.connect() as connection:
        columns = connection.execute(_COLUMN_BYTES).scalar_one()
        whole = connection.execute(oldest.where(silent).limit(1)).scalar() if used >= 2 * columns else None
        return whole, list(connection.execute(with_columns).scalars())


def _silent() -> ColumnElement[bool]:
    return schema.runs.c.last_seen_ns < time.time_ns() - _LATELY_NS


def _sizes(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        return {name: usage.size_bytes for name, usage in workspace_queries.usage(connection).items()}


def _largest_workspace(engine: Engine) -> str:
    sizes = _sizes(engine)
    return max(sizes, key=lambda name: sizes[name]) if sizes else schema.DEFAULT_WORKSPACE


def used_bytes(engine: Engine) -> int:
    """Size that `shrink` compares with its limit.

    For SQLite, the file without its free pages. For PostgreSQL, which frees space late, the columns alone.
    """
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            pages, page_bytes, free = (
                int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
                for name in ("page_count", "page_size", "freelist_count")
            )
            return (pages - free) * page_bytes
        return int(connection.execute(_COLUMN_BYTES).scalar_one())


def vacuum(engine: Engine) -> None:
    """Return free pages to the file system. PostgreSQL reuses them, and returns pages at a table's end by itself.

    Raises:
        UnavailableError: No room is left for it, or another process locks the file. Removed rows stay removed.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if engine.dialect.name != "sqlite":
            connection.exec_driver_sql("VACUUM chunks")
            return
        # The pragma frees a page per step of the statement. Only a script runs a statement without rows to its end.
        script = connection.connection.driver_connection.executescript  # type: ignore[union-attr]
        free = int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())
        for begin in range(0, free, _PAGES):
            if begin:
                _pause()
            with database_errors.translated(connection):
                script(f"PRAGMA incremental_vacuum({_PAGES})")
        if free:
            _truncate_log(connection)


def _truncate_log(connection: Connection) -> None:
    """Truncate the log, which grew with the removal and would keep its size. Do not wait for readers."""
    (timeout_ms,) = connection.exec_driver_sql("PRAGMA busy_timeout").one()
    connection.exec_driver_sql("PRAGMA busy_timeout=0").all()
    try:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout={timeout_ms}").all()
