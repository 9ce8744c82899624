"""`ddpobs horovodrun`: Horovod's command line, mapped to torchrun or mpiexec."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from ddpobs.cli.app import WRONG_USE, fail, main

_NOT_STARTED = 127
_THIS_HOST = ("localhost", "127.0.0.1")


@main.command(context_settings={"allow_interspersed_args": False})
def horovodrun(
    command: Annotated[list[str], typer.Argument(help="Command of one rank, such as `python train.py`.")],
    ranks: Annotated[int, typer.Option("-np", "--num-proc", min=1, help="Number of ranks.")],
    hosts: Annotated[str, typer.Option("-H", "--hosts", help="HOST:SLOTS,HOST:SLOTS,…; several need --mpi.")] = "",
    mpi: Annotated[bool, typer.Option("--mpi", help="Start the ranks with mpiexec.")] = False,
    gloo: Annotated[bool, typer.Option("--gloo", help="Start the ranks with torchrun, as by default.")] = False,
) -> None:
    """Start a script with Horovod's interface: torchrun on this host, or mpiexec."""
    if mpi and gloo:
        fail("--mpi and --gloo exclude each other", WRONG_USE)
    try:
        launcher = by_mpiexec(command, ranks, hosts) if mpi else by_torchrun(command, ranks, hosts)
    except ValueError as error:
        fail(str(error), WRONG_USE)
    try:
        os.execvp(launcher[0], launcher)
    except OSError as error:
        fail(f"{launcher[0]}: {error.strerror}", _NOT_STARTED)


def by_torchrun(command: list[str], ranks: int, hosts: str) -> list[str]:
    """Return torchrun's command for ranks on this host.

    Raises:
        ValueError: Other hosts are named, or the command is no Python script.
    """
    others = [host for host in hosts.split(",") if host and host.split(":")[0] not in _THIS_HOST]
    if others:
        raise ValueError(
            f"without --mpi the ranks start on this host only, not on {', '.join(others)}: pass --mpi, or start "
            "torchrun with --nnodes and --node-rank on each host"
        )
    if len(command) < 2 or not Path(command[0]).name.startswith("python"):
        raise ValueError(f"torchrun starts `python SCRIPT …`, not `{' '.join(command)}`")
    interpreter, *script = command
    return [interpreter, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *script]


def by_mpiexec(command: list[str], ranks: int, hosts: str) -> list[str]:
    """Return the command of the `mpiexec` beside this Python, or of the one in PATH."""
    own = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(own) if own.exists() else shutil.which("mpiexec") or "mpiexec"
    open_mpi = Path(mpiexec).with_name("ompi_info").exists()
    placed = ["--host" if open_mpi else "-hosts", hosts] if hosts else []
    return [mpiexec, "-n", str(ranks), *placed, *command]
