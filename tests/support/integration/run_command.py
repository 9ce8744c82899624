"""The command that starts a script under ddpobs run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.rig.training import PATIENT, ROOT

NO_COLLECTOR = "http://127.0.0.1:9"


def command(
    *arguments: object, url: str = NO_COLLECTOR, run: str = "r", by: Sequence[str] = ("run",)
) -> dict[str, Any]:
    """Return arguments for `subprocess.Popen` that start Python under `ddpobs run`, or another command of ddpobs."""
    ddpobs_run = [
        sys.executable,
        "-c",
        "from ddpobs.cli import main; main()",
        *by,
        "--collector",
        url,
        "--run",
        run,
        "--",
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ |= {"DDPOBS_SPOOL": os.environ["DDPOBS_SPOOL"], "DDPOBS_QUIET": "1"} if url == NO_COLLECTOR else PATIENT
    return {"args": [*ddpobs_run, sys.executable, *map(str, arguments)], "env": environ, "text": True}
