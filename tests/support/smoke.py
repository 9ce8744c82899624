"""Runs a benchmark in its smallest form, forked from a process that has imported torch."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.faults.launch import ROOT, fork_server

LIMIT_S = 500
"""For a full machine: a benchmark takes some twenty seconds."""


def run(name: str, *arguments: str) -> str:
    """Return the output of a benchmark.

    Raises:
        AssertionError: It failed, or did not end in time; the message has its output.
    """
    script = ROOT / "benchmarks" / f"{name}.py"
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")])}
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = fork_server().start([str(script), "--smoke", *arguments], environ, ROOT, log)
        try:
            status: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        output = log.read_text()
    assert status == 0, f"{name}: {'no end' if status is None else f'status {status}'}\n{output}"
    return output
