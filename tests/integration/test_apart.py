"""Ranks that train apart, with a real collector: on ours, on torch's DDP with `attach`, and once under `ddpobs run`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.launch import ranks_of
from benchmarks.rig import patience
from benchmarks.rig.training import PATIENT, TORCHRUN
from tests.support.integration.run_command import command
from tests.support.integration.slow_ranks import get

pytestmark = pytest.mark.wide

SCRIPT = Path(__file__).with_name("scripts") / "apart.py"
REASONS = {"off-by-one": "unsynchronised", "bypass": "bypassed", "unfreeze": "unfrozen"}


def train(case: str, door: str, url: str, folder: Path) -> tuple[str, list[dict[str, Any]], set[str]]:
    """Train, and return the run's name, its `not-reduced` findings, and the sums of the ranks' parameters."""
    run = f"apart-{case}-{door or 'run'}"
    if door:
        environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run, "DOOR": door} | PATIENT
        with ranks_of(SCRIPT, case, ranks=2, folder=folder, environ=environ) as ranks:
            assert [process.wait(120) for process in ranks.processes] == [0, 0], ranks.logs()
            output = ranks.logs()
    else:
        arguments = command(*TORCHRUN[1:], SCRIPT, case, url=url, run=run)
        done = patience.run(arguments["args"], environ=arguments["env"], stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout
        output = done.stdout
    sums = {line.split("SUM ")[1] for line in output.splitlines() if "SUM " in line}
    findings = get(url, run, "/diagnostics")["findings"]
    return run, [finding for finding in findings if finding["code"] == "not-reduced"], sums


@pytest.mark.parametrize(
    ("case", "door"), [("off-by-one", "ours"), ("off-by-one", "attach"), ("bypass", "ours"), ("bypass", "")]
)
def test_steps_on_unreduced_gradients_are_found(case: str, door: str, url: str, tmp_path: Path) -> None:
    _, (finding,), sums = train(case, door, url, tmp_path)
    assert len(sums) == 2
    assert (finding["severity"], finding["ranks"]) == ("critical", [0, 1])
    assert finding["parameters"] == ["backbone.weight", "backbone.bias", "head.weight", "head.bias"]
    assert finding["evidence"]["reason"] == REASONS[case]


def test_an_unfrozen_backbone_is_found_on_torchs_ddp(url: str, tmp_path: Path) -> None:
    _, (finding,), sums = train("unfreeze", "attach", url, tmp_path)
    assert len(sums) == 2
    assert finding["parameters"] == ["backbone.weight", "backbone.bias"]
    assert (finding["evidence"]["reason"], finding["steps"][0]) == ("unfrozen", 5)


def test_an_unfrozen_backbone_is_trained_alike_on_our_ddp(url: str, tmp_path: Path) -> None:
    run, findings, sums = train("unfreeze", "ours", url, tmp_path)
    assert len(sums) == 1
    assert findings == []
    layouts = get(url, run, "/layout")["layouts"]
    assert sum(len(bucket["parameters"]) for bucket in layouts[-1]["buckets"]) == 4


@pytest.mark.parametrize(
    ("case", "door", "every"), [("by-hand", "ours", 1), ("averaged", "ours", 5), ("averaged", "", 5)]
)
def test_replicas_that_the_script_keeps_together_are_an_info(
    case: str, door: str, every: int, url: str, tmp_path: Path
) -> None:
    run, (finding,), sums = train(case, door, url, tmp_path)
    assert len(sums) == 1
    assert finding["severity"] == "info"
    assert get(url, run, "/diagnostics")["steps_seen"] == 40
    facts = finding["evidence"]
    assert (facts["reason"], facts["every"], facts["optimizer_steps"]) == ("exchanged", every, 40)


@pytest.mark.parametrize("door", ["ours", "attach"])
def test_a_healthy_run_has_no_such_finding(door: str, url: str, tmp_path: Path) -> None:
    _, findings, sums = train("healthy", door, url, tmp_path)
    assert len(sums) == 1
    assert findings == []
