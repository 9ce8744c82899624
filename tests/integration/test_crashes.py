"""Ranks that end before their training does: each leaves its place, and at most two seconds of its steps are lost."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.crashing import step_ends
from benchmarks.faults.launch import CRASHING, Ranks, ranks_of
from benchmarks.rig import patience
from benchmarks.rig.collector import Collector, collector
from benchmarks.rig.ports import free_port
from benchmarks.rig.training import PATIENT, ROOT
from tests.support.cli import ddpobs
from tests.support.integration.collectors import absent
from tests.support.server.batches import get

STEP = 250
LOST_S = 4.0
"""Twice the two seconds that a kill may lose; `benchmarks/crashes.py` measures the loss."""
AUTOLOAD = {"MODE": "run", "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "ddpobs" / "autoload", ROOT)))}


def ends(running: Collector) -> dict[int, dict[str, Any]]:
    """The event that ended each rank, by rank, with its kind."""
    with closing(sqlite3.connect(running.database)) as database:
        query = "select rank, body from events join sources using (run_id, source)"
        events = [(rank, json.loads(body)) for rank, body in database.execute(query)]
    kinds = ("failed", "died", "terminated", "goodbye")
    return {rank: {"kind": e["kind"], "step": e["step"], **e["detail"]} for rank, e in events if e["kind"] in kinds}


def stored_steps(running: Collector) -> dict[int, int]:
    """The number of stored steps, by rank."""
    with closing(sqlite3.connect(running.database)) as database:
        query = "select rank, sum(steps) from rollups join sources using (run_id, source) group by rank"
        return dict(database.execute(query).fetchall())


def lost_s(folder: Path, running: Collector, rank: int) -> float:
    """Seconds between the end of a rank's last stored step and of its last step."""
    moments = step_ends(folder, rank)
    count = min(len(moments), stored_steps(running).get(rank, 0))
    return moments[-1] - moments[max(0, count - 1)]


def push(folder: Path, url: str) -> str:
    command = [str(Path(sys.executable).with_name("ddpobs")), "push", str(folder), "--collector", url]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def crash(folder: Path, url: str, *case: str, **environ: str) -> Any:
    environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": "crash", "FAULT_STEP": str(STEP)} | PATIENT | environ
    return ranks_of(CRASHING, *case, ranks=2, folder=folder, environ=environ)


def returncodes(ranks: Ranks) -> list[int]:
    return [process.wait(patience.HANG_S) for process in ranks.processes]


@pytest.mark.parametrize(
    ("kind", "phase", "event", "status", "environ"),
    [
        ("exception", "forward", "failed", 1, {}),
        ("exception", "data", "failed", 1, AUTOLOAD),
        ("kill", "backward", "died", -signal.SIGKILL, {}),
        pytest.param("kill", "backward", "died", -signal.SIGKILL, AUTOLOAD, marks=pytest.mark.wide),
        ("exit", "data", "died", 3, {}),
        ("segfault", "optimizer", "died", -signal.SIGSEGV, {}),
        ("terminate", "forward", "terminated", -signal.SIGTERM, {}),
    ],
)
def test_a_rank_that_ends_leaves_its_place(  # noqa: PLR0917 - the facts of one case
    kind: str, phase: str, event: str, status: int, environ: dict[str, str], tmp_path: Path
) -> None:
    with collector(tmp_path) as running, crash(tmp_path, running.url, kind, phase, **environ) as ranks:
        ranks.wait_for_fault()
        assert returncodes(ranks) == [1, status], ranks.logs()
        end = patience.until(lambda: ends(running).get(1), ranks.logs)
        assert (end["kind"], end["step"], end["phase"]) == (event, STEP, phase)
        assert ends(running)[0]["kind"] == "failed"
        assert lost_s(tmp_path, running, 1) <= (LOST_S if event == "died" else 0)
        assert lost_s(tmp_path, running, 0) == 0
        if event == "failed":
            assert (end["error"], end["message"]) == ("ValueError", "a bad sample")
            assert 'raise ValueError("a bad sample")\nValueError: a bad sample' in end["traceback"]
            assert "ddpobs/ddp.py" not in end["traceback"]
        if event == "died":
            assert end["synchronised"] == STEP + (phase == "optimizer")
        assert [path.name for path in (tmp_path / "spool").rglob("*")] == ["places"]


