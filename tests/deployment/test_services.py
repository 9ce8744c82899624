"""The systemd unit, and the job of SLURM with the programs of SLURM that are not here replaced."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.rig import patience
from benchmarks.rig.collector import collector
from benchmarks.rig.training import ROOT
from tests.support.integration.tools import need

UNIT = ROOT / "deploy" / "systemd" / "ddpobs-collector.service"
JOB = ROOT / "deploy" / "slurm" / "train.sbatch"
SRUN = """#!/bin/bash
# Starts the command once for each node, as srun does with one task a node.
for node in $(seq "$SLURM_NNODES"); do SLURM_PROCID=$((node - 1)) "$@" & started+=($!); done
trap 'kill -TERM "${started[@]}" 2>/dev/null' TERM
for task in "${started[@]}"; do wait "$task" || status=$?; done
for task in "${started[@]}"; do while kill -0 "$task" 2>/dev/null; do wait "$task" || status=$?; done; done
exit "${status:-0}"
"""
TRAINING = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(int(sys.argv[1])):
    model(torch.ones(4, 8)).sum().backward()
    if step == 20:
        open("started", "w").close()
    time.sleep(0.01)
dist.destroy_process_group()
"""


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = need("systemd-analyze", "systemd")
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/ddpobs/bin/ddpobs-server", sys.executable))
    assert verified(program, unit) == ""
    unit.write_text(unit.read_text().replace("Restart=", "Restrat="))
    assert "Restrat" in verified(program, unit)


def verified(program: str, unit: Path) -> str:
    """What systemd finds wrong in a unit; empty for nothing."""
    checked = subprocess.run([program, "verify", unit], capture_output=True, text=True, check=False)
    return checked.stdout + checked.stderr


def test_the_unit_restarts_the_collector_and_waits_for_its_orderly_end() -> None:
    settings = dict(line.split("=", 1) for line in UNIT.read_text().splitlines() if "=" in line and line[0] != "#")
    assert settings["Restart"] == "always"
    assert int(settings["TimeoutStopSec"]) > 30


def job(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the job's script as SLURM does on the first node."""
    programs = folder / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN)
    (programs / "srun").chmod(0o755)
    (folder / "train.py").write_text(TRAINING)
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = os.environ | {
        "PATH": path,
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "training",
        "SLURM_NNODES": "2",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_TMPDIR": str(folder),
        "SLURMD_NODENAME": "127.0.0.1",
    }
    return subprocess.Popen(
        ["bash", JOB, "train.py", *arguments],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def runs_in(backup: Path, folder: Path) -> dict[str, int]:
    """Steps of each run in a backup, by a collector that reads it."""
    with collector(folder, database_url=f"sqlite:///{backup}") as reading:
        runs = httpx.get(f"{reading.url}/api/v1/runs").json()["runs"]
    return {run["run"]: run["steps"] for run in runs}


@pytest.mark.wide
def test_a_job_of_slurm_leaves_its_runs_in_the_folder_that_it_was_submitted_from(tmp_path: Path) -> None:
    process = job(tmp_path, "60")
    output, _ = process.communicate(timeout=patience.HANG_S)
    assert process.returncode == 0, output
    assert "training-77" in output
    assert runs_in(tmp_path / "ddpobs-77.db", tmp_path) == {"training-77": 60}
    assert list(tmp_path.glob("ddpobs-77.*/")) == []


@pytest.mark.wide
def test_a_failed_training_fails_its_job_of_slurm(tmp_path: Path) -> None:
    process = job(tmp_path, "no-number")
    output, _ = process.communicate(timeout=patience.HANG_S)
    assert process.returncode != 0, output
    assert re.search("ValueError", output)


@pytest.mark.wide
def test_a_job_of_slurm_keeps_its_steps_when_its_time_ends(tmp_path: Path) -> None:
    process = job(tmp_path, "100000")
    patience.until((tmp_path / "started").exists)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=patience.HANG_S)
    assert process.returncode != 0, output
    (steps,) = runs_in(tmp_path / "ddpobs-77.db", tmp_path).values()
    assert steps >= 20
