"""Horovod's torch interface on ddpobs' buckets and telemetry: `import ddpobs.horovod as hvd`."""

from __future__ import annotations

from typing import Any

import torch.distributed as _dist

from ddpobs.horovod.broadcast import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ddpobs.horovod.collectives import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from ddpobs.horovod.compression import Compression
from ddpobs.horovod.optimizer import DistributedOptimizer, join
from ddpobs.horovod.process import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from ddpobs.horovod.timeline import start_timeline, stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "gloo_built",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

gloo_built = _dist.is_gloo_available
nccl_built = _dist.is_nccl_available


def mpi_built() -> bool:
    """Whether torch has MPI: its own backend, or `ddpobs.mpi`, which `init` imports under mpiexec."""
    return _dist.is_mpi_available() or _dist.is_backend_available("ddpobs_mpi")


def __getattr__(name: str) -> Any:
    """Raise AttributeError with a replacement for the parts of Horovod that do not exist here."""
    if name in ("elastic", "SyncBatchNorm"):
        replacements = {
            "elastic": "restart with `torchrun --max-restarts` and load a checkpoint",
            "SyncBatchNorm": "use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), which works on CUDA",
        }
        raise AttributeError(f"ddpobs.horovod has no {name}: {replacements[name]}")
    raise AttributeError(f"module 'ddpobs.horovod' has no attribute {name!r}")
