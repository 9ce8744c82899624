"""A rank is killed in a real training: its sent data are stored, and the other rank's data are complete."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.rig import patience
from benchmarks.rig.collector import running_collector
from benchmarks.rig.training import PATIENT, ROOT
from tests.support.ports import free_port
from tests.support.server.batches import get

_SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from ddpobs import DistributedDataParallel
dist.init_process_group("gloo")
torch.set_num_threads(1)
layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
model = DistributedDataParallel(layers, bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with open(sys.argv[1], "a", buffering=1) as done:
    while True:
        optimizer.zero_grad()
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        print("step", file=done)
"""


def test_the_sent_data_of_a_killed_rank_are_stored_and_the_survivors_are_complete(tmp_path: Path) -> None:
    with running_collector(tmp_path, lost_after_s=2) as url:
        port = free_port()
        ranks = [start_rank(rank, port, url, tmp_path) for rank in range(2)]
        try:
            patience.until(lambda: stored_steps(url) > 40)
            ranks[1].send_signal(signal.SIGKILL)
            assert ranks[0].wait(60) not in (0, None)  # Its all-reduce fails; no other process ends it.
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        survivor = len((tmp_path / "steps-0").read_text().splitlines())
        patience.until(lambda: get(url, "/runs/killed")["state"] == "failed")
        patience.until(lambda: get(url, "/runs/killed/ranks")["ranks"][1]["state"] == "failed")
        by_rank = {rank["rank"]: rank for rank in get(url, "/runs/killed/ranks")["ranks"]}
        assert [by_rank[rank]["state"] for rank in range(2)] == ["failed", "failed"]
        assert [by_rank[rank]["dropped"] for rank in range(2)] == [0, 0]
        assert [by_rank[rank]["steps"] for rank in range(2)] == [by_rank[rank]["last_step"] + 1 for rank in range(2)]
        assert_spans_once(url, {rank: by_rank[rank]["steps"] for rank in range(2)})
        assert by_rank[0]["steps"] >= survivor > by_rank[1]["steps"] - 2 > 38


def assert_spans_once(url: str, steps: dict[int, int]) -> None:
    """Assert that each rank has every bucket of its steps' layouts once."""
    layouts = get(url, "/runs/killed/layout")["layouts"]
    buckets = {layout["revision"]: len(layout["buckets"]) for layout in layouts}
    columns = get(url, "/runs/killed/spans")["columns"]
    rows = Counter(zip(*(columns[name] for name in ("rank", "step", "revision", "bucket")), strict=True))
    revisions = {(rank, step): revision for rank, step, revision, _ in rows}
    assert set(revisions) == {(rank, step) for rank, count in steps.items() for step in range(count)}
    assert rows == Counter((*key, rev, bucket) for key, rev in revisions.items() for bucket in range(buckets[rev]))


def stored_steps(url: str) -> int:
    """Return the steps that both ranks have stored."""
    ranks = {run["run"] for run in get(url, "/runs")["runs"]} and get(url, "/runs/killed/ranks")["ranks"]
    return min((rank["steps"] for rank in ranks), default=0) if len(ranks) == 2 else 0


def start_rank(rank: int, port: int, url: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start a rank without a launcher, which would end the survivors as well."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environ |= {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": "killed", "DDPOBS_FLUSH_S": "0.2", "DDPOBS_SPOOL": str(folder)}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | PATIENT
    command = [sys.executable, "-c", _SCRIPT, str(folder / f"steps-{rank}")]
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env=environ, stdout=log, stderr=log)
