"""A fully sharded training under `ddpobs run`, and its findings."""

from __future__ import annotations

from typing import Any

from benchmarks.rig import patience
from benchmarks.rig.training import ROOT, TORCHRUN
from tests.support.integration.run_command import command
from tests.support.integration.slow_ranks import get

SCRIPT = ROOT / "tests" / "integration" / "scripts" / "sharded.py"


def train(url: str, run: str, fault: str = "", steps: int = 60, environ: dict[str, str] | None = None) -> Any:
    given = command(*TORCHRUN[1:], SCRIPT, fault, steps, url=url, run=run)
    return patience.run(given["args"], environ=given["env"] | (environ or {}))


def findings(url: str, run: str) -> dict[str, dict[str, Any]]:
    return {finding["code"]: finding for finding in get(url, run, "/diagnostics")["findings"]}
