"""The condition of the database under a running collector: files in place, undamaged pages, this version's schema.

Commits that go to a removed or replaced file are lost at the next start. A damaged database may lose any of them. What
an older version writes into a newer schema may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext

from ddpobs_server.store.database import database_errors, migration
from ddpobs_server.store.database.database_errors import LostDatabaseError

_SUFFIXES = ("", "-wal", "-shm")
"""The file, its write-ahead log and the log's index: a commit needs all three until the next checkpoint."""
_Identity = tuple[int, int]
"""Device and inode."""


class DatabaseState:
    """Refuses commits of an engine after its files were removed or replaced, its pages damaged, or its schema changed.

    Args:
        engine: Its connections are observed from now on.
        file: File of a SQLite database; None for a server.
    """

    def __init__(self, engine: Engine, file: Path | None) -> None:
        self._paths = [] if file is None else [Path(f"{file}{suffix}") for suffix in _SUFFIXES]
        self._opened: dict[Path, _Identity] = {}
        self._damage: str | None = None
        event.listen(engine, "handle_error", self._note_damage)
        event.listen(engine, "commit", self._check_commit)
        if self._paths:
            event.listen(engine, "connect", self._record_files)

    def check(self) -> None:
        """Compare the paths with the files that the first connection opened.

        Raises:
            LostDatabaseError: A file is missing, another file has its name, or a page is damaged.
        """
        if self._damage is not None:
            raise database_errors.damaged(self._damage)
        for path, opened in self._opened.items():
            current = _identity(path)
            if current != opened:
                change = "removed" if current is None else "replaced by another file"
                raise LostDatabaseError(
                    f"{path} was {change} while the collector had it open: restart the collector, or move the "
                    "original file back"
                )

    def _check_commit(self, connection: Connection) -> None:
        self.check()
        migration.check(connection)

    def _record_files(self, _connection: Any, _record: object) -> None:
        """Record the files of the first connection; a later connection must open the same files.

        They exist from the first connection on, and SQLite deletes a log only with the last connection.
        """
        for path in self._paths:
            if path not in self._opened and (identity := _identity(path)) is not None:
                self._opened[path] = identity
        self.check()

    def _note_damage(self, context: ExceptionContext) -> None:
        self._note(context.original_exception)

    def _note(self, error: BaseException | None) -> None:
        if database_errors.is_damage(error):
            self._damage = str(error)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Note the damage that direct calls of SQLite's driver meet: the engine's events do not show it."""
        try:
            yield
        except LostDatabaseError as error:
            self._note(error.__cause__)
            raise


def _identity(path: Path) -> _Identity | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
