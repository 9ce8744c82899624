"""Limits of the collector that neither a client nor a setting can lift."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from benchmarks.rig.collector import collector, running_collector
from ddpobs import wire
from tests.support.server.batches import batch, path, put, steps

SERVER = Path(sys.executable).with_name("ddpobs-server")


def test_an_empty_token_does_not_allow_every_interface(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="token"), running_collector(tmp_path, token="", host="0.0.0.0"):
        pass


def test_absurd_counts_of_one_client_leave_the_list_of_runs_readable(tmp_path: Path) -> None:
    with running_collector(tmp_path) as url:
        put(url, batch("good", steps=steps(0, 1)))
        for rank in range(3):
            put(url, batch("absurd", rank=rank, world_size=4, emitted=2**62))
        assert httpx.get(f"{url}/api/v1/runs").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 200


def test_a_second_signal_ends_the_collector_despite_an_open_upload(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        address = urlsplit(running.url)
        with socket.create_connection((address.hostname, address.port), 30) as client:
            head = f"PUT {path(batch('slow'))} HTTP/1.1\r\nHost: here\r\nContent-Type: {wire.MSGPACK}\r\n"
            client.sendall(f"{head}Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n".encode())
            assert b"100 Continue" in client.recv(1000)
            running.process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                running.process.wait(1)
            running.process.send_signal(signal.SIGTERM)
            try:
                running.process.wait(8)  # Earlier than the shutdown would end by itself.
            finally:
                running.process.kill()


def test_more_ranks_can_connect_than_the_usual_limit_of_open_files(tmp_path: Path) -> None:
    few_files = ["bash", "-c", f"ulimit -Sn 64; exec {SERVER}"]
    with collector(tmp_path, command=few_files) as running, ExitStack() as ranks:
        address = urlsplit(running.url)
        for _ in range(150):
            ranks.enter_context(socket.create_connection((address.hostname, address.port), 30))
        # Idle connections are closed after half a minute.
        assert httpx.get(f"{running.url}/healthz", timeout=20).status_code == 200
