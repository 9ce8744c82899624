"""Networks of hosts on one machine: where they are, and what remains of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.links import INTERFACE, MANAGEMENT, LinkError, Links, address, links
from benchmarks.rig import patience

ROOT = Path(__file__).resolve().parents[2]
LISTEN = (
    "import socket; s = socket.create_server(('{address}', 9000)); print(1, flush=True); s.accept()[0].send(b'here')"
)
CONNECT = "import socket; print(socket.create_connection(('{address}', 9000), 60).recv(9).decode())"
KILLED = """
import subprocess, sys, time
from benchmarks.links import links
with links(1, "1gbit") as network:
    for run in (network.inside, network.on_own_host):
        subprocess.Popen(run(0, ["sleep", "600"]))
    subprocess.run(network.inside(0, ["sleep", "0"]))
    print("made", flush=True)
    time.sleep(600)
"""


@contextmanager
def two_hosts() -> Iterator[Links]:
    try:
        with links(2, "1gbit") as network:
            yield network
    except LinkError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


def networks() -> set[str]:
    """The network namespaces of all processes."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        with suppress(OSError):
            found.add(str(link.readlink()))
    return found


def test_hosts_reach_each_other_through_a_switch_outside_of_this_machines_network() -> None:
    before = socket.if_nameindex()
    with two_hosts() as network:
        assert socket.if_nameindex() == before
        for interface in (INTERFACE, MANAGEMENT):
            listen, connect = (code.format(address=address(0, interface)) for code in (LISTEN, CONNECT))
            command = network.inside(0, [sys.executable, "-c", listen])
            with subprocess.Popen(command, stdout=subprocess.PIPE) as listener:
                assert listener.stdout is not None
                assert listener.stdout.readline() == b"1\n"
                command = network.inside(1, [sys.executable, "-c", connect])
                assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "here\n"


ANSWER = """
import socket
with socket.create_server(("{address}", 9000)) as server:
    print(1, flush=True)
    asked = server.accept()[0]
    while data := asked.recv(1):
        asked.sendall(data)
    server.accept()[0].sendall(bytes(10**7))
"""
ASK = """
import socket, time
asked = socket.create_connection(("{address}", 9000), 60)
times = []
for _ in range(5):
    began = time.monotonic()
    asked.sendall(b"1")
    asked.recv(1)
    times.append(time.monotonic() - began)
asked.close()
received = socket.create_connection(("{address}", 9000), 60)
print(min(times), sum(len(part) for part in iter(lambda: received.recv(2**20), b"")))
"""


def asked_once(network: Links) -> tuple[float, int]:
    """The shortest time of a byte there and back, and the bytes of a large answer."""
    listen, connect = (code.format(address=address(0)) for code in (ANSWER, ASK))
    with subprocess.Popen(network.inside(0, [sys.executable, "-c", listen]), stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == b"1\n"
        command = network.inside(1, [sys.executable, "-c", connect])
        shortest_s, count = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(shortest_s), int(count)


def test_a_delayed_link_takes_its_time_in_each_direction_and_loses_nothing() -> None:
    with two_hosts() as network:
        network.set_delay(0.02)
        shortest_s, count = asked_once(network)
        assert (shortest_s >= 0.04, count) == (True, 10**7)
        network.set_delay(0)
        shortest_s, count = asked_once(network)
        assert (shortest_s < 0.04, count) == (True, 10**7)


def test_each_host_has_a_name_of_its_own() -> None:
    with two_hosts() as network:
        for rank in range(2):
            named = subprocess.run(network.on_own_host(rank, ["hostname"]), capture_output=True, text=True, check=True)
            assert named.stdout == f"node{rank}\n"


def test_what_runs_on_a_host_ends_with_the_network() -> None:
    with two_hosts() as network:
        orphaned = "sleep 600 & echo $!"
        command = network.inside(0, ["setsid", "sh", "-c", orphaned])
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as started:
            assert started.stdout is not None
            pid = int(started.stdout.readline())
            assert Path(f"/proc/{pid}").exists()
            network_of_host = str(Path(f"/proc/{pid}/ns/net").readlink())
    assert network_of_host not in networks()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_network_ends_with_the_process_that_made_it(number: signal.Signals) -> None:
    with two_hosts():
        pass  # Skips where links cannot be made.
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        made = {str(Path(f"/proc/{pid}/ns/net").readlink()) for pid in children(process.pid)}
        assert len(made) == 2, "a switch and a host"
        process.send_signal(number)
        process.wait()
    deadline = time.monotonic() + patience.HANG_S
    while made & networks():
        assert time.monotonic() < deadline, f"{made & networks()} remain"
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
