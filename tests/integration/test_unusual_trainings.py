"""Unusual trainings that are right: parameters bit for bit torch's, every step counted, and no false finding."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from benchmarks.faults.launch import ranks_of
from benchmarks.rig import patience
from benchmarks.rig.training import PATIENT, TORCHRUN
from tests.support.integration.matrix_launch import digests
from tests.support.integration.run_command import command
from tests.support.integration.slow_ranks import get
from tests.support.integration.tools import need

SCRIPT = Path(__file__).with_name("scripts") / "unusual.py"
STEPS = 40
MACHINE = {"processor-bound", "utilisation-swings", "comm-bound", "straggler"}
"""Findings that other programs on the machine may cause in steps of a few milliseconds."""


Environ = Mapping[str, str]
NONE: Environ = {}


def train(
    case: str, folder: Path, ranks: int = 2, ended: tuple[int, ...] = (0, 0), environ: Environ = NONE
) -> list[str]:
    """Train without a launcher, and return the ranks' digests."""
    environ = {"FOLDER": str(folder), **environ}
    with ranks_of(SCRIPT, case, str(STEPS), ranks=ranks, folder=folder, environ=environ) as started:
        assert tuple(process.wait(patience.HANG_S) for process in started.processes) == ended[:ranks], started.logs()
        return digests(started.logs())


@cache
def with_torch(case: str) -> list[str]:
    """The digests without ddpobs."""
    with TemporaryDirectory() as folder:
        return train(case, Path(folder))


def assert_right(
    url: str, run: str, steps: int, *, attempts: int = 1, ranks: int = 2, found: str = ""
) -> dict[str, Any]:
    """The run is finished and whole, and no finding but this one is a warning or worse."""
    summary = get(url, run)
    assert (summary["state"], summary["ranks"], summary["steps"], summary["dropped"]) == ("finished", ranks, steps, 0)
    assert len(summary["attempts"]) == attempts
    findings = {finding["code"]: finding for finding in get(url, run, "/diagnostics")["findings"]}
    assert {code for code, f in findings.items() if f["severity"] != "info"} - MACHINE <= {found}
    return findings


def marks(case: str, door: str) -> Any:
    always = {("signals", "attach"), ("out-of-memory", "ours")}
    return pytest.param(case, door, marks=[] if (case, door) in always else [pytest.mark.wide])


