"""Who takes part: ranks, and sets of them."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ddpobs.errors import HorovodError


@dataclass(frozen=True)
class _Place:
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


_place: _Place | None = None
_made_group = False


class ProcessSet:
    """Some of the ranks, with collectives of their own. To be used after `add_process_set`.

    Args:
        *ranks: Their numbers, or one sequence of these; none for all.
    """

    def __init__(self, *ranks: int | Sequence[int]) -> None:
        flat = ranks[0] if len(ranks) == 1 and not isinstance(ranks[0], int) else ranks
        self.ranks: list[int] | None = sorted(flat) if flat else None  # type: ignore[arg-type]
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group behind it.

        Raises:
            HorovodError: `init` or `add_process_set` has not been called, or this rank is not of the set.
        """
        check_initialized()
        if self.ranks is None:
            return dist.group.WORLD  # type: ignore[return-value]
        if not self.included():
            raise HorovodError(f"rank {rank()} is not of the process set {self.ranks}, and may not use it")
        if self._group is None:
            raise HorovodError(f"the process set {self.ranks} is unknown: call add_process_set with it on every rank")
        return self._group

    def included(self) -> bool:
        """Whether this rank is of the set."""
        return self.ranks is None or rank() in self.ranks

    def size(self) -> int:
        """How many ranks it has."""
        return size() if self.ranks is None else len(self.ranks)

    def rank(self) -> int:
        """This rank's number in the set."""
        return self.group.rank()


global_process_set = ProcessSet()
"""All ranks."""


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None) -> None:
    """Join the other ranks; more calls do nothing.

    Takes the process group that is there, or makes one by the launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT, as torchrun sets them), with NCCL for CUDA and gloo for the host. With neither there is one rank.

    Args:
        comm: Horovod's MPI communicator; only None is understood.
        process_sets: Made at once; or "dynamic", without which Horovod makes none later. Here that is always allowed.

    Raises:
        HorovodError: `comm` is given.
    """
    global _place, _made_group  # noqa: PLW0603 - one Horovod a process, as it is in Horovod
    if comm is not None:
        raise HorovodError("init(comm=...) takes an MPI communicator; here torchrun says which ranks there are")
    if _place is not None:
        return
    if not dist.is_initialized():
        _init_process_group()
        _made_group = True
        atexit.register(shutdown)
    _place = _find_place()
    for process_set in () if process_sets is None or process_sets == "dynamic" else process_sets:
        add_process_set(process_set)


def _init_process_group() -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _find_place() -> _Place:
    """This rank's place on its host; found by the hosts' names, whoever launched the ranks."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    mine = hosts[dist.get_rank()]
    local_rank = hosts[: dist.get_rank()].count(mine)
    peers = [host for place, host in enumerate(hosts) if hosts[:place].count(host) == local_rank]
    homogeneous = len({hosts.count(host) for host in hosts}) == 1
    return _Place(local_rank, hosts.count(mine), peers.index(mine), len(peers), homogeneous)


def shutdown() -> None:
    """Leave; the process group too where `init` made it."""
    global _place, _made_group
    atexit.unregister(shutdown)
    if _made_group and dist.is_initialized():
        dist.destroy_process_group()
    _place, _made_group = None, False


def is_initialized() -> bool:
    """Whether `init` was called."""
    return _place is not None


def check_initialized() -> _Place:
    """This rank's place.

    Raises:
        HorovodError: `init` was not called.
    """
    if _place is None:
        raise HorovodError("call hvd.init() first")
    return _place


def size() -> int:
    """How many ranks there are."""
    check_initialized()
    return dist.get_world_size()


def rank() -> int:
    """This rank's number."""
    check_initialized()
    return dist.get_rank()


def local_size() -> int:
    """How many ranks are on this host."""
    return check_initialized().local_size


def local_rank() -> int:
    """This rank's number on its host."""
    return check_initialized().local_rank


def cross_size() -> int:
    """How many hosts have a rank with this local rank."""
    return check_initialized().cross_size


def cross_rank() -> int:
    """This host's number among them."""
    return check_initialized().cross_rank


def is_homogeneous() -> bool:
    """Whether every host has as many ranks."""
    return check_initialized().homogeneous


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make the set's connections; every rank calls this alike, those outside of it too.

    Raises:
        HorovodError: `init` was not called, or a number is no rank's.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = made.ranks
    if ranks is not None:
        if not set(ranks) <= set(range(size())):
            raise HorovodError(f"process set: expected ranks below {size()}, got {ranks}")
        made._group = dist.new_group(ranks)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Let go of the set's connections; returns whether there were any."""
    group, process_set._group = process_set._group, None
    if group is None:
        return False
    if process_set.included():
        dist.destroy_process_group(group)
    return True
