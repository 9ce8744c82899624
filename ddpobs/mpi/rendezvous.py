"""Rank, size and rendezvous store from MPI: `init_method="mpi://"`, and the default under MPI's launcher."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

from ddpobs.errors import MpiError
from ddpobs.mpi.runtime import launched, library
from ddpobs.torch_seam.rendezvous import default_timeout

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_READ_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_CONNECT_S = 3.0

Rendezvous = Iterator[tuple[dist.Store, int, int]]


def from_mpi(url: str, timeout: timedelta = default_timeout, **_: Any) -> Rendezvous:
    """Yield a store, this rank and the number of ranks, as MPI's launcher placed them.

    Sets LOCAL_RANK and the other variables of torchrun if the environment does not have them.

    Raises:
        MpiError: No address of the first rank can be reached.
    """
    world = library().COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    store = _create_store(world, timeout)
    node = world.Split_type(library().COMM_TYPE_SHARED)
    for name, value in (
        ("RANK", rank),
        ("WORLD_SIZE", size),
        ("LOCAL_RANK", node.Get_rank()),
        ("LOCAL_WORLD_SIZE", node.Get_size()),
    ):
        os.environ.setdefault(name, str(value))
    node.Free()
    yield store, rank, size
    raise RuntimeError("mpi:// cannot meet the ranks a second time")


def before(environment: Callable[..., Rendezvous]) -> Callable[..., Rendezvous]:
    """Return torch's `env://`, preceded by MPI if its launcher started the process and gave no address."""

    def meet(url: str, **options: Any) -> Rendezvous:
        by_mpi = launched() and "MASTER_ADDR" not in os.environ
        return (from_mpi if by_mpi else environment)(url, **options)

    return meet


def _create_store(world: Any, timeout: timedelta) -> TCPStore:
    """Open the store on rank 0, and connect to the first of its addresses that answers."""
    if world.Get_rank() == 0:
        store = TCPStore("0.0.0.0", 0, world.Get_size(), True, timeout, wait_for_workers=False)
        world.bcast((_addresses(), store.port))
        return store
    addresses, port = world.bcast(None)
    for address in addresses:
        try:
            socket.create_connection((address, port), _CONNECT_S).close()
        except OSError:
            continue
        return TCPStore(address, port, world.Get_size(), False, timeout, wait_for_workers=False)
    raise MpiError(f"mpi://: none of rank 0's addresses {', '.join(addresses)} answers on port {port}")


def _addresses() -> list[str]:
    """Return this host's IPv4 addresses, the loopback's last."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            request = struct.pack("256s", interface.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _READ_ADDRESS, request)
            except OSError:  # The interface has no IPv4 address.
                continue
            addresses.append(socket.inet_ntoa(answer[20:24]))
    return sorted(addresses, key=lambda address: address.startswith("127."))
