"""Scripts with Transformers, Accelerate, Lightning, Horovod and plain torch, each recorded with its steps and names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddpobs import wire
from tests import patience
from tests.integration.test_slow_rank_end_to_end import get
from tests.integration.training import PATIENT, ROOT

pytestmark = pytest.mark.timeout(500)

SCRIPTS = Path(__file__).with_name("scripts")
BIN = Path(sys.executable).parent
EVALUATION_NS = 400_000_000
"""Least duration of each rank's share of an evaluation: its loader sleeps."""

TORCHRUN = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2")
ACCELERATE = (
    *(str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
    *("--mixed_precision=no", "--dynamo_backend=no", "--num_cpu_threads_per_process=1"),
)


@dataclass(frozen=True)
class Script:
    """Start command of a script, and the facts that its run must have on each rank."""

    launch: tuple[str, ...]
    name: str
    arguments: tuple[str, ...] = ()
    model: str = "Sequential"
    prefix: str = ""
    parameters: int = 8
    steps: int = 9
    micro_steps: int = 2
    samples: int = 32
    evaluated_before: frozenset[int] = frozenset()
    evaluated_quickly_before: frozenset[int] = frozenset()
    reducer: str = "torch"


RUNS = {
    "trainer": Script(
        TORCHRUN,
        "with_trainer.py",
        model="GPT2LMHeadModel",
        prefix="transformer.",
        parameters=28,
        steps=12,
        samples=16,
        evaluated_before=frozenset({4, 8}),
    ),
    "accelerate-shard": Script(ACCELERATE, "with_accelerate.py", ("shard",), evaluated_before=frozenset({3, 6})),
    "accelerate-dispatch": Script(ACCELERATE, "with_accelerate.py", ("dispatch",), evaluated_before=frozenset({3, 6})),
    "lightning": Script(
        (sys.executable,), "with_lightning.py", model="Digits", prefix="network.", evaluated_before=frozenset({3, 6})
    ),
    "bare": Script(TORCHRUN, "bare.py", steps=18, micro_steps=1, samples=16),
    "bare-ours": Script(TORCHRUN, "bare.py", steps=18, micro_steps=1, samples=16, reducer="ddpobs"),
    "horovod": Script(
        TORCHRUN,
        str(ROOT / "examples" / "train_horovod.py"),
        model="SGD",
        parameters=6,
        steps=36,
        micro_steps=4,
        samples=64,
        evaluated_quickly_before=frozenset({12, 24}),
        reducer="ddpobs.horovod",
    ),
}


def launch(run: str, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script under `ddpobs run`; with our DDP, by the import and `DDPOBS_TELEMETRY` alone."""
    script = RUNS[run]
    path = SCRIPTS / script.name
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DDPOBS_", "HF_"))}
    environ |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DDPOBS_QUIET": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{SCRIPTS}",
    } | PATIENT
    command = [str(BIN / "ddpobs"), "run", "--collector", url, "--run", run, "--"]
    if script.reducer.startswith("ddpobs"):
        text = path.read_text()
        path = folder / path.name
        path.write_text(text.replace("from torch.nn.parallel import", "from ddpobs import"))
        environ |= {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run}
        command = []
    return patience.run(
        [*command, *script.launch, str(path), *script.arguments, str(folder / run)],
        environ=environ,
        timeout_s=400,
        cwd=folder,
    )


@pytest.fixture(scope="module")
def launches(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """Run all scripts, two at a time: most of the time is imports and an evaluation that sleeps."""
    folder = tmp_path_factory.mktemp("frameworks")
    with ThreadPoolExecutor(2) as pool:
        yield {run: pool.submit(launch, run, url, folder) for run in RUNS}


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest, launches: dict[str, Future[Any]]) -> str:
    done = launches[request.param].result()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ddpobs" not in done.stderr
    return str(request.param)


def columns(url: str, run: str, rank: int) -> dict[str, Any]:
    lists = get(url, run, "/steps", rank=rank)["columns"]
    return {name: np.array(values) for name, values in lists.items()}


def test_the_run_is_finished_with_both_ranks_and_all_steps(url: str, run: str) -> None:
    script, summary = RUNS[run], get(url, run)
    assert (summary["state"], summary["ranks"], summary["dropped"]) == ("finished", 2, 0)
    assert summary["hello"]["settings"]["reducer"] == script.reducer
    assert [module["name"] for module in summary["modules"]] == [script.model]
    for rank in range(2):
        steps = columns(url, run, rank)
        assert steps["step"].tolist() == list(range(script.steps))
        assert set(steps["micro_steps"].tolist()) == {script.micro_steps}
        assert set(steps["samples"].tolist()) == {script.samples}


def test_every_step_has_its_phases_and_they_add_up(url: str, run: str) -> None:
    for rank in range(2):
        steps = columns(url, run, rank)
        phases = {phase: steps[f"{phase}_ns"] for phase in wire.PHASES}
        assert (sum(phases.values()) == steps["end_ns"] - steps["start_ns"]).all()
        for phase in ("data", "forward", "backward", "optimizer"):
            assert (phases[phase] > 0).all(), phase


def test_evaluations_and_checkpoints_are_in_no_step_and_the_next_step_has_no_origin(url: str, run: str) -> None:
    script = RUNS[run]
    for rank in range(2):
        steps = columns(url, run, rank)
        evaluated_before = sorted(script.evaluated_before)
        # On a busy machine a loader may take as long to start, but hardly after each evaluation.
        assert not evaluated_before or steps["data_ns"][evaluated_before].min() < EVALUATION_NS
        gaps = steps["start_ns"][1:] - steps["end_ns"][:-1]
        assert script.evaluated_before <= set(np.flatnonzero(gaps >= EVALUATION_NS / 2) + 1)
        unclean = set(np.flatnonzero(steps["flags"] & wire.NO_ORIGIN))
        assert unclean == script.evaluated_before | script.evaluated_quickly_before | {0}


def test_the_buckets_hold_every_parameter_by_name(url: str, run: str) -> None:
    script = RUNS[run]
    layout = get(url, run, "/layout")["layouts"][-1]
    parameters = [parameter for bucket in layout["buckets"] for parameter in bucket["parameters"]]
    assert len(parameters) == script.parameters
    assert all(parameter["name"].startswith(script.prefix) for parameter in parameters)
    assert 4 * sum(parameter["size"] for parameter in parameters) == sum(b["size_bytes"] for b in layout["buckets"])
    spans = get(url, run, "/spans")["columns"]
    last = [s for s, revision in zip(spans["step"], spans["revision"], strict=True) if revision == layout["revision"]]
    assert last.count(script.steps - 1) == 2 * len(layout["buckets"])


def test_only_the_script_without_set_epoch_has_that_finding(url: str, run: str) -> None:
    findings = {finding["code"]: finding for finding in get(url, run, "/diagnostics")["findings"]}
    assert ("epoch-not-set" in findings) == run.startswith("bare")
    if run.startswith("bare"):
        assert (findings["epoch-not-set"]["ranks"], findings["epoch-not-set"]["steps"]) == ([0, 1], [6, 17])
        assert findings["epoch-not-set"]["evidence"]["dataset"] == "TensorDataset"
