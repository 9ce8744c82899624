"""Rows out of the tables, a run at a time, its own row first: two that do so at once wait, and never for each other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Exists, Table, exists, func, select, tuple_

from ddpobs_server.store import aggregate_queries, database_errors, schema

_CHUNKS, _PAGES = 5000, 8192
"""Removed and given back at once: ingest gets in between, and SQLite's log stays small."""
_CHUNKS_FOR_ROOM = 500
"""Removed at once to make room: not much more goes than has to."""
_PAUSE_S = 0.1
"""As long as SQLite lets a writer sleep before it tries again."""
_DAY_NS = 86_400 * 10**9
_LATELY_NS = 600 * 10**9
"""A run heard of since then may be running, and is not removed altogether to make room."""
_COLUMN_BYTES = select(func.coalesce(func.sum(schema.runs.c.chunk_bytes), 0))
_Conditions = Sequence[ColumnElement[bool]]


def delete_run(engine: Engine, run: str, only_if: _Conditions = ()) -> bool:
    """Remove everything of a run; False where there is none, or its own row is not, or no longer, as asked."""
    sum(_delete_chunks(engine, run, only_if=only_if))
    with engine.begin() as connection:
        return delete_rows(connection, run, only_if)


def delete_rows(connection: Connection, run: str, only_if: _Conditions = ()) -> bool:
    """Remove what is left of a run; False likewise."""
    found = connection.execute(schema.runs.delete().where(schema.runs.c.run_id == run, *only_if)).rowcount
    if only_if and not found:
        return False
    for table in schema.metadata.tables.values():
        if table not in (schema.runs, schema.tokens):
            connection.execute(table.delete().where(table.c.run_id == run))
    return bool(found)


def expire_chunks(engine: Engine, before_ns: int) -> int:
    """Remove the columns of batches that came before then and what they told of unused sets and events.

    Their sums stay, and of unused sets and events those that metrics and diagnoses read.

    Returns:
        How many chunks.
    """
    runs, c = schema.runs.c, schema.chunks.c
    # Of a run without columns that was silent a day before then, all went that is to go.
    left = (runs.chunk_bytes > 0) | (runs.last_seen_ns > before_ns - _DAY_NS)
    with engine.connect() as connection:
        older = connection.execute(select(runs.run_id).where(runs.created_ns < before_ns, left)).scalars().all()
    removed = 0
    for run in older:
        came_before = _came_before(run, before_ns, c.source, c.seq).correlate(schema.chunks)
        with engine.connect() as connection:  # Most have nothing left that is to go, and need not be locked.
            some = connection.execute(select(c.seq).where(c.run_id == run, came_before).limit(1)).first()
        if some is not None:
            removed += sum(_delete_chunks(engine, run, came_before))
        for table in (schema.unused, schema.events):
            _expire_told(engine, table, run, before_ns)
    return removed


def prune_unused_sets(engine: Engine, before_ns: int) -> None:
    """Remove unused sets of before then that neither metrics nor diagnoses read any more.

    A model whose set changes in every step tells one a step and rank, and both look through all that there are.
    """
    runs = schema.runs.c
    with engine.connect() as connection:
        active = connection.execute(select(runs.run_id).where(runs.last_seen_ns > before_ns)).scalars().all()
    for run in active:
        _expire_told(engine, schema.unused, run, before_ns)


def _came_before(run: str, before_ns: int, source: Any, seq: Any) -> Exists:
    c = schema.batches.c
    return exists().where(c.run_id == run, c.source == source, c.seq == seq, c.received_ns < before_ns)


def _expire_told(engine: Engine, table: Table, run: str, before_ns: int) -> None:
    """Remove a run's unused sets or events of before then, but not those that metrics and diagnoses read."""
    c = table.c
    key = (c.source, c.seq, c.position)
    number, read = (
        (aggregate_queries.unused_number(), aggregate_queries.UNUSED_JUDGED)
        if table is schema.unused
        else (aggregate_queries.event_number(), 1)
    )
    n = select(*key, number).where(c.run_id == run).subquery().c
    old = select(n.source, n.seq, n.position).where(n.number > read, _came_before(run, before_ns, n.source, n.seq))
    with engine.connect() as connection:
        if connection.execute(old.limit(1)).first() is None:
            return
    gone = _CHUNKS
    while gone == _CHUNKS:
        with engine.begin() as connection:
            _lock(connection, run)
            which = tuple_(*key).in_(old.limit(_CHUNKS))
            gone = connection.execute(table.delete().where(c.run_id == run, which)).rowcount
        time.sleep(_PAUSE_S)


