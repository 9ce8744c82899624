"""Ranks and process sets: the participants of a collective."""

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
class _Position:
    """This rank's position on its host and among the hosts."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables in which the launchers of Open MPI and of MPICH give the number of ranks."""

_position: _Position | None = None
_created_group = False


class ProcessSet:
    """A subset of the ranks with its own collectives; to be used after `add_process_set`.

    Args:
        *ranks: The ranks, or one sequence of ranks; without any, all ranks.
    """

    def __init__(self, *ranks: int | Sequence[int]) -> None:
        flat = ranks[0] if len(ranks) == 1 and not isinstance(ranks[0], int) else ranks
        self.ranks: list[int] | None = sorted(flat) if flat else None  # type: ignore[arg-type]
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The set's process group.

        Raises:
            HorovodError: `init` or `add_process_set` was not called, or this rank is not in the set.
        """
        check_initialized()
        if self.ranks is None:
            return dist.group.WORLD  # type: ignore[return-value]
        if not self.included():
            raise HorovodError(f"rank {rank()} is not in the process set {self.ranks}, and may not use it")
        if self._group is None:
            raise HorovodError(f"the process set {self.ranks} is unknown: call add_process_set with it on every rank")
        return self._group

    def included(self) -> bool:
        """Whether this rank is in the set."""
        return self.ranks is None or rank() in self.ranks

    def size(self) -> int:
        """Number of ranks in the set."""
        return size() if self.ranks is None else len(self.ranks)

    def rank(self) -> int:
        """This rank's index in the set."""
        return self.group.rank()


global_process_set = ProcessSet()
"""All ranks."""


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | Literal["dynamic"] | None = None) -> None:
    """Connect to the other ranks; later calls do nothing.

    Uses torch's default process group if it exists. Otherwise creates it from the launcher's environment (RANK,
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun sets them), with NCCL for CUDA and gloo for the host. Under
    mpiexec the ranks are MPI's; without CUDA, MPI replaces gloo. Without any launcher there is one rank.

    Args:
        comm: Horovod's MPI communicator; must be None.
        process_sets: Sets to add at once, or "dynamic". Horovod needs "dynamic" to add sets later; here it is always
            possible.

    Raises:
        HorovodError: `comm` is not None.
    """
    global _position, _created_group  # noqa: PLW0603 - one Horovod a process, as it is in Horovod
    if comm is not None:
        raise HorovodError("init(comm=...) takes an MPI communicator; here torchrun defines the ranks")
    if _position is not None:
        return
    if not dist.is_initialized():
        _init_process_group()
        _created_group = True
        atexit.register(shutdown)
    _position = _find_position()
    for process_set in () if process_sets is None or process_sets == "dynamic" else process_sets:
        add_process_set(process_set)


def _init_process_group() -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group(backend)
    elif any(int(os.environ.get(name, "1")) > 1 for name in _SIZES_OF_MPI):
        import ddpobs.mpi

        if not torch.cuda.is_available():
            backend = ddpobs.mpi.BACKEND
        dist.init_process_group(backend, init_method="mpi://")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def _find_position() -> _Position:
    """Find the position by comparing host names, which works with every launcher."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    own_host = hosts[dist.get_rank()]
    local_rank = hosts[: dist.get_rank()].count(own_host)
    peers = [host for index, host in enumerate(hosts) if hosts[:index].count(host) == local_rank]
    homogeneous = len({hosts.count(host) for host in hosts}) == 1
    return _Position(local_rank, hosts.count(own_host), peers.index(own_host), len(peers), homogeneous)


def shutdown() -> None:
    """Disconnect; destroys the process group if `init` created it."""
    global _position, _created_group
    atexit.unregister(shutdown)
    if _created_group and dist.is_initialized():
        dist.destroy_process_group()
    _position, _created_group = None, False


def is_initialized() -> bool:
    """Whether `init` was called."""
    return _position is not None


def check_initialized() -> _Position:
    """Return this rank's position.

    Raises:
        HorovodError: `init` was not called.
    """
    if _position is None:
        raise HorovodError("call hvd.init() first")
    return _position


def size() -> int:
    """Number of ranks."""
    check_initialized()
    return dist.get_world_size()


def rank() -> int:
    """This rank."""
    check_initialized()
    return dist.get_rank()


def local_size() -> int:
    """Number of ranks on this host."""
    return check_initialized().local_size


def local_rank() -> int:
    """This rank's index on its host."""
    return check_initialized().local_rank


def cross_size() -> int:
    """Number of hosts that have a rank with this local rank."""
    return check_initialized().cross_size


def cross_rank() -> int:
    """This host's index among the hosts that have a rank with this local rank."""
    return check_initialized().cross_rank


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return check_initialized().homogeneous


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Create the set's process group. Every rank must call this, also ranks outside of the set.

    Raises:
        HorovodError: `init` was not called, or a rank of the set does not exist.
    """
    created = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = created.ranks
    if ranks is not None:
        if not set(ranks) <= set(range(size())):
            raise HorovodError(f"process set: expected ranks below {size()}, got {ranks}")
        created._group = dist.new_group(ranks)
    return created


def remove_process_set(process_set: ProcessSet) -> bool:
    """Destroy the set's process group; return whether there was one."""
    group, process_set._group = process_set._group, None
    if group is None:
        return False
    if process_set.included():
        dist.destroy_process_group(group)
    return True
