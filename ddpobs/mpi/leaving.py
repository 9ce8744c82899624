"""The end of a process that uses MPI.

mpi4py calls MPI_Finalize after the interpreter's end. No thread may be inside of MPI then (MPICH aborts), and the call
waits for the other ranks. A rank that an error ends would wait for ranks that wait for it, so it aborts the job, as
torchrun ends the other ranks.
"""

from __future__ import annotations

import atexit
import sys

from ddpobs.mpi.library import MPI
from ddpobs.mpi.works import progress


def register() -> None:
    """Leave MPI in order when the interpreter exits; functions that are registered later run before."""
    atexit.register(_leave)


def _leave() -> None:
    all_ended = progress.stop()
    failed = hasattr(sys, "last_value") and not hasattr(sys, "ps1")
    if MPI.Is_finalized() or (all_ended and not failed):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)
