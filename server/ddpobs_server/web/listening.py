"""Sockets on one or several addresses, which share a port."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack

_ATTEMPTS = 10
"""Attempts to find a port that is free on all addresses."""
_NO_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of an address that this machine lacks, as `::1` without IPv6."""


class AddressError(Exception):
    """An address cannot be used; the message has the reason."""


def bind(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Bind a socket to each address of each host: an IPv6 address never includes IPv4.

    Args:
        hosts: Addresses or names. A name may have an address that this machine lacks, if it also has another one.
        port: Port of all addresses; 0 selects one that is free on all.

    Raises:
        AddressError: An address cannot be used.
    """
    for attempt in range(_ATTEMPTS):
        with ExitStack() as bound:
            sockets: list[socket.socket] = []
            try:
                for host in hosts:
                    _bind_host(host, sockets[0].getsockname()[1] if sockets else port, sockets, bound)
            except (OSError, UnicodeError) as error:
                if port == 0 and sockets and attempt + 1 < _ATTEMPTS and _is_in_use(error):
                    continue
                reason = getattr(error, "strerror", None) or error
                raise AddressError(f"cannot listen on {host}, port {port}: {reason}") from error
            bound.pop_all()
            return sockets
    raise AssertionError("the last attempt returns or raises")


def _bind_host(host: str, port: int, sockets: list[socket.socket], bound: ExitStack) -> None:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    addresses = list(dict.fromkeys((family, address) for family, _, _, _, address in infos))
    missing: OSError | None = None
    count = len(sockets)
    for family, address in addresses:
        try:
            sockets.append(_bound(family, (address[0], port, *address[2:]), bound))
            port = sockets[-1].getsockname()[1]
        except OSError as error:
            if error.errno not in _NO_ADDRESS:
                raise
            missing = error
    if len(sockets) == count and missing is not None:
        raise missing


def _bound(family: int, address: tuple[object, ...], bound: ExitStack) -> socket.socket:
    result = bound.enter_context(socket.socket(family, socket.SOCK_STREAM))
    result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        result.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    result.bind(address)
    return result


def _is_in_use(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EADDRINUSE
