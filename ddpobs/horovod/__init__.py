"""Horovod's torch interface on ddpobs' buckets and telemetry: `import ddpobs.horovod as hvd`."""

from __future__ import annotations

import sys
from typing import Any

from ddpobs.errors import HorovodInternalError, MismatchError
from ddpobs.horovod import elastic
from ddpobs.horovod.allreduce import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)
from ddpobs.horovod.backends import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from ddpobs.horovod.broadcast import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ddpobs.horovod.collectives import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from ddpobs.horovod.compression import Compression
from ddpobs.horovod.handle import poll, synchronize
from ddpobs.horovod.joining import join
from ddpobs.horovod.launch import run
from ddpobs.horovod.operations import Adasum, Average, Max, Min, Product, Sum
from ddpobs.horovod.optimizer import DistributedOptimizer
from ddpobs.horovod.position import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    size,
)
from ddpobs.horovod.process import ProcessSet, add_process_set, global_process_set, init, remove_process_set, shutdown
from ddpobs.horovod.sync_batch_norm import SyncBatchNorm
from ddpobs.horovod.timeline import start_timeline, stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
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
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
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
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

REPLACEMENTS = {
    "callbacks": "it is Keras's; with torch, call broadcast_parameters, broadcast_optimizer_state and allreduce",
    "wait": "Horovod never had it; call synchronize with the handle",
    "AverageMeter": "Horovod never had it; average a metric with allreduce",
}
"""Names that texts about Horovod use and that do not exist here, with what to do."""


def __getattr__(name: str) -> Any:
    """Return this module as `mpi_ops`, and name the replacement of the parts of Horovod that do not exist here."""
    if name == "mpi_ops":
        return sys.modules[__name__]
    if name in REPLACEMENTS:
        raise AttributeError(f"ddpobs.horovod has no {name}: {REPLACEMENTS[name]}")
    raise AttributeError(f"module 'ddpobs.horovod' has no attribute {name!r}")
