"""A rank that is killed in a real training: what it sent is there, and the others' data are whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.collector import running_collector
from tests.integration.faults import until
from tests.integration.training import PATIENT, ROOT
from tests.ports import free_port
from tests.server.batches import get

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


def test_what_a_killed_rank_sent_is_there_and_the_survivors_data_are_whole(tmp_path: Path) -> None:
    with running_collector(tmp_path, lost_after_s=2) as url:
        port = free_port()
        ranks = [_rank(rank, port, url, tmp_path) for rank in range(2)]
        try:
            until(lambda: _stored(url) > 40)
            ranks[1].send_signal(signal.SIGKILL)
            assert ranks[0].wait(60) not in (0, None)  # Its all-reduce fails; nobody ends it from outside.
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        survivor = len((tmp_path / "steps-0").read_text().splitlines())
        until(lambda: get(url, "/runs/killed")["state"] == "failed")
        until(lambda: get(url, "/runs/killed/ranks")["ranks"][1]["state"] == "lost")
        told = {rank["rank"]: rank for rank in get(url, "/runs/killed/ranks")["ranks"]}
        assert [told[rank]["state"] for rank in range(2)] == ["failed", "lost"]
        assert [told[rank]["dropped"] for rank in range(2)] == [0, 0]
        assert [told[rank]["steps"] for rank in range(2)] == [told[rank]["last_step"] + 1 for rank in range(2)]
        assert_spans_once(url, {rank: told[rank]["steps"] for rank in range(2)})
        assert told[0]["steps"] >= survivor > told[1]["steps"] - 2 > 38


def assert_spans_once(url: str, steps: dict[int, int]) -> None:
    """Each rank has every bucket of its steps' layouts once."""
    layouts = get(url, "/runs/killed/layout")["layouts"]
    buckets = {layout["revision"]: len(layout["buckets"]) for layout in layouts}
    columns = get(url, "/runs/killed/spans")["columns"]
    rows = Counter(zip(*(columns[name] for name in ("rank", "step", "revision", "bucket")), strict=True))
    revisions = {(rank, step): revision for rank, step, revision, _ in rows}
    assert set(revisions) == {(rank, step) for rank, count in steps.items() for step in range(count)}
    assert rows == Counter((*key, rev, bucket) for key, rev in revisions.items() for bucket in range(buckets[rev]))


def _stored(url: str) -> int:
    ranks = {run["run"] for run in get(url, "/runs")["runs"]} and get(url, "/runs/killed/ranks")["ranks"]
    return min((rank["steps"] for rank in ranks), default=0) if len(ranks) == 2 else 0


def _rank(rank: int, port: int, url: str, folder: Path) -> subprocess.Popen[bytes]:
    """Without a launcher: that would end the survivors as well."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DDPOBS_")}
    environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environ |= {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": "killed", "DDPOBS_FLUSH_S": "0.2", "DDPOBS_SPOOL": str(folder)}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | PATIENT
    command = [sys.executable, "-c", _SCRIPT, str(folder / f"steps-{rank}")]
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env=environ, stdout=log, stderr=log)
