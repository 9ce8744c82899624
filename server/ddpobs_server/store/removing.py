"""Rows out of the tables, a run at a time, its own row first: two that do so at once wait, and never for each other."""

from __future__ import annotations

from sqlalchemy import Connection, Engine, exists, func, select

from ddpobs_server.store import schema


def delete_run(connection: Connection, run: str) -> bool:
    """Remove everything of a run; False where there is none."""
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
        with engine.begin() as connection:
            connection.execute(select(runs.run_id).where(runs.run_id == run).with_for_update())
            gone = connection.execute(schema.chunks.delete().where(chunks.run_id == run, came_before)).rowcount
            left = select(func.coalesce(func.sum(func.length(chunks.payload)), 0)).where(chunks.run_id == run)
            if gone:
                size = connection.execute(left).scalar_one()
                connection.execute(schema.runs.update().where(runs.run_id == run).values(chunk_bytes=int(size)))
        removed += gone
    return removed


def expire_runs(engine: Engine, before_ns: int) -> int:
    """Remove runs that were last heard of before then. Returns how many."""
    runs = schema.runs.c
    with engine.connect() as connection:
        older = connection.execute(select(runs.run_id).where(runs.last_seen_ns < before_ns)).scalars().all()
    for run in older:
        with engine.begin() as connection:
            delete_run(connection, run)
    return len(older)


def shrink(engine: Engine, limit_bytes: int) -> tuple[int, int]:
    """Remove the oldest runs' columns, then on SQLite the oldest runs, until what is used is below the limit.

    Returns:
        How many chunks, and how many runs.
    """
    runs, chunks = schema.runs.c, schema.chunks.c
    removed_chunks = removed_runs = 0
    while used_bytes(engine) > limit_bytes:
        oldest = select(runs.run_id).order_by(runs.last_seen_ns, runs.run_id).limit(1)
        with engine.begin() as connection:
            holding = connection.execute(oldest.where(runs.chunk_bytes > 0)).scalar()
            run = connection.execute(oldest).scalar()
            if holding is not None:
                connection.execute(schema.runs.update().where(runs.run_id == holding).values(chunk_bytes=0))
                statement = schema.chunks.delete().where(chunks.run_id == holding)
                removed_chunks += connection.execute(statement).rowcount
            elif run is not None and engine.dialect.name == "sqlite":
                removed_runs += delete_run(connection, run)
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
        if engine.dialect.name == "sqlite":
            # It frees a page a step, and only a script is stepped to its end where no rows come.
            connection.connection.driver_connection.executescript("PRAGMA incremental_vacuum")  # type: ignore[union-attr]
        else:
            connection.exec_driver_sql("VACUUM chunks")