def test_message_and_traceback_can_be_kept_out(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        with crash(tmp_path, running.url, "exception", "forward", DDPOBS_TRACEBACK="0", FAULT_STEP="3") as ranks:
            returncodes(ranks)
        end = patience.until(lambda: ends(running).get(1))
        assert end["error"] == "ValueError"
        assert not {"message", "traceback"} & set(end)


@pytest.mark.parametrize("environ", [{}, AUTOLOAD], ids=["ours", "attached"])
def test_a_hung_rank_that_is_terminated_loses_no_step(environ: dict[str, str], tmp_path: Path) -> None:
    """Rank 1 hangs in a loader, and rank 0 waits for it in a collective."""
    with collector(tmp_path) as running, crash(tmp_path, running.url, "hang", "data", **environ) as ranks:
        ranks.wait_for_fault()
        time.sleep(1.0)  # Rank 0 reaches its backward.
        for process in ranks.processes:
            process.send_signal(signal.SIGTERM)
        assert returncodes(ranks) == [-signal.SIGTERM] * 2, ranks.logs()
        assert {rank: end["kind"] for rank, end in ends(running).items()} == {0: "terminated", 1: "terminated"}
        assert [(ends(running)[rank]["phase"], ends(running)[rank]["step"]) for rank in (0, 1)] == [
            ("backward", STEP),
            ("data", STEP),
        ]
        assert ends(running)[0]["bucket"] >= 0
        assert stored_steps(running) == {0: STEP, 1: STEP}


@pytest.mark.parametrize(
    ("number", "state"),
    [(signal.SIGTERM, "failed"), pytest.param(signal.SIGINT, "interrupted", marks=pytest.mark.wide)],
)
def test_the_hang_of_a_run_that_a_signal_ended_stays_the_first_finding(number: int, state: str, tmp_path: Path) -> None:
    hang_after = {"DDPOBS_HANG_AFTER_S": "3"}
    with collector(tmp_path) as running, crash(tmp_path, running.url, "hang", "data", **hang_after) as ranks:
        ranks.wait_for_fault()
        patience.until(lambda: [run["state"] for run in get(running.url, "/runs")["runs"]] == ["hung"], ranks.logs)
        for process in ranks.processes:
            process.send_signal(number)
        returncodes(ranks)
        assert get(running.url, "/runs/crash")["state"] == state
        finding = get(running.url, "/runs/crash/diagnostics")["findings"][0]
        assert (finding["code"], finding["severity"], finding["ranks"]) == ("hang", "critical", [1])
        assert finding["verdict"] == f"The run hung in step {STEP}, waiting for rank 1"
        assert finding["measure"].endswith(f"until {signal.Signals(number).name}")
        assert finding["cause"].startswith("rank 1 had been in the data loader")
        facts = finding["evidence"]
        (held,) = finding["intervals"]
        assert held["ended_ns"] - held["began_ns"] == facts["length_ns"]
        assert any("crashing.py" in frame for frame in facts["stacks"]["1"])
        printed = ddpobs("stacks", "crash", "--collector", running.url).stdout
        assert "until it was ended" in printed
        assert "crashing.py" in printed


def test_a_rank_whose_collective_timed_out_ended_because_it_waited_for_the_rank_that_hangs(tmp_path: Path) -> None:
    environ = {"DDPOBS_HANG_AFTER_S": "3", "GROUP_TIMEOUT_S": "12", "FAULT_STEP": "30"}
    with collector(tmp_path) as running, crash(tmp_path, running.url, "hang", "data", **environ) as ranks:
        ranks.wait_for_fault()
        assert ranks.processes[0].wait(patience.HANG_S) == 1
        patience.until(lambda: 0 in ends(running), ranks.logs)
        findings = get(running.url, "/runs/crash/diagnostics")["findings"]
        (finding,) = [finding for finding in findings if finding["code"] in ("crash", "hang")]
        assert (finding["code"], finding["ranks"]) == ("crash", [1])
        assert finding["verdict"] == "Rank 0 ended in step 30, waiting for rank 1"
        assert finding["cause"].startswith("rank 1 had been in the data loader for ")
        assert "crashing.py" in finding["cause"]
        assert finding["cause"].endswith("rank 0 waited in bucket 0.0 of step 30")


def test_push_recovers_ranks_that_were_all_killed_while_the_collector_was_away(tmp_path: Path) -> None:
    with crash(tmp_path, absent(), "hang", "backward", FAULT_STEP="500") as ranks:
        ranks.wait_for_fault()
        patience.until(lambda: len(step_ends(tmp_path, 0)) >= 500, ranks.logs)
        time.sleep(1.0)  # Rank 0 reaches its backward.
        for process in ranks.processes:
            process.kill()
        assert returncodes(ranks) == [-signal.SIGKILL] * 2
    with collector(tmp_path) as running:
        push(tmp_path / "spool", running.url)
        assert {rank: (end["kind"], end["step"], end["phase"]) for rank, end in ends(running).items()} == {
            0: ("died", 500, "backward"),
            1: ("died", 500, "backward"),
        }
        assert max(lost_s(tmp_path, running, rank) for rank in (0, 1)) <= LOST_S
        assert "sent 0" in push(tmp_path / "spool", running.url)


def test_the_next_attempt_reports_the_one_before(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        with crash(tmp_path, running.url, "hang", "backward") as ranks:
            ranks.wait_for_fault()
            for process in ranks.processes:
                process.kill()
        assert not ends(running)
        (tmp_path / "ready").unlink()
        with crash(tmp_path, running.url, "hang", "backward", FAULT_STEP="50") as ranks:
            ranks.wait_for_fault()
            patience.until(lambda: len(ends(running)) == 2, ranks.logs)
        assert {end["kind"] for end in ends(running).values()} == {"died"}


def test_a_survivor_that_is_stuck_reports_a_dead_rank(tmp_path: Path) -> None:
    """Rank 0 waits in a store that rank 1 never fills; no connection between them breaks."""
    script = tmp_path / "stuck.py"
    script.write_text(_STUCK)
    environ = {"DDPOBS_RUN": "crash"} | PATIENT
    with collector(tmp_path) as running:
        environ["DDPOBS_TELEMETRY"] = running.url
        with ranks_of(script, ranks=2, folder=tmp_path, environ=environ) as ranks:
            ranks.wait_for_fault()
            end = patience.until(lambda: ends(running).get(1), ranks.logs)
            assert ranks.processes[0].poll() is None
    assert (end["kind"], end["step"]) == ("died", 49)


_STUCK = """
import os, signal, time
import torch
import torch.distributed as dist
from pathlib import Path
from ddpobs import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(50):
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(0.02)
if dist.get_rank() == 1:
    time.sleep(1)
    Path(os.environ["OUT"], "ready").touch()
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def test_a_spawned_process_that_raises_fails(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        script = tmp_path / "spawned.py"
        script.write_text(_SPAWNED)
        output = run(script, running.url, tmp_path)
        assert "a bad sample" in output
        end = patience.until(lambda: ends(running).get(1))
        assert (end["kind"], end["message"]) == ("failed", "a bad sample")


_SPAWNED = """
import os, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ddpobs import DistributedDataParallel


def work(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    for step in range(100):
        if rank == 1 and step == 6:
            raise ValueError("a bad sample")
        model(torch.randn(4, 4)).sum().backward()


if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


def test_an_error_of_a_thread_that_trains_fails_the_process(tmp_path: Path) -> None:
    with collector(tmp_path) as running:
        script = tmp_path / "threaded.py"
        script.write_text(_THREADED)
        run(script, running.url, tmp_path, status=0)
        assert (ends(running)[0]["kind"], ends(running)[0]["message"]) == ("failed", "a bad sample")


_THREADED = """
import os, threading, torch
import torch.distributed as dist
from ddpobs import DistributedDataParallel, telemetry

os.environ.update(RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))


def train():
    for step in range(100):
        if step == 6:
            raise ValueError("a bad sample")
        model(torch.randn(4, 4)).sum().backward()


thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


def run(script: Path, url: str, folder: Path, status: int = 1) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    environ |= {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DDPOBS_TELEMETRY": url,
        "DDPOBS_RUN": "crash",
    } | PATIENT
    environ |= {"DDPOBS_SPOOL": str(folder / "spool"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=patience.HANG_S, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr
