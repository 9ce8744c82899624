"""The store's one face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, event, func, select

from ddpobs import wire
from ddpobs_server.store import reading, schema, writing
from ddpobs_server.store.rows import Attempt, BucketRollup, PeerTotal, Rollup, Run, Source
from ddpobs_server.store.writing import Arrival, Outcome

_MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_S = 30


class Store:
    """Batches in, columns and rows out. Safe to use from several threads; one at a time writes.

    Args:
        url: SQLAlchemy's, of SQLite or PostgreSQL.
    """

    def __init__(self, url: str) -> None:
        sqlite = url.startswith("sqlite")
        self._engine = create_engine(url, connect_args={"timeout": _BUSY_S} if sqlite else {}, pool_pre_ping=not sqlite)
        if sqlite:
            event.listen(self._engine, "connect", _durable)

    def migrate(self) -> None:
        """Bring the schema to this version's, from whatever earlier one is there."""
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        with self._engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def ingest(self, arrivals: Sequence[Arrival]) -> list[Outcome]:
        """Store batches in one transaction; returns after its commit, with the outcome of each."""
        with self._engine.begin() as connection:
            return [writing.write(connection, arrival) for arrival in arrivals]

    def delete(self, run: str) -> bool:
        """Remove everything of a run; False where there is none."""
        with self._engine.begin() as connection:
            return writing.delete_run(connection, run)

    def ready(self) -> bool:
        """Whether the database answers."""
        with self._engine.connect() as connection:
            return connection.execute(select(1)).scalar() == 1

    def runs(self, limit: int, before: tuple[int, str] | None = None) -> list[Run]:
        """The runs seen last, newest first; `before` is (last_seen_ns, run) of the last one had."""
        with self._engine.connect() as connection:
            names = connection.execute(reading.runs_query(before, limit)).scalars().all()
            return [found for name in names if (found := reading.run(connection, name)) is not None]

    def active_runs(self, since_ns: int) -> list[Run]:
        """Runs heard of since then, by this collector's wall clock."""
        with self._engine.connect() as connection:
            c = schema.runs.c
            names = connection.execute(select(c.run_id).where(c.last_seen_ns >= since_ns).order_by(c.run_id)).scalars()
            return [found for name in names.all() if (found := reading.run(connection, name)) is not None]

    def run(self, run: str) -> Run | None:
        """One run, or None."""
        with self._engine.connect() as connection:
            return reading.run(connection, run)

    def commits(self, run: str) -> int:
        """How often the run was written to: what a cache of its reports is keyed by."""
        with self._engine.connect() as connection:
            c = schema.runs.c
            return connection.execute(select(c.commits).where(c.run_id == run)).scalar() or 0

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


def _durable(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()
