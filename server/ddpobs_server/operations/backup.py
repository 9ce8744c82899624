"""Backs up a SQLite database to a file while a collector writes to it, and restores it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from ddpobs_server.settings import printable_url, sqlite_file
from ddpobs_server.store.database import database_lock


class BackupError(Exception):
    """Nothing was changed; the message has the reason and the remedy."""


def backup(database_url: str, file: Path) -> None:
    """Copy the committed data while collectors continue to write. The copy is checked before it gets its name.

    Raises:
        BackupError: The database is not a SQLite file or does not exist, the file exists already, or the copy is
            damaged.
    """
    database = _sqlite_file(database_url, f"pg_dump --format=custom --file={file}")
    if not database.exists():
        raise BackupError(f"no database {database}")
    if file.exists():
        raise BackupError(f"{file} exists already: choose another name")
    _copy(database, file)


def restore(database_url: str, file: Path) -> None:
    """Create the database from a backup. The collector's next start upgrades an older schema.

    Raises:
        BackupError: The database exists already, or the file is not a backup of a collector's database.
        UnusableError: A collector runs with this file, even if the file was moved away.
    """
    database = _sqlite_file(database_url, f"pg_restore --exit-on-error --no-owner {file}, into an empty database")
    with database_lock.held(database, alone=True):
        _restore(database, file)


def _restore(database: Path, file: Path) -> None:
    existing = [str(path) for path in (database, Path(f"{database}-wal"), Path(f"{database}-shm")) if path.exists()]
    if existing:
        raise BackupError(f"{', '.join(existing)} would be lost: stop the collector and move it away first")
    if not file.exists():
        raise BackupError(f"no file {file}")
    _copy(file, database)


def _sqlite_file(database_url: str, alternative: str) -> Path:
    file = sqlite_file(database_url)
    if file is None:
        raise BackupError(f"{printable_url(database_url)} has its own tool: {alternative}")
    return file


def _copy(source: Path, target: Path) -> None:
    unfinished = target.with_name(f"{target.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        with (
            closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as original,
            closing(sqlite3.connect(unfinished)) as copy,
        ):
            # All pages in a single step: with several steps, each commit of the collector restarts the copy.
            original.backup(copy, pages=-1)
            copy.execute("PRAGMA journal_mode=DELETE")
            damage = copy.execute("PRAGMA quick_check(1)").fetchone()[0]
            tables = {name for (name,) in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if damage != "ok":
            raise BackupError(f"{source} is damaged: {damage}")
        if not {"alembic_version", "runs", "batches"} <= tables:
            raise BackupError(f"{source} is not a collector's database")
        _sync(unfinished)
        _name_new(unfinished, target)
        _sync(target.parent)
    except (sqlite3.Error, OSError) as error:
        raise BackupError(f"{source} could not be copied to {target}: {error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _name_new(unfinished: Path, target: Path) -> None:
    """Give the copy its name; another process may have created a file of that name meanwhile."""
    try:
        os.link(unfinished, target)
    except FileExistsError:
        raise BackupError(f"{target} was created by another process meanwhile: choose another name") from None
    except OSError:  # A file system without hard links.
        unfinished.rename(target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
