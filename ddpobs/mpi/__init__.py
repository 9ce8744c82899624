"""MPI as a backend of `torch.distributed`, with torch as pip installs it.

    import ddpobs.mpi

    dist.init_process_group("ddpobs_mpi")  # mpiexec -n 2 python train.py

Importing this registers the backend and `init_method="mpi://"`. Rank, size and rendezvous come from MPI. Torch's own
name for it, `"mpi"`, raises in torch as pip installs it, before torch looks at any other backend.
"""

from __future__ import annotations

import torch.distributed as dist

from ddpobs.mpi import rendezvous
from ddpobs.mpi.group import BACKEND, MpiGroup
from ddpobs.mpi.runtime import launched
from ddpobs.torch_seam.rendezvous import replace_handler

__all__ = ["BACKEND", "MpiGroup", "launched"]

dist.Backend.register_backend(BACKEND, MpiGroup.create, extended_api=True, devices=["cpu"])
dist.register_rendezvous_handler("mpi", rendezvous.from_mpi)
replace_handler("env", rendezvous.before)
