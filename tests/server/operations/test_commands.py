"""Commands report an unusable database in a single line, without a traceback and without a password."""

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
from ddpobs_server.store import Store
from ddpobs_server.store.database import engine
from typer.testing import CliRunner

SERVER = str(Path(sys.executable).with_name("ddpobs-server"))
COMMANDS = [
    "token create x",
    "token list",
    "token revoke abcd",
    "audit",
    "check",
    "backup copy",
    "restore copy",
    "distribute",
]
LOCKS: list[sqlite3.Connection] = []


def unreachable(folder: Path) -> str:
    return "postgresql+psycopg://me:s3cret@127.0.0.1:9/none"


def no_folder(folder: Path) -> str:
    return f"sqlite:///{folder}/none/x.db"


def no_database(folder: Path) -> str:
    (folder / "x.db").write_bytes(b"hello" * 1000)
    return f"sqlite:///{folder}/x.db"


def foreign(folder: Path) -> str:
    with closing(sqlite3.connect(folder / "x.db")) as connection:
        connection.execute("CREATE TABLE experiments (name TEXT)")
    return f"sqlite:///{folder}/x.db"


def newer(folder: Path) -> str:
    url = f"sqlite:///{folder}/x.db"
    store = Store(url)
    store.migrate()
    store.close()
    with closing(sqlite3.connect(folder / "x.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    return url


def locked(folder: Path) -> str:
    url = f"sqlite:///{folder}/x.db"
    store = Store(url)
    store.migrate()
    store.close()
    LOCKS.append(sqlite3.connect(folder / "x.db"))
    LOCKS[-1].execute("BEGIN IMMEDIATE")
    return url


@pytest.fixture(autouse=True)
def short_lock_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine, "_BUSY_S", 0.1)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def occupied_port() -> Iterator[str]:
    """A port with another listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


@pytest.mark.parametrize("database", [unreachable, no_folder, no_database, foreign, newer, locked])
def test_an_unusable_database_is_reported_in_a_line(tmp_path: Path, database: Callable[[Path], str]) -> None:
    url = database(tmp_path)
    # A backup works with any schema and during a write.
    allowed = ["backup copy"] if database in (foreign, newer, locked) else []
    for command in COMMANDS:
        if command in allowed:
            continue
        done = CliRunner().invoke(commands.cli, [*command.split(), "--database-url", url])
        messages = [line for line in done.output.splitlines() if line.startswith(("ddpobs-server: ", "fail "))]
        assert (done.exit_code, type(done.exception), len(messages)) == (1, SystemExit, 1), (command, done.output)
        assert "s3cret" not in done.output
        assert command == "check" or done.stderr.splitlines() == messages
    while LOCKS:
        LOCKS.pop().close()
    if database is foreign:
        with closing(sqlite3.connect(tmp_path / "x.db")) as connection:
            assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("experiments",)]


@pytest.mark.parametrize(
    "url", ["nonsense", "mysql://me:s3cret@h/x", "postgresql://h/x", "sqlite://", "sqlite:///:memory:"]
)
def test_a_database_url_of_another_kind_is_refused(url: str) -> None:
    for command in COMMANDS:
        done = CliRunner().invoke(commands.cli, [*command.split(), "--database-url", url])
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.output
        assert "database_url: expected sqlite:///FILE or postgresql+psycopg://" in done.stderr
        assert "s3cret" not in done.output


@pytest.mark.parametrize("database", [unreachable, foreign, newer])
def test_a_server_reports_an_unusable_database_before_it_starts(
    tmp_path: Path, database: Callable[[Path], str]
) -> None:
    command = [SERVER, "--port", "0", "--log-level", "error", "--database-url", database(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert done.stderr.startswith("ddpobs-server: ")
    assert "s3cret" not in done.stderr


def serve(*arguments: str, command: tuple[str, ...] = (SERVER,)) -> tuple[int, list[str]]:
    """Exit code and error lines of a server that cannot start."""
    full_command = [*command, "serve", "--log-level", "warning", *arguments]
    done = subprocess.run(full_command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.splitlines()


def test_an_occupied_port_is_reported_in_a_line(occupied_port: str) -> None:
    code, (line,) = serve("--port", occupied_port)
    assert code == 1
    assert line.startswith(f"ddpobs-server: cannot listen on 127.0.0.1, port {occupied_port}: ")


@pytest.mark.parametrize("host", ["nowhere.invalid", "a..b", "203.0.113.1"])
def test_an_address_of_another_machine_is_reported_in_a_line(host: str) -> None:
    code, (line,) = serve("--host", host, "--token", "s3cret")
    assert code == 1
    assert line.startswith(f"ddpobs-server: cannot listen on {host}, port 8321: ")


def test_a_port_occupied_after_it_was_bound_ends_the_server_with_1() -> None:
    code = (
        "from ddpobs_server import app; from ddpobs_server.web import listening; bind = listening.bind\n"
        "def bind_and_lose(hosts, port):\n"
        "    sockets = bind(hosts, port); other = bind(hosts, sockets[0].getsockname()[1]); other[0].listen()\n"
        "    globals()['kept'] = other; return sockets\n"
        "listening.bind = bind_and_lose; app.main()"
    )
    exit_code, lines = serve("--port", "0", command=(sys.executable, "-c", code))
    assert exit_code == 1
    assert ": Address already in use; end that process, or choose another --port" in "".join(lines)


def test_an_unknown_setting_causes_a_warning(occupied_port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPOBS_SERVER_KEEP_SPANS", "3")
    monkeypatch.setenv("DDPOBS_SERVER_XYZZY", "s3cret")
    monkeypatch.setenv("ddpobs_server_access_log", "true")
    warnings = [
        "DDPOBS_SERVER_KEEP_SPANS is not a setting of this version; did you mean DDPOBS_SERVER_KEEP_SPANS_DAYS?",
        "DDPOBS_SERVER_XYZZY is not a setting of this version",
    ]
    checked = CliRunner().invoke(commands.cli, ["check"])
    assert [line for line in checked.stdout.splitlines() if "settings: " in line] == [
        f"warn  settings: {warning}" for warning in warnings
    ]
    assert checked.exit_code == 0
    *log, _ = serve("--port", occupied_port)[1]
    assert [(line["level"], line["event"]) for line in map(json.loads, log)] == [
        ("warning", warning) for warning in warnings
    ]


def test_only_the_collectors_user_can_read_the_database_files(tmp_path: Path) -> None:
    command = [SERVER, "token", "create", "x", "--database-url", f"sqlite:///{tmp_path}/x.db"]
    subprocess.run(command, check=True, capture_output=True, umask=0o022)
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in tmp_path.iterdir()} == {"x.db": "0o600"}


def test_the_command_without_server_packages_names_the_package_to_install() -> None:
    code = "import sys; sys.modules['fastapi'] = None; from ddpobs_server import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "ddpobs-server: fastapi is not installed; install the server with: pip install '.[server]'\n"


def test_the_help_names_the_default_command_and_lists_it_first() -> None:
    command = [sys.executable, "-m", "ddpobs_server.app", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Without a command it runs `serve`" in " ".join(done.stdout.split())
    assert done.stdout.index("serve  ") < done.stdout.index("audit  ")
