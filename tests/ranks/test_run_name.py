"""Names of runs: the launcher's, otherwise the script's with the time."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from ddpobs.config import TelemetryConfig
from ddpobs.ranks.run_name import child_run_name, launcher_run_name, run_name

SLURM = {"SLURM_JOB_NAME": "gpt", "SLURM_JOB_ID": "77"}
UUID = "3f1c2f7e-94d5-4f0b-8d0e-6d5b5a3c9f10"


def torchrun(run: str) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": run}


def pod(name: str) -> dict[str, str]:
    return {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": name}


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, None),
        (torchrun("job-7"), "job-7"),
        (torchrun("a b/c"), "a-b-c"),
        (torchrun("x" * 200), "x" * 128),
        (torchrun("none"), None),
        (torchrun(""), None),
        (torchrun(UUID), None),
        (SLURM, "gpt-77"),
        (SLURM | torchrun("77"), "gpt-77"),
        (SLURM | torchrun("lr=0.1"), "gpt-77-lr-0.1"),
        (SLURM | {"SLURM_STEP_ID": "0"}, "gpt-77"),
        (SLURM | {"SLURM_STEP_ID": "3"}, "gpt-77.3"),
        (SLURM | {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "4"}, "gpt-70_4"),
        (SLURM | {"SLURM_JOB_NAME": "interactive"}, None),
        (pod("gpt-worker-0"), "gpt"),
        (pod("gpt-large-master-0"), "gpt-large"),
        (pod("gpt-3") | {"JOB_COMPLETION_INDEX": "3"}, "gpt"),
        (pod("gpt-3-x7k2p") | {"JOB_COMPLETION_INDEX": "3"}, "gpt"),
        (pod("gpt-x7k2p"), "gpt"),
        (pod("notebook"), None),
        ({"HOSTNAME": "gpt-x7k2p"}, None),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"metadata": {"job_submission_id": "raysubmit_1"}}'}, "raysubmit_1"),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "no JSON"}, None),
        ({"LSB_JOBID": "12", "LSB_JOBNAME": "gpt", "LSB_JOBINDEX": "0"}, "gpt-12"),
        ({"LSB_JOBID": "12", "LSB_JOBNAME": "gpt[1-9]", "LSB_JOBINDEX": "4"}, "gpt-12_4"),
    ],
)
def test_the_launcher_names_the_run(environ: dict[str, str], name: str | None) -> None:
    assert launcher_run_name(environ) == name


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("/work/train gpt.py", "train-gpt"),
        ("/work/trainer/__main__.py", "trainer"),
        ("-c", "python"),
        ("", "python"),
        ("x" * 300, "x" * 64),
    ],
)
def test_without_a_launcher_script_and_time_name_the_run(
    script: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script])
    first, second = run_name({}), run_name({})
    assert re.fullmatch(rf"{name}-\d{{8}}-\d{{6}}-[0-9a-f]{{6}}", first)
    assert first != second
    assert TelemetryConfig(run=first).run == first


def test_restarts_by_the_same_torchrun_share_the_name() -> None:
    assert run_name(torchrun("none")) == run_name(torchrun("none"))
    assert run_name(torchrun(UUID)) == run_name(torchrun(UUID))
    assert run_name(torchrun(UUID)) != run_name(torchrun("none"))


@pytest.mark.parametrize(
    ("chosen", "ranks", "name"),
    [
        ("trial-3", {os.getppid(): "sweep"}, "trial-3"),
        ("sweep", {os.getppid(): "sweep"}, r"sweep\.eval"),
        ("sweep", {1: "sweep.trial", os.getppid(): "sweep"}, r"sweep\.trial\.eval"),
        (None, {os.getppid(): "s" * 128}, f"{'s' * 39}.eval"),
        (None, {os.getppid(): ""}, "eval"),
        ("trial-3", {os.getppid(): ""}, "trial-3"),
    ],
)
def test_a_program_that_a_rank_starts_has_no_name_of_a_rank_above(
    chosen: str | None, ranks: dict[int, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["eval.py"])
    first, second = (child_run_name(chosen, ranks, SLURM | torchrun("none")) for _ in range(2))
    assert re.fullmatch(name if name == chosen else rf"{name}-\d{{8}}-\d{{6}}-[0-9a-f]{{6}}", first)
    assert (first == second) == (name == chosen)
    assert TelemetryConfig(run=first).run == first


def test_a_shell_between_torchrun_and_a_rank_is_no_agent() -> None:
    """The restarts by one torchrun share the name although each has another shell."""
    code = "from ddpobs.ranks.run_name import run_name; print(run_name())"
    environ = {**os.environ, **torchrun("none"), "TORCHELASTIC_ERROR_FILE": "/tmp/attempt_0/0/error.json"}
    command = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", code]
    names = {subprocess.check_output(command, env=environ, text=True) for _ in range(2)}
    assert len(names) == 1
    assert names.pop().startswith("python-")
