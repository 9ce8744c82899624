"""Ranks on one machine with links of a chosen speed: hosts are network namespaces, shaped by tbf, behind a switch.

A host and the switch are namespaces without a name, each held by a process. The kernel removes such a namespace, with
its interfaces, when its last process ends. All processes end with this one, however it ends, so nothing is left behind.
The switch's bridges are in a namespace of their own, because this machine's firewall may filter those outside.

Needs root, iproute2 and util-linux. Several processes may have links at the same time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

INTERFACE, MANAGEMENT = "link0", "management0"
"""Names inside each namespace: of the shaped link, and of a second network for the rendezvous."""
_PREFIXES = {INTERFACE: "10.83.0", MANAGEMENT: "10.84.0"}
"""First part of the addresses. In the switch a bridge has the interface's name."""
SHAPE = "burst 128kb latency 400ms"
_RELAY = Path(__file__).with_name("delaying.py")
_MTU, _DELAYED_MTU = 1500, 60_000
"""Bytes of a frame. The relay passes on some ten thousand frames a second: 1 Gbit/s only if they are large."""
_TIED = ("setpriv", "--pdeathsig", "KILL")
"""Ends a command with the thread that started it; its processes' children need not end with them."""
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "setpriv": "util-linux", "unshare": "util-linux"}
_END_S = 10.0


class LinkError(RuntimeError):
    """Links cannot be made here; holds the reason."""


def address(rank: int, interface: str = INTERFACE) -> str:
    """Return a rank's address."""
    return f"{_PREFIXES[interface]}.{rank + 1}"


def _end(interface: str, rank: int) -> str:
    return f"{interface}-{rank}"


def moved_bytes() -> tuple[int, int]:
    """Return the bytes sent and received so far over this process's link, Ethernet headers included."""
    # sysfs is mounted for the machine's namespace; this file is the one of the process's own.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            columns = counters.split()
            return int(columns[8]), int(columns[0])
    raise LinkError(f"this process has no interface {INTERFACE}: start it with `Links.inside`")


