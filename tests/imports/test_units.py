"""Units of fully sharded modules in traces, and process groups: what torch's annotations tell of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpobs import wire
from ddpobs.imports import kineto
from ddpobs.imports.files import read
from ddpobs.imports.kineto import _collective
from ddpobs.imports.replay import Replayed, replay
from ddpobs.imports.units import unit_range
from tests.support.profiler_traces import nccl_trace, sharded_trace

ROWS = [
    ("(root)", "all_gather"),
    ("blocks.0", "all_gather"),
    ("blocks.0", "all_gather_again"),
    ("blocks.0", "reduce_scatter"),
    ("(root)", "reduce_scatter"),
]


@pytest.fixture
def sharded(tmp_path: Path) -> Replayed:
    return replay(kineto.read(sharded_trace(tmp_path)))


def test_the_rows_of_a_sharded_trace_have_their_units(sharded: Replayed) -> None:
    (layout,) = sharded.layouts
    assert [(bucket.unit, bucket.kind) for bucket in layout.buckets] == ROWS
    assert layout.comm == "fully_shard"
    spans = sharded.summary.spans
    assert spans.bucket.tolist() == list(range(5)) * 3
    assert (spans.done_ns - spans.launched_ns).tolist() == [450_000] * 15
    assert (spans.waited_ns == spans.done_ns - spans.launched_ns).all()


def test_waits_for_units_are_exposed_and_the_last_reduction_is_part_of_backward(sharded: Replayed) -> None:
    steps = sharded.summary.steps
    times_us = {phase: int(getattr(steps, f"{phase}_ns")[1]) // 1000 for phase in wire.PHASES}
    # Five waits of 450 us, and 50 us between the last gradient and the last reduction.
    assert times_us["exposed_comm"] == 5 * 450 + 50
    # From 3,000 to 5,900 us, without two waits, the end of the last one, and the time after it, which is `other`.
    assert times_us["backward"] == 2_900 - 2 * 450 - 500 - 300
    assert sum(times_us.values()) == 10_000


def test_a_run_with_units_is_no_run_with_buckets(tmp_path: Path) -> None:
    imported = read([sharded_trace(tmp_path, rank) for rank in range(2)], "r")
    hellos = [batch.hello for batch in imported.batches() if batch.hello]
    assert [hello.settings.get("reducer") for hello in hellos] == ["fully_shard"] * 2


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("FSDP::all_gather", "(root)"),
        ("FSDP::all_gather (layers.3.mlp)", "layers.3.mlp"),
        ("FSDP::all_gather (a, b) [pg=4]", "a, b"),
        ("FSDP::pre_forward (a)", None),
    ],
)
def test_the_unit_is_read_from_the_name_of_torchs_range(name: str, unit: str | None) -> None:
    found = unit_range(name, 0, 1)
    assert (found.unit if found else None) == unit


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("allreduce", "all_reduce"),
        ("allreduce_coalesced", "all_reduce"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("_allgather_base", "all_gather"),
        ("all_reduce_barrier", "barrier"),
        ("AllReduce", "all_reduce"),
        ("", ""),
    ],
)
def test_a_collective_has_one_name_whatever_torch_calls_it(name: str, known: str) -> None:
    assert _collective(name) == known


def test_all_reduces_as_torch_names_them_now_are_buckets_with_their_size_and_group(tmp_path: Path) -> None:
    replayed = replay(kineto.read(nccl_trace(tmp_path, 2, [0, 2], 4)))
    assert [bucket.size_bytes for bucket in replayed.layouts[0].buckets] == [4_000]
    assert len(replayed.summary.spans) == 3
    assert replayed.group == (0, 2)
    assert replay(kineto.read(nccl_trace(tmp_path, 2, [0, 1, 2, 3], 4))).group == ()


def test_only_ranks_that_reduce_together_are_compared(tmp_path: Path) -> None:
    lasts_us = {0: 1_000, 1: 3_000, 2: 1_500, 3: 3_000}
    files = [nccl_trace(tmp_path, rank, [rank % 2, rank % 2 + 2], 4, lasts) for rank, lasts in lasts_us.items()]
    imported = read(files, "r")
    _, first, second = imported.lines
    assert first.startswith("of ranks 0 and 2, rank 2 arrived last in 2 of 2 steps: 0.5 ms after the others")
    assert second == "ranks 1 and 3 arrived together in 2 steps"
    batches = [batch for batch in imported.batches() if batch.hello]
    assert [batch.hello.settings["group_first"] for batch in batches if batch.hello] == [0, 1, 0, 1]
    assert [[peers.rank.tolist() for peers in batch.peers] for batch in batches] == [[[0, 2]], [[1, 3]], [], []]
