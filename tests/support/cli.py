"""The `ddpobs` command, in a process of its own and in this one, against small HTTP servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner, Result

from benchmarks.rig import patience
from ddpobs.cli import main
from tests.support.integration.collectors import Reply

ROOT = Path(__file__).parents[2]


def ddpobs(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    environ = {"DDPOBS_TIMEOUT_S": str(patience.HANG_S), **os.environ, "PYTHONPATH": str(ROOT), **settings}
    command = [sys.executable, "-c", "from ddpobs.cli import main; main()", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def invoke(*arguments: str, **environ: str) -> Result:
    """Run a command in this process, which is faster."""
    return CliRunner().invoke(main, list(arguments), env=environ)


def answering(answers: dict[str, object]) -> Callable[[str], Reply]:
    return lambda path: (200, {}, json.dumps(answers[path.removeprefix("/api/v1")]).encode())
