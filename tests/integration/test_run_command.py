"""`ddpobs run` with scripts that start their own ranks, fail, use DataParallel, or have a sitecustomize."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ddpobs
from benchmarks.rig import patience
from benchmarks.rig.training import ROOT
from ddpobs.errors import DataParallelError
from tests.support.integration.run_command import command
from tests.support.integration.slow_ranks import get

pytestmark = pytest.mark.wide

SPAWNING = Path(__file__).with_name("scripts") / "spawning.py"


def run_to_end(arguments: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return patience.run(arguments["args"], environ=arguments["env"])


def run_aloud(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script under `ddpobs run`, which says why a training has no telemetry."""
    aloud = command(*arguments)
    return run_to_end(aloud | {"env": aloud["env"] | {"DDPOBS_QUIET": "0"}})


@pytest.mark.parametrize(
    "start", ["spawn", *(pytest.param(start, marks=pytest.mark.wide) for start in ("forkserver", "fork"))]
)
def test_a_script_that_starts_its_own_ranks_is_a_finished_run(url: str, start: str, tmp_path: Path) -> None:
    run = f"started-by-{start}"
    done = run_to_end(command(SPAWNING, start, tmp_path / "store", url=url, run=run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "rank 0: 4 threads, 0 in workers",  # Rank 0 prints the verdict.
        "rank 1: 3 threads, 0 in workers",
    ]
    summary = get(url, run)
    assert (summary["state"], summary["ranks"], summary["steps"], summary["dropped"]) == ("finished", 2, 4, 0)


def test_the_exit_status_and_a_signal_reach_the_parent_process() -> None:
    assert run_to_end(command("-c", "raise SystemExit(37)")).returncode == 37
    waiting = subprocess.Popen(
        **command("-c", "print(flush=True); import time; time.sleep(60)"), stdout=subprocess.PIPE
    )
    assert waiting.stdout is not None
    waiting.stdout.readline()
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(30) == -signal.SIGTERM
    waiting.stdout.close()


def test_a_missing_command_is_reported_in_one_line() -> None:
    arguments = command()
    arguments["args"][-1] = "no-such-launcher"
    done = run_to_end(arguments)
    assert (done.returncode, done.stderr) == (127, "ddpobs: no-such-launcher: No such file or directory\n")


DATA_PARALLEL = """
import torch
for _ in range(2):
    model = torch.nn.DataParallel(torch.nn.Linear(2, 1))
model(torch.ones(3, 2)).sum().backward()
print(model.module.weight.grad.tolist())
"""


def test_data_parallel_gets_one_line_of_advice_and_trains(tmp_path: Path) -> None:
    done = run_to_end(command("-c", DATA_PARALLEL))
    assert (done.returncode, done.stdout) == (0, "[[3.0, 3.0]]\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("ddpobs: no telemetry for this model: torch.nn.DataParallel ")
    assert "torchrun" in line


OWN_HOOK = """
from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: print("stepped"))
"""


def test_a_training_without_ddp_may_have_hooks_of_its_own_on_optimizers() -> None:
    done = run_aloud("-c", OWN_HOOK + OPTIMIZER)
    assert (done.returncode, done.stdout) == (0, "stepped\n" * 3), done.stderr
    assert done.stderr.startswith("ddpobs: no telemetry: ")


OPTIMIZER = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


JOINED = """
import torch
import torch.distributed as dist
from ddpobs import TelemetryConfig, telemetry
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
joined = torch.nn.Linear(2, 1)
recorder = telemetry.join(joined, TelemetryConfig(), dist.group.WORLD, {})
"""


def test_a_training_through_a_door_without_ddp_is_not_called_one_without_telemetry() -> None:
    leave = "telemetry.leave(recorder)\ndist.destroy_process_group()\n"
    done = run_aloud("-c", JOINED + OPTIMIZER + leave)
    assert done.returncode == 0, done.stderr
    assert "no telemetry" not in done.stderr


def test_a_training_without_ddp_prints_once_on_rank_0_why_it_has_no_telemetry() -> None:
    """The ranks take turns in one process, which reads its rank from the environment at the first step.

    A `sitecustomize` of the system, as Debian's, has replaced ours in `sys.modules`.
    """
    turns = [
        ({}, "one process only trains here, without DistributedDataParallel: start it with torchrun"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ""),
        ({"RANK": "0", "DDPOBS_QUIET": "1"}, ""),
        (
            {"DDPOBS_QUIET": "0"},
            "no DistributedDataParallel, fully_shard module or DeepSpeed engine (FSDP1 has no telemetry)",
        ),
    ]
    code = f"import os, sys\n{OPTIMIZER}\n"
    code += "finder = next(finder for finder in sys.meta_path if type(finder).__name__ == '_Finder')\n"
    code += "watch = finder.find_spec.__globals__['_watch_optimizers']\n"
    for variables, _ in turns[1:]:
        code += f"os.environ |= {variables}\nwatch(sys.modules['torch.optim.optimizer'])\n{OPTIMIZER}"
    done = run_aloud("-c", code)
    lines = [f"ddpobs: no telemetry: {reason}" for _, reason in turns if reason]
    assert (done.returncode, done.stderr.splitlines()) == (0, lines)


def test_a_command_that_used_torch_without_a_model_of_ranks_ends_with_the_reason() -> None:
    done = run_aloud("-c", "import torch; print(torch.ones(2).sum().item())")
    reason = "no process wrapped a model in DistributedDataParallel or fully_shard, or gave it to ddpobs.attach"
    assert (done.returncode, done.stdout) == (0, "2.0\n")
    assert done.stderr.splitlines() == [f"ddpobs: no telemetry: {reason}"]


@pytest.mark.parametrize("wrap", [ddpobs.DistributedDataParallel, ddpobs.attach])
def test_data_parallel_inside_or_instead_of_ddp_is_refused_with_advice(wrap: Callable[[Any], object]) -> None:
    with pytest.raises(DataParallelError, match="torchrun, and give the model itself to DistributedDataParallel"):
        wrap(torch.nn.DataParallel(torch.nn.Linear(2, 1)))


SITECUSTOMIZE = """
from pathlib import Path
here = Path(__file__).parent.name
"""


def test_a_sitecustomize_of_the_user_is_kept_and_may_import_torch(tmp_path: Path) -> None:
    """The user's sitecustomize runs with its own file and name. Torch is instrumented even if it imports torch."""
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE + "import torch\n")
    arguments = command(
        "-c", f"import sitecustomize\nprint(sitecustomize.here, sitecustomize.__name__)\n{DATA_PARALLEL}"
    )
    arguments["env"]["PYTHONPATH"] += os.pathsep + str(tmp_path)
    done = run_to_end(arguments)
    assert done.stdout.splitlines()[0] == f"{tmp_path.name} sitecustomize", done.stderr
    assert "no telemetry for this model" in done.stderr


PYTHONS = {path.resolve() for path in (Path.home() / ".pyenv/versions").glob("*/bin/python")} | {
    Path("/usr/bin/python3")
}


@pytest.mark.parametrize("python", sorted(filter(Path.exists, PYTHONS)), ids=lambda path: path.name)
def test_another_python_that_a_training_starts_prints_nothing_of_ours(python: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the other sitecustomize')\n")
    arguments = command(
        "-c", f"import subprocess; subprocess.run([{str(python)!r}, '-B', '-c', 'print(1)'], check=True)"
    )
    arguments["env"]["PYTHONPATH"] += os.pathsep + str(tmp_path)
    done = run_to_end(arguments)
    assert (done.returncode, done.stderr) == (0, "")
    # Of `ddpobs run`, the training and the program, which write to the pipe when they end.
    assert sorted(done.stdout.splitlines()) == ["1", *["the other sitecustomize"] * 3]


def test_an_old_python_can_read_the_start_up_code() -> None:
    """The words of later versions: annotations, a future that Python 2 does not have, texts with values in them."""
    tree = ast.parse((ROOT / "ddpobs" / "autoload" / "sitecustomize.py").read_text(encoding="ascii"))
    later = (ast.AnnAssign, ast.arg, ast.JoinedStr, ast.NamedExpr, ast.AsyncFunctionDef, ast.Nonlocal)
    assert not [node for node in ast.walk(tree) if isinstance(node, later)]
    assert "__future__" not in {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


EARLY = "import torch, runpy; runpy.run_path({!r})\n"


def test_torch_that_was_imported_before_sitecustomize_is_instrumented(tmp_path: Path) -> None:
    autoload = ROOT / "ddpobs" / "autoload" / "sitecustomize.py"
    arguments = command("-c", EARLY.format(str(autoload)) + DATA_PARALLEL)
    arguments["args"] = arguments["args"][arguments["args"].index("--") + 1 :]
    assert "no telemetry for this model" in run_to_end(arguments).stderr


WAITS_BEFORE_THE_MODEL = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
def prepare():
    dist.barrier()
prepare()
print(*sys.modules["torch.nn.parallel.distributed"].__ddpobs_waits__)
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
dist.barrier()
print(len(sys.modules["torch.nn.parallel.distributed"].__ddpobs_waits__))
"""


def test_waits_at_barriers_are_noted_until_the_first_model(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WAITS_BEFORE_THE_MODEL)
    done = run_to_end(command(script, tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    waits, count = done.stdout.splitlines()
    assert waits.endswith(", 'barrier at script.py:5 prepare')")
    assert count == "1"