class Links:
    """The hosts of a running network, one per rank."""

    def __init__(self, switch: _Namespace, hosts: list[_Namespace]) -> None:
        self._switch, self._hosts = switch, hosts
        self._relay: subprocess.Popen[bytes] | None = None

    def inside(self, rank: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` in the rank's network. It ends with the thread that starts it."""
        return self._hosts[rank].enter("--net", command)

    def on_own_host(self, rank: int, command: Sequence[str]) -> list[str]:
        """As `inside`, with a host name of its own: telemetry then takes each rank for a host."""
        return self._hosts[rank].enter("--net --uts", command)

    def namespaces(self, rank: int, *kinds: str) -> list[str]:
        """Return the files of a rank's namespaces, which a process enters with setns: `net`, and `uts` for its name."""
        return [f"/proc/{self._hosts[rank].pid}/ns/{kind}" for kind in kinds or ("net",)]

    def set_rate(self, rate: str) -> None:
        """Change the speed of all links, in both directions, while ranks use them."""
        self._shape("change", rate)

    def set_delay(self, delay_s: float) -> None:
        """Have each frame of the shaped links wait in the switch, in each direction; 0 for the kernel's own switch.

        A process passes the frames on, which hold up to 60 kB then. Connections between ranks break.
        """
        ends = [_end(INTERFACE, rank) for rank in range(len(self._hosts))]
        self._end_relay()
        mtu = _DELAYED_MTU if delay_s else _MTU
        self._switch.run("ip", *(f"link set dev {end} mtu {mtu} {'nomaster' if delay_s else ''}" for end in ends))
        for host in self._hosts:
            host.run("ip", f"link set dev {INTERFACE} mtu {mtu}")
        if not delay_s:
            self._switch.run("ip", *(f"link set dev {end} master {INTERFACE}" for end in ends))
            return
        for rank in range(len(self._hosts)):
            subprocess.run(self.inside(rank, [sys.executable, str(_RELAY), "plain", INTERFACE]), check=True)
        command = self._switch.enter("--net", [sys.executable, str(_RELAY), str(delay_s), *ends])
        self._relay = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._relay.stdout is not None
        if not self._relay.stdout.readline():
            raise LinkError(f"no delay of {delay_s} s: the relay ended with {self._relay.wait()}")

    def _end_relay(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
            self._relay = None

    def cut(self, rank: int, *interfaces: str) -> None:
        """Take down links of a rank."""
        self._hosts[rank].run("ip", *(f"link set dev {interface} down" for interface in interfaces or (INTERFACE,)))

    def _connect(self, rate: str) -> None:
        for interface in _PREFIXES:
            ends = {_end(interface, rank): host for rank, host in enumerate(self._hosts)}
            self._switch.run(
                "ip",
                f"link add name {interface} type bridge",
                f"link set dev {interface} up",
                *(
                    f"link add name {end} type veth peer name {interface} netns {host.pid}"
                    for end, host in ends.items()
                ),
                *(f"link set dev {end} master {interface} up" for end in ends),
            )
        for rank, host in enumerate(self._hosts):
            host.run("ip", *(f"addr add {address(rank, each)}/24 dev {each}" for each in _PREFIXES))
            host.run("ip", *(f"link set dev {each} up" for each in ("lo", *_PREFIXES)))
        self._shape("add", rate)

    def _shape(self, verb: str, rate: str) -> None:
        shaped = f"root tbf rate {rate} {SHAPE}"
        ends = (_end(INTERFACE, rank) for rank in range(len(self._hosts)))
        self._switch.run("tc", *(f"qdisc {verb} dev {end} {shaped}" for end in ends))
        for host in self._hosts:
            host.run("tc", f"qdisc {verb} dev {INTERFACE} {shaped}")


@contextmanager
def links(ranks: int, rate: str) -> Iterator[Links]:
    """Make a host for each rank, with a link of `rate` (as tc writes it: `1gbit`) in both directions.

    At the end every process on these hosts is killed.

    Raises:
        LinkError: Not root, or a tool is missing.
    """
    # Debian has some tools there, outside of many users' PATH.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    missing = [f"{tool} ({package})" for tool, package in _TOOLS.items() if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        reason = f"missing: {', '.join(missing)}" if missing else "not root"
        raise LinkError(f"network namespaces with links of a chosen speed cannot be made here: {reason}")
    with ExitStack() as stack:
        switch = stack.enter_context(_namespace("switch"))
        hosts = [stack.enter_context(_namespace(f"node{rank}")) for rank in range(ranks)]
        made = Links(switch, hosts)
        made._connect(rate)
        stack.callback(made._end_relay)
        yield made


class _Namespace:
    """A network with a host name, held by a process that sleeps."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._network = Path(f"/proc/{pid}/ns/net").readlink()

    def enter(self, namespaces: str, command: Sequence[str]) -> list[str]:
        return [*_TIED, "nsenter", f"--target={self.pid}", *namespaces.split(), *command]

    def run(self, tool: str, *lines: str) -> None:
        command = self.enter("--net", [tool, "-batch", "-"])
        done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LinkError(f"{tool} failed: {done.stderr.strip()}\nin: {'; '.join(lines)}")

    def processes(self) -> list[int]:
        """Return the processes in this network."""
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (folder / "ns" / "net").readlink() == self._network:
                    pids.append(int(folder.name))
        return pids

    def end(self) -> None:
        deadline = time.monotonic() + _END_S
        while (pids := self.processes()) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


@contextmanager
def _namespace(name: str) -> Iterator[_Namespace]:
    hold = f"hostname {name} && echo held && exec sleep infinity"
    command = [*_TIED, "unshare", "--net", "--uts", "sh", "-c", hold]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as holder:
        try:
            assert holder.stdout is not None
            line = holder.stdout.readline().decode().strip()
            if line != "held":
                raise LinkError(f"no network namespace can be made here: {line}")
            made = _Namespace(holder.pid)
            try:
                yield made
            finally:
                made.end()
        finally:
            holder.kill()
