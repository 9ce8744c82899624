"""Missing rights and network file systems are named, and a benchmark spares a database with runs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ddpobs_server.operations import commands, self_check
from ddpobs_server.settings import Settings
from ddpobs_server.store import Arrival, Store
from ddpobs_server.store.database import database_access
from typer.testing import CliRunner

from benchmarks import capacity, loads
from benchmarks.rig import databases
from tests.support.server.batches import batch


def unprivileged(url: str) -> str:
    """Standard error of `token create` under user 65534. All imports come before: that user may not read them."""
    code = (
        "import os, sys; from ddpobs_server.app import cli, open_store; from ddpobs_server.settings import Settings\n"
        "open_store(Settings(database_url=sys.argv.pop())).close()\n"
        "os.setegid(65534); os.seteuid(65534); cli()"
    )
    warm = f"{url.removesuffix('x.db')}warm.db"
    command = [sys.executable, "-c", code, "token", "create", "x", "--database-url", url, warm]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
@pytest.mark.parametrize("case", ["folder", "file", "write to folder"])
def test_a_database_that_cannot_be_opened_names_user_right_and_path(case: str) -> None:
    with tempfile.TemporaryDirectory(prefix="ddpobs-") as name:
        folder = Path(name)
        folder.chmod(0o777 if case == "file" else 0o755)
        store = Store(f"sqlite:///{folder}/x.db")
        store.migrate()
        store.close()
        (folder / "x.db").chmod(0o600 if case == "file" else 0o666)
        denied = folder / "x.db" if case == "file" else folder
        if case == "folder":
            folder.chmod(0o700)
        error = unprivileged(f"sqlite:///{folder}/x.db")
    right = {"folder": "read or write or enter", "file": "read or write", "write to folder": "write"}[case]
    assert f"user nobody (65534) cannot {right} {denied}" in error
    assert "Traceback" not in error


def test_a_missing_folder_and_a_folder_as_file_are_named(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none" / "x.db", "finds no folder"), (tmp_path, "is a folder")):
        done = CliRunner().invoke(commands.cli, ["token", "create", "x", "--database-url", f"sqlite:///{path}"])
        assert done.exit_code == 1
        assert reason in done.stderr


@pytest.mark.parametrize(
    ("number", "name", "state"),
    [
        *((number, name, "fail") for number, name in ((0x6969, "NFS"), (0xFF534D42, "CIFS"), (0x00C36400, "Ceph"))),
        (0x65735546, "FUSE", "warn"),
        (0xEF53, "local", "ok"),
        (None, "local", "ok"),
    ],
)
def test_check_refuses_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None, name: str, state: str
) -> None:
    monkeypatch.setattr(database_access, "_file_system_number", lambda _: number)
    results = {r.name: r for r in self_check.run(Settings(database_url=f"sqlite:///{tmp_path}/x.db"))}
    assert (results["file system"].state, name in results["file system"].detail) == (state, True)


def test_the_number_is_that_of_the_systems_own_command(tmp_path: Path) -> None:
    done = subprocess.run(["stat", "-f", "-c", "%t", tmp_path], capture_output=True, text=True, check=True)
    assert database_access._file_system_number(tmp_path) == int(done.stdout, 16)


def test_a_benchmark_refuses_a_database_with_runs(fresh: databases.Fresh, tmp_path: Path) -> None:
    url = fresh(tmp_path)
    store = Store(url)
    store.migrate()
    capacity._refuse_used(url)
    store.ingest([Arrival(batch("mine"), bytes(32), 1, 1)])
    store.close()
    with pytest.raises(capacity.CapacityError, match="has runs"):
        capacity.measure(loads.flood(1, 1), url)


def test_a_postgresql_database_that_is_not_in_utf_8_is_named_with_the_remedy() -> None:
    with databases.postgresql_server() as server:
        url = databases.new_database(server, "ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
        for command in (["check"], ["token", "create", "x"]):
            done = CliRunner().invoke(commands.cli, [*command, "--database-url", url])
            assert done.exit_code == 1
            assert "the database has the encoding SQL_ASCII, and UTF8 is needed" in done.output
            assert "Traceback" not in done.output
