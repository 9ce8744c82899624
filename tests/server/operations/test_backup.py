"""Backups that are taken while batches come in, and what comes back from them."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import httpx
import pytest
from ddpobs_server.operations import backup, commands
from ddpobs_server.store import Store, schema
from sqlalchemy import create_engine, func, make_url, select
from typer.testing import CliRunner, Result

from ddpobs import wire
from tests import databases
from tests.collector import collector
from tests.server.batches import ATTEMPT, batch, get, path, put, source_of, spans, steps

STEPS = 20


def command(*arguments: str) -> Result:
    return CliRunner().invoke(commands.cli, list(arguments))


@contextmanager
def load(url: str) -> Iterator[Callable[[], int]]:
    """Two ranks that send one batch after the other; gives how many were acknowledged so far."""
    acknowledged, ended = [0, 0], threading.Event()

    def send(rank: int) -> None:
        with httpx.Client(base_url=url, timeout=60, headers={"Content-Type": wire.MSGPACK}) as client:
            for seq in count():
                if ended.is_set():
                    return
                first = seq * STEPS
                sent = batch("loaded", seq=seq, rank=rank, steps=steps(first, STEPS), spans=spans(first, STEPS))
                assert client.put(path(sent), content=wire.encode(sent)).status_code == 201
                acknowledged[rank] += 1

    threads = [threading.Thread(target=send, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield lambda: sum(acknowledged)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1200):
        if holds():
            return
        pause.wait(0.05)
    raise AssertionError("it did not come true within a minute")


def assert_whole(database_url: str, at_least: int, at_most: int) -> None:
    """Every batch that is in it is there with all of its steps, spans and sums; a rank's batches have no gaps."""
    engine = create_engine(database_url)
    with engine.connect() as connection:
        keys = connection.execute(select(schema.batches.c.source, schema.batches.c.seq)).all()
        sums = connection.execute(select(func.sum(schema.rollups.c.steps))).scalar_one()
    engine.dispose()
    assert at_least <= len(keys) <= at_most
    for rank in range(2):
        seqs = sorted(seq for source, seq in keys if source == source_of(rank))
        assert seqs == list(range(len(seqs)))
    store = Store(database_url)
    bucket_sums = sum(rollup.steps for rollup in store.bucket_rollups("loaded", ATTEMPT))
    assert (sums, bucket_sums) == (len(keys) * STEPS, len(keys) * STEPS * 2)
    ranks, _ = store.steps("loaded", ATTEMPT)
    span_ranks, _ = store.spans("loaded", ATTEMPT)
    store.close()
    assert (len(ranks), len(span_ranks)) == (len(keys) * STEPS, len(keys) * STEPS * 2)


def test_a_backup_under_load_has_whole_batches_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector(tmp_path) as running, load(running.url) as acknowledged:
        for number in range(2):
            before = acknowledged()
            until(lambda before=before: acknowledged() > before + 10)  # type: ignore[misc]
            before = acknowledged()
            file = tmp_path / f"backup-{number}"
            done = command("backup", str(file), "--database-url", f"sqlite:///{running.database}")
            assert done.exit_code == 0, done.output
            assert_whole(f"sqlite:///{file}", before, acknowledged() + 2)
    restored = tmp_path / "restored"
    restored.mkdir()
    monkeypatch.chdir(tmp_path)
    done = command("restore", file.name, "--database-url", "sqlite:///restored/runs.db")
    assert done.exit_code == 0, done.output
    with collector(restored) as running:
        known = get(running.url, "/runs/loaded/ranks")["ranks"]
        again = batch("loaded", seq=0, steps=steps(0, STEPS), spans=spans(0, STEPS))
        assert put(running.url, again, form="msgpack").status_code == 200, "what it has, it knows"
        assert sum(rank["steps"] for rank in known) % STEPS == 0


def test_pg_dump_under_load_has_whole_batches_and_comes_back(postgresql: databases.Fresh, tmp_path: Path) -> None:
    database, empty, file = postgresql(tmp_path), postgresql(tmp_path), tmp_path / "backup"
    with collector(tmp_path, database_url=database) as running, load(running.url) as acknowledged:
        until(lambda: acknowledged() > 10)
        before = acknowledged()
        pg(database, "pg_dump", "--format=custom", f"--file={file}", f"--dbname={plain(database)}")
        after = acknowledged() + 2
    pg(database, "pg_restore", "--exit-on-error", "--no-owner", f"--dbname={plain(empty)}", str(file))
    assert_whole(empty, before, after)


def plain(url: str) -> str:
    """The address as PostgreSQL's own programs take it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def pg(database: str, program: str, *arguments: str) -> None:
    """Run a program of the server's own version: a `pg_dump` older than the server refuses."""
    engine = create_engine(database)
    with engine.connect() as connection:
        folder = connection.exec_driver_sql("SELECT setting FROM pg_config WHERE name = 'BINDIR'").scalar_one()
    engine.dispose()
    command = [Path(folder) / program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("what", ["there already", "nowhere", "nothing", "no database", "damaged", "postgresql"])
def test_what_cannot_be_backed_up_or_restored_is_refused_and_nothing_changed(tmp_path: Path, what: str) -> None:
    database, file = tmp_path / "runs.db", tmp_path / "backup"
    store = Store(f"sqlite:///{database}")
    store.migrate()
    store.close()
    verb, url, says = "restore", f"sqlite:///{tmp_path}/new.db", what
    if what == "there already":
        file.write_bytes(b"mine")
        verb, url = "backup", f"sqlite:///{database}"
    elif what == "nowhere":
        verb, url, file, says = "backup", f"sqlite:///{database}", database / "backup", "could not be copied"
    elif what == "nothing":
        verb, url, says = "backup", f"sqlite:///{tmp_path}/none.db", "no database"
    elif what == "no database":
        file.write_bytes(b"hello" * 1000)
        says = "not a database"
    elif what == "damaged":
        backup.backup(f"sqlite:///{database}", file)
        whole = file.read_bytes()
        file.write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])
        says = "damaged"
    else:
        verb, url, says = "backup", "postgresql+psycopg://me:s3cret@localhost/ddpobs", "pg_dump --format=custom"
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = command(verb, str(file), "--database-url", url)
    assert done.exit_code == 1
    assert says in done.stderr
    assert "s3cret" not in done.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_nothing_is_restored_over_a_database(tmp_path: Path) -> None:
    for name in ("runs.db", "backup"):
        store = Store(f"sqlite:///{tmp_path}/{name}")
        store.migrate()
        store.close()
    done = command("restore", f"{tmp_path}/backup", "--database-url", f"sqlite:///{tmp_path}/runs.db")
    assert done.exit_code == 1
    assert "move it away" in done.stderr
