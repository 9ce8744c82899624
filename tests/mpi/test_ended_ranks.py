"""Ranks of MPI that a signal ends under `ddpobs run -- mpiexec`: reported within seconds, while no rank survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.rig import patience
from benchmarks.rig.collector import collector
from benchmarks.rig.training import PATIENT
from tests.support.mpi.launch import AS_ROOT_ON_FEW_CORES, ROOT, mpiexec
from tests.support.server.batches import get

SCRIPT = """
import os, time, torch
import torch.distributed as dist
from pathlib import Path
import ddpobs.mpi
from ddpobs import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("ddpobs_mpi")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(100_000):
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.02)
    if step == 150:
        Path(os.environ["OUT"], f"new-{dist.get_rank()}").write_text(str(os.getpid()))
        Path(os.environ["OUT"], f"new-{dist.get_rank()}").rename(Path(os.environ["OUT"], f"{dist.get_rank()}"))
"""


@pytest.mark.parametrize(("number", "state"), [(signal.SIGKILL, "failed"), (signal.SIGINT, "interrupted")])
def test_a_signal_s_end_of_the_job_is_named_at_once(number: int, state: str, tmp_path: Path) -> None:
    """SIGKILL goes to rank 1, SIGINT to `ddpobs run`, which passes it on to mpiexec."""
    with collector(tmp_path) as running:
        environ = os.environ | AS_ROOT_ON_FEW_CORES | PATIENT | {"OMP_NUM_THREADS": "1", "OUT": str(tmp_path)}
        environ |= {"PYTHONPATH": str(ROOT), "DDPOBS_SPOOL": str(tmp_path / "spool")}
        run = [sys.executable, "-m", "ddpobs.cli", "run", "--collector", running.url, "--run", "mpi", "--"]
        command = [*run, mpiexec(), "-n", "2", sys.executable, "-c", SCRIPT]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + patience.HANG_S
            while not all((tmp_path / rank).exists() for rank in "01"):
                assert process.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            os.kill(process.pid if number == signal.SIGINT else int((tmp_path / "1").read_text()), number)
            assert process.wait(patience.HANG_S) != 0
            assert get(running.url, "/runs/mpi")["state"] == state, (tmp_path / "log").read_text()
            (attempt,) = get(running.url, "/runs/mpi/attempts")["attempts"]
            assert attempt["outcome"] == state
            if number == signal.SIGKILL:
                crash = get(running.url, "/runs/mpi/diagnostics")["findings"][0]
                assert (crash["code"], crash["ranks"], crash["steps"][0] > 150) == ("crash", [1], True)
        finally:
            process.kill()
            process.wait()
