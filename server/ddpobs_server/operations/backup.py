"""A SQLite database into one file and back, while a collector writes to it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from sqlalchemy import make_url


class BackupError(Exception):
    """Nothing was changed; says why and what to do."""


def backup(database_url: str, file: Path) -> None:
    """Copy what is committed now; collectors go on writing meanwhile. The file is checked before it gets its name.

    Raises:
        BackupError: The database is no SQLite file or is not there, the file is there already, or the copy is damaged.
    """
    database = _sqlite(database_url, f"pg_dump --format=custom --file={file}")
    if not database.exists():
        raise BackupError(f"no database {database}")
    if file.exists():
        raise BackupError(f"{file} is there already: choose another name")
    _copy(database, file)


def restore(database_url: str, file: Path) -> None:
    """Make the database from a backup's file; the collector's next start brings an older schema up to date.

    Raises:
        BackupError: There is a database already, or the file is no backup of a collector's.
    """
    database = _sqlite(database_url, f"pg_restore --exit-on-error --no-owner {file}, into an empty database")
    there = [str(path) for path in (database, Path(f"{database}-wal"), Path(f"{database}-shm")) if path.exists()]
    if there:
        raise BackupError(f"{', '.join(there)} would be lost: stop the collector and move it away first")
    if not file.exists():
        raise BackupError(f"no file {file}")
    _copy(file, database)


def _sqlite(database_url: str, instead: str) -> Path:
    url = make_url(database_url)
    if url.get_backend_name() != "sqlite" or not url.database:
        raise BackupError(f"{url.render_as_string()} has a tool of its own: {instead}")
    return Path(url.database).resolve()


def _copy(source: Path, target: Path) -> None:
    unfinished = target.with_name(f"{target.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        with (
            closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as theirs,
            closing(sqlite3.connect(unfinished)) as ours,
        ):
            # All pages in one step: a copy in several would begin anew with each commit of the collector's.
            theirs.backup(ours, pages=-1)
            ours.execute("PRAGMA journal_mode=DELETE")
            damage = ours.execute("PRAGMA quick_check(1)").fetchone()[0]
            tables = {name for (name,) in ours.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if damage != "ok":
            raise BackupError(f"{source} is damaged: {damage}")
        if not {"alembic_version", "runs", "batches"} <= tables:
            raise BackupError(f"{source} is not a collector's database")
        _sync(unfinished)
        unfinished.rename(target)
        _sync(target.parent)
    except (sqlite3.Error, OSError) as error:
        raise BackupError(f"{source} could not be copied to {target}: {error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
