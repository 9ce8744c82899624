"""A rank is killed in a real training: its sent data are stored, and the other rank's data are complete."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

from benchmarks.faults.launch import ranks_of
from benchmarks.rig import patience
from benchmarks.rig.collector import running_collector
from benchmarks.rig.training import PATIENT
from tests.support.server.batches import get

_SCRIPT = """
import torch
import torch.distributed as dist
from ddpobs import DistributedDataParallel
dist.init_process_group("gloo")
torch.set_num_threads(1)
layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
model = DistributedDataParallel(layers, bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with open(f"steps-{dist.get_rank()}", "a", buffering=1) as done:
    while True:
        optimizer.zero_grad()
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        print("step", file=done)
"""


def test_the_sent_data_of_a_killed_rank_are_stored_and_the_survivors_are_complete(tmp_path: Path) -> None:
    with running_collector(tmp_path, lost_after_s=2) as url:
        (script := tmp_path / "train.py").write_text(_SCRIPT)
        environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": "killed", "DDPOBS_FLUSH_S": "0.2"} | PATIENT
        with ranks_of(script, ranks=2, folder=tmp_path, environ=environ) as started:
            patience.until(lambda: stored_steps(url) > 40, started.logs)
            started.processes[1].send_signal(signal.SIGKILL)
            assert started.processes[0].wait(60) != 0  # Its all-reduce fails; no other process ends it.
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
