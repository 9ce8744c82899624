"""Real trainings in which telemetry rests: its cost is measured, and no rest is taken for a loss or a delay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.faults.launch import ranks_of
from benchmarks.rig import patience
from benchmarks.rig.training import PATIENT
from ddpobs.shared.paired_blocks import Rests
from tests.integration.scripts.resting import STEPS
from tests.support.server.batches import get

SCRIPT = Path(__file__).with_name("scripts") / "resting.py"
_CYCLE = 64


@pytest.fixture(params=["costly", pytest.param("plain", marks=pytest.mark.wide)])
def trained(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> tuple[str, str, str]:
    kind = str(request.param)
    run = f"resting-{kind}"
    environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run, "DDPOBS_REST_EVERY": str(_CYCLE)} | PATIENT
    with ranks_of(SCRIPT, kind, ranks=2, folder=tmp_path, environ=environ) as ranks:
        assert [process.wait(patience.HANG_S) for process in ranks.processes] == [0, 0], ranks.logs()
        return kind, run, ranks.logs()


def test_a_rest_is_no_loss_and_its_steps_keep_their_numbers(trained: tuple[str, str, str], url: str) -> None:
    kind, run, logs = trained
    rests = Rests(_CYCLE)
    steps: dict[str, Any] = get(url, f"/runs/{run}/steps", rank=0, **{"from": 0, "to": STEPS})["columns"]
    assert steps["step"] == [step for step in range(STEPS) if not rests.rests(step)]
    assert [number for number in steps["collective"] if number >= 0] == steps["step"]
    diagnosis = get(url, f"/runs/{run}/diagnostics")
    codes = {finding["code"] for finding in diagnosis["findings"]}
    assert not codes & {"telemetry-loss", "hang", "crash", "time-outside-steps", "replicas-differ", "straggler"}
    account = get(url, f"/runs/{run}/account")
    parts = {part["part"]: part for part in account["parts"]}
    assert parts["resting"]["is_goodput"]
    assert "unrecorded" not in parts
    cost = diagnosis["telemetry"]
    assert cost == account["telemetry"]
    assert cost["rests"] >= STEPS // _CYCLE - 2
    assert "telemetry adds" in account["summary"].lower()
    assert "telemetry adds" in logs.lower(), "the box at the end has it"
    metrics = httpx.get(f"{url}/metrics", params={"only": "runs"}).text
    assert f'ddpobs_telemetry_overhead_ratio{{run="{run}"}}' in metrics
    assert ("telemetry-overhead" in codes) == (cost["low_ratio"] > 0.01)
    if kind == "costly":
        assert cost["cost_ratio"] > 0.01
