"""The store's one face."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Connection, MetaData, String, Table, case, func, select
from sqlalchemy.exc import DatabaseError, DataError
from sqlalchemy.schema import CreateTable

from ddpobs import wire
from ddpobs_server.store import (
    aggregate_queries,
    bucket_sums,
    column_queries,
    compaction,
    engine,
    ingest,
    migration,
    removal,
    schema,
)
from ddpobs_server.store.column_queries import ColumnQuery
from ddpobs_server.store.database_errors import UnavailableError, UnusableError
from ddpobs_server.store.ingest import Arrival, Outcome, UnstorableBatchError
from ddpobs_server.store.phase_totals import PhaseTotals
from ddpobs_server.store.rows import Aggregates, Attempt, BucketRollup, Rollup, Run, Source, Token
from ddpobs_server.store.schema import DEFAULT_WORKSPACE

_TRIED = Table("ddpobs_tried", MetaData(), Column("run_id", String(1), primary_key=True))
Ranks = int | Collection[int] | None
"""One rank, some of them, or all."""


class Store:
    """Batches in, columns and rows out. Safe to use from several threads; one at a time writes.

    Whatever touches the database raises `UnavailableError` while that is away or full, and works again afterwards.

    Args:
        url: SQLAlchemy's, of SQLite or PostgreSQL.
        keep_free_bytes: With less room on a SQLite file's disk no batch is stored: to remove some takes room, too.
        read_only: Whether a SQLite file is only looked at, and stays as it is.
    """

    def __init__(self, url: str, keep_free_bytes: int = 0, *, read_only: bool = False) -> None:
        self._engine = engine.engine(url, write_ahead=not read_only)
        self._keep_free_bytes, self._disk = keep_free_bytes, self.folder
        self._phases: defaultdict[str, PhaseTotals] = defaultdict(PhaseTotals)

    @property
    def folder(self) -> Path | None:
        """Where a SQLite file lies; None for a server's database."""
        url = self._engine.url
        return Path(url.database).resolve().parent if url.get_backend_name() == "sqlite" and url.database else None

    def migrate(self) -> None:
        """Bring the schema to this version's, from whatever earlier one is there.

        Raises:
            UnusableError: A newer version made it.
        """
        migration.migrate(self._engine)

    def revisions(self) -> tuple[str | None, str | None]:
        """The schema's revision in the database, and this version's."""
        return migration.revisions(self._engine)

    def earlier_revisions(self) -> set[str]:
        """Revisions of the schema that this version can start from."""
        return migration.earlier_revisions()

    def integrity_errors(self) -> list[str]:
        """What is wrong with a SQLite file, read as a whole; nothing for a server's database."""
        if self._engine.dialect.name != "sqlite":
            return []
        try:
            with self._engine.connect() as connection:
                found = connection.exec_driver_sql("PRAGMA quick_check(5)").scalars().all()
        except DatabaseError as error:
            return [str(error.orig)]
        return [] if found == ["ok"] else list(found)

    def ingest(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Store batches in one transaction; returns after its commit, with the outcome of each.

        Raises:
            Unstorable: A batch never can be.
        """
        if self._disk is not None and (free := shutil.disk_usage(self._disk).free) < self._keep_free_bytes:
            raise UnavailableError(f"{free} bytes are free, {self._keep_free_bytes} are to stay so", full=True)
        try:
            with self._engine.begin() as connection:
                return ingest.write(connection, arrivals)
        except (DataError, OverflowError) as error:
            detail = f"a value is beyond what the database holds: {str(error).partition(chr(10))[0]}"
            raise UnstorableBatchError(detail) from error

    def delete(self, run: str) -> bool:
        """Remove everything of a run and return its space; False where there is none."""
        found = removal.delete_run(self._engine, run)
        removal.vacuum(self._engine)
        return found

    def compact(self, since_ns: int) -> Iterator[int]:
        """Join the small chunks of runs that were heard of since then; how many fewer there are, join by join."""
        c = schema.runs.c
        with self._engine.connect() as connection:
            active = connection.execute(select(c.run_id).where(c.last_seen_ns >= since_ns)).scalars().all()
        for run in active:
            yield from compaction.compact(self._engine, run)

    def expire_chunks(self, before_ns: int) -> int:
        """Remove the columns of batches that came before then, and return their space; how many chunks."""
        removed = removal.expire_chunks(self._engine, before_ns)
        if removed:
            removal.vacuum(self._engine)
        return removed

    def prune_unused_sets(self, before_ns: int) -> None:
        """Remove unused sets of before then that neither metrics nor diagnoses read any more."""
        removal.prune_unused_sets(self._engine, before_ns)

    def expire_runs(self, before_ns: int) -> int:
        """Remove runs that were last heard of before then, and return their space; how many."""
        removed = removal.expire_runs(self._engine, before_ns)
        if removed:
            removal.vacuum(self._engine)
        return removed

    def shrink(self, limit_bytes: int) -> tuple[int, int]:
        """Remove the oldest columns, then the oldest runs, until what is used is below the limit; how many of each."""
        return removal.shrink(self._engine, limit_bytes)

    def ready(self) -> bool:
        """Whether the database answers."""
        with self._engine.connect() as connection:
            return connection.execute(select(1)).scalar() == 1

    def distribution(self) -> list[str]:
        """What spreads the tables over a Citus cluster: every query is then answered by one node."""
        tables = [table.name for table in schema.metadata.sorted_tables if table is not schema.tokens]
        by_run = [f"SELECT create_distributed_table('{name}', 'run_id')" for name in tables]
        return [*by_run, "SELECT create_reference_table('tokens')"]

    def distribute(self) -> None:
        """Run `distribution`, for tables that are not distributed yet: an upgrade may bring new ones.

        Raises:
            UnusableError: The database is no PostgreSQL.
            SQLAlchemyError: It has no Citus.
        """
        if self._engine.dialect.name != "postgresql":
            raise UnusableError(f"expected a PostgreSQL database with Citus, got {self._engine.dialect.name}")
        self.migrate()
        with self._engine.begin() as connection:
            known = connection.exec_driver_sql("SELECT logicalrelid::text FROM pg_dist_partition").scalars().all()
            for statement in self.distribution():
                if statement.split("'")[1] not in known:
                    connection.exec_driver_sql(statement)

    def now_ns(self) -> int:
        """The database's wall clock."""
        with self._engine.connect() as connection:
            if self._engine.dialect.name == "sqlite":
                return int(connection.exec_driver_sql("SELECT (julianday('now') - 2440587.5) * 86400.0e9").scalar_one())
            return int(connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp()) * 1e9").scalar_one())

    def try_write(self) -> None:
        """Make a table with a row in it and take it back.

        Raises:
            UnavailableError: The disk is full, or the file or its server takes no writing.
            SQLAlchemyError: Rights are missing.
        """
        with self._engine.connect() as connection:
            if self._engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            connection.execute(CreateTable(_TRIED))
            connection.execute(_TRIED.insert(), {"run_id": ""})
            connection.rollback()

    def runs(self, limit: int, before: tuple[int, str] | None = None, workspace: str = DEFAULT_WORKSPACE) -> list[Run]:
        """A workspace's runs, newest first; `before` is (created_ns, run) of the last one had."""
        with self._engine.connect() as connection:
            return aggregate_queries.runs(connection, aggregate_queries.where_page(workspace, before), limit)

    def runs_there(self, workspace: str) -> int:
        """How many runs a workspace has."""
        with self._engine.connect() as connection:
            query = select(func.count()).where(schema.runs.c.workspace == workspace)
            return connection.execute(query).scalar_one()

    def sources_there(self, run: str, source: str) -> tuple[int, bool]:
        """How many sources a run has, and whether this is one of them."""
        c = schema.sources.c
        with self._engine.connect() as connection:
            mine = func.coalesce(func.sum(case((c.source == source, 1), else_=0)), 0)
            row = connection.execute(select(func.count(), mine).where(c.run_id == run)).one()
        return row[0], bool(row[1])

    def aggregates(self, since_ns: int, until_ns: int = 2**63 - 1, workspace: str = DEFAULT_WORKSPACE) -> Aggregates:
        """What metrics tell of the runs last heard of in that time, in a few statements for all of them."""
        which = aggregate_queries.active(workspace, since_ns, until_ns)
        of = aggregate_queries.sources_of_latest(which)
        with self._snapshot() as connection:
            runs, histograms = aggregate_queries.runs(connection, which), aggregate_queries.histograms(connection, of)
            layouts = aggregate_queries.layouts(connection, of)
            by_bucket, reduced_bytes = bucket_sums.read(connection, of, layouts)
            steps = {run: sum(counts) for run, counts in histograms.items()}
            last_seen = aggregate_queries.last_seen(connection, of)
            return Aggregates(
                runs=runs,
                phases=self._phases[workspace].read(connection, of, runs, steps, last_seen),
                last_seen=last_seen,
                hellos=aggregate_queries.hellos(connection, of),
                histograms=histograms,
                buckets=by_bucket,
                layouts=layouts,
                reduced_bytes=reduced_bytes,
                peers=aggregate_queries.peer_totals(connection, of),
                unused=aggregate_queries.unused(connection, of),
            )

    @contextmanager
    def _snapshot(self) -> Iterator[Connection]:
        """A connection that sees one state of the database."""
        with self._engine.connect() as connection:
            if self._engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN")
                yield connection
            else:
                yield connection.execution_options(isolation_level="REPEATABLE READ")

    def run(self, run: str) -> Run | None:
        """One run, or None."""
        with self._engine.connect() as connection:
            return next(iter(aggregate_queries.runs(connection, aggregate_queries.where_run(run))), None)

    def commits(self, run: str) -> tuple[int, int]:
        """When the run was made and how often it was written to: what a cache of its reports is keyed by."""
        with self._engine.connect() as connection:
            c = schema.runs.c
            found = connection.execute(select(c.created_ns, c.commits).where(c.run_id == run)).one_or_none()
        return (found.created_ns, found.commits) if found else (0, 0)

    def attempts(self, run: str) -> list[Attempt]:
        """The run's attempts, oldest first."""
        with self._engine.connect() as connection:
            return column_queries.attempts(connection, run)

    def sources(self, run: str, attempt: str) -> list[Source]:
        """The attempt's sources, by rank."""
        with self._engine.connect() as connection:
            return column_queries.sources(connection, run, attempt)

    def missing_batches(self, run: str, attempt: str) -> dict[str, tuple[int, int]]:
        """By source that has said goodbye, how many batches are missing of those it sent, and how many these are."""
        with self._engine.connect() as connection:
            return column_queries.missing_batches(connection, run, attempt)

    def has_gaps(self, run: str, attempt: str) -> bool:
        """Whether a batch is missing before another of its source; of one that lives it may be under way."""
        with self._engine.connect() as connection:
            return column_queries.has_gaps(connection, run, attempt)

    def layouts(self, run: str, attempt: str) -> list[wire.Layout]:
        """Each module's layouts, by revision, as the lowest rank that told them told them."""
        with self._engine.connect() as connection:
            return [
                layout
                for _, layout in aggregate_queries.layouts(
                    connection, aggregate_queries.sources_of_attempt(run, attempt)
                )
            ]

    def steps(
        self, run: str, attempt: str, rank: Ranks = None, first: int | None = None, last: int | None = None
    ) -> tuple[wire.Ints, wire.Steps]:
        """Steps in [first, last], sorted by step and rank, with the rank of each row.

        Raises:
            TooManyRowsError: There are too many, here as of spans and of comms.
        """
        return self._columns(wire.Steps, ColumnQuery("steps", run, attempt, _collected(rank), first, last))

    def spans(
        self, run: str, attempt: str, rank: Ranks = None, first: int | None = None, last: int | None = None
    ) -> tuple[wire.Ints, wire.Spans]:
        """Bucket spans of the steps in [first, last], likewise."""
        return self._columns(wire.Spans, ColumnQuery("spans", run, attempt, _collected(rank), first, last))

    def comms(
        self, run: str, attempt: str, rank: Ranks = None, first: int | None = None, last: int | None = None
    ) -> tuple[wire.Ints, wire.Comms]:
        """Other communication of the steps in [first, last], likewise."""
        return self._columns(wire.Comms, ColumnQuery("comms", run, attempt, _collected(rank), first, last))

    def page_end(
        self, kind: str, run: str, attempt: str, *, rows: int, first: int | None, last: int | None, rank: Ranks = None
    ) -> int | None:
        """Where a page of about so many rows of `steps`, `spans` or `comms` ends; None where [first, last] is one.

        Returns:
            The page's last step; a page has at least one.
        """
        if first is not None and first == last:
            return None
        with self._engine.connect() as connection:
            return column_queries.page_end(
                connection, ColumnQuery(kind, run, attempt, _collected(rank), first, last), rows
            )

    def rows_held(self, kind: str, run: str, attempt: str, first: int, last: int) -> int:
        """About how many rows of `steps`, `spans` or `comms` the steps in [first, last] have."""
        with self._engine.connect() as connection:
            return column_queries.rows_held(connection, ColumnQuery(kind, run, attempt, None, first, last))

    def unused(
        self, run: str, attempt: str, module: int | None = None, limit: int = 1000
    ) -> list[tuple[int, wire.Unused]]:
        """(rank, unused set) in the order in which each rank told them: so many of the latest, of a module or all."""
        with self._engine.connect() as connection:
            of = aggregate_queries.sources_of_attempt(run, attempt)
            return [row[1:] for row in aggregate_queries.unused(connection, of, module=module, limit=limit)]

    def latest_unused(self, run: str, attempt: str) -> list[tuple[int, wire.Unused]]:
        """Likewise: of each source and module the latest few sets that name parameters, and those that name none."""
        with self._engine.connect() as connection:
            of = aggregate_queries.sources_of_attempt(run, attempt)
            return [row[1:] for row in aggregate_queries.unused(connection, of, latest=aggregate_queries.UNUSED_JUDGED)]

    def first_events(self, run: str, attempt: str) -> list[tuple[int, wire.Event]]:
        """(rank, event), of each source and kind the first."""
        with self._engine.connect() as connection:
            return [
                row[1:]
                for row in aggregate_queries.events(connection, aggregate_queries.sources_of_attempt(run, attempt))
            ]

    def rollups(self, run: str, attempt: str) -> list[Rollup]:
        """Sums by rank."""
        with self._engine.connect() as connection:
            return [
                rollup
                for _, rollup in aggregate_queries.rollups(
                    connection, aggregate_queries.sources_of_attempt(run, attempt)
                )
            ]

    def bucket_rollups(self, run: str, attempt: str) -> list[BucketRollup]:
        """Sums by bucket, over all ranks."""
        with self._engine.connect() as connection:
            return [
                rollup
                for _, rollup in bucket_sums.read(connection, aggregate_queries.sources_of_attempt(run, attempt))[0]
            ]

    def tokens(self) -> list[Token]:
        """All of them, the revoked ones too, the oldest first."""
        with self._engine.connect() as connection:
            rows = connection.execute(select(schema.tokens).order_by(schema.tokens.c.created_ns)).all()
        return [
            Token(**{**row._mapping, "digest": bytes(row.digest), "scopes": tuple(row.scopes.split(","))})
            for row in rows
        ]

    def add_token(self, token: Token) -> None:
        """Keep a token."""
        with self._engine.begin() as connection:
            connection.execute(schema.tokens.insert(), {**vars(token), "scopes": ",".join(token.scopes)})

    def revoke_token(self, token_id: str, now_ns: int) -> bool:
        """Have it work no more; False where there is none that does."""
        c = schema.tokens.c
        with self._engine.begin() as connection:
            statement = schema.tokens.update().where(c.token_id == token_id, c.revoked_ns.is_(None))
            return bool(connection.execute(statement.values(revoked_ns=now_ns)).rowcount)

    def used_bytes(self) -> int:
        """What `shrink` counts against its limit."""
        return removal.used_bytes(self._engine)

    def size_bytes(self) -> int:
        """What the database takes on disk."""
        with self._engine.connect() as connection:
            if self._engine.dialect.name == "sqlite":
                pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
                return int(pages) * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())
            return int(connection.execute(select(func.pg_database_size(func.current_database()))).scalar_one())

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def _columns(self, kind: Any, part: ColumnQuery) -> tuple[wire.Ints, Any]:
        with self._engine.connect() as connection:
            return column_queries.columns(connection, kind, part)


def _collected(rank: Ranks) -> Collection[int] | None:
    return [rank] if isinstance(rank, int) else rank
