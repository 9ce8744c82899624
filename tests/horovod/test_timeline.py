"""`start_timeline`: Horovod's Chrome trace, and the rank for which the others wait."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ddpobs.horovod as hvd
from ddpobs.imports.files import encoded, read
from tests.support.distributed.compare import net
from tests.support.distributed.horovod import loss, together
from tests.support.distributed.launch import run_ranks


def read_events(folder: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads((folder / "timeline-0.json").read_text()) if event]


def traced(rank: int, ranks: int, folder: str) -> None:
    hvd.init()
    model = net()
    path = Path(folder) / f"timeline-{rank}.json"
    hvd.start_timeline(str(path), mark_cycles=True)
    hvd.start_timeline(str(path), mark_cycles=True)  # It goes on.
    together(model, rank, 3, loss_fn=late)
    hvd.stop_timeline()
    hvd.stop_timeline()


def late(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    time.sleep(1.0 * rank)
    return loss(model, rank, number)


def test_the_timeline_has_horovods_events(tmp_path: Path) -> None:
    run_ranks(traced, 2, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["timeline-0.json"]
    events = read_events(tmp_path)
    lanes = {e["args"]["name"]: e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert set(lanes) - {""} == {name for name, _ in net().named_parameters()}
    assert sum(event.get("name") == "CYCLE_START" for event in events) == 3
    for lane in set(lanes.values()) - {0}:
        ours = [event for event in events if event["pid"] == lane and event["ph"] != "M"]
        assert ours == sorted(ours, key=lambda event: event["ts"])
        names = [event.get("name") for event in ours]
        once = ["NEGOTIATE_ALLREDUCE", "0", "1", None, "ALLREDUCE", "GLOO_ALLREDUCE", None, None]
        assert names == once * 3
        # Rank 1 sleeps before its backward, so that rank 0 waits for it.
        marks = {event["name"]: event["ts"] for event in ours[:8] if event["ph"] == "X"}
        assert marks["1"] - marks["0"] > 100_000
        assert ours[7]["args"]["dtype"] == "float32"
    run = read([tmp_path / "timeline-0.json"], "r")
    assert run.lines[0] == "3 steps of ranks 0 and 1"
    assert run.lines[1].startswith("rank 1 arrived last in 2 of 2 steps: ")  # The first step has no begin.
    (first, _) = [batch for batch, _ in encoded(run)]
    assert {b.parameters[0].name for b in first.layouts[0].buckets} == {name for name, _ in net().named_parameters()}
    assert sum(b.size_bytes for b in first.layouts[0].buckets) == 4 * sum(p.numel() for p in net().parameters())


def called(rank: int, ranks: int, folder: str) -> None:
    hvd.init()
    pair = hvd.add_process_set([0, 1])
    hvd.start_timeline(str(Path(folder) / f"timeline-{rank}.json"))
    for _ in range(2):
        hvd.allreduce(torch.ones(3), name="loss")
    handles = [hvd.broadcast_async(torch.ones(2, dtype=torch.int32), 0) for _ in range(2)]
    for handle in handles:
        hvd.synchronize(handle)
    if rank < 2:
        hvd.reducescatter(torch.ones(4), name="part", process_set=pair)
    hvd.allgather(torch.ones(rank + 1), name="rows")
    hvd.stop_timeline()


def test_the_timeline_has_collectives_that_a_script_calls(tmp_path: Path) -> None:
    run_ranks(called, 3, str(tmp_path))
    events = read_events(tmp_path)
    lanes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    named = [(lanes[event["pid"]], event.get("name"), event["ph"]) for event in events if event["ph"] in "BX"]
    assert [name for lane, name, kind in named if lane == "allreduce.loss" and kind == "B"] == [
        *("NEGOTIATE_ALLREDUCE", "ALLREDUCE", "GLOO_ALLREDUCE") * 2
    ]
    assert {lane for lane, name, _ in named if name == "GLOO_BROADCAST"} <= {"broadcast.noname.1", "broadcast.noname.2"}
    assert sum(name == "GLOO_BROADCAST" for _, name, _ in named) == 2
    marks = {lane: sorted(str(name) for one, name, kind in named if one == lane and kind == "X") for lane, *_ in named}
    assert marks["reducescatter.part"] == ["0", "1"]
    assert marks["allgather.rows"] == ["0", "1", "2"]
    for lane, name in lanes.items():
        ours = [event for event in events if event["pid"] == lane and event["ph"] in "BXE"]
        assert ours == sorted(ours, key=lambda event: event["ts"]), name


def switched(rank: int, ranks: int, folder: str) -> None:
    hvd.init()
    for name in ("first", "second"):
        hvd.start_timeline(str(Path(folder) / f"{name}.json"))
        hvd.allreduce(torch.ones(3), name=name)
    hvd.stop_timeline()


def test_a_timeline_ends_where_one_of_another_path_begins(tmp_path: Path) -> None:
    run_ranks(switched, 2, str(tmp_path))
    for name in ("first", "second"):
        events = json.loads((tmp_path / f"{name}.json").read_text())
        lanes = {event["args"]["name"] for event in events if event.get("name") == "process_name"}
        assert lanes == {"", f"allreduce.{name}"}


def joined(rank: int, ranks: int, folder: str) -> None:
    hvd.init()
    model = net()
    hvd.start_timeline(str(Path(folder) / f"timeline-{rank}.json"))
    optimizer = together(model, rank, [4, 2][rank])
    hvd.join()
    for number in range(2):
        optimizer.zero_grad()
        loss(model, rank, number).backward()
        optimizer.step()
    hvd.stop_timeline()


def test_ranks_count_synchronisations_alike_while_one_has_joined(tmp_path: Path) -> None:
    run_ranks(joined, 2, str(tmp_path))
    events = read_events(tmp_path)
    lane = next(event["pid"] for event in events if event["ph"] == "M" and event["args"]["name"])
    marks = "".join(event["name"] for event in events if event["pid"] == lane and event["ph"] == "X")
    assert sorted(marks) == sorted("01" * 2 + "0" * 2 + "01" * 2)
    assert {*marks[:4]} == {*marks[-4:]} == {"0", "1"}
    assert marks[4:6] == "00"
    assert read([tmp_path / "timeline-0.json"], "r").lines[0] == "4 steps of ranks 0 and 1"
