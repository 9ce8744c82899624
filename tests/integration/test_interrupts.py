"""Trainings that SIGINT ends: an outcome of its own and no finding, unless the run had crashed or hung before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from benchmarks.faults.launch import ranks_of
from benchmarks.rig import patience
from benchmarks.rig.collector import Collector, collector
from benchmarks.rig.ports import free_port
from benchmarks.rig.training import PATIENT, ROOT
from tests.support.server.batches import get

pytestmark = pytest.mark.wide

SCRIPT = Path(__file__).with_name("scripts") / "interrupted.py"
DDPOBS = str(Path(sys.executable).with_name("ddpobs"))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    with collector(tmp_path_factory.mktemp("collector")) as started:
        yield started


def interrupted(running: Collector, folder: Path, run: str, how: str, number: int, *ranks: int) -> None:
    """Run the script on two ranks, or on one, and send the signal to these ranks once they train."""
    environ = {"DDPOBS_TELEMETRY": running.url, "DDPOBS_RUN": run} | PATIENT
    with ranks_of(SCRIPT, how, ranks=max(ranks) + 1, folder=folder, environ=environ) as started:
        started.wait_for_fault()
        for rank in ranks:
            started.processes[rank].send_signal(number)
        for process in started.processes:
            process.wait(60)


def outcome(running: Collector, run: str) -> tuple[str, str, set[str]]:
    """State of the run, outcome of its attempt, and codes of findings about its end."""
    (attempt,) = get(running.url, f"/runs/{run}/attempts")["attempts"]
    codes = {finding["code"] for finding in get(running.url, f"/runs/{run}/diagnostics")["findings"]}
    return get(running.url, f"/runs/{run}")["state"], attempt["outcome"], codes & {"crash", "hang"}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("raised", ("interrupted", "interrupted", set())),
        ("caught", ("interrupted", "interrupted", set())),
        ("exit status", ("interrupted", "interrupted", set())),
        ("own handler", ("interrupted", "interrupted", set())),
        ("went on", ("finished", "finished", set())),
        ("failed later", ("failed", "failed", {"crash"})),
    ],
)
def test_an_interrupt_is_an_outcome_if_it_ends_the_training(
    how: str, expected: tuple[str, str, set[str]], running: Collector, tmp_path: Path
) -> None:
    run = how.replace(" ", "-")
    interrupted(running, tmp_path, run, how, signal.SIGINT, 0)
    assert outcome(running, run) == expected


def test_a_rank_that_fails_because_another_was_interrupted_changes_nothing(running: Collector, tmp_path: Path) -> None:
    interrupted(running, tmp_path, "one-of-two", "raised", signal.SIGINT, 1)
    assert outcome(running, "one-of-two") == ("interrupted", "interrupted", set())
    (attempt,) = get(running.url, "/runs/one-of-two/attempts")["attempts"]
    assert (attempt["first_rank"], attempt["reason"].split(" in ")[0]) == (1, "interrupted")


def test_sigterm_is_no_interrupt(running: Collector, tmp_path: Path) -> None:
    interrupted(running, tmp_path, "terminated", "raised", signal.SIGTERM, 0)
    assert outcome(running, "terminated") == ("failed", "failed", set())


SESSION = """
import os, signal, threading, time, torch
import torch.distributed as dist
from ddpobs import DistributedDataParallel
os.environ.update(RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
def train(steps):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(0.01)

train(20)
print("trains", flush=True); train(100_000)
print("stopped", flush=True)
"""


def test_a_session_that_trains_again_after_an_interrupt_is_running(running: Collector, tmp_path: Path) -> None:
    """Python's own prompt; `sys.ps1` exists as in a notebook."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")} | PATIENT
    environ |= {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ |= {"DDPOBS_TELEMETRY": running.url, "DDPOBS_RUN": "session", "DDPOBS_SPOOL": str(tmp_path)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-i", "-q"], env=environ, text=True, **pipes) as session:
        assert session.stdin is not None
        assert session.stdout is not None
        session.stdin.write(SESSION)
        session.stdin.flush()
        assert session.stdout.readline() == "trains\n"
        patience.until(lambda: "session" in [run["run"] for run in get(running.url, "/runs")["runs"]])
        session.send_signal(signal.SIGINT)
        assert session.stdout.readline() == "stopped\n"
        patience.until(lambda: outcome(running, "session") == ("interrupted", "interrupted", set()))
        session.stdin.write("train(50)\n")
        session.stdin.flush()
        patience.until(lambda: outcome(running, "session") == ("running", "running", set()))
        session.stdin.close()
        assert session.wait(60) == 0
    assert outcome(running, "session") == ("finished", "finished", set())


def ddpobs(running: Collector, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [DDPOBS, *arguments, "--collector", running.url]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_commands_show_an_interrupt_as_no_finding(running: Collector, tmp_path: Path) -> None:
    interrupted(running, tmp_path, "shown", "raised", signal.SIGINT, 0)
    report = ddpobs(running, "report", "shown")
    assert report.returncode == 0
    assert "rank 0: interrupted in " in report.stdout
    assert "crash" not in report.stdout
    assert "shown" in ddpobs(running, "list", "--state", "interrupted").stdout
    watched = ddpobs(running, "watch", "shown")
    assert (watched.returncode, "interrupted" in watched.stdout) == (3, True)
    with urlopen(f"{running.url}/metrics", timeout=patience.HANG_S) as answer:
        assert b'ddpobs_run_state{run="shown",state="interrupted"} 1' in answer.read()
    assert (tmp_path / "rank-0.log").read_text().count("ddpobs: interrupted") == 1
