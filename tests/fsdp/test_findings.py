"""Fully sharded trainings, attached in code or under `ddpobs run`: a rank with a real fault is named with its unit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.faults.launch import ranks_of
from benchmarks.rig import patience
from benchmarks.rig.collector import collector
from benchmarks.rig.training import PATIENT
from tests.support.integration.sharded import SCRIPT, findings, train


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with collector(tmp_path_factory.mktemp("collector")) as running:
        yield running.url


def hang_of(url: str, run: str) -> dict[str, Any] | None:
    try:
        return findings(url, run).get("hang")
    except httpx.HTTPStatusError:  # The run has sent nothing yet.
        return None


def attached(url: str, run: str, fault: str, folder: Path) -> None:
    """Train to the end on ranks that attach in code, without a launcher that imports torch for each of them."""
    environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run, "ATTACH": "1"} | PATIENT
    with ranks_of(SCRIPT, fault, ranks=2, folder=folder, environ=environ) as ranks:
        assert [process.wait(patience.HANG_S) for process in ranks.processes] == [0, 0], ranks.logs()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_slow_rank_is_named_with_its_unit(url: str, phase: str, tmp_path: Path) -> None:
    attached(url, f"slow-{phase}", f"slow-{phase}", tmp_path)
    slow = findings(url, f"slow-{phase}")["straggler"]
    assert (slow["ranks"], slow["phase"]) == ([1], phase)
    assert "unit blocks.1" in slow["where"]
    assert "blocks.1.inner.0.weight" in slow["parameters"]


@pytest.mark.wide
def test_collectives_that_take_most_of_the_steps_are_told_by_kind(url: str) -> None:
    done = train(url, "wide", "wide", steps=30)
    assert done.returncode == 0, done.stderr
    bound = findings(url, "wide")["comm-bound"]
    by_kind = bound["evidence"]["exposed_by_collective_ns"]
    assert set(by_kind) == {"all_gather", "all_gather_again", "reduce_scatter"}
    assert sum(by_kind.values()) > 0.5 * bound["evidence"]["moving_ns"]
    assert "reduce-scatter" in bound["measure"]


def test_a_crash_is_named_with_the_collective_launched_last(url: str) -> None:
    assert train(url, "crash", "crash").returncode != 0
    crash = findings(url, "crash")["crash"]
    assert (crash["ranks"], crash["phase"]) == ([1], "backward")
    assert "all-gather in backward of unit blocks.0" in crash["where"]


def test_gradients_of_a_parameter_outside_of_every_unit_are_not_reduced(url: str, tmp_path: Path) -> None:
    attached(url, "ignored", "ignored", tmp_path)
    finding = findings(url, "ignored")["not-reduced"]
    assert (finding["ranks"], finding["parameters"]) == ([0, 1], ["head.weight", "head.bias"])
    assert "fully_shard was not applied to them" in finding["cause"]


def test_a_hang_is_named_with_the_collective_in_which_the_other_rank_waits(url: str, tmp_path: Path) -> None:
    environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": "hang", "ATTACH": "1"}
    with ranks_of(SCRIPT, "hang", ranks=2, folder=tmp_path, environ=environ) as ranks:
        hang = patience.until(lambda: hang_of(url, "hang"), ranks.logs)
    assert (hang["ranks"], hang["evidence"]["kind"]) == ([1], "absent")
    assert "rank 0 waits in the all-gather of unit (root) of step 5" in hang["cause"]
    assert "stem.weight" in hang["parameters"]