@pytest.mark.parametrize(
    ("case", "door"),
    [
        marks(case, door)
        for case in ("signals", "out-of-memory", "owners", "packing", "trials", "ppo")
        for door in ("attach", "ours")
    ],
)
def test_an_unusual_training_is_recorded_as_it_is(case: str, door: str, url: str, tmp_path: Path) -> None:
    run = f"{case}-{door}"
    environ = {"DOOR": door, "DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run} | PATIENT
    assert train(case, tmp_path, environ=environ) == with_torch(case)
    found = "other-bound" if case == "ppo" else ""
    findings = assert_right(url, run, 3 * STEPS if case == "trials" else STEPS, found=found)
    if case == "trials":
        assert [module["name"] for module in get(url, run)["modules"]] == ["Sequential"] * 3
    if case == "packing":
        assert findings["imbalanced-batches"]["severity"] == "info"
    if case == "ppo":
        assert "ppo (sleep) takes" in findings["other-bound"]["cause"]


@pytest.fixture
def left_behind() -> Iterator[list[str]]:
    """Files that programs of another user leave in the folder of temporary files."""
    names = [f"/tmp/{name}" for name in ("ddpobs-spool-54321", "torchinductor_uid_54321")]
    yield names
    for name in names:
        shutil.rmtree(name, ignore_errors=True)


@pytest.mark.wide
@pytest.mark.skipif(os.geteuid() != 0, reason="changes the user")
@pytest.mark.usefixtures("left_behind")
def test_a_user_without_a_name_or_a_home_trains_as_any_other(url: str) -> None:
    """As in a container that runs with a number of its own: no entry in passwd, and a home that cannot be written."""
    user = (need("setpriv", "util-linux"), "--reuid=54321", "--regid=54321", "--clear-groups")
    may_read = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    arguments = command(*TORCHRUN[1:], SCRIPT, "packing", STEPS, url=url, run="nobody")
    unset = ("USER", "LOGNAME", "DDPOBS_SPOOL", "XDG_CACHE_HOME", "XDG_STATE_HOME", "TMPDIR")
    environ = {name: value for name, value in arguments["env"].items() if name not in unset}
    environ["HOME"] = "/proc/nobody"
    done = patience.run([*user, *may_read, *arguments["args"]], environ=environ, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    assert digests(done.stdout) == with_torch("packing")
    assert_right(url, "nobody", STEPS)


@pytest.mark.wide
@pytest.mark.parametrize("door", ["attach", "ours"])
def test_a_restart_with_fewer_ranks_is_the_next_attempt(door: str, url: str, tmp_path: Path) -> None:
    run, trained = f"fewer-{door}", []
    for environ in (NONE, {"DOOR": door, "DDPOBS_TELEMETRY": url, "DDPOBS_RUN": run} | PATIENT):
        folder = tmp_path / environ.get("DOOR", "torch")
        train("smaller-world", folder, ended=(1, -9), environ=environ)
        trained.append(train("smaller-world", folder, ranks=1, ended=(0,), environ=environ))
    assert trained[0] == trained[1]
    assert_right(url, run, STEPS // 2, attempts=2, ranks=1, found="time-outside-steps")
    attempts = get(url, run, "/attempts")["attempts"]
    assert [(attempt["outcome"], attempt["world_size"], attempt["steps"]) for attempt in attempts] == [
        ("failed", 2, STEPS // 2),
        ("finished", 1, STEPS // 2),
    ]


CELLS = f"""
import torch
from accelerate import Accelerator, debug_launcher
from digest import report

def cell():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    ddp, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    for _ in range({STEPS}):
        optimizer.zero_grad()
        accelerator.backward(ddp(torch.randn(4, 16, generator=generator)).square().mean())
        optimizer.step()
    report(accelerator.process_index, model)
    accelerator.end_training()

debug_launcher(cell)
debug_launcher(cell)
"""


@pytest.mark.wide
def test_cells_of_a_notebook_that_fork_ranks_are_attempts_of_one_run(url: str) -> None:
    """Python's own prompt, which `accelerate` forks ranks from as `notebook_launcher` does in a notebook."""
    arguments = command("-i", "-q", url=url, run="notebook")
    arguments["env"]["PYTHONPATH"] += os.pathsep + str(SCRIPT.parent)
    plain = arguments["args"][arguments["args"].index("--") + 1 :]
    outputs = []
    for line in (plain, arguments["args"]):
        session = subprocess.run(
            line, env=arguments["env"], input=CELLS, capture_output=True, text=True, timeout=patience.HANG_S, check=True
        )
        outputs.append(digests(session.stdout))
    assert len(outputs[0]) == 4
    assert outputs[0] == outputs[1]
    assert_right(url, "notebook", STEPS, attempts=2)


OUTLIVES = """
import os, time, torch, torch.distributed as dist, ddpobs
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = ddpobs.DistributedDataParallel(torch.nn.Linear(2, 1))
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
time.sleep(1 if os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.wide
def test_a_rank_that_outlives_the_store_loses_no_record(url: str, tmp_path: Path) -> None:
    """Rank 0, which has the store, ends at once and without `destroy_process_group`."""
    script = tmp_path / "outlives.py"
    script.write_text(OUTLIVES)
    environ = {"DDPOBS_TELEMETRY": url, "DDPOBS_RUN": "outlives"} | PATIENT
    with ranks_of(script, ranks=2, folder=tmp_path, environ=environ) as ranks:
        assert [process.wait(patience.HANG_S) for process in ranks.processes] == [0, 0], ranks.logs()
        assert "c10d" not in ranks.logs()
    assert_right(url, "outlives", 3)
    assert [rank["steps"] for rank in get(url, "outlives", "/ranks")["ranks"]] == [3, 3]
