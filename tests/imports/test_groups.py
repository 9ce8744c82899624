"""Which ranks are compared of files that do not tell it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpobs.imports.files import read
from ddpobs.imports.rank_trace import Collective, RankTrace
from ddpobs.imports.reductions import trace_of
from ddpobs.imports.traced_run import TracedRun
from tests.support.distributed.launch import run_ranks

PAIRS = ((0, 1), (2, 3))
MS = 1_000_000


def run(
    starts_ms: Sequence[Sequence[float]],
    groups: Sequence[tuple[tuple[int, ...], ...] | None],
    *,
    meets: bool = False,
    jitter_ms: float = 0.1,
) -> TracedRun:
    """A run of 12 steps.

    Args:
        starts_ms: Work of each rank in a step, by its group: the slowest of a group decides when all of it reduce.
        groups: Process groups of each rank, as its file tells them.
        meets: All ranks meet in a barrier at the end of each step.
        jitter_ms: Spread of the times at which a rank leaves a collective.
    """
    random, traces, rank = np.random.default_rng(0), [], 0
    for work_ms in starts_ms:
        for own_ms in work_ms:
            steps, at_ms = [], 1000.0 * rank  # The ranks' clocks differ.
            length_ms = max(map(max, starts_ms)) if meets else max(work_ms)
            for _ in range(12):
                left_ms = at_ms + max(work_ms) + random.uniform(0, jitter_ms)
                reduced = [_collective("all_reduce", at_ms + own_ms, left_ms)]
                if meets:
                    met_ms = at_ms + length_ms + 2 + random.uniform(0, jitter_ms)
                    reduced.append(_collective("barrier", left_ms, met_ms))
                steps.append(reduced)
                at_ms += length_ms + 5
            traces.append(trace_of(f"{rank}.json", rank, 4, steps, backend="gloo"))
            rank += 1
    return TracedRun([_with(trace, known) for trace, known in zip(traces, groups, strict=True)], "r", "torch.profiler")


def _collective(name: str, launched_ms: float, done_ms: float) -> Collective:
    return Collective(name, int(launched_ms * MS), int(launched_ms * MS), int(done_ms * MS))


def _with(trace: RankTrace, groups: tuple[tuple[int, ...], ...] | None) -> RankTrace:
    return replace(trace, groups=groups)


def late(of: TracedRun) -> set[int]:
    return {arrival.rank for arrival in of.arrivals if arrival.delay_ns > 5 * MS}


OF_PAIRS = [(pair,) for pair in PAIRS for _ in pair]
UNKNOWN = "ranks 0, 1, 2 and 3 are not compared: the files do not tell which ranks reduce gradients together"


def test_ranks_of_a_file_without_groups_are_compared_if_their_reductions_end_together() -> None:
    assert late(run([(30, 30, 50, 30)], [None] * 4)) == {2}


@pytest.mark.parametrize("meets", [False, True], ids=["apart", "meeting once in a step"])
def test_a_group_that_is_slower_than_another_has_no_late_rank(meets: bool) -> None:
    found = run([(30, 30), (60, 60)], OF_PAIRS, meets=meets)
    assert late(found) == set()
    assert {line.partition(", ")[0] for line in found.lines[1:]} == {"of ranks 0 and 1", "of ranks 2 and 3"}


@pytest.mark.parametrize("meets", [False, True], ids=["apart", "meeting once in a step"])
def test_a_late_rank_is_late_among_those_of_its_group(meets: bool) -> None:
    found = run([(30, 50), (60, 60)], OF_PAIRS, meets=meets)
    assert late(found) == {1}
    assert any(line.startswith("of ranks 0 and 1, rank 1 arrived last in ") for line in found.lines)
    hellos = [batch.hello for batch in found.batches() if batch.hello]
    told = [(hello.settings["group_ranks"], hello.settings["group_first"]) for hello in hellos]
    assert told == [(2, 0), (2, 0), (2, 2), (2, 2)]


def test_groups_that_are_not_used_do_not_keep_ranks_from_being_compared() -> None:
    found = run([(30, 50, 30, 30)], OF_PAIRS)
    assert late(found) == {1}
    assert all("group_ranks" not in batch.hello.settings for batch in found.batches() if batch.hello)


@pytest.mark.parametrize("meets", [False, True], ids=["apart", "meeting once in a step"])
@pytest.mark.parametrize("groups", [None, ((0, 3),)], ids=["unknown", "other ones"])
def test_ranks_are_not_compared_if_nothing_tells_their_groups(groups: tuple[tuple[int, ...], ...], meets: bool) -> None:
    found = run([(30, 30), (60, 60)], [groups] * 4, meets=meets)
    assert found.lines[1:] == [UNKNOWN]
    assert found.arrivals == []
    for batch in found.batches():
        assert batch.peers == []
        assert batch.hello is None or batch.hello.settings["not_compared"] == UNKNOWN.partition(": ")[2]


def test_files_of_different_runs_are_not_compared() -> None:
    found = run([(30,), (33,)], [(), ()])
    reason = "the collectives of the ranks do not end together, as those of one run do"
    assert found.lines[1:] == [f"ranks 0 and 1 are not compared: {reason}"]


def test_collectives_that_a_rank_does_not_share_may_end_at_any_time() -> None:
    tensors, replicas = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    traces = []
    for rank, work_ms in enumerate((30, 30, 80, 70)):
        groups, left_ms = (tensors[rank // 2], replicas[rank % 2]), (32, 82)[rank // 2]
        steps = [
            [
                _collective("all_reduce", at_ms + work_ms, at_ms + left_ms)._replace(group=groups[0]),
                _collective("all_reduce", at_ms + left_ms + 3, at_ms + 90)._replace(group=groups[1]),
            ]
            for at_ms in range(1000 * rank, 1000 * rank + 1200, 100)
        ]
        traces.append(_with(trace_of(f"{rank}.json", rank, 4, steps, backend="nccl"), groups))
    assert late(TracedRun(traces, "r", "torch.profiler")) == {2}


def test_times_at_which_ranks_leave_may_vary() -> None:
    assert late(run([(30, 50, 30, 30)], [()] * 4, jitter_ms=8)) == {1}


def profiled(rank: int, _size: int, folder: str) -> None:
    """Profile ten steps with DDP in pairs, of which the second one has more work, and an all-reduce of all ranks."""
    group = [dist.new_group(pair) for pair in PAIRS][rank // 2]
    model = DistributedDataParallel(nn.Linear(64, 64), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(10):
            time.sleep(0.1 if rank > 1 else 0.03)
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
            dist.all_reduce(torch.zeros(1))
    profiler.export_chrome_trace(f"{folder}/{rank}.json")


@pytest.mark.wide
def test_recorded_groups_over_gloo_are_compared_apart(tmp_path: Path) -> None:
    run_ranks(profiled, 4, str(tmp_path))
    lines = read([tmp_path / f"{rank}.json" for rank in range(4)], "r").lines
    assert {line.partition(", ")[0] for line in lines[1:]} <= {"of ranks 0 and 1", "of ranks 2 and 3"}
    assert len(lines) > 2
