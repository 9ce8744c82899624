"""Runs the example training on real ranks, with an optional slow rank."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests import patience
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
RANKS = 2
PATIENT = {"DDPOBS_EXIT_S": "30"}
"""For tests that need each rank's last batch: the default of two seconds may be too short on a busy machine."""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")


def train(
    url: str,
    run: str,
    *,
    slow_rank: int = -1,
    phase: str = "backward",
    steps: int = 60,
    launcher: tuple[str, ...] = (),
    script: Path = SCRIPT,
    flush_s: float = 2.0,
) -> str:
    """Train on two ranks that report to `url`, and return their output.

    Args:
        url: The collector's address.
        run: The run's name.
        slow_rank: Rank with extra work; negative for none.
        phase: Phase of the extra work.
        steps: Number of training steps.
        launcher: Command that starts the ranks. Without it, two processes are started directly, which is faster.
        script: Training script.
        flush_s: Seconds between flushes. The ranks exchange statistics only in a run of several flushes.

    Raises:
        AssertionError: The training failed or took more than two minutes.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DDPOBS_FLUSH_S": str(flush_s)} | PATIENT
    if "--collector" not in launcher:
        environ |= {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run}
    command = [*(launcher or [sys.executable]), script]
    command += [f"--steps={steps}", f"--slow-rank={slow_rank}", f"--slow-phase={phase}"]

    def run_to_end(variables: dict[str, str]) -> str:
        done = patience.run(command, environ=environ | variables, timeout_s=120, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout
        return done.stdout

    if launcher:
        return run_to_end({})
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    with ThreadPoolExecutor(RANKS) as pool:
        by_rank = [rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
        return "".join(pool.map(run_to_end, by_rank))
