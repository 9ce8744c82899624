"""Two runs compared over HTTP, and by the command."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.rig.collector import Collector
from ddpobs import wire
from ddpobs.cli import main
from tests.support.server.batches import MS, assert_problem, batch, get, hello, layout, put, spans, steps

STEPS = 300


def train(url: str, run: str, backward: float, **settings: wire.Scalar) -> None:
    """Send two ranks whose backward takes 40 ms times `backward`, with noise of its own."""
    random = np.random.default_rng(sum(map(ord, run)))
    facts = msgspec.structs.replace(hello(), settings=settings)
    for rank in range(2):
        backward_ns = (40 * MS * backward * random.normal(1, 0.05, STEPS)).astype(np.int64)
        walls = backward_ns + 60 * MS
        end_ns = np.cumsum(walls)
        rows = steps(0, STEPS, start_ns=end_ns - walls, end_ns=end_ns, backward_ns=backward_ns)
        sent: dict[str, Any] = {"hello": facts, "layouts": [layout()], "spans": spans(0, STEPS)}
        put(url, batch(run, rank=rank, steps=rows, **sent))


@pytest.fixture(scope="module")
def runs(shared: Collector) -> str:
    """The address of a collector with two runs, of which the second is slower."""
    train(shared.url, "before", 1.0, bucket_cap_mb=25)
    train(shared.url, "after", 1.2, bucket_cap_mb=1)
    return shared.url


def compared(url: str, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["compare", *arguments, "--collector", url])
    return result.exit_code, result.output


def test_a_slower_run_is_compared_by_phase_bucket_and_setting(runs: str) -> None:
    answer = get(runs, "/runs/before/compare", **{"with": "after", "limit": 0.05})
    changes = {(change["name"], change["kind"]): change for change in answer["changes"]}
    backward, optimizer = changes["backward", "phase"], changes["optimizer", "phase"]
    assert (backward["verdict"], optimizer["verdict"]) == ("slower", "same")
    assert backward["low_ratio"] < 0.2 < backward["high_ratio"]
    assert backward["b_ns"] - backward["a_ns"] == pytest.approx(8 * MS, rel=0.1)
    assert {kind for _, kind in changes} == {"step", "long", "phase", "compute", "comm"}
    assert changes["bucket 1: stem.weight", "comm"]["a_ns"] == 15 * MS
    assert answer["limit"] == {
        "ratio": 0.05,
        "exceeded": ["step", "backward"],
        "decided": True,
        "words": "exceeded by step, backward",
    }
    title = "setting bucket_cap_mb"
    assert answer["differences"] == [{"name": "settings.bucket_cap_mb", "title": title, "a": 25, "b": 1}]
    assert answer["not_the_same_job"] == ""
    assert (answer["a"]["run"], answer["a"]["steps"], answer["b"]["run"]) == ("before", STEPS - 10, "after")


def test_the_command_exits_with_the_verdict(runs: str) -> None:
    code, output = compared(runs, "before", "after", "--fail-over", "5%")
    assert (code, output.splitlines()[-1]) == (3, "limit 5 %: exceeded by step, backward")
    assert "differs: setting bucket_cap_mb: 25 → 1" in output
    assert output.startswith("after is slower by 8.")
    assert compared(runs, "after", "before", "--fail-over", "5%")[0] == 0
    assert compared(runs, "before", "after")[0] == 0
    assert compared(runs, "before", "after", "--fail-over", "much")[0] == 2


def test_a_run_without_enough_steps_is_not_decided(runs: str, run: str) -> None:
    put(runs, batch(run, steps=steps(0, 20)))
    code, output = compared(runs, "before", run, "--fail-over", "5%")
    assert (code, output.splitlines()[-1]) == (4, "limit 5 %: not decided, too few steps")
    assert "290 and 10 typical steps are too few: 20 of each run are needed" in output


def test_runs_of_other_numbers_of_ranks_are_not_the_same_job(runs: str, run: str) -> None:
    for rank in range(3):
        put(runs, batch(run, rank=rank, world_size=3, hello=hello(), layouts=[layout()], steps=steps(0, 60)))
    code, output = compared(runs, "before", run)
    assert (code, output.splitlines()[0]) == (0, f"Not the same job: 2 ranks in before, 3 in {run}")
    assert "differs: ranks: 2 → 3" in output


@pytest.mark.parametrize(
    ("query", "status"), [({"with": "nowhere"}, 404), ({}, 422), ({"with": "after", "with_attempt": "b" * 16}, 404)]
)
def test_a_comparison_needs_a_second_run(runs: str, query: dict[str, Any], status: int) -> None:
    assert_problem(httpx.get(f"{runs}/api/v1/runs/before/compare", params=query), status)


def test_waiting_for_ranks_and_moving_data_are_compared_apart(runs: str) -> None:
    for run, wait_ms in (("even", 0), ("uneven", 30)):
        for rank in range(2):
            noise_ns = np.random.default_rng(rank).integers(0, MS, STEPS)
            exposed_ns = 5 * MS + noise_ns + (wait_ms * MS if rank else 0)
            rows = steps(0, STEPS, exposed_comm_ns=exposed_ns, backward_ns=45 * MS - exposed_ns)
            assert put(runs, batch(run, rank=rank, steps=rows)).status_code == 201
    changes = {change["title"]: change for change in get(runs, "/runs/even/compare", **{"with": "uneven"})["changes"]}
    assert changes["waiting for ranks"]["verdict"] == "slower"
    assert changes["waiting for ranks"]["change_ns"] == pytest.approx(15 * MS, rel=0.1)
    assert changes["moving data"]["verdict"] == "same"
    assert "exposed communication" not in changes