def _delete_chunks(
    engine: Engine,
    run: str,
    *which: ColumnElement[bool],
    only_if: _Conditions = (),
    for_room: bool = False,
) -> Iterator[int]:
    """Remove chunks of a run while its own row is as asked, and note what the others take.

    To make room the oldest go first, fewer at once.

    Yields:
        How many went, each time some did.
    """
    runs, c, a = schema.runs.c, schema.chunks.c, schema.attempts.c
    key = (c.source, c.kind, c.seq)
    # As they came: SQLite then finds the file's last pages, which it gives back first, soon in its list of free ones.
    order: tuple[Any, ...] = (c.seq,)
    at_once = _CHUNKS_FOR_ROOM if for_room else _CHUNKS
    if for_room:
        ordinal = select(a.ordinal).where(a.run_id == c.run_id, a.attempt == c.attempt).correlate(schema.chunks)
        order = (ordinal.scalar_subquery(), c.last_step)
    some = select(*key).where(c.run_id == run, *which).order_by(*order).limit(at_once).correlate(None)
    delete = schema.chunks.delete().where(c.run_id == run, tuple_(*key).in_(some)).returning(func.length(c.payload))
    left = select(func.coalesce(func.sum(func.length(c.payload)), 0)).where(c.run_id == run)
    while True:
        with engine.begin() as connection:
            if not _lock(connection, run, only_if):
                return
            gone = connection.execute(delete).scalars().all()
            last = len(gone) < at_once
            size_bytes = int(connection.execute(left).scalar_one()) if last else runs.chunk_bytes - sum(gone)
            connection.execute(schema.runs.update().where(runs.run_id == run).values(chunk_bytes=size_bytes))
        yield len(gone)
        if last:
            return
        time.sleep(_PAUSE_S)


def _lock(connection: Connection, run: str, only_if: _Conditions = ()) -> bool:
    """Have nobody write to a run until the transaction ends; False where there is none, or its row is not as asked.

    On SQLite a SELECT would lock nothing.
    """
    c = schema.runs.c
    same = schema.runs.update().where(c.run_id == run, *only_if).values(chunk_bytes=c.chunk_bytes)
    return bool(connection.execute(same).rowcount)


def expire_runs(engine: Engine, before_ns: int) -> int:
    """Remove runs that were last heard of before then. Returns how many."""
    runs = schema.runs.c
    silent = runs.last_seen_ns < before_ns
    with engine.connect() as connection:
        older = connection.execute(select(runs.run_id).where(silent)).scalars().all()
    return sum(delete_run(engine, run, [silent]) for run in older)  # One may have come back meanwhile.


def shrink(engine: Engine, limit_bytes: int) -> tuple[int, int]:
    """Make room until what is used is below the limit: columns of silent runs, the oldest first, then of any.

    On SQLite silent runs go altogether instead, while rows take more room than columns, which would be lost in vain.

    Returns:
        How many chunks, and how many runs.
    """
    runs = schema.runs.c
    silent = runs.last_seen_ns < time.time_ns() - _LATELY_NS
    oldest = select(runs.run_id).order_by(runs.last_seen_ns, runs.run_id).limit(1)
    holding = oldest.where(runs.chunk_bytes > 0)
    removed_chunks = removed_runs = 0
    while (used := used_bytes(engine)) > limit_bytes:
        with engine.connect() as connection:
            columns = connection.execute(_COLUMN_BYTES).scalar_one()
            whole = connection.execute(oldest.where(silent)).scalar() if used >= 2 * columns else None
            run = connection.execute(holding.where(silent)).scalar() or connection.execute(holding).scalar()
        if whole is not None:
            gone = int(delete_run(engine, whole, [silent]))
            removed_runs += gone
        else:
            gone = next(_delete_chunks(engine, run, for_room=True), 0) if run is not None else 0
            removed_chunks += gone
        if not gone:
            break
        time.sleep(_PAUSE_S)
    if removed_chunks + removed_runs:
        vacuum(engine)
    return removed_chunks, removed_runs


def used_bytes(engine: Engine) -> int:
    """What the rows take: a file without its free pages; of PostgreSQL, which frees late, the columns alone."""
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            used, size = (
                int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()) for name in ("page_count", "page_size")
            )
            return (used - int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())) * size
        return int(connection.execute(_COLUMN_BYTES).scalar_one())


def vacuum(engine: Engine) -> None:
    """Return free pages to the file system. PostgreSQL uses them again, and returns those at a table's end itself.

    Raises:
        UnavailableError: There is no room to do so, or another holds the file; what was removed stays so.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if engine.dialect.name != "sqlite":
            connection.exec_driver_sql("VACUUM chunks")
            return
        # It frees a page a step, and only a script is stepped to its end where no rows come.
        script = connection.connection.driver_connection.executescript  # type: ignore[union-attr]
        free = int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())
        for begin in range(0, free, _PAGES):
            if begin:
                time.sleep(_PAUSE_S)
            with database_errors.of_driver():
                script(f"PRAGMA incremental_vacuum({_PAGES})")
        if free:
            _cut_log(connection)


def _cut_log(connection: Connection) -> None:
    """The log has grown with what was removed, and would keep that room. For a reader nobody waits."""
    (patience,) = connection.exec_driver_sql("PRAGMA busy_timeout").one()
    connection.exec_driver_sql("PRAGMA busy_timeout=0").all()
    try:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout={patience}").all()
