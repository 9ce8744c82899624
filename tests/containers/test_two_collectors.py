"""`deploy/two-collectors.yml` started by a real Docker engine: a training, and a collector that is killed meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.rig import patience
from benchmarks.rig.training import ROOT, TORCHRUN
from tests.support.compose import BEARER, TOKEN, URL, Stack, stack

pytestmark = [
    pytest.mark.wide,
    pytest.mark.timeout(1800),
]  # The image is built first, and one compose file runs at a time.
STEPS = 100
TRAINING = f"""
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range({STEPS}):
    time.sleep(0.1)
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack("deploy/two-collectors.yml", tmp_path_factory.mktemp("compose")) as started:
        yield started


def stored(run: str) -> list[tuple[int, int]]:
    """Rank and step of each stored step; empty before the run's first batch."""
    answer = httpx.get(f"{URL}/api/v1/runs/{run}/steps", headers=BEARER)
    columns = answer.json()["columns"] if answer.status_code == 200 else {"rank": [], "step": []}
    return sorted(zip(columns["rank"], columns["step"], strict=True))


@pytest.mark.parametrize("killed", ["collector-1", "collector-2"])
def test_no_step_is_lost_when_a_collector_is_killed(services: Stack, tmp_path: Path, killed: str) -> None:
    script, run = tmp_path / "train.py", f"without-{killed}"
    script.write_text(TRAINING)
    environ = os.environ | {"DDPOBS_TELEMETRY": URL, "DDPOBS_TOKEN": TOKEN, "DDPOBS_RUN": run, "OMP_NUM_THREADS": "1"}
    environ |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")]), "DDPOBS_EXIT_S": "60"}
    ddpobs = Path(sys.executable).with_name("ddpobs")
    with subprocess.Popen([ddpobs, "run", "--", *TORCHRUN, script], env=environ) as training:
        patience.until(lambda: stored(run), services.logs)
        assert len(stored(run)) < 2 * STEPS
        services.compose("kill", killed)
        assert training.wait(patience.HANG_S) == 0
    assert stored(run) == [(rank, step) for rank in (0, 1) for step in range(STEPS)]
    services.up()
    assert stored(run) == [(rank, step) for rank in (0, 1) for step in range(STEPS)]
