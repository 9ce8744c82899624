"""Runs the example training on real ranks, with an optional slow rank."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.faults.launch import ranks_of
from benchmarks.rig import patience

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
        launcher: Command that starts the ranks. Without it, two processes are forked, which is faster.
        script: Training script.
        flush_s: Seconds between flushes. The ranks exchange statistics only in a run of several flushes.

    Raises:
        AssertionError: The training failed; under a launcher also if it took more than two minutes.
        subprocess.TimeoutExpired: A forked rank took more than two minutes.
    """
    settings = {"DDPOBS_FLUSH_S": str(flush_s)} | PATIENT
    if "--collector" not in launcher:
        settings |= {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run}
    arguments = [f"--steps={steps}", f"--slow-rank={slow_rank}", f"--slow-phase={phase}"]
    if not launcher:
        return _fork(script, arguments, settings)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | settings
    done = patience.run([*launcher, script, *arguments], environ=environ, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


def _fork(script: Path, arguments: list[str], settings: dict[str, str]) -> str:
    with (
        tempfile.TemporaryDirectory() as folder,
        ranks_of(script, *arguments, ranks=RANKS, folder=Path(folder), environ=settings) as ranks,
    ):
        ended = [process.wait(120) for process in ranks.processes]
        assert not any(ended), ranks.logs()
        return "".join(log.read_text() for log in sorted(Path(folder).glob("rank-*.log")))
