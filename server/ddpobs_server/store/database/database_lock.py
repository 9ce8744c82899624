"""A lock beside a SQLite file: collectors share it, and a restore needs it alone.

The file itself cannot be locked: `restore` creates it, and SQLite loses its own locks if a process closes the file.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddpobs_server.store.database.database_errors import UnusableError


@contextmanager
def held(database: Path, *, alone: bool) -> Iterator[None]:
    """Hold the lock of a database. The system releases it if the process ends in any way.

    Args:
        database: The SQLite file, which need not exist.
        alone: Whether no other process may hold the lock.

    Raises:
        UnusableError: A process holds a conflicting lock, or the lock's file cannot be opened.
    """
    path = Path(f"{database}.lock")
    descriptor = _open_locked(path, database, alone)
    try:
        yield
    finally:
        if alone:
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _open_locked(path: Path, database: Path, alone: bool) -> int:
    """Open and lock the file. If its last holder removed it meanwhile, begin again with the new file."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnusableError(f"{path} cannot be opened by user {os.geteuid()}: {error.strerror}") from error
        try:
            _lock(descriptor, database, alone)
            if _is_same(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _lock(descriptor: int, database: Path, alone: bool) -> None:
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = "a collector uses it: stop it first" if alone else "a restore is in progress: start again after it"
        raise UnusableError(f"{database} is locked, because {holder}") from error
    except OSError as error:
        raise UnusableError(f"{database}.lock cannot be locked: {error.strerror}; use a local file system") from error
