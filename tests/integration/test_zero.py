"""A training with DeepSpeed under `ddpobs run`: the slow rank is named, and a rank that stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.faults.launch import ranks_of
from benchmarks.rig import patience
from benchmarks.rig.training import ROOT, TORCHRUN
from tests.support.distributed.engines import find_deepspeed
from tests.support.integration.run_command import command
from tests.support.integration.sharded import findings
from tests.support.integration.slow_ranks import get

FOLDER = find_deepspeed()
pytestmark = pytest.mark.alone
SCRIPT = ROOT / "tests" / "integration" / "scripts" / "zero.py"
OF_BUCKETS = {"bucket-size", "bucket-order", "compression-pays", "accumulation-pays", "prefetch-missing", "unit-size"}


def train(url: str, run: str, stage: int, fault: str = "") -> Any:
    given = command(*TORCHRUN[1:], SCRIPT, stage, fault, url=url, run=run)
    path = f"{given['env']['PYTHONPATH']}:{FOLDER}"
    return patience.run(given["args"], environ=given["env"] | {"PYTHONPATH": path})


@pytest.mark.parametrize("stage", [2, pytest.param(0, marks=pytest.mark.wide), pytest.param(3, marks=pytest.mark.wide)])
def test_a_slow_backward_on_one_rank_is_named(url: str, stage: int) -> None:
    run = f"zero-{stage}"
    done = train(url, run, stage, "slow-backward")
    assert done.returncode == 0, done.stderr
    assert get(url, run, "/diagnostics")["steps_seen"] == 60
    found = findings(url, run)
    assert (found["straggler"]["ranks"], found["straggler"]["phase"]) == ([1], "backward")
    assert not OF_BUCKETS & set(found), found
    kinds = {bucket["kind"] for bucket in get(url, run, "/layout")["layouts"][0]["buckets"]}
    assert kinds >= ({"reduce_scatter"} if stage == 3 else {"all_reduce"})


def hang_of(url: str, run: str) -> dict[str, Any] | None:
    try:
        return findings(url, run).get("hang")
    except httpx.HTTPStatusError:  # The run has sent nothing yet.
        return None


def test_a_hang_is_named_with_the_collective_in_which_the_other_rank_waits(url: str, tmp_path: Path) -> None:
    environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": "zero-hang", "ATTACH": "1", "PYTHONPATH": f"{ROOT}:{FOLDER}"}
    with ranks_of(SCRIPT, "2", "hang", ranks=2, folder=tmp_path, environ=environ) as ranks:
        hang = patience.until(lambda: hang_of(url, "zero-hang"), ranks.logs)
    assert (hang["ranks"], hang["evidence"]["kind"]) == ([1], "absent")
    assert "rank 0 waits in the all-reduce over replicas of unit" in hang["cause"], hang["cause"]
    assert "of step 5" in hang["cause"], hang["cause"]
