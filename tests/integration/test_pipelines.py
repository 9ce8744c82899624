"""Pipelines from the schedule to the finding: real gloo ranks and a real collector."""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from ddpobs import DistributedDataParallel, TelemetryConfig, telemetry
from ddpobs.cli import main
from tests.support.distributed.launch import run_ranks
from tests.support.distributed.pipelines import Layer, Pipeline, groups, models

pytestmark = pytest.mark.alone


class Case(NamedTuple):
    """A training: schedule, steps, pauses of each stage's layers in ms, and the additional pause of rank 1."""

    schedule: str
    steps: int
    layers_ms: tuple[tuple[float, ...], ...]
    slow_ms: float = 0.0
    micro_batches: int = 4


CASES = {
    # A message takes up to some milliseconds: long micro-batches make that a small part of the bubble.
    "equal-gpipe": Case("ScheduleGPipe", 7, ((100.0,),) * 2, micro_batches=2),
    "equal-1f1b": Case("Schedule1F1B", 7, ((100.0,),) * 2, micro_batches=2),
    "equal-interleaved": Case("ScheduleInterleaved1F1B", 7, ((100.0,),) * 4, micro_batches=2),
    "uneven": Case("ScheduleGPipe", 22, ((9.0,), (9.0,) * 3)),
    "moved": Case("ScheduleGPipe", 22, ((9.0,) * 2, (9.0,) * 2)),
    "slow-replica": Case("Schedule1F1B", 44, ((1.0,) * 2, (1.0,) * 2), slow_ms=3.0),
}


def trained(rank: int, world_size: int, url: str, spool: Path) -> None:
    on_groups = groups()
    for run, case in CASES.items():
        config = TelemetryConfig(collector=url, run=run, spool=spool, flush_s=0.5, exit_s=30, quiet=True)
        extra_s = case.slow_ms / 1e3 * (rank == 1)
        layers = [[Layer(pause / 1e3) for pause in own] for own in case.layers_ms]
        layers[0][0].pause_s += extra_s
        wrapped = partial(wrap, config)
        pipeline = Pipeline(case.schedule, models(layers), wrapped, case.micro_batches, on_groups)
        for step in range(case.steps):
            pipeline.step(step)
        process, telemetry._process = telemetry._process, None
        assert process is not None
        process.close()
        dist.barrier()


def wrap(config: TelemetryConfig, module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(module, process_group=group, telemetry=config)


@pytest.fixture(scope="module")
def runs(url: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The collector's address, with all cases trained."""
    run_ranks(trained, 4, url, tmp_path_factory.mktemp("spool"))
    return url


def get(url: str, run: str, path: str = "") -> Any:
    answer = httpx.get(f"{url}/api/v1/runs/{run}{path}")
    answer.raise_for_status()
    return answer.json()


def findings(url: str, run: str, code: str) -> list[dict[str, Any]]:
    return [found for found in get(url, run, "/diagnostics")["findings"] if found["code"] == code]


@pytest.mark.parametrize(
    ("run", "formula"), [("equal-gpipe", 1 / 3), ("equal-1f1b", 1 / 3), ("equal-interleaved", 1 / 5)]
)
def test_the_bubble_of_equal_stages_is_the_formulas(runs: str, run: str, formula: float) -> None:
    pipeline, steps = get(runs, run, "/pipeline")["pipeline"], steps_of(runs, run)
    assert pipeline["expected_bubble"] == pytest.approx(formula, abs=1e-4)
    assert [stage["ranks"] for stage in pipeline["by_rank"]] == [[0, 1], [2, 3]]
    for stage in pipeline["by_rank"]:
        of_ranks = [bubbles([step for step in steps if step["rank"] == rank]) for rank in stage["ranks"]]
        assert stage["bubble"] == pytest.approx(statistics.mean(map(statistics.median, of_ranks)), abs=1e-3)
        assert abs(stage["bubble"] - formula) < 0.02, of_ranks


def test_each_step_has_its_micro_batches(runs: str) -> None:
    assert {step["micro_steps"] for step in steps_of(runs, "equal-gpipe")} == {2}
    assert {step["micro_steps"] for step in steps_of(runs, "equal-interleaved")} == {4}


def steps_of(url: str, run: str) -> list[dict[str, int]]:
    """Return each step of each rank but the first, in which torch sets the pipeline up."""
    columns = get(url, run, "/steps")["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [row for row in rows if row["step"] > 0]


def bubbles(steps: list[dict[str, int]]) -> list[float]:
    return [(step["receive_wait_ns"] + step["send_wait_ns"]) / step["schedule_ns"] for step in steps]


def test_the_overlap_of_the_last_stages_all_reduce_is_measured(runs: str) -> None:
    first, last = get(runs, "slow-replica", "/pipeline")["pipeline"]["by_rank"]
    assert last["reduce_ns"] > 0
    assert first["reduce_exposed_ns"] > 0
    assert (last["reduce_exposed_ns"], last["reduce_overlap"]) == (0, 1.0)


def undisturbed_ns(url: str, run: str) -> float:
    """Return the schedule's fastest step: other programs on the machine delay the rest."""
    return min(step["schedule_ns"] for step in steps_of(url, run))


def test_the_slow_stage_is_named_with_the_gain_of_moving_a_layer(runs: str) -> None:
    (finding,) = findings(runs, "uneven", "pipeline-imbalance")
    assert finding["ranks"] == [2, 3]
    assert (finding["evidence"]["layers"], finding["evidence"]["moved_to"]) == (3, [0])
    uneven_ns, moved_ns = (undisturbed_ns(runs, run) for run in ("uneven", "moved"))
    assert finding["gain"]["step_ns"] == pytest.approx(uneven_ns - moved_ns, rel=0.5)
    assert findings(runs, "moved", "pipeline-imbalance") == []


def test_the_slow_replica_is_named_within_its_stage(runs: str) -> None:
    finding, *_ = findings(runs, "slow-replica", "straggler")
    assert (finding["ranks"], finding["evidence"]["stages"]) == ([1], [0])
    assert "replicas of stage 0" in finding["title"]
    assert findings(runs, "slow-replica", "pipeline-imbalance") == []
    lateness = get(runs, "slow-replica", "/stragglers")["per_rank"]
    assert max(lateness, key=lambda row: row["last_share"])["rank"] == 1


def test_the_report_shows_the_stages(runs: str) -> None:
    shown = CliRunner().invoke(main, ["report", "uneven", "--collector", runs]).stdout
    assert "pipeline: ScheduleGPipe, 4 micro-batches a step; with equal stages the bubble is 20.0 %" in shown
    assert "stage 1 (rank 2, 3): " in shown
    assert "The pipeline waits for stage 1" in shown
