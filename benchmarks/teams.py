"""Teams: the rank processes of one variant, which run in turns and are stopped in between.

Every variant is a separate training, as a user would start it: own processes, one model in each, its own patches and
threads. Between its turns a team is stopped (SIGSTOP), background threads included, so that no variant's telemetry runs
on another's time. Linux only.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.tied import end_with_parent

_context = multiprocessing.get_context("fork")
_SETTLE_S = 0.002

Steps = Callable[[int], object]
"""Runs a number of training steps, and returns the rank's note."""


class RankError(RuntimeError):
    """A rank of a team failed; holds its traceback."""


class Team:
    """The ranks of one variant, forked from this process, which must not have started any threads.

    Args:
        ranks: Number of ranks.
        prepare: Called on each rank within its process group; returns the function that runs steps.
        companions: Processes that only this variant needs, such as its collector; stopped together with it.
        pin: Rank r and its threads run on core r modulo the number of cores.
        device: `cpu`, or `cuda`: rank r trains on GPU r modulo their number, over NCCL if each rank has one of its own.

    Attributes:
        ranks: Number of ranks.
        notes: Return value of each rank's steps in the last turn.
    """

    def __init__(
        self,
        ranks: int,
        prepare: Callable[[], Steps],
        companions: Sequence[subprocess.Popen[bytes]] = (),
        pin: bool = True,
        device: str = "cpu",
    ) -> None:
        import_module("torch._dynamo")  # The first step of a training imports it: once here, and not in every rank.

        self._companions = companions
        self._folder = tempfile.TemporaryDirectory()
        self.ranks = ranks
        self.notes: list[Any] = []
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(ranks):
            connection, rank_end = _context.Pipe()
            process = _context.Process(
                target=_rank_main,
                args=(rank_end, (rank, ranks), f"{self._folder.name}/store", prepare),
                kwargs={"pin": pin, "device": device},
            )
            process.start()
            rank_end.close()
            self._connections.append(connection)
            self._processes.append(process)
        try:
            self._receive()
        except RankError:
            self.disband()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, steps: int, warm: int = 0) -> tuple[float, float]:
        """Take a turn of `steps` steps, after `warm` steps that are not measured.

        Returns:
            Wall seconds and processor seconds a step, each the mean over the ranks.

        Raises:
            RankError: A rank failed.
        """
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.send((steps, warm))
        answers = self._receive()
        self._signal(signal.SIGSTOP)
        wall, processor, self.notes = map(list, zip(*answers, strict=True))
        return sum(wall) / len(wall) / steps, sum(processor) / len(processor) / steps

    def end(self) -> float:
        """End the ranks like a script that reached its last line.

        Returns:
            Seconds until the last process was gone.
        """
        self._signal(signal.SIGCONT)
        began = time.perf_counter()
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join()
        return time.perf_counter() - began

    def disband(self) -> None:
        """Kill the ranks without their exit handlers: a last flush would take seconds."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        for companion in self._companions:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(companion.pid, signal.SIGKILL)
            companion.wait()
        self._folder.cleanup()

    def _receive(self) -> list[Any]:
        answers = []
        for rank, connection in enumerate(self._connections):
            try:
                answer = connection.recv()
            except EOFError:
                answer = f"rank {rank} died"
            if isinstance(answer, str):
                raise RankError(answer)
            answers.append(answer)
        return answers

    def _signal(self, number: signal.Signals) -> None:
        for companion in self._companions:
            os.killpg(companion.pid, number)
        for process in self._processes:
            os.kill(process.pid, number)
            if number == signal.SIGSTOP:
                os.waitpid(process.pid, os.WUNTRACED)


def steps_of(team: Team, seconds: float) -> int:
    """Return the approximate number of steps that a team takes in `seconds`, at least one."""
    step_s, _ = team.run(2)
    if step_s < seconds / 2:
        step_s, _ = team.run(round(seconds / step_s))
    return max(1, round(seconds / step_s))


def companion(command: Sequence[str], log: Path, **environ: str) -> subprocess.Popen[bytes]:
    """Start a process in its own session. It ends with this process at the latest."""
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            cwd=log.parent,
            env=os.environ | environ,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509 - this process has one thread
        )


def machine_s() -> tuple[float, float]:
    """Return the seconds since boot that cores were busy, and that the hypervisor withheld from them."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, steal = (field / os.sysconf("SC_CLK_TCK") for field in fields)
    return user + nice + system + irq + softirq, steal


def _rank_main(
    connection: Connection,
    position: tuple[int, int],
    store: str,
    prepare: Callable[[], Steps],
    *,
    pin: bool,
    device: str,
) -> None:
    rank, ranks = position
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if pin:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            _backend(rank, ranks, device),
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(minutes=10),
        )
        torch.manual_seed(rank)
        _serve(connection, prepare())
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send(f"rank {rank}:\n{traceback.format_exc()}")
        sys.stdout.flush()
        os._exit(1)


def _backend(rank: int, ranks: int, device: str) -> str:
    """Choose the rank's GPU, if it trains on one, and return the backend: NCCL refuses two ranks on one GPU."""
    import torch

    if device == "cpu":
        return "gloo"
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(rank % gpus)
    return "nccl" if ranks <= gpus else "gloo"


def _serve(connection: Connection, steps: Steps) -> None:
    """Report readiness, then run the requested steps of each turn, and report seconds and processor seconds.

    When a turn begins, the caches hold another team's data: `warm` steps refill them. Threads that were stopped while
    they waited check the clock when they continue, which no real training does. A pause lets this end before the
    measurement.
    """
    import torch.distributed as dist

    connection.send(())
    while (turn := connection.recv()) is not None:
        count, warm = turn
        time.sleep(_SETTLE_S)
        dist.barrier()
        if warm:
            steps(warm)
        began, processor_began = time.perf_counter(), time.process_time()
        note = steps(count)
        connection.send((time.perf_counter() - began, time.process_time() - processor_began, note))
