"""A connection of one's own to the store of a process group, and whether its server is gone.

The server of a `TCPStore` ends with the process of rank 0, or with its process group. Each call of a connection then
prints a page on stderr, which no setting prevents within a process. So the socket is looked at before a call.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import finalize

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore


class StoreConnection:
    """A clone of a store.

    Args:
        store: The store of a process group, of any kind.

    Attributes:
        store: The clone.
    """

    def __init__(self, store: Any) -> None:
        port = _port_of(store)
        known = set() if port is None else set(_sockets_to(port))
        self.store = store.clone()
        fresh = {} if port is None else _sockets_to(port)
        # Duplicates of its descriptor, which end with this object, and without a warning where the process exits.
        self._descriptors: list[int] = []
        finalize(self, _close, self._descriptors)
        self._descriptors.extend(os.dup(number) for inode, number in fresh.items() if inode not in known)

    def prefixed(self, prefix: str) -> PrefixedStore:
        """Return the store under a prefix. Each of its calls first looks whether the server is gone."""
        return PrefixedStore(self, prefix)

    def is_closed(self) -> bool:
        """Whether the server has closed the connection; False for a store without a server."""
        return any(map(_is_closed, self._descriptors))


class PrefixedStore:
    """The methods of a store that telemetry calls.

    Each method raises a `dist.DistNetworkError` if the server is gone; the store's own would print a page as well.

    Args:
        connection: The connection.
        prefix: Prefix of the keys.
    """

    def __init__(self, connection: StoreConnection, prefix: str) -> None:
        self._connection, self._prefixed = connection, PrefixStore(prefix, connection.store)

    def __getattr__(self, name: str) -> Any:
        if self._connection.is_closed():
            raise dist.DistNetworkError("the server of the ranks' store is gone")
        return getattr(self._prefixed, name)


def _port_of(store: Any) -> int | None:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    port = getattr(store, "port", None)
    return port if isinstance(port, int) else None


def _sockets_to(port: int) -> dict[int, int]:
    """Descriptors of this process's sockets that are connected to a port, by inode; empty on systems without /proc."""
    found = {}
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, of which some are gone by now
            with suppress(OSError):
                facts = os.fstat(int(name))
                if stat.S_ISSOCK(facts.st_mode) and _peer_port(int(name)) == port:
                    found[facts.st_ino] = int(name)
    return found


def _peer_port(number: int) -> int | None:
    with _borrowed(number) as connection:
        address = connection.getpeername()
        return address[1] if isinstance(address, tuple) else None


def _is_closed(descriptor: int) -> bool:
    try:
        with _borrowed(descriptor) as connection:
            return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket object, which leaves the descriptor open."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
