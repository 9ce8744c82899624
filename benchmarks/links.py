"""Ranks on one machine with a link of a chosen speed between them: network namespaces behind a bridge, shaped by tbf.

Needs root and iproute2, and leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "ddpobs"
_BRIDGE = f"{_PREFIX}-bridge"
INTERFACE = "link0"
"""What the link is called inside each namespace."""
SHAPE = "burst 128kb latency 400ms"


class LinkError(RuntimeError):
    """Links cannot be made here; says why."""


def address(rank: int) -> str:
    """A rank's address."""
    return f"10.83.0.{rank + 1}"


def namespace(rank: int) -> str:
    """A rank's namespace."""
    return f"{_PREFIX}-{rank}"


@contextmanager
def links(ranks: int, rate: str) -> Iterator[None]:
    """So many namespaces, each with a link of `rate` (as tc writes it: `1gbit`) in both directions.

    Raises:
        LinkError: Not root, or a tool is missing.
    """
    # Where Debian has both, and not everybody's PATH leads to.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        reason = f"{' and '.join(missing)} missing (iproute2)" if missing else "not root"
        raise LinkError(f"network namespaces with links of a chosen speed cannot be made here: {reason}")
    _take_down(ranks)
    try:
        _put_up(ranks, rate)
        yield
    finally:
        _take_down(ranks)


def inside(rank: int, command: Sequence[str]) -> list[str]:
    """The command that runs `command` in the rank's namespace."""
    return ["ip", "netns", "exec", namespace(rank), *command]


def moved_bytes() -> tuple[int, int]:
    """Sent and received so far over this process's own link, Ethernet headers included."""
    statistics = Path("/sys/class/net") / INTERFACE / "statistics"
    return int((statistics / "tx_bytes").read_text()), int((statistics / "rx_bytes").read_text())


def _put_up(ranks: int, rate: str) -> None:
    _do(f"ip link add {_BRIDGE} type bridge")
    _do(f"ip link set {_BRIDGE} up")
    for rank in range(ranks):
        inner, outer, name = INTERFACE, f"{_PREFIX}{rank}", namespace(rank)
        _do(f"ip netns add {name}")
        _do(f"ip link add {outer} type veth peer name {inner} netns {name}")
        _do(f"ip link set {outer} master {_BRIDGE} up")
        _do(f"ip -n {name} addr add {address(rank)}/24 dev {inner}")
        _do(f"ip -n {name} link set {inner} up")
        _do(f"ip -n {name} link set lo up")
        _do(f"tc qdisc add dev {outer} root tbf rate {rate} {SHAPE}")
        _do(f"tc -n {name} qdisc add dev {inner} root tbf rate {rate} {SHAPE}")


def _take_down(ranks: int) -> None:
    for rank in range(ranks):
        subprocess.run(["ip", "netns", "del", namespace(rank)], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["ip", "link", "del", f"{_PREFIX}{rank}"], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["ip", "link", "del", _BRIDGE], stderr=subprocess.DEVNULL, check=False)


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LinkError(f"`{command}` failed: {done.stderr.strip()}")
