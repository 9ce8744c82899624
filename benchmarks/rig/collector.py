"""A real collector: the `ddpobs-server` command with a free port and a SQLite file.

It is forked from a process that has imported its modules, which saves a second each time.
"""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults.fork_server import ForkedRank, ForkServer
from benchmarks.rig import databases, patience

ROOT = Path(__file__).resolve().parents[2]
_LISTENING = re.compile(r"ddpobs-server: (https?://[^ ,]+)")


@dataclass
class Collector:
    """A running collector. Its database remains after its end."""

    url: str
    process: subprocess.Popen[bytes] | ForkedRank
    database: Path
    log: Path

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal the process and wait for its end."""
        self.process.send_signal(number)
        return self.process.wait(patience.HANG_S)


@contextmanager
def collector(
    folder: Path, command: list[str] | None = None, ca: Path | None = None, **settings: object
) -> Iterator[Collector]:
    """Start `ddpobs-server` with a database of this version's schema, and end it with the block if it still runs.

    Args:
        folder: Folder of database and log; a second collector in it continues with the same database.
        command: Command to start instead of this environment's `ddpobs-server`; it makes the database itself.
        ca: Authority that signed its certificate, if it has one.
        settings: Fields of `ddpobs_server.settings.Settings`.
    """
    log = folder / f"collector-{time.monotonic_ns()}.log"
    log.touch()
    values = {"port": 0, "database_url": f"sqlite:///{folder}/runs.db"} | settings
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    environ |= {f"DDPOBS_SERVER_{name.upper()}": str(value) for name, value in values.items()}
    if command is None:
        if not (database := folder / "runs.db").exists() and "database_url" not in settings:
            databases.copy_template(database)
        program = str(Path(sys.executable).with_name("ddpobs-server"))
        process: subprocess.Popen[bytes] | ForkedRank = fork_server().start([program], environ, folder, log)
    else:
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=environ, cwd=folder)
    try:
        yield Collector(_listening(process, log, ca), process, folder / "runs.db", log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@cache
def fork_server() -> ForkServer:
    """Return the process that collectors are forked from, which starts with the first call."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")])}
    return ForkServer(kept | paths, ("benchmarks.rig.collector_preload",))


@contextmanager
def running_collector(folder: Path, **settings: Any) -> Iterator[str]:
    """Run a real collector and yield its address."""
    with collector(folder, **settings) as running:
        yield running.url


def spooling(run: str, folder: Path) -> dict[str, str]:
    """Return the environment of ranks that leave their telemetry in `folder / "spool"`: none reaches a collector."""
    return {
        "DDPOBS_TELEMETRY": "http://127.0.0.1:9",
        "DDPOBS_RUN": run,
        "DDPOBS_SPOOL": str(folder / "spool"),
        "DDPOBS_EXIT_S": "30",
    }


def push(spool: Path, url: str) -> None:
    """Send a spool's telemetry to a collector."""
    command = [str(Path(sys.executable).with_name("ddpobs")), "push", str(spool), "--collector", url]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    subprocess.run(command, check=True, env=kept, timeout=120, stdout=subprocess.DEVNULL)


def _listening(process: subprocess.Popen[bytes] | ForkedRank, log: Path, ca: Path | None) -> str:
    authorities = ssl.create_default_context(cafile=ca)
    deadline = time.monotonic() + patience.HANG_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the collector ended with {process.returncode}:\n{log.read_text()}")
        if match := _LISTENING.search(log.read_text()):
            httpx.get(f"{match[1]}/readyz", timeout=patience.HANG_S, verify=authorities).raise_for_status()
            return match[1]
        time.sleep(0.05)
    raise TimeoutError(f"no collector after {patience.HANG_S} s:\n{log.read_text()}")
