"""Ranks that train apart, with a real collector: on torch's own DDP under `ddpobs run`, and on ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import patience
from tests.integration.test_run_command import command
from tests.integration.test_slow_rank_end_to_end import get
from tests.integration.training import TORCHRUN

SCRIPT = Path(__file__).with_name("scripts") / "apart.py"
REASONS = {"off-by-one": "unsynchronised", "bypass": "bypassed", "unfreeze": "unfrozen"}


def train(case: str, url: str, *, ours: bool) -> tuple[str, list[dict[str, Any]], set[str]]:
    """Train, and return the run's name, its `not-reduced` findings, and the sums of the ranks' parameters."""
    run = f"apart-{case}-{'ours' if ours else 'torch'}"
    arguments = command(*TORCHRUN[1:], SCRIPT, case, url=url, run=run)
    if ours:
        arguments["args"] = [sys.executable, *TORCHRUN[1:], str(SCRIPT), case]
        arguments["env"] |= {"OURS": "1", "DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run}
    done = patience.run(arguments["args"], environ=arguments["env"], timeout_s=120, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    sums = {line.split("SUM ")[1] for line in done.stdout.splitlines() if "SUM " in line}
    findings = get(url, run, "/diagnostics")["findings"]
    return run, [finding for finding in findings if finding["code"] == "not-reduced"], sums


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch"])
@pytest.mark.parametrize("case", ["off-by-one", "bypass"])
def test_steps_on_unreduced_gradients_are_found(case: str, ours: bool, url: str) -> None:
    _, (finding,), sums = train(case, url, ours=ours)
    assert len(sums) == 2
    assert (finding["severity"], finding["ranks"]) == ("critical", [0, 1])
    assert finding["parameters"] == ["backbone.weight", "backbone.bias", "head.weight", "head.bias"]
    assert finding["evidence"]["reason"] == REASONS[case]


def test_an_unfrozen_backbone_is_found_on_torchs_ddp(url: str) -> None:
    _, (finding,), sums = train("unfreeze", url, ours=False)
    assert len(sums) == 2
    assert finding["parameters"] == ["backbone.weight", "backbone.bias"]
    assert (finding["evidence"]["reason"], finding["steps"][0]) == ("unfrozen", 5)


def test_an_unfrozen_backbone_is_trained_alike_on_our_ddp(url: str) -> None:
    run, findings, sums = train("unfreeze", url, ours=True)
    assert len(sums) == 1
    assert findings == []
    layouts = get(url, run, "/layout")["layouts"]
    assert sum(len(bucket["parameters"]) for bucket in layouts[-1]["buckets"]) == 4


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "torch"])
def test_a_healthy_run_has_no_such_finding(ours: bool, url: str) -> None:
    _, findings, sums = train("healthy", url, ours=ours)
    assert len(sums) == 1
    assert findings == []
