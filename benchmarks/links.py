"""Ranks on one machine with links of a chosen speed: network namespaces behind a bridge, shaped by tbf.

Needs root and iproute2. Removes everything afterwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PREFIX = f"dd{os.getpid()}"
"""Processes that make links at the same time need names of their own; 15 characters are the most for an interface."""
_BRIDGE = f"{_PREFIX}br"
INTERFACE = "link0"
"""Name of the link inside each namespace."""
SHAPE = "burst 128kb latency 400ms"


class LinkError(RuntimeError):
    """Links cannot be made here; holds the reason."""


def address(rank: int) -> str:
    """Return a rank's address."""
    return f"10.83.0.{rank + 1}"


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
    _tear_down(ranks)
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
        _run(f"tc qdisc change dev {_outer(rank)} root tbf rate {rate} {SHAPE}")
        _run(f"tc -n {namespace(rank)} qdisc change dev {INTERFACE} root tbf rate {rate} {SHAPE}")


def moved_bytes() -> tuple[int, int]:
    """Return the bytes sent and received so far over this process's link, Ethernet headers included."""
    statistics = Path("/sys/class/net") / INTERFACE / "statistics"
    return int((statistics / "tx_bytes").read_text()), int((statistics / "rx_bytes").read_text())


def _outer(rank: int) -> str:
    """Name of the link's end at the bridge."""
    return f"{_PREFIX}r{rank}"


def _set_up(ranks: int, rate: str) -> None:
    _run(f"ip link add {_BRIDGE} type bridge")
    _run(f"ip link set {_BRIDGE} up")
    for rank in range(ranks):
        inner, outer, name = INTERFACE, _outer(rank), namespace(rank)
        _run(f"ip netns add {name}")
        _run(f"ip link add {outer} type veth peer name {inner} netns {name}")
        _run(f"ip link set {outer} master {_BRIDGE} up")
        _run(f"ip -n {name} addr add {address(rank)}/24 dev {inner}")
        _run(f"ip -n {name} link set {inner} up")
        _run(f"ip -n {name} link set lo up")
        _run(f"tc qdisc add dev {outer} root tbf rate {rate} {SHAPE}")
        _run(f"tc -n {name} qdisc add dev {inner} root tbf rate {rate} {SHAPE}")


def _tear_down(ranks: int) -> None:
    for rank in range(ranks):
        subprocess.run(["ip", "netns", "del", namespace(rank)], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["ip", "link", "del", _outer(rank)], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["ip", "link", "del", _BRIDGE], stderr=subprocess.DEVNULL, check=False)


def _run(command: str) -> None:
    result = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise LinkError(f"`{command}` failed: {result.stderr.strip()}")
