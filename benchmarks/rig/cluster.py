"""PostgreSQL servers of a measurement: one alone, or a Citus cluster of a coordinator and workers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from benchmarks.rig.ports import free_port

_DATABASE = "postgres"
_STATEMENT = re.compile(r"LOG:  (?:statement|execute [^:]+): (.*)")
_OWN = re.compile("ALTER SYSTEM|SELECT pg_reload_conf")


@dataclass
class Server:
    """A PostgreSQL server on this machine, in a folder of its own.

    Attributes:
        programs: Folder of `initdb` and `pg_ctl`.
        folder: Its data and log; created by `start`.
        user: Unprivileged user that runs it.
        settings: Lines of its configuration.
        port: TCP port on 127.0.0.1.
    """

    programs: Path
    folder: Path
    user: str
    settings: Sequence[str] = ()
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        """SQLAlchemy URL of its database."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{_DATABASE}"

    def start(self) -> None:
        """Start it, and create its data first if there are none."""
        if not self.folder.exists():
            self.folder.mkdir()
            shutil.chown(self.folder, self.user)
            self._run("initdb", "--auth=trust", "--username=postgres", "--encoding=utf8", "--no-sync")
            lines = [f"port = {self.port}", "listen_addresses = '127.0.0.1'", "unix_socket_directories = ''"]
            with (self.folder / "postgresql.conf").open("a") as configuration:
                configuration.write("\n".join([*lines, *self.settings, ""]))
        self._run("pg_ctl", "-w", "-l", str(self.folder / "log"), "start")

    def stop(self, mode: str = "fast") -> None:
        """Stop it with a mode of `pg_ctl`: `fast` closes its connections, `immediate` is a crash."""
        self._run("pg_ctl", "-w", "-m", mode, "stop")

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        """Run one statement outside a transaction; returns its rows."""
        with psycopg.connect(f"host=127.0.0.1 port={self.port} user=postgres dbname={_DATABASE}") as connection:
            connection.autocommit = True
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def statements(self) -> Iterator[list[str]]:
        """The statements that the server logs within the block, filled at its end."""
        logged: list[str] = []
        self._log("all")
        log = self.folder / "log"
        begin = log.stat().st_size
        try:
            yield logged
        finally:
            self._log("none")
            with log.open(errors="replace") as text:
                text.seek(begin)
                matches = _STATEMENT.finditer(text.read())
            logged += [match[1] for match in matches if not _OWN.match(match[1])]

    def _log(self, which: str) -> None:
        self.execute(f"ALTER SYSTEM SET log_statement = '{which}'")
        self.execute("SELECT pg_reload_conf()")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self.programs / program), "-D", str(self.folder), *arguments]
        done = subprocess.run(
            command, user=self.user, check=False, capture_output=True, cwd="/", env={"HOME": "/"}, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{program} ended with {done.returncode}: {done.stdout}{done.stderr}")


@contextmanager
def running(servers: Sequence[Server]) -> Iterator[None]:
    """Run servers until the block ends."""
    with ExitStack() as stack:
        for server in servers:
            server.start()
            stack.callback(server.stop, "immediate")
        yield


def join(coordinator: Server, workers: Sequence[Server], ports: Sequence[int]) -> None:
    """Make servers that have loaded Citus one cluster.

    Args:
        coordinator: Its node without shards.
        workers: Its other nodes.
        ports: Port at which the other nodes reach each worker.
    """
    for server in (coordinator, *workers):
        server.execute("CREATE EXTENSION citus")
    coordinator.execute(f"SELECT citus_set_coordinator_host('127.0.0.1', {coordinator.port})")
    for port in ports:
        coordinator.execute(f"SELECT citus_add_node('127.0.0.1', {port})")


def distribute(server: Server) -> None:
    """Create the schema and distribute it, as `ddpobs-server distribute` does."""
    command = [sys.executable, "-m", "ddpobs_server.app", "distribute", "--database-url", server.url]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
