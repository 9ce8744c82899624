"""A program that a rank starts and that trains by itself: a run of its own, and no rank or attempt of its parent's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.rig import patience
from tests.integration.scripts.child_trains import CHILD_STEPS, STEPS
from tests.support.integration.run_command import command
from tests.support.integration.slow_ranks import get

SCRIPT = Path(__file__).with_name("scripts") / "child_trains.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def train(url: str, run: str, way: str, **environ: str) -> None:
    arguments = command(*TORCHRUN, SCRIPT, way, url=url, run=run)
    if environ:
        at = arguments["args"].index("--run")
        del arguments["args"][at : at + 2]  # The launcher names the run.
    done = patience.run(arguments["args"], environ={**arguments["env"], "DDPOBS_FLUSH_S": "0.5", **environ})
    assert done.returncode == 0, done.stdout + done.stderr


def children(url: str, parent: str) -> list[dict[str, Any]]:
    """Return the runs whose first process says that a rank of this run started it, once they have ended."""
    runs = httpx.get(f"{url}/api/v1/runs", params={"limit": 500}).json()["runs"]
    found = [get(url, run["run"]) for run in runs]
    own = [run for run in found if run["hello"] and run["hello"]["settings"].get("parent_run") == parent]
    return own if all(run["state"] == "finished" for run in own) else []


def assert_apart(url: str, run: str, steps: int) -> None:
    (child,) = patience.until(lambda: children(url, run))
    assert child["run"].startswith(f"{run}.child_trains-")
    assert (child["ranks"], child["steps"], len(child["attempts"])) == (1, CHILD_STEPS, 1)
    parent = get(url, run)
    assert (parent["state"], parent["ranks"], parent["steps"]) == ("finished", 2, steps)
    assert len(parent["attempts"]) == 1
    codes = [finding["code"] for finding in get(url, run, "/diagnostics")["findings"]]
    assert not {"crash", "replicas-differ", "not-reduced"} & set(codes)


@pytest.mark.parametrize("way", ["program", pytest.param("orphan", marks=pytest.mark.wide)])
def test_a_program_that_a_rank_starts_changes_nothing_of_the_ranks_run(url: str, way: str) -> None:
    train(url, f"starts-{way}", way)
    assert_apart(url, f"starts-{way}", 2 * STEPS)


def test_a_process_that_a_rank_forks_changes_nothing_of_the_ranks_run(url: str) -> None:
    train(url, "forks", "fork")
    assert_apart(url, "forks", STEPS)


@pytest.mark.wide
def test_a_program_does_not_take_the_name_that_its_ranks_launcher_gave(url: str) -> None:
    train(url, "", "program", SLURM_JOB_NAME="sweep", SLURM_JOB_ID="77")
    assert_apart(url, "sweep-77", 2 * STEPS)
