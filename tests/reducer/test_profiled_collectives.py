"""The collectives of each step in torch's profiler, compared with those of torch's DDP."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddpobs import DistributedDataParallel
from ddpobs.torch_seam import ranges
from tests.support.distributed.compare import batch, net
from tests.support.distributed.launch import run_ranks

STEPS = 4


def collectives(**options: Any) -> Any:
    def case(kind: Any, rank: int) -> Any:
        """Return the number of all-reduces in each step, and the number of collectives in all of them."""
        ddp, by_step = kind(net(), **options), []
        for step in range(STEPS):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                ddp(batch(rank, step)).sum().backward()
                _end_of_collectives()
            names = [event.name for event in profile.events()]
            by_step.append(Counter(name for name in names if name.startswith("gloo:") and name != "gloo:barrier"))
        strategies_compared = int(kind is DistributedDataParallel)  # By an all-gather in the first backward.
        total = sum(names.total() for names in by_step)
        return [[names["gloo:all_reduce"] for names in by_step], total - strategies_compared]

    return case


def _end_of_collectives() -> None:
    """Let gloo's two threads close the profiler's events: they do so after they report the end of a collective."""
    for _ in range(4):
        dist.barrier()


def searches(kind: Any, rank: int) -> Any:
    """Return how often each step searches for unused parameters, once the first step is over."""
    ddp, counts = kind(net(), find_unused_parameters=True), []
    for step in range(STEPS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ddp(batch(rank, step)).sum().backward()
        counts.append(sum(event.name.endswith("search_unused_parameters") for event in profile.events()))
    return counts[1:]


CASES = {
    "default": collectives(),
    "views": collectives(gradient_as_bucket_view=True),
    "find_unused_parameters": collectives(find_unused_parameters=True),
    "static_graph": collectives(static_graph=True),
    "searches": searches,
}


@pytest.mark.parametrize("case", CASES)
def test_the_profiler_counts_as_many_as_with_torch(verdicts_by_rank: list[dict[str, str]], case: str) -> None:
    assert {verdict[case] for verdict in verdicts_by_rank} == {"equal"}


def marked_ranges(rank: int, world_size: int) -> tuple[list[list[str]], int]:
    """Return the ranges around each all-reduce in an exported trace, and the number of ranges without a profiler."""
    ddp = DistributedDataParallel(nn.Sequential(OrderedDict(größe=net())), bucket_cap_mb=0.05)
    with mock.patch.object(ranges, "mark", wraps=ranges.mark) as mark:
        for step in range(3):  # The buckets are rebuilt after the first step.
            ddp(batch(rank, step)).sum().backward()
        unprofiled = mark.call_count
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ddp(batch(rank, 3)).sum().backward()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    marked = [e for e in events if e.get("name", "").startswith("ddpobs bucket")]
    reduced = [e for e in events if e.get("name") == "c10d::allreduce_"]
    inside = [
        [m["name"] for m in marked if m["tid"] == e["tid"] and m["ts"] <= e["ts"] <= m["ts"] + m["dur"]]
        for e in reduced
    ]
    return inside, unprofiled


def test_each_all_reduce_is_in_a_range_that_names_its_bucket_only_while_a_profiler_records() -> None:
    ((inside, unprofiled),) = run_ranks(marked_ranges, 1)
    assert inside == [["ddpobs bucket 0: gr??e.4.bias ..."], ["ddpobs bucket 1: gr??e.0.bias ..."]]
    assert unprofiled == 0
