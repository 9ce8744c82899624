"""Starts the ranks of a training with a fault, and ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.faults.fork_server import ForkedRank, ForkServer
from benchmarks.rig import patience
from benchmarks.rig.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
HANGING = Path(__file__).with_name("hanging.py")
CRASHING = Path(__file__).with_name("crashing.py")
COMMUNICATING = Path(__file__).with_name("communicating.py")
Namespaces = Callable[[int], Sequence[str]]


@dataclass
class Ranks:
    """Running ranks.

    Attributes:
        processes: One per rank.
        folder: Their logs (`rank-0.log`) and the file `ready`, which the faulty rank writes at its fault.
    """

    processes: Sequence[subprocess.Popen[bytes] | ForkedRank]
    folder: Path

    def wait_for_fault(self, timeout_s: float = patience.HANG_S) -> float:
        """Wait until the faulty rank has reached its fault; returns the time (`time.time`) at which it did.

        Raises:
            TimeoutError: It did not in time; the ranks' logs are in the message.
        """
        ready = self.folder / "ready"
        deadline = time.monotonic() + timeout_s
        while not ready.exists():
            if time.monotonic() > deadline or all(process.poll() is not None for process in self.processes):
                raise TimeoutError(f"no fault within {timeout_s} s\n{self.logs()}")
            time.sleep(0.05)
        return ready.stat().st_mtime

    def logs(self) -> str:
        """The ranks' output, one after the other."""
        return "\n".join(f"{log.name}:\n{log.read_text()}" for log in sorted(self.folder.glob("rank-*.log")))


@contextmanager
def ranks_of(
    script: Path,
    *arguments: str,
    ranks: int,
    folder: Path,
    environ: dict[str, str],
    namespaces: Namespaces | None = None,
    master: str = "127.0.0.1",
) -> Iterator[Ranks]:
    """Start `python SCRIPT ARGUMENTS` once per rank, without a launcher that would end the survivors.

    Ranks are forked from a process that has imported torch, unless they start with import paths of their own.

    Args:
        script: The training.
        *arguments: Its arguments.
        ranks: Number of ranks.
        folder: For logs and whatever the script writes (its `$OUT`).
        environ: Added to this process's environment without its own DDPOBS settings.
        namespaces: Returns the files of the namespaces that a rank enters; not with import paths of their own.
        master: Address of rank 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    shared = kept | {"MASTER_ADDR": master, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    shared |= {"OMP_NUM_THREADS": "1", "OUT": str(folder), "DDPOBS_SPOOL": str(folder / "spool")}
    shared |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")])} | environ
    processes: list[subprocess.Popen[bytes] | ForkedRank] = []
    try:
        for rank in range(ranks):
            log, own = folder / f"rank-{rank}.log", shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            if "PYTHONPATH" not in environ:
                entered = namespaces(rank) if namespaces else ()
                processes.append(fork_server().start([str(script), *arguments], own, folder, log, entered))
                continue
            command = [sys.executable, str(script), *arguments]
            with log.open("wb") as output:
                started = subprocess.Popen(
                    command, env=own, stdout=output, stderr=output, cwd=folder, start_new_session=True
                )
                processes.append(started)
        yield Ranks(processes, folder)
    finally:
        for process in processes:
            # A rank that is killed leaves the workers of its loader behind; each rank leads a session of its own.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in processes:
            process.wait()


@cache
def fork_server() -> ForkServer:
    """The process that forks all ranks of this one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    return ForkServer(kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")])})
