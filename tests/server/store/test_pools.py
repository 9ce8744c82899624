"""PostgreSQL behind pgbouncer in transaction mode: no prepared statements, and errors that pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psycopg
import pytest
from ddpobs_server.settings import Settings
from ddpobs_server.store import Store, UnavailableError
from ddpobs_server.store.database import database_errors
from psycopg import errors
from sqlalchemy import make_url

from benchmarks.rig import databases, patience
from benchmarks.rig.collector import collector
from benchmarks.rig.ports import free_port
from tests.support.server.batches import batch, put, spans, steps


def need_pgbouncer() -> str:
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        reason = "pgbouncer is not installed: apt-get install pgbouncer"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return program


@contextmanager
def pool(url: str, folder: Path) -> Iterator[str]:
    """Address of a database behind pgbouncer in transaction mode, with few server connections."""
    program, port = need_pgbouncer(), free_port()
    database = make_url(url)
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n{database.database} = host={database.query['host']} dbname={database.database} user=postgres\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nauth_type = any\npool_mode = transaction\n"
        f"default_pool_size = 3\nunix_socket_dir =\nlogfile = {folder}/pool.log\n"
        "server_check_delay = 0\n"
    )
    folder.chmod(0o777)
    owner = Path(str(database.query["host"])).stat().st_uid  # Only the server's own user may enter its folder.
    process = subprocess.Popen(
        [program, "-q", str(folder / "pgbouncer.ini")], user=owner, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        pooled = f"postgresql+psycopg://postgres@127.0.0.1:{port}/{database.database}"
        wait_for(pooled)
        yield pooled
    finally:
        process.terminate()
        process.wait(20)


def wait_for(url: str) -> None:
    plain = make_url(url).set(drivername="postgresql").render_as_string()
    deadline = time.monotonic() + patience.HANG_S
    while True:
        try:
            psycopg.connect(plain).close()
        except psycopg.Error:
            assert time.monotonic() < deadline, "pgbouncer does not answer"
            time.sleep(0.1)
        else:
            return


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that pgbouncer's user can reach: it does not run as root."""
    with tempfile.TemporaryDirectory(prefix="ddpobs-") as folder:
        yield Path(folder)


def test_a_collector_behind_a_pool_in_transaction_mode_stores_every_batch(
    postgresql: databases.Fresh, tmp_path: Path, open_folder: Path
) -> None:
    with (
        pool(postgresql(tmp_path), open_folder) as url,
        collector(tmp_path, database_url=url, prepare_threshold="off") as running,
        ThreadPoolExecutor(8) as threads,
    ):
        keys = [(seq, rank) for seq in range(50) for rank in range(4)]
        batches = [batch("x", seq, rank, world_size=4, steps=steps(seq, 1), spans=spans(seq, 1)) for seq, rank in keys]
        puts = [threads.submit(put, running.url, payload) for payload in batches]
        reads = [threads.submit(httpx.get, f"{running.url}/metrics") for _ in range(20)]
        assert {answer.result().status_code for answer in puts} == {201}
        assert {answer.result().status_code for answer in reads} == {200}


def test_with_prepared_statements_a_pool_costs_no_batch_either(
    postgresql: databases.Fresh, tmp_path: Path, open_folder: Path
) -> None:
    with (
        pool(postgresql(tmp_path), open_folder) as url,
        collector(tmp_path, database_url=url, prepare_threshold=1) as running,
        ThreadPoolExecutor(8) as threads,
    ):
        batches = [
            batch("x", seq=seq, rank=rank, world_size=4, steps=steps(seq, 1)) for seq in range(50) for rank in range(4)
        ]
        answers = {answer.status_code for answer in threads.map(lambda payload: put(running.url, payload), batches)}
        assert answers <= {201, 503}, "a client keeps a batch that got a 503"


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidSqlStatementName("prepared statement _pg3_0 does not exist"),
        errors.DuplicatePreparedStatement("prepared statement _pg3_0 already exists"),
        errors.InternalError_("server closed the connection unexpectedly"),
        errors.InternalError_("server conn crashed?"),
        errors.ProtocolViolation("query_wait_timeout"),
        errors.SystemError("pgbouncer cannot connect to server"),
    ],
    ids=lambda error: str(error)[:20],
)
def test_an_error_of_a_pool_passes_and_drops_the_connection(error: psycopg.Error) -> None:
    context: Any = SimpleNamespace(original_exception=error, is_pre_ping=False, is_disconnect=False, engine=None)
    assert isinstance(database_errors.translate(context), UnavailableError)
    assert context.is_disconnect


LOSE_SERVER = """
    CREATE FUNCTION lose_server() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN RAISE EXCEPTION 'server closed the connection unexpectedly' USING ERRCODE = 'XX000'; END $$;
    CREATE TRIGGER lose_server BEFORE INSERT ON chunks EXECUTE FUNCTION lose_server();
"""


def test_a_batch_that_meets_such_an_error_gets_503_and_is_stored_when_it_is_sent_again(
    postgresql: databases.Fresh, tmp_path: Path
) -> None:
    url = postgresql(tmp_path)
    payload = batch("x", steps=steps(0, 2))
    with (
        collector(tmp_path, database_url=url) as running,
        psycopg.connect(
            make_url(url).set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True
        ) as database,
    ):
        database.execute(LOSE_SERVER)
        refused = put(running.url, payload)
        assert (refused.status_code, refused.headers["Retry-After"].isdecimal()) == (503, True)
        assert "server closed the connection" in running.log.read_text()
        database.execute("DROP TRIGGER lose_server ON chunks")
        assert put(running.url, payload).status_code == 201


def test_an_internal_error_of_the_server_itself_stays() -> None:
    error = errors.InternalError_("cache lookup failed for relation 1")
    context: Any = SimpleNamespace(original_exception=error, is_pre_ping=False, is_disconnect=False, engine=None)
    assert database_errors.translate(context) is None


@pytest.mark.parametrize(("value", "expected"), [("off", None), ("7", 7)])
def test_the_threshold_reaches_the_driver(
    postgresql: databases.Fresh, tmp_path: Path, value: str, expected: int | None
) -> None:
    settings = Settings(database_url=postgresql(tmp_path), prepare_threshold=value)
    store = Store(settings.database_url, prepare_threshold=settings.statement_threshold)
    with store._engine.connect() as connection:
        assert connection.connection.driver_connection.prepare_threshold == expected  # type: ignore[union-attr]
    store.close()
