"""Backups made while batches arrive, and their restoration."""

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

from benchmarks.rig import databases, patience
from benchmarks.rig.collector import collector
from ddpobs import wire
from tests.support.server.batches import ATTEMPT, batch, get, path, put, source_of, spans, steps

STEPS = 20


def command(*arguments: str) -> Result:
    return CliRunner().invoke(commands.cli, list(arguments))


@contextmanager
def load(url: str) -> Iterator[Callable[[], int]]:
    """Two ranks that send batches without a pause; yields a function that counts the acknowledged batches."""
    acknowledged, ended = [0, 0], threading.Event()

    def send(rank: int) -> None:
        with httpx.Client(base_url=url, headers={"Content-Type": wire.MSGPACK}) as client:
            for seq in count():
                if ended.is_set():
                    return
                first = seq * STEPS
                sent_batch = batch("loaded", seq=seq, rank=rank, steps=steps(first, STEPS), spans=spans(first, STEPS))
                assert client.put(path(sent_batch), content=wire.encode(sent_batch)).status_code == 201
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


def assert_whole(database_url: str, at_least: int, at_most: int) -> None:
    """Every batch has all its steps, spans and sums, and no rank has a gap."""
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
    bucket_sums = sum(rollup.steps for rollup in store.bucket_rollups("loaded", ATTEMPT, 100)[0])
    assert (sums, bucket_sums) == (len(keys) * STEPS, len(keys) * STEPS * 2)
    ranks, _ = store.steps("loaded", ATTEMPT)
    span_ranks, _ = store.spans("loaded", ATTEMPT)
    store.close()
    assert (len(ranks), len(span_ranks)) == (len(keys) * STEPS, len(keys) * STEPS * 2)


def wait_for_ten_more(acknowledged: Callable[[], int]) -> None:
    begin = acknowledged()
    patience.until(lambda: acknowledged() > begin + 10)


def test_a_backup_under_load_has_whole_batches_and_can_be_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector(tmp_path) as running, load(running.url) as acknowledged:
        for number in range(2):
            wait_for_ten_more(acknowledged)
            lower = acknowledged()
            file = tmp_path / f"backup-{number}"
            done = command("backup", str(file), "--database-url", f"sqlite:///{running.database}")
            assert done.exit_code == 0, done.output
            assert_whole(f"sqlite:///{file}", lower, acknowledged() + 2)
    restored = tmp_path / "restored"
    restored.mkdir()
    monkeypatch.chdir(tmp_path)
    done = command("restore", file.name, "--database-url", "sqlite:///restored/runs.db")
    assert done.exit_code == 0, done.output
    with collector(restored) as running:
        ranks = get(running.url, "/runs/loaded/ranks")["ranks"]
        again = batch("loaded", seq=0, steps=steps(0, STEPS), spans=spans(0, STEPS))
        assert put(running.url, again, form="msgpack").status_code == 200, "a restored batch counts as repeated"
        assert sum(rank["steps"] for rank in ranks) % STEPS == 0


def test_pg_dump_under_load_has_whole_batches_and_can_be_restored(postgresql: databases.Fresh, tmp_path: Path) -> None:
    database, empty, file = postgresql(tmp_path), postgresql(tmp_path), tmp_path / "backup"
    with collector(tmp_path, database_url=database) as running, load(running.url) as acknowledged:
        patience.until(lambda: acknowledged() > 10)
        lower = acknowledged()
        pg(database, "pg_dump", "--format=custom", f"--file={file}", f"--dbname={plain(database)}")
        upper = acknowledged() + 2
    pg(database, "pg_restore", "--exit-on-error", "--no-owner", f"--dbname={plain(empty)}", str(file))
    assert_whole(empty, lower, upper)


def plain(url: str) -> str:
    """The URL in the form of PostgreSQL's own programs."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def pg(database: str, program: str, *arguments: str) -> None:
    """Run a program of the server's version: a `pg_dump` older than the server fails."""
    engine = create_engine(database)
    with engine.connect() as connection:
        folder = connection.exec_driver_sql("SELECT setting FROM pg_config WHERE name = 'BINDIR'").scalar_one()
    engine.dispose()
    command = [str(Path(folder) / program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", ["exists already", "no folder", "no source", "no database", "damaged", "postgresql"])
def test_an_impossible_backup_or_restore_is_refused_and_changes_nothing(tmp_path: Path, case: str) -> None:
    database, file = tmp_path / "runs.db", tmp_path / "backup"
    store = Store(f"sqlite:///{database}")
    store.migrate()
    store.close()
    verb, url, message = "restore", f"sqlite:///{tmp_path}/new.db", case
    if case == "exists already":
        file.write_bytes(b"mine")
        verb, url = "backup", f"sqlite:///{database}"
    elif case == "no folder":
        verb, url, file, message = "backup", f"sqlite:///{database}", database / "backup", "could not be copied"
    elif case == "no source":
        verb, url, message = "backup", f"sqlite:///{tmp_path}/none.db", "no database"
    elif case == "no database":
        file.write_bytes(b"hello" * 1000)
        message = "not a database"
    elif case == "damaged":
        backup.backup(f"sqlite:///{database}", file)
        whole = file.read_bytes()
        file.write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])
        message = "damaged"
    else:
        verb, url, message = "backup", "postgresql+psycopg://me:s3cret@localhost/ddpobs", "pg_dump --format=custom"
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = command(verb, str(file), "--database-url", url)
    assert done.exit_code == 1
    assert message in done.stderr
    assert "s3cret" not in done.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_a_restore_never_overwrites_a_database(tmp_path: Path) -> None:
    for name in ("runs.db", "backup"):
        store = Store(f"sqlite:///{tmp_path}/{name}")
        store.migrate()
        store.close()
    done = command("restore", f"{tmp_path}/backup", "--database-url", f"sqlite:///{tmp_path}/runs.db")
    assert done.exit_code == 1
    assert "move it away" in done.stderr
