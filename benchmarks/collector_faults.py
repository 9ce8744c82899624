"""Faults of a collector in a soak: each begins, lasts for some seconds and ends."""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alembic import command
from ddpobs_server.store import Store
from ddpobs_server.store.database import migration
from sqlalchemy import create_engine

from benchmarks import stepped_clock
from benchmarks.rig import databases
from benchmarks.tenants import Collector, Tenant

_GRACE_S, _OUTAGE_S = 1.0, 3.0
"""Time in which batches that were committed before a file was moved are acknowledged, and time after an outage."""
_HOUR_NS = 3600 * 10**9
_EARLIER, _INTERRUPTED = "0004", 3
"""The schema's revision before an upgrade, and how often that upgrade is killed."""
_STEPS_NS = (-365 * 24 * _HOUR_NS, -_HOUR_NS, _HOUR_NS, 365 * 24 * _HOUR_NS)


@dataclass
class Outcome:
    """Record of the faults.

    Attributes:
        counts: Number of faults by kind.
        outages: (begin, end) of each fault that stops the store.
        acknowledged_without_file: Batches that were acknowledged while the database's file was away.
        removed: URL of each removed database, and the number of batches acknowledged until then.
    """

    counts: dict[str, int] = field(default_factory=dict)
    outages: list[tuple[float, float]] = field(default_factory=list)
    acknowledged_without_file: int = 0
    removed: list[tuple[str, int]] = field(default_factory=list)


class Faults:
    """Draws faults.

    Args:
        collector: The collector.
        loud: A workspace whose clients are slow.
        server: PostgreSQL's server; None for a SQLite file.
        clock: File of the collector's clock.
        acknowledged: Returns the number of batches acknowledged so far.
        prepare: Fills the tables that a new database needs.
        limit: Stores the limits of workspaces.
        seed: Of the draws.
    """

    def __init__(
        self,
        collector: Collector,
        loud: Tenant,
        server: Any,
        clock: Path,
        *,
        acknowledged: Callable[[], int],
        prepare: Callable[[], None],
        limit: Callable[[], None],
        seed: int,
    ) -> None:
        self._collector, self._loud, self._server, self._clock = collector, loud, server, clock
        self._acknowledged, self._prepare, self._limit = acknowledged, prepare, limit
        self._random = random.Random(seed)
        self._remaining: list[Callable[[float], None]] = []
        self.outcome = Outcome()

    def draw(self, seconds: float) -> None:
        """Draw a fault, and end it after some seconds. Each kind is drawn once before any is drawn again."""
        if not self._remaining:
            self._remaining = [self._kill, self._fill_disk, self._stop_database, self._step_clock]
            self._remaining += [self._unfinished_bodies, self._unread_answers, self._kill_during_upgrade]
            if self._server is None:
                self._remaining += [self._move_file, self._remove_file]
            self._random.shuffle(self._remaining)
        kind = self._remaining.pop()
        name = kind.__name__.strip("_").replace("_", " ")
        self.outcome.counts[name] = self.outcome.counts.get(name, 0) + 1
        kind(seconds)

    @contextmanager
    def _outage(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.outcome.outages.append((began - 1, time.monotonic() + _OUTAGE_S))

    def _restart(self, **settings: object) -> None:
        self._collector.end(kill=True)
        self._collector.start(**settings)

    def _kill(self, _seconds: float) -> None:
        with self._outage():
            self._restart()

    def _kill_during_upgrade(self, _seconds: float) -> None:
        """Return the schema to an earlier revision, and kill the collector several times while it upgrades it."""
        with self._outage():
            self._collector.end(kill=True)
            downgrade(self._collector.database_url, _EARLIER)
            for _ in range(_INTERRUPTED):
                self._collector.launch()
                time.sleep(self._random.uniform(0.5, 3.0))
                self._collector.end(kill=True)
            migrate(self._collector.database_url)
            self._limit()  # The earlier revision has no table for them. Without them, clients would exceed them.
            self._collector.start()

    def _fill_disk(self, seconds: float) -> None:
        with self._outage():
            self._restart(keep_free_mb=10**9)
            time.sleep(seconds)
            self._restart()

    def _stop_database(self, seconds: float) -> None:
        """Stop PostgreSQL as in a crash, or lock the SQLite file."""
        with self._outage():
            if self._server is not None:
                databases.stop(self._server, "immediate")
                time.sleep(seconds)
                databases.start(self._server)
                return
            connection = sqlite3.connect(self._file, isolation_level=None, timeout=30)
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(seconds)
            connection.execute("ROLLBACK")
            connection.close()

    def _step_clock(self, seconds: float) -> None:
        """Set the collector's wall clock, and set it back."""
        stepped_clock.set_offset(self._clock, self._random.choice(_STEPS_NS))
        time.sleep(seconds)
        stepped_clock.set_offset(self._clock, 0)

    def _move_file(self, seconds: float) -> None:
        """Move the files away under the running collector, and move them back."""
        with self._outage():
            away = self._file.parent / "away"
            away.mkdir(exist_ok=True)
            files = self._files()
            for path in files:
                path.rename(away / path.name)
            self._wait_without_file(seconds)
            for path in files:
                (away / path.name).rename(path)

    def _remove_file(self, seconds: float) -> None:
        """Remove the files under the running collector, then start it with a new database.

        A second link keeps the removed data, so that they can be compared with the acknowledgements.
        """
        with self._outage():
            kept = self._file.parent / f"removed-{len(self.outcome.removed)}.db"
            for path in self._files():
                if not path.name.endswith("-shm"):
                    os.link(path, f"{kept}{path.name.removeprefix(self._file.name)}")
            for path in self._files():
                path.unlink()
            acknowledged = self._wait_without_file(seconds)
            self.outcome.removed.append((f"sqlite:///{kept}", acknowledged))
            self._collector.end(kill=True)
            self._prepare()
            self._collector.start()

    def _wait_without_file(self, seconds: float) -> int:
        """Count the acknowledgements while the file is away; return the number before."""
        time.sleep(_GRACE_S)
        before = self._acknowledged()
        time.sleep(seconds)
        self.outcome.acknowledged_without_file += self._acknowledged() - before
        return before

    def _unfinished_bodies(self, seconds: float) -> None:
        with self._loud.unfinished_bodies(86):
            time.sleep(seconds)

    def _unread_answers(self, seconds: float) -> None:
        with self._loud.slow_readers(16):
            time.sleep(seconds)

    @property
    def _file(self) -> Path:
        return Path(self._collector.database_url.removeprefix("sqlite:///"))

    def _files(self) -> list[Path]:
        """The database's file, its log and the log's index."""
        return [path for suffix in ("", "-wal", "-shm") if (path := Path(f"{self._file}{suffix}")).exists()]


def migrate(url: str) -> None:
    """Upgrade a database's schema."""
    store = Store(url)
    store.migrate()
    store.close()


def downgrade(url: str, revision: str) -> None:
    """Return a database's schema to an earlier revision. Spans stay."""
    engine = create_engine(url)
    with engine.begin() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        config = migration._alembic()
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
    engine.dispose()
