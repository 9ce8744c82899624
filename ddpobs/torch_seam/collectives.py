"""Torch's collectives as the reducer calls them: the unwrapped methods, which telemetry does not record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.torch_seam.patching import unwrap

_ALL_REDUCE = unwrap(dist.ProcessGroup.allreduce)
_BROADCAST = unwrap(dist.ProcessGroup.broadcast)
_ALL_GATHER = unwrap(dist.ProcessGroup.allgather)
_WAIT = unwrap(dist.Work.wait)
_VALUE = unwrap(torch._C.Future.wait)


def all_reduce(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], *options: Any) -> Any:
    """Start the group's all-reduce, unrecorded.

    `torch.distributed.all_reduce` has more overhead than a small bucket's exchange takes.
    """
    return _ALL_REDUCE(group, list(tensors), *options)


def broadcast_from_first(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], *options: Any) -> Any:
    """Start the group's broadcast from its first rank, unrecorded.

    The function is not named `broadcast`. For a group that is written in Python, pybind11 looks at the caller's name:
    it takes a caller named like the method for an override that calls its parent.
    """
    return _BROADCAST(group, list(tensors), *options)


def all_gather(group: dist.ProcessGroup, gathered: torch.Tensor, local: torch.Tensor) -> Any:
    """Start to gather the ranks' equally long tensors, one after the other, and return the work."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # The name until torch 2.12.
    return gather(gathered, local, group=group, async_op=True)


def values_of_all(group: dist.ProcessGroup, value: torch.Tensor) -> list[torch.Tensor]:
    """Gather the ranks' equally long tensors, unrecorded, and wait for them."""
    values = [torch.empty_like(value) for _ in range(group.size())]
    wait_for(_ALL_GATHER(group, [values], [value]))
    return values


def wait_for(work: Any) -> None:
    """Wait for a work, unrecorded; for its name see `broadcast_from_first`."""
    _WAIT(work)


def value_of(future: Any) -> Any:
    """Wait for a future, unrecorded, and return its value."""
    return _VALUE(future)


def name_of(group: dist.ProcessGroup) -> str:
    """The group's name, the same on every rank; a group that is written in Python has no name of its own."""
    return str(dist.distributed_c10d._get_process_group_name(group))


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that moves the group's tensors on that device.

    If the user chose no backend, torch calls the group's backend "undefined".
    """
    name = dist.get_backend(group)
    return name if name != "undefined" else str(group._get_backend(device).name())


def gloo_threads(group: dist.ProcessGroup) -> int | None:
    """Number of threads that run the group's collectives on the CPU; None if it is not a group of gloo's."""
    if dist.get_backend(group) != "gloo":
        return None
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_threads", None)


def time_collectives(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Make the group's works measure their duration; return whether they will.

    It costs NCCL one more event per work.
    """
    if device.type != "cuda" or "nccl" not in backend_of(group, device):
        return False
    group._enable_collectives_timing()  # type: ignore[attr-defined]
    return True
