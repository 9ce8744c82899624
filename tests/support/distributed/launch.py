"""Runs a function on real gloo ranks, each a process of its own with one thread.

A fork server that has imported torch and has no threads starts them: importing torch takes longer than most tests.
With `DDPOBS_TEST_MPI=1`, mpiexec starts the ranks, over the backend ddpobs_mpi.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.rig import patience
from benchmarks.tied import end_with_parent
from tests.support.mpi.launch import run_over_mpi


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = patience.HANG_S, gpu: bool = False
) -> list[Any]:
    """Return the result of `function(rank, world_size, *args)` on each rank.

    Args:
        function: Importable by name. Its results and arguments can be pickled.
        world_size: Number of ranks.
        *args: Further arguments of the function.
        timeout_s: Seconds after which all ranks are killed.
        gpu: Let the ranks see the machine's GPUs. Torch's PowerSGD refuses tensors of the CPU beside a GPU.

    Raises:
        AssertionError: A rank failed (the message has its traceback), or did not answer in time.
    """
    if os.environ.get("DDPOBS_TEST_MPI"):
        return run_over_mpi(function, world_size, *args, timeout_s=timeout_s)
    environ = dict(os.environ) if gpu else {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.support.distributed.preload"])
    with TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(target=_rank, args=(function, (rank, world_size), folder, pipes[rank][1], args, environ))
            for rank in range(world_size)
        ]
        for process, (_, answers_end) in zip(ranks, pipes, strict=True):
            process.start()
            answers_end.close()  # Otherwise the pipe of a rank that dies would not end.
        try:
            answers = [_answer(pipes[rank][0], rank, ranks[rank], timeout_s) for rank in range(world_size)]
        finally:
            for process in ranks:
                process.join(5)
                if process.is_alive() and process.pid:
                    os.kill(process.pid, signal.SIGABRT)  # It writes its stacks.
                    process.join(5)
                process.kill()
        failed = [answer for ok, answer in answers if not ok]
        if failed:
            failed += [text for path in sorted(Path(folder).glob("crash-*")) if (text := path.read_text())]
    assert not failed, "\n".join(failed)
    return [answer for _, answer in answers]


def _answer(pipe: Any, rank: int, process: BaseProcess, timeout_s: float) -> tuple[bool, Any]:
    if not pipe.poll(timeout_s):
        return False, f"rank {rank} did not answer within {timeout_s} s"
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join(5)
        return False, f"rank {rank} died, exit code {process.exitcode}"


def _rank(  # noqa: PLR0917
    function: Callable[..., Any],
    rank_and_size: tuple[int, int],
    folder: str,
    pipe: Any,
    args: tuple[Any, ...],
    environ: dict[str, str],
) -> None:
    end_with_parent()  # The fork server, which ends with pytest.
    rank, world_size = rank_and_size
    crash = (Path(folder) / f"crash-{rank}").open("w")
    faulthandler.enable(crash)  # SIGSEGV and SIGABRT write the stacks there.
    os.environ.clear()
    os.environ.update(environ, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import set_debug_level_from_env

    set_debug_level_from_env()
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{Path(folder) / 'store'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        dist.barrier()  # A rank that ends at once would close its connections while other ranks still open theirs.
        pipe.send((True, function(rank, world_size, *args)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
