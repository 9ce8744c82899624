"""Trainings in containers: on a network of Docker's, without /dev/shm, as a user of no name, and with little memory."""

from __future__ import annotations

import secrets
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.rig.containers import address, collector_image, container, docker, ready_s
from benchmarks.rig.training import ROOT
from tests.support.containers import need_images
from tests.support.integration.tools import end

pytestmark = [pytest.mark.wide, pytest.mark.timeout(1800)]  # The image is built first.
BASE = "python:3.11-slim"
TOKEN = "a-token-of-sixteen-characters"
SITE = sysconfig.get_path("purelib")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
TRAINING = """
import os
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if "RANK" not in os.environ:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
leak = []
for step in range(200 if "leak" in sys.argv else 40):
    if step >= 20 and "leak" in sys.argv and dist.get_rank() == dist.get_world_size() - 1:
        leak.append(torch.ones(25_000_000))
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


class Network:
    """A network with a collector, which trainings reach by its name."""

    def __init__(self, name: str, collector: str) -> None:
        self.name, self._collector = name, collector

    def train(self, folder: Path, run: str, *words: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
        """Train in a container under `ddpobs run`; returns its exit status and output.

        Args:
            folder: Folder for the script.
            run: The run's name.
            *words: Arguments of Python, before the script's own after `train.py`.
            options: Options of `docker run`.
        """
        (folder / "train.py").write_text(TRAINING)
        folder.chmod(0o755)
        environ = {
            "TELEMETRY": "http://collector:8321",
            "TOKEN": TOKEN,
            "RUN": run,
            "SPOOL": "/tmp/spool",
            "EXIT_S": "60",
        }
        settings = [f"--env=DDPOBS_{name}={value}" for name, value in environ.items()]
        settings += [f"--env=PYTHONPATH={ROOT}:{SITE}", "--env=OMP_NUM_THREADS=1", f"--network={self.name}"]
        mounts = [f"--volume={path}:{path}:ro" for path in (ROOT, SITE)] + [f"--volume={folder}:/train:ro"]
        command = ("python", "-c", "from ddpobs.cli import main; main()", "run", "--", "python", *words)
        with container(BASE, *command, options=(*settings, *mounts, "--workdir=/train", *options)) as training:
            status = int(docker("wait", training))
            return status, docker("logs", training)

    def get(self, path: str) -> Any:
        """The JSON of a route of the collector."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.get(f"{address(self._collector)}/api/v1/runs/{path}", headers=headers)
        answer.raise_for_status()
        return answer.json()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    need_images(BASE)
    if sys.version_info[:2] != (3, 11):
        end("the wheels of this Python do not fit that of the container, 3.11")
    image, name = collector_image(), f"ddpobs{secrets.token_hex(4)}"
    docker("network", "create", name)
    try:
        options = (f"--network={name}", "--network-alias=collector", "--publish=127.0.0.1::8321")
        with container(image, options=(*options, f"--env=DDPOBS_SERVER_TOKEN={TOKEN}")) as collector:
            ready_s(collector)
            yield Network(name, collector)
    finally:
        docker("network", "rm", name)


RESTRICTED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges:true")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", ()),
        ("no-shm", ("--ipc=none",)),
        ("nameless-user", ("--user=12345:12345",)),
        ("read-only", (*RESTRICTED, "--ipc=none", "--user=12345:12345")),
    ],
)
def test_a_training_in_a_container_reports_all_steps_of_all_ranks(
    network: Network, tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    status, output = network.train(tmp_path, name, *TORCHRUN, "train.py", options=options)
    assert status == 0, output
    columns = network.get(f"{name}/steps")["columns"]
    assert sorted(zip(columns["rank"], columns["step"], strict=True)) == [(r, s) for r in (0, 1) for s in range(40)]
    assert {rank["dropped"] for rank in network.get(f"{name}/ranks")["ranks"]} == {0}
    assert "Traceback" not in output


@pytest.mark.parametrize(("name", "launcher"), [("oom-of-a-rank", TORCHRUN), ("oom-of-the-command", ())])
def test_an_out_of_memory_kill_in_a_container_is_named(
    network: Network, tmp_path: Path, name: str, launcher: tuple[str, ...]
) -> None:
    limits = ("--memory=1500m", "--memory-swap=1500m")
    status, output = network.train(tmp_path, name, *launcher, "train.py", "leak", options=limits)
    assert status == (1 if launcher else 137), output
    found = network.get(f"{name}/diagnostics")["findings"]
    (finding,) = (finding for finding in found if finding["code"] == "crash")
    assert finding["ranks"] == ([1] if launcher else [0])
    assert "its host ran out of memory" in finding["cause"]
