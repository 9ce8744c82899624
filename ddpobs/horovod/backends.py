"""Backends that torch has, and those that the process group uses, by Horovod's names."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddpobs.horovod.position import check_initialized

_MPI = "ddpobs_mpi"


def gloo_built() -> bool:
    """Whether torch has gloo."""
    return dist.is_gloo_available()


def nccl_built() -> bool:
    """Whether torch has NCCL."""
    return dist.is_nccl_available()


def mpi_built() -> bool:
    """Whether torch has MPI: its own backend, or `ddpobs.mpi`, which `init` imports under mpiexec."""
    return dist.is_mpi_available() or dist.is_backend_available(_MPI)


def cuda_built() -> bool:
    """Whether torch was built for CUDA."""
    return torch.backends.cuda.is_built() and torch.version.hip is None


def rocm_built() -> bool:
    """Whether torch was built for ROCm."""
    return torch.version.hip is not None


def ccl_built() -> bool:
    """Return False: ddpobs does not use oneCCL."""
    return False


def ddl_built() -> bool:
    """Return False: torch has no DDL."""
    return False


def gloo_enabled() -> bool:
    """Whether the ranks use gloo.

    Raises:
        HorovodError: `init` was not called.
    """
    return _uses("gloo")


def mpi_enabled() -> bool:
    """Whether the ranks use MPI.

    Raises:
        HorovodError: `init` was not called.
    """
    return _uses("mpi")


def mpi_threads_supported() -> bool:
    """Whether the script may call MPI beside ddpobs: `ddpobs.mpi` requires MPI_THREAD_MULTIPLE.

    Raises:
        HorovodError: `init` was not called.
    """
    return _uses(_MPI)


def _uses(backend: str) -> bool:
    check_initialized()
    return backend in str(dist.get_backend_config())
