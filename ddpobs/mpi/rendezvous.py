"""Rendezvous through MPI: `mpi://`, the default of the backend `ddpobs_mpi`.

The first rank opens torch's store on a free port and broadcasts its addresses. Ranks of other hosts take the first
address that answers; MASTER_ADDR on the first rank names another one.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import register_rendezvous_handler

from ddpobs.errors import MpiError
from ddpobs.mpi.blocking import logged_if_long
from ddpobs.mpi.library import MPI
from ddpobs.torch_seam.patching import Patches

_SCHEME = "mpi"
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_ANSWER_S = 2.0
_LOOK_S = 1e-3


def register(backend: str) -> None:
    """Register `mpi://`, and make it the default of the backend."""
    register_rendezvous_handler(_SCHEME, _meet)
    patches = Patches()
    for module in (dist, dist.distributed_c10d):
        patches.put(module, "init_process_group", lambda original: _with_default(original, backend))


def _with_default(original: Callable[..., Any], own_backend: str) -> Callable[..., Any]:
    def init_process_group(backend: Any = None, init_method: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if str(backend).lower() == "mpi" and not dist.is_mpi_available():
            raise MpiError(
                'this torch is built without its backend "mpi", and refuses the name before it asks a plugin: '
                f'init_process_group("{own_backend}")'
            )
        uses_mpi = own_backend in str(backend).lower()
        if uses_mpi and init_method is None and not args and not {"store", "rank", "world_size"} & kwargs.keys():
            init_method = f"{_SCHEME}://"
        return original(backend, init_method, *args, **kwargs)

    return init_process_group


def _meet(_url: str, timeout: timedelta = default_pg_timeout, **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Yield torch's store, this rank and the number of ranks."""
    world = MPI.COMM_WORLD
    with logged_if_long("MPI_Ibarrier"):
        _wait_for_all(world)
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    facts = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": local.rank, "LOCAL_WORLD_SIZE": local.size}
    os.environ.update({name: str(value) for name, value in facts.items()})
    beside_first = local.allreduce(world.rank, MPI.MIN) == 0
    local.Free()
    store, offer = None, None
    if world.rank == 0:
        store = TCPStore("localhost", 0, world.size, True, timeout, wait_for_workers=False)
        offer = _own_addresses(), store.port
    addresses, port = world.bcast(offer)
    if store is None:
        address = _first_that_answers([*(["127.0.0.1"] if beside_first else []), *addresses], port)
        store = TCPStore(address, port, world.size, False, timeout)
    yield store, world.rank, world.size
    raise MpiError("the rendezvous mpi:// cannot be repeated: start the job again with mpiexec")


def _wait_for_all(world: MPI.Intracomm) -> None:
    """Wait until all ranks have come here, and sleep meanwhile.

    MPI's calls that block take a whole processor while they wait. Ranks that are bound to the same core, or have few,
    would take it from a rank that still imports torch.
    """
    arrived = world.Ibarrier()
    while not arrived.Test():
        time.sleep(_LOOK_S)


def _own_addresses() -> list[str]:
    """Addresses under which other hosts may reach this one, the most likely first."""
    found = [os.environ["MASTER_ADDR"]] if "MASTER_ADDR" in os.environ else []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # An interface without an address.
                continue
            address = socket.inet_ntoa(answer[20:24])
            if not address.startswith("127."):
                found.append(address)
    return [*found, socket.gethostname()]


def _first_that_answers(addresses: list[str], port: int) -> str:
    for address in addresses:
        try:
            socket.create_connection((address, port), _ANSWER_S).close()
        except OSError:
            continue
        return address
    raise MpiError(
        f"the first rank listens on port {port}, but none of its addresses answers on {socket.gethostname()}: "
        f"{', '.join(addresses)}. Set MASTER_ADDR on the first rank to an address that this host reaches"
    )
