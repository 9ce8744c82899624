"""Ranks on one machine with links of a chosen speed: network namespaces behind a bridge, shaped by tbf.

Needs root and iproute2. Removes everything afterwards. Names hold the process's number, so that several processes may
have links at the same time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PREFIX = f"ddp{os.getpid()}"
INTERFACE, MANAGEMENT = "link0", "management0"
"""Names inside each namespace: of the shaped link, and of a second network for the rendezvous."""
_NETWORKS = {INTERFACE: ("10.83.0", "r"), MANAGEMENT: ("10.84.0", "m")}
"""First part of the addresses, and the letter in the names of the bridge and its links."""
SHAPE = "burst 128kb latency 400ms"


class LinkError(RuntimeError):
    """Links cannot be made here; holds the reason."""


def address(rank: int, interface: str = INTERFACE) -> str:
    """Return a rank's address."""
    return f"{_NETWORKS[interface][0]}.{rank + 1}"


def namespace(rank: int) -> str:
    """Return the name of a rank's namespace."""
    return f"{_PREFIX}ns{rank}"


@contextmanager
def links(ranks: int, rate: str) -> Iterator[None]:
    """Set up a namespace for each rank, with a link of `rate` (as tc writes it: `1gbit`) in both directions.

    Raises:
        LinkError: Not root, or a tool is missing.
    """
    # Debian has both tools there, outside of many users' PATH.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        reason = f"{' and '.join(missing)} missing (iproute2)" if missing else "not root"
        raise LinkError(f"network namespaces with links of a chosen speed cannot be made here: {reason}")
    try:
        _set_up(ranks, rate)
        yield
    finally:
        _tear_down(ranks)


def inside(rank: int, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` in the rank's namespace."""
    return ["ip", "netns", "exec", namespace(rank), *command]


def on_own_host(rank: int, command: Sequence[str]) -> list[str]:
    """As `inside`, with a host name of its own: telemetry then takes each rank for a host."""
    naming = f'hostname node{rank} && exec "$@"'
    return inside(rank, ["unshare", "--uts", "sh", "-c", naming, "sh", *command])


def set_rate(ranks: int, rate: str) -> None:
    """Change the speed of all links, in both directions, while ranks use them."""
    for rank in range(ranks):
        _run(f"tc qdisc change dev {_PREFIX}r{rank} root tbf rate {rate} {SHAPE}")
        _run(f"tc -n {namespace(rank)} qdisc change dev {INTERFACE} root tbf rate {rate} {SHAPE}")


def moved_bytes() -> tuple[int, int]:
    """Return the bytes sent and received so far over this process's link, Ethernet headers included."""
    statistics = Path("/sys/class/net") / INTERFACE / "statistics"
    return int((statistics / "tx_bytes").read_text()), int((statistics / "rx_bytes").read_text())


def cut(rank: int, *interfaces: str) -> None:
    """Take down links of a rank."""
    for interface in interfaces or (INTERFACE,):
        _run(f"ip -n {namespace(rank)} link set {interface} down")


def _set_up(ranks: int, rate: str) -> None:
    for rank in range(ranks):
        _run(f"ip netns add {namespace(rank)}")
        _run(f"ip -n {namespace(rank)} link set lo up")
    for interface, (_, letter) in _NETWORKS.items():
        bridge = f"{_PREFIX}{letter}"
        _run(f"ip link add {bridge} type bridge")
        _run(f"ip link set {bridge} up")
        for rank in range(ranks):
            outer, name = f"{bridge}{rank}", namespace(rank)
            _run(f"ip link add {outer} type veth peer name {interface} netns {name}")
            _run(f"ip link set {outer} master {bridge} up")
            _run(f"ip -n {name} addr add {address(rank, interface)}/24 dev {interface}")
            _run(f"ip -n {name} link set {interface} up")
            if interface == INTERFACE:
                _run(f"tc qdisc add dev {outer} root tbf rate {rate} {SHAPE}")
                _run(f"tc -n {name} qdisc add dev {interface} root tbf rate {rate} {SHAPE}")


def _tear_down(ranks: int) -> None:
    for rank in range(ranks):
        subprocess.run(["ip", "netns", "del", namespace(rank)], stderr=subprocess.DEVNULL, check=False)
    for _, letter in _NETWORKS.values():
        for name in (*(f"{_PREFIX}{letter}{rank}" for rank in range(ranks)), f"{_PREFIX}{letter}"):
            subprocess.run(["ip", "link", "del", name], stderr=subprocess.DEVNULL, check=False)


def _run(command: str) -> None:
    result = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise LinkError(f"`{command}` failed: {result.stderr.strip()}")
