"""Signals end the collector at any time, also as process 1 of a container, where the kernel discards the defaults."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from benchmarks.rig import patience
from benchmarks.rig.collector import Collector, collector
from tests.support.server.batches import batch, path, put

ROOT = Path(__file__).resolve().parents[3]
SERVER = str(Path(sys.executable).with_name("ddpobs-server"))
SLOW_IMPORT = """
import importlib.abc, sys, time
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "ddpobs_server.app":
            print("importing", flush=True)
            time.sleep(120)
sys.meta_path.insert(0, Slow())
from ddpobs_server import main
main()
"""


def as_process_1(*command: str) -> list[str]:
    """The command in a process namespace of its own."""
    unshare = shutil.which("unshare")
    command_1 = [str(unshare), "--pid", "--fork", "--kill-child", *command]
    if unshare is None or subprocess.run([*command_1[:4], "true"], capture_output=True, check=False).returncode:
        reason = "unshare cannot create a process namespace: run as root, outside of a container without CAP_SYS_ADMIN"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return command_1


def child(process: Any) -> int:
    """Process id of the process that `unshare` started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    patience.until(lambda: bool(children.read_text()))
    return int(children.read_text())


@contextmanager
def unfinished_upload(running: Collector) -> Iterator[None]:
    address = urlsplit(running.url)
    with socket.create_connection((address.hostname, address.port), 60) as client:
        head = f"PUT {path(batch('slow'))} HTTP/1.1\r\nHost: here\r\nContent-Type: application/x-msgpack\r\n"
        client.sendall(f"{head}Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n".encode())
        assert b"100 Continue" in client.recv(1000)
        yield


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_process_1_at_once(tmp_path: Path, second: signal.Signals) -> None:
    with collector(tmp_path, as_process_1(SERVER)) as running, unfinished_upload(running):
        pid = child(running.process)
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(1)
        os.kill(pid, second)
        assert running.process.wait(8) == 128 + second  # Earlier than the shutdown would end by itself.


def test_a_signal_ends_process_1_after_its_batches_are_written(tmp_path: Path) -> None:
    with collector(tmp_path, as_process_1(SERVER)) as running:
        assert put(running.url, batch("x")).status_code == 201
        os.kill(child(running.process), signal.SIGTERM)
        assert running.process.wait(30) == 0
        assert "all accepted batches are written" in running.log.read_text()


def test_the_alarm_ends_process_1_if_its_end_hangs(tmp_path: Path) -> None:
    code = "import time; from ddpobs_server import signals; signals.end_within(1); print(1, flush=True); time.sleep(60)"
    command = as_process_1(sys.executable, "-c", code)
    assert subprocess.run(command, check=False, cwd=tmp_path).returncode == 128 + signal.SIGALRM


@pytest.mark.parametrize("alone", [False, True], ids=["usual", "process 1"])
def test_a_signal_during_the_imports_ends_the_process(tmp_path: Path, alone: bool) -> None:
    command = [sys.executable, "-c", SLOW_IMPORT]
    with subprocess.Popen(
        as_process_1(*command) if alone else command, stdout=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        os.kill(child(process) if alone else process.pid, signal.SIGTERM)
        assert process.wait(30) == (128 + signal.SIGTERM if alone else -signal.SIGTERM)


@pytest.mark.parametrize("pause_s", [0.1, 0.3, 0.5, 0.8, 1.2, 1.6, 2.4])
def test_a_signal_at_any_time_of_the_start_ends_process_1(tmp_path: Path, pause_s: float) -> None:
    environ = {**os.environ, "DDPOBS_SERVER_PORT": "0", "DDPOBS_SERVER_DATABASE_URL": f"sqlite:///{tmp_path}/x.db"}
    with subprocess.Popen(as_process_1(SERVER), env=environ, stderr=subprocess.DEVNULL) as process:
        pid = child(process)
        handled = Path(f"/proc/{pid}/status")
        patience.until(lambda: catches_sigterm(handled.read_text()))
        time.sleep(pause_s)
        os.kill(pid, signal.SIGTERM)
        assert process.wait(60) in (0, 1, 128 + signal.SIGTERM)


def catches_sigterm(status: str) -> bool:
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_collector_answers_again_after_a_second_signal_ended_it(tmp_path: Path) -> None:
    with collector(tmp_path) as running, unfinished_upload(running):
        put(running.url, batch("kept"))
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGINT)
        running.process.wait(30)
    with collector(tmp_path) as running:
        assert httpx.get(f"{running.url}/api/v1/runs/kept").status_code == 200


@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/two-collectors.yml"])
def test_containers_of_collectors_have_an_init_process(file: str) -> None:
    services = yaml.safe_load((ROOT / file).read_text())["services"]
    collectors = {name: service for name, service in services.items() if name.startswith("collector")}
    assert collectors
    assert all(service["init"] for service in collectors.values())
