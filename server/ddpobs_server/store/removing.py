"""Rows out of the tables, a run at a time, its own row first: two that do so at once wait, and never for each other."""

from __future__ import annotations

import time

from sqlalchemy import ColumnElement, Connection, Engine, exists, func, select, tuple_

from ddpobs_server.store import schema

_CHUNKS, _PAGES = 5000, 8192
"""Removed and given back at once: ingest gets in between, and SQLite's log stays small."""
_PAUSE_S = 0.1
"""As long as SQLite lets a writer sleep before it tries again."""


def delete_run(engine: Engine, run: str) -> bool:
    """Remove everything of a run; False where there is none."""
    _delete_chunks(engine, run)
    with engine.begin() as connection:
        return delete_rows(connection, run)


def delete_rows(connection: Connection, run: str) -> bool:
    """Remove what is left of a run; False where there is none."""
    found = connection.execute(schema.runs.delete().where(schema.runs.c.run_id == run)).rowcount
    for table in schema.metadata.tables.values():
        if table not in (schema.runs, schema.tokens):
            connection.execute(table.delete().where(table.c.run_id == run))
    return bool(found)


def expire_chunks(engine: Engine, before_ns: int) -> int:
    """Remove the columns of batches that came before then; their sums stay. Returns how many chunks."""
    runs, chunks, batches = schema.runs.c, schema.chunks.c, schema.batches.c
    with engine.connect() as connection:
        older = connection.execute(select(runs.run_id).where(runs.created_ns < before_ns)).scalars().all()
    removed = 0
    for run in older:
        came_before = exists().where(
            batches.run_id == run,
            batches.source == chunks.source,
            batches.seq == chunks.seq,
            batches.received_ns < before_ns,
        )
        removed += _delete_chunks(engine, run, came_before.correlate(schema.chunks))
    return removed


def _delete_chunks(engine: Engine, run: str, *which: ColumnElement[bool]) -> int:
    """Remove chunks of a run, some at a time, and note what the others take; how many went."""
    runs, c = schema.runs.c, schema.chunks.c
    key = (c.source, c.kind, c.seq)
    # As they came: SQLite then finds the file's last pages, which it gives back first, soon in its list of free ones.
    some = select(*key).where(c.run_id == run, *which).order_by(c.seq).limit(_CHUNKS).correlate(None)
    left = select(func.coalesce(func.sum(func.length(c.payload)), 0)).where(c.run_id == run)
    removed = 0
    while True:
        with engine.begin() as connection:
            connection.execute(select(runs.run_id).where(runs.run_id == run).with_for_update())
            statement = schema.chunks.delete().where(c.run_id == run, tuple_(*key).in_(some))
            gone = connection.execute(statement).rowcount
            removed += gone
            if gone < _CHUNKS:
                size_bytes = int(connection.execute(left).scalar_one())
                connection.execute(schema.runs.update().where(runs.run_id == run).values(chunk_bytes=size_bytes))
                return removed
        time.sleep(_PAUSE_S)


def expire_runs(engine: Engine, before_ns: int) -> int:
    """Remove runs that were last heard of before then. Returns how many."""
    runs = schema.runs.c
    with engine.connect() as connection:
        older = connection.execute(select(runs.run_id).where(runs.last_seen_ns < before_ns)).scalars().all()
    for run in older:
        delete_run(engine, run)
    return len(older)


def shrink(engine: Engine, limit_bytes: int) -> tuple[int, int]:
    """Remove the oldest runs' columns, then on SQLite the oldest runs, until what is used is below the limit.

    Returns:
        How many chunks, and how many runs.
    """
    runs = schema.runs.c
    oldest = select(runs.run_id).order_by(runs.last_seen_ns, runs.run_id).limit(1)
    removed_chunks = removed_runs = 0
    while used_bytes(engine) > limit_bytes:
        with engine.connect() as connection:
            holding = connection.execute(oldest.where(runs.chunk_bytes > 0)).scalar()
            run = connection.execute(oldest).scalar()
        if holding is not None:
            removed_chunks += _delete_chunks(engine, holding)
        elif run is not None and engine.dialect.name == "sqlite":
            removed_runs += delete_run(engine, run)
        else:
            break
        give_back(engine)
    return removed_chunks, removed_runs


def used_bytes(engine: Engine) -> int:
    """What the rows take: a file without its free pages; of PostgreSQL, which frees late, the columns alone."""
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            used, size = (
                int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()) for name in ("page_count", "page_size")
            )
            return (used - int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())) * size
        return int(connection.execute(select(func.coalesce(func.sum(schema.runs.c.chunk_bytes), 0))).scalar_one())


def give_back(engine: Engine) -> None:
    """Return free pages to the file system. PostgreSQL uses them again, and returns those at a table's end itself."""
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
            script(f"PRAGMA incremental_vacuum({_PAGES})")
