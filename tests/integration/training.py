"""Runs the example training on real ranks, with one of them slowed down on request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import patience

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"


def train(
    url: str,
    run: str,
    *,
    slow_rank: int = -1,
    phase: str = "backward",
    steps: int = 60,
    command: tuple[str, ...] = (),
    script: Path = SCRIPT,
) -> str:
    """Two ranks under torchrun, reporting to `url`; returns what they printed.

    Raises:
        AssertionError: The training failed or took more than two minutes.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if not command:
        environment |= {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    arguments = [f"--steps={steps}", f"--slow-rank={slow_rank}", f"--slow-phase={phase}"]
    done = patience.run([*command, *launch, *arguments], environ=environment, timeout_s=120, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout
