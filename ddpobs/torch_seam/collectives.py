"""Torch's collectives as the reducer calls them: the plain methods, which telemetry does not record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpobs.torch_seam.patching import plain

_ALL_REDUCE = plain(dist.ProcessGroup.allreduce)


_BROADCAST = plain(dist.ProcessGroup.broadcast)


_WAIT = plain(dist.Work.wait)


_VALUE = plain(torch._C.Future.wait)


def all_reduce(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], *options: Any) -> Any:
    """The group's own method, not noted; cheaper than torch.distributed's by more than a small bucket takes."""
    return _ALL_REDUCE(group, list(tensors), *options)


def broadcast_from_first(group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], *options: Any) -> Any:
    """The same for a broadcast.

    It is not called as the method is: of a group that is written in Python pybind11 would take such a caller for the
    method itself, which asks for its parent's.
    """
    return _BROADCAST(group, list(tensors), *options)


def all_gather(group: dist.ProcessGroup, everyone: torch.Tensor, mine: torch.Tensor) -> Any:
    """Started, not waited for: the ranks' equally long tensors one after the other."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # The name until torch 2.12.
    return gather(everyone, mine, group=group, async_op=True)


def wait_for(work: Any) -> None:
    """The work's own wait, not noted; named so for the same reason."""
    _WAIT(work)


def value_of(future: Any) -> Any:
    """A future's value once it is there; the wait is not noted."""
    return _VALUE(future)


def name_of(group: dist.ProcessGroup) -> str:
    """What every rank calls the group; one that is written in Python does not know it itself."""
    return str(dist.distributed_c10d._get_process_group_name(group))


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """What moves the group's tensors on that device; nobody has to name it to torch, which then calls it undefined."""
    named = dist.get_backend(group)
    return named if named != "undefined" else str(group._get_backend(device).name())


def time_collectives(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Have the group's works know how long they took, which costs NCCL an event more each; whether they will."""
    if device.type != "cuda" or "nccl" not in backend_of(group, device):
        return False
    group._enable_collectives_timing()  # type: ignore[attr-defined]
    return True
