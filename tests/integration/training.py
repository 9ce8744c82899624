"""Runs the example training on real ranks, with one of them slowed down on request."""

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
"""For ranks whose last batch must come: two seconds may be too few on a full machine."""
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
    """Two ranks, reporting to `url`; returns what they printed.

    Args:
        url: The collector's address.
        run: The run's name.
        slow_rank: Which rank has more to do; none where it is negative.
        phase: In which phase it has.
        steps: How many steps are trained.
        launcher: The command that starts the ranks; without one they are started as they are, which takes less time.
        script: What is run.
        flush_s: Seconds between flushes; a run must last some of them for the ranks' statistics to meet.

    Raises:
        AssertionError: The training failed or took more than two minutes.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DDPOBS_FLUSH_S": str(flush_s)} | PATIENT
    if "--collector" not in launcher:
        environ |= {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run}
    command = [*(launcher or [sys.executable]), script]
    command += [f"--steps={steps}", f"--slow-rank={slow_rank}", f"--slow-phase={phase}"]

    def ended(place: dict[str, str]) -> str:
        done = patience.run(command, environ=environ | place, timeout_s=120, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout
        return done.stdout

    if launcher:
        return ended({})
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    with ThreadPoolExecutor(RANKS) as pool:
        places = [rendezvous | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
        return "".join(pool.map(ended, places))
