"""Runs a benchmark in its smallest form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--smoke", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
