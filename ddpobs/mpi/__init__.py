"""Process groups over MPI: importing this registers the backend `ddpobs_mpi` with `torch.distributed`.

    import ddpobs.mpi
    torch.distributed.init_process_group("ddpobs_mpi")     # mpiexec -n 2 python train.py

Rank, number of ranks, local rank and rendezvous come from MPI (`init_method="mpi://"`, which other backends may use
too). The name `mpi` is torch's own backend, which pip's torch lacks: torch refuses it before it asks a plugin.

Raises:
    MpiError: mpi4py or an MPI library is missing, or the library was initialized without MPI_THREAD_MULTIPLE.
"""

from ddpobs.mpi import leaving, rendezvous
from ddpobs.mpi.group import BACKEND, MpiGroup, register

register()
rendezvous.register(BACKEND)
leaving.register()

__all__ = ["BACKEND", "MpiGroup"]
