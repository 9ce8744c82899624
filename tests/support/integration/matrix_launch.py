"""Runs the commands of the matrix, each with and without ddpobs, and compares how they end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.rig import patience
from benchmarks.rig.training import PATIENT, ROOT
from scripts.combinations import IN_CODE, UNDER_RUN, VARIABLE, Command
from tests.support.mpi.launch import AS_ROOT_ON_FEW_CORES

SCRIPTS = ROOT / "tests" / "integration" / "scripts"
BIN = Path(sys.executable).parent
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": f"{ROOT}{os.pathsep}{SCRIPTS}",
} | AS_ROOT_ON_FEW_CORES
_FOLDER_OF_CHECKPOINTS = ("with_accelerate.py", "with_lightning.py", "with_trainer.py")
_ABORTED = "terminate called without an active exception"
"""Torch's own end, if a thread of its process group drops a work while the interpreter exits."""
_BOX = re.compile(r"^(┌─|\+-) ddpobs .*?^(└|\+)[─-]+(┘|\+)$\n", re.MULTILINE | re.DOTALL)
_DIGEST = re.compile(r"rank \d+: parameters [0-9a-f]{64}")
_VARIES = re.compile(r"0x[0-9a-f]+|\d[\d.:e+-]*")
"""Addresses, process ids, ports and times."""


def start(
    command: Command, folder: Path, way: str = "", url: str = "", run: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command without ddpobs, or in one of the ways with it."""
    folder.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DDPOBS_", "HF_"))}
    environ |= ENVIRON | {"FOLDER": str(folder), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    prefix: tuple[str, ...] = ()
    if way:
        environ |= PATIENT | {"DDPOBS_RUN": run, "DDPOBS_SPOOL": f"{folder}-spool"}
    if way in UNDER_RUN:
        prefix = ("ddpobs", "run", "--collector", url, "--run", run, "--")
    elif way == VARIABLE:
        environ["DDPOBS_TELEMETRY"] = url
    elif way == IN_CODE:
        environ["COLLECTOR"] = url
    script = SCRIPTS / command.script
    if not script.exists():
        script = ROOT / "examples" / command.script
    arguments = [*command.arguments, *([str(folder)] if command.script in _FOLDER_OF_CHECKPOINTS else [])]
    line = [*prefix, *command.launcher, str(script), *arguments]
    return patience.run(["env", *line], environ=environ, cwd=folder)


def start_without(command: Command, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without ddpobs, and once more each time that torch aborts it at its exit, at most twice."""
    for attempt in range(3):
        done = start(command, folder.with_name(f"{folder.name}-{attempt}"))
        if _ABORTED not in done.stderr:
            break
    return done


def output_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The digests of parameters and the other lines, sorted; a digest may stand inside of another rank's line.

    Numbers are left out of the other lines.
    """
    others = _DIGEST.sub("", done.stdout).splitlines()
    return sorted([*_DIGEST.findall(done.stdout), *(_VARIES.sub("#", line) for line in others if line)])


def digests(output: str) -> list[str]:
    """The digests of parameters in a text, sorted."""
    return sorted(_DIGEST.findall(output))


def foreign_lines(done: subprocess.CompletedProcess[str]) -> Iterator[str]:
    """The lines on stderr that are not ours, without numbers."""
    for line in _BOX.sub("", done.stderr).splitlines():
        if line.strip() and not line.startswith("ddpobs: "):
            yield _VARIES.sub("#", line)
