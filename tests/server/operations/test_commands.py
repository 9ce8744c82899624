"""What the command line says of a database that it cannot use: one line, no traceback and no password."""

from __future__ import annotations

import json
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from ddpobs_server.operations import commands
from ddpobs_server.store import Store, engine
from typer.testing import CliRunner

SERVER = str(Path(sys.executable).with_name("ddpobs-server"))
COMMANDS = ["token create x", "token list", "token revoke abcd", "check", "backup copy", "restore copy", "distribute"]
KEPT: list[sqlite3.Connection] = []


def away(folder: Path) -> str:
    return "postgresql+psycopg://me:s3cret@127.0.0.1:9/none"


def no_folder(folder: Path) -> str:
    return f"sqlite:///{folder}/none/x.db"


def no_database(folder: Path) -> str:
    (folder / "x.db").write_bytes(b"hello" * 1000)
    return f"sqlite:///{folder}/x.db"


def another_s(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "x.db")) as connection:
        connection.execute("CREATE TABLE experiments (name TEXT)")
    return f"sqlite:///{folder}/x.db"


def newer(folder: Path) -> str:
    url = f"sqlite:///{folder}/x.db"
    made = Store(url)
    made.migrate()
    made.close()
    with closing(sqlite3.connect(folder / "x.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    return url


def locked(folder: Path) -> str:
    url = f"sqlite:///{folder}/x.db"
    made = Store(url)
    made.migrate()
    made.close()
    KEPT.append(sqlite3.connect(folder / "x.db"))
    KEPT[-1].execute("BEGIN IMMEDIATE")
    return url


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "_BUSY_S", 0.1)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def taken() -> Iterator[str]:
    """A port where somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield str(other.getsockname()[1])


@pytest.mark.parametrize("database", [away, no_folder, no_database, another_s, newer, locked])
def test_a_database_that_cannot_be_used_is_said_in_a_line(tmp_path: Path, database: Callable[[Path], str]) -> None:
    url = database(tmp_path)
    # Whoever copies a file may do so whatever schema it has and while it is written to.
    able = ["backup copy"] if database in (another_s, newer, locked) else []
    for command in COMMANDS:
        if command in able:
            continue
        done = CliRunner().invoke(commands.cli, [*command.split(), "--database-url", url])
        said = [line for line in done.output.splitlines() if line.startswith(("ddpobs-server: ", "fail "))]
        assert (done.exit_code, type(done.exception), len(said)) == (1, SystemExit, 1), (command, done.output)
        assert "s3cret" not in done.output
        assert command == "check" or done.stderr.splitlines() == said
    while KEPT:
        KEPT.pop().close()
    if database is another_s:
        with closing(sqlite3.connect(tmp_path / "x.db")) as connection:
            assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("experiments",)]


@pytest.mark.parametrize(
    "url", ["nonsense", "mysql://me:s3cret@h/x", "postgresql://h/x", "sqlite://", "sqlite:///:memory:"]
)
def test_an_address_of_no_such_database_is_refused(url: str) -> None:
    for command in COMMANDS:
        done = CliRunner().invoke(commands.cli, [*command.split(), "--database-url", url])
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
        assert "database_url: expected sqlite:///FILE or postgresql+psycopg://" in done.stderr
        assert "s3cret" not in done.output


@pytest.mark.parametrize("database", [away, another_s, newer])
def test_a_server_says_so_before_it_starts(tmp_path: Path, database: Callable[[Path], str]) -> None:
    command = [SERVER, "--port", "0", "--log-level", "error", "--database-url", database(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("ddpobs-server: ")
    assert "s3cret" not in done.stderr


def serve(*arguments: str, command: tuple[str, ...] = (SERVER,)) -> tuple[int, list[str]]:
    """How a server ends that cannot begin, and its lines."""
    told = [*command, "serve", "--log-level", "warning", *arguments]
    done = subprocess.run(told, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stderr.splitlines()


def test_a_server_whose_port_is_taken_says_so_in_a_line(taken: str) -> None:
    code, (line,) = serve("--port", taken)
    assert code == 1
    assert line.startswith(f"ddpobs-server: cannot listen on 127.0.0.1, port {taken}: ")


@pytest.mark.parametrize("host", ["nowhere.invalid", "a..b", "203.0.113.1"])
def test_an_address_that_is_not_this_machines_is_said_in_a_line(host: str) -> None:
    code, (line,) = serve("--host", host, "--token", "s3cret")
    assert code == 1
    assert line.startswith(f"ddpobs-server: cannot listen on {host}, port 8321: ")


def test_a_port_that_was_taken_meanwhile_ends_it_with_1_too(taken: str) -> None:
    late = "from ddpobs_server import app, checks; checks.address_problem = lambda *_: None; app.main()"
    assert serve("--port", taken, command=(sys.executable, "-c", late))[0] == 1


def test_a_name_that_is_no_setting_is_warned_of(taken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPOBS_SERVER_KEEP_SPANS", "3")
    monkeypatch.setenv("DDPOBS_SERVER_XYZZY", "s3cret")
    monkeypatch.setenv("ddpobs_server_access_log", "true")
    said = [
        "DDPOBS_SERVER_KEEP_SPANS is not a setting of this version; did you mean DDPOBS_SERVER_KEEP_SPANS_DAYS?",
        "DDPOBS_SERVER_XYZZY is not a setting of this version",
    ]
    checked = CliRunner().invoke(commands.cli, ["check"])
    assert [line for line in checked.stdout.splitlines() if "settings: " in line] == [
        f"warn  settings: {one}" for one in said
    ]
    assert checked.exit_code == 0
    *warned, _ = serve("--port", taken)[1]
    assert [(line["level"], line["event"]) for line in map(json.loads, warned)] == [("warning", one) for one in said]


def test_the_files_of_a_database_are_their_user_s_alone(tmp_path: Path) -> None:
    made = [SERVER, "token", "create", "x", "--database-url", f"sqlite:///{tmp_path}/x.db"]
    subprocess.run(made, check=True, capture_output=True, timeout=60, umask=0o022)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()} == {"x.db": "0o600"}


def test_where_only_the_training_side_is_installed_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['fastapi'] = None; from ddpobs_server import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "ddpobs-server: fastapi is not installed; install the server with: pip install '.[server]'\n"
