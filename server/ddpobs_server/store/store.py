"""The store's one face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import case, create_engine, event, func, select
from sqlalchemy.exc import DataError

from ddpobs import wire
from ddpobs_server.store import compacting, faults, reading, removing, schema, writing
from ddpobs_server.store.rows import Attempt, BucketRollup, PeerTotal, Rollup, Run, Source, Token
from ddpobs_server.store.writing import Arrival, Outcome

_MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_S = 30
_CONNECT_S = 10
_MIGRATING = 0xDD90B5
"""The lock that whoever migrates a PostgreSQL database holds."""
_INCREMENTAL = 2


class Unstorable(Exception):  # noqa: N818 - a batch is
    """A batch holds a value that the database has no room for; it never will be stored."""


class Store:
    """Batches in, columns and rows out. Safe to use from several threads; one at a time writes.

    Whatever touches the database raises `UnavailableError` while that is away or full, and works again afterwards.

    Args:
        url: SQLAlchemy's, of SQLite or PostgreSQL.
    """

    def __init__(self, url: str) -> None:
        sqlite = url.startswith("sqlite")
        waiting = {"timeout": _BUSY_S} if sqlite else {"connect_timeout": _CONNECT_S}
        self._engine = create_engine(url, connect_args=waiting, pool_pre_ping=not sqlite)
        event.listen(self._engine, "handle_error", faults.translate, retval=True)
        if sqlite:
            event.listen(self._engine, "connect", _durable)

    def migrate(self) -> None:
        """Bring the schema to this version's, from whatever earlier one is there."""
        with self._engine.begin() as connection:
            if self._engine.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_MIGRATING)))  # Another collector may start, too.
            config = _alembic()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
        if self._engine.dialect.name == "sqlite":
            self._make_shrinkable()

    def revisions(self) -> tuple[str | None, str | None]:
        """The schema's revision in the database, and this version's."""
        with self._engine.connect() as connection:
            here = MigrationContext.configure(connection).get_current_revision()
        return here, ScriptDirectory.from_config(_alembic()).get_current_head()

    def _make_shrinkable(self) -> None:
        """A file of the first version never gives space back; it is written anew, once."""
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            if connection.exec_driver_sql("PRAGMA auto_vacuum").scalar_one() != _INCREMENTAL:
                connection.exec_driver_sql("PRAGMA auto_vacuum=INCREMENTAL")
                connection.exec_driver_sql("VACUUM")

    def ingest(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Store batches in one transaction; returns after its commit, with the outcome of each.

        Raises:
            Unstorable: A value is one that the database has no room for.
        """
        try:
            with self._engine.begin() as connection:
                return writing.write(connection, arrivals)
        except (DataError, OverflowError) as error:
            raise Unstorable(str(error).partition("\n")[0]) from error

    def delete(self, run: str) -> bool:
        """Remove everything of a run and return its space; False where there is none."""
        with self._engine.begin() as connection:
            found = removing.delete_run(connection, run)
        removing.give_back(self._engine)
        return found

    def compact(self, since_ns: int) -> int:
        """Join the small chunks of runs that were heard of since then; how many fewer there are."""
        c = schema.runs.c
        with self._engine.connect() as connection:
            active = connection.execute(select(c.run_id).where(c.last_seen_ns >= since_ns)).scalars().all()
        return sum(compacting.compact(self._engine, run) for run in active)

    def expire_chunks(self, before_ns: int) -> int:
        """Remove the columns of batches that came before then, and return their space; how many chunks."""
        removed = removing.expire_chunks(self._engine, before_ns)
        if removed:
            removing.give_back(self._engine)
        return removed

    def expire_runs(self, before_ns: int) -> int:
        """Remove runs that were last heard of before then, and return their space; how many."""
        removed = removing.expire_runs(self._engine, before_ns)
        if removed:
            removing.give_back(self._engine)
        return removed

    def shrink(self, limit_bytes: int) -> tuple[int, int]:
        """Remove the oldest columns, then the oldest runs, until what is used is below the limit; how many of each."""
        return removing.shrink(self._engine, limit_bytes)

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
        """Run `distribution`.

        Raises:
            ValueError: The database is no PostgreSQL.
            SQLAlchemyError: It has no Citus, or the tables are distributed already.
        """
        if self._engine.dialect.name != "postgresql":
            raise ValueError(f"expected a PostgreSQL database with Citus, got {self._engine.dialect.name}")
        with self._engine.begin() as connection:
            for statement in self.distribution():
                connection.exec_driver_sql(statement)

    def now_ns(self) -> int:
        """The database's wall clock."""
        with self._engine.connect() as connection:
            if self._engine.dialect.name == "sqlite":
                return int(connection.exec_driver_sql("SELECT (julianday('now') - 2440587.5) * 86400.0e9").scalar_one())
            return int(connection.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp()) * 1e9").scalar_one())

    def try_write(self) -> None:
        """Write a row and take it back.

        Raises:
            UnavailableError: The disk is full, or the file or its server takes no writing.
            SQLAlchemyError: Rights are missing.
        """
        row = {"run_id": "", "attempt": "", "created_ns": 0, "last_seen_ns": 0, "commits": 0, "workspace": ""}
        row |= {"chunk_bytes": 0}
        with self._engine.connect() as connection:
            connection.execute(schema.runs.insert(), row)
            connection.rollback()

    def runs(self, limit: int, before: tuple[int, str] | None = None, workspace: str = "default") -> list[Run]:
        """A workspace's runs, newest first; `before` is (created_ns, run) of the last one had."""
        with self._engine.connect() as connection:
            names = connection.execute(reading.runs_query(workspace, before, limit)).scalars().all()
            return [found for name in names if (found := reading.run(connection, name)) is not None]

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

    def active_runs(self, since_ns: int, workspace: str = "default") -> list[Run]:
        """A workspace's runs heard of since then, by this collector's wall clock."""
        with self._engine.connect() as connection:
            c = schema.runs.c
            query = select(c.run_id).where(c.workspace == workspace, c.last_seen_ns >= since_ns).order_by(c.run_id)
            names = connection.execute(query).scalars()
            return [found for name in names.all() if (found := reading.run(connection, name)) is not None]

    def run(self, run: str) -> Run | None:
        """One run, or None."""
        with self._engine.connect() as connection:
            return reading.run(connection, run)

    def commits(self, run: str) -> tuple[int, int]:
        """When the run was made and how often it was written to: what a cache of its reports is keyed by."""
        with self._engine.connect() as connection:
            c = schema.runs.c
            found = connection.execute(select(c.created_ns, c.commits).where(c.run_id == run)).one_or_none()
        return (found.created_ns, found.commits) if found else (0, 0)

    def attempts(self, run: str) -> list[Attempt]:
        """The run's attempts, oldest first."""
        with self._engine.connect() as connection:
            return reading.attempts(connection, run)

    def sources(self, run: str, attempt: str) -> list[Source]:
        """The attempt's sources, by rank."""
        with self._engine.connect() as connection:
            return reading.sources(connection, run, attempt)

    def layouts(self, run: str, attempt: str) -> list[wire.Layout]:
        """Each module's layouts, by revision."""
        with self._engine.connect() as connection:
            return reading.layouts(connection, run, attempt)

    def steps(
        self, run: str, attempt: str, rank: int | None = None, first: int | None = None, last: int | None = None
    ) -> tuple[wire.Ints, wire.Steps]:
        """Steps in [first, last], sorted by step and rank, with the rank of each row."""
        return self._columns(("steps", wire.Steps), run, attempt, rank, first, last)

    def spans(
        self, run: str, attempt: str, rank: int | None = None, first: int | None = None, last: int | None = None
    ) -> tuple[wire.Ints, wire.Spans]:
        """Bucket spans of the steps in [first, last], likewise."""
        return self._columns(("spans", wire.Spans), run, attempt, rank, first, last)

    def comms(
        self, run: str, attempt: str, rank: int | None = None, first: int | None = None, last: int | None = None
    ) -> tuple[wire.Ints, wire.Comms]:
        """Other communication of the steps in [first, last], likewise."""
        return self._columns(("comms", wire.Comms), run, attempt, rank, first, last)

    def unused(self, run: str, attempt: str) -> list[tuple[int, wire.Unused]]:
        """(rank, unused set) in the order in which each rank told them."""
        with self._engine.connect() as connection:
            return reading.told(connection, "unused", run, attempt)

    def events(self, run: str, attempt: str) -> list[tuple[int, wire.Event]]:
        """(rank, event) in the order in which each rank told them."""
        with self._engine.connect() as connection:
            return reading.told(connection, "events", run, attempt)

    def rollups(self, run: str, attempt: str) -> list[Rollup]:
        """Sums by rank."""
        with self._engine.connect() as connection:
            return reading.rollups(connection, run, attempt)

    def bucket_rollups(self, run: str, attempt: str) -> list[BucketRollup]:
        """Sums by rank and bucket."""
        with self._engine.connect() as connection:
            return reading.bucket_rollups(connection, run, attempt)

    def peer_totals(self, run: str, attempt: str) -> list[PeerTotal]:
        """Straggler statistics made among the ranks, by rank."""
        with self._engine.connect() as connection:
            return reading.peer_totals(connection, run, attempt)

    def histogram(self, run: str, attempt: str) -> list[int]:
        """Steps of all ranks under each of `schema.STEP_BOUNDS_S`, not cumulated, and above the last."""
        with self._engine.connect() as connection:
            return reading.histogram(connection, run, attempt)

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

    def _columns(self, kind: tuple[str, Any], run: str, attempt: str, *which: int | None) -> tuple[wire.Ints, Any]:
        rank, first, last = which
        with self._engine.connect() as connection:
            return reading.columns(connection, kind, run, attempt, rank=rank, first=first, last=last)


def _alembic() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    return config


def _durable(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for setting in ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()
