"""This rank, its place on its host and among the hosts, while Horovod is initialised."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch.distributed as dist

from ddpobs.errors import HorovodError


@dataclass(frozen=True)
class _Position:
    """This rank's position on its host and among the hosts."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


_position: _Position | None = None


def find() -> None:
    """Find the position by comparing host names, which works with every launcher."""
    global _position  # noqa: PLW0603 - one Horovod a process, as it is in Horovod
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    own_host = hosts[dist.get_rank()]
    local_rank = hosts[: dist.get_rank()].count(own_host)
    peers = [host for index, host in enumerate(hosts) if hosts[:index].count(host) == local_rank]
    homogeneous = len({hosts.count(host) for host in hosts}) == 1
    _position = _Position(local_rank, hosts.count(own_host), peers.index(own_host), len(peers), homogeneous)


def forget() -> None:
    """Horovod is not initialised any more."""
    global _position  # noqa: PLW0603 - one Horovod a process
    _position = None


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
