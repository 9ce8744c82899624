"""Run the torch tests of a Horovod checkout on two gloo ranks, with `ddpobs.horovod` in the place of `horovod.torch`.

    git clone --depth 1 https://github.com/horovod/horovod /tmp/horovod
    python -m benchmarks.horovod_suite /tmp/horovod [--only SUBSTRING] [--verbose]

Each test gets new processes, and passes if it passes on each rank. The tests need numpy and cloudpickle.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn
from unittest import mock

import torch
import torch._dynamo  # A process's first optimizer imports it, which takes seconds.

import ddpobs.horovod as hvd
from benchmarks.rig.ports import free_port

FILES = {"test/parallel/test_torch.py": 2, "test/single/test_torch_elastic.py": 1}
"""Ranks by file."""
_NEWER_OPTIMIZERS = ("Muon",)
"""Optimizers of a newer torch that the tests cannot build: they give each one a model with biases."""
LIMIT_S = 180.0
"""Seconds after which a test's processes are killed."""
PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"


def put_in_place() -> None:
    """Let the tests import our module under Horovod's names, and `mock` from the standard library.

    They go through all optimizers in torch's modules. Those that they cannot build are moved out.
    """
    for name in ("horovod", "horovod.runner", "horovod.runner.util", "horovod.runner.util.threads"):
        sys.modules[name] = ModuleType(name)
    sys.modules["horovod.runner.util.threads"].in_thread = None  # type: ignore[attr-defined]
    sys.modules["horovod"].torch = hvd  # type: ignore[attr-defined]
    sys.modules["horovod.torch"] = hvd
    sys.modules["mock"] = mock
    for name in _NEWER_OPTIMIZERS:
        if (newer := getattr(torch.optim, name, None)) is not None:
            newer.__module__ = "newer"


def cases(checkout: Path) -> Iterator[tuple[str, unittest.TestCase, int]]:
    """The tests of each file: file and name, the test, and its ranks."""
    for file, ranks in FILES.items():
        path = checkout / file
        sys.path[:0] = [str(path.parent), str(checkout / "test/utils")]
        module = importlib.import_module(path.stem)
        for suite in unittest.defaultTestLoader.loadTestsFromModule(module):
            assert isinstance(suite, unittest.TestSuite)
            for case in suite:
                assert isinstance(case, unittest.TestCase)
                yield f"{path.stem}: {case._testMethodName}", case, ranks


def run(case: unittest.TestCase, ranks: int) -> tuple[str, list[str]]:
    """Return a test's outcome, and each rank's reason if it did not pass."""
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                _run_rank(case, rank, ranks, port, folder / str(rank))
            children.append(child)
        _wait(children)
        results = [_read(folder / str(rank)) for rank in range(ranks)]
    outcomes = [outcome for outcome, _ in results]
    outcome = next((bad for bad in (FAILED, SKIPPED) if bad in outcomes), PASSED)
    return outcome, [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(results) if reason]


def _read(result: Path) -> tuple[str, str]:
    if not result.exists():
        return FAILED, f"the process ended, or was killed after {LIMIT_S:.0f} s"
    outcome, reason = json.loads(result.read_text())
    return outcome, reason


def _run_rank(case: unittest.TestCase, rank: int, ranks: int, port: int, result: Path) -> NoReturn:
    shape = {"RANK": rank, "SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": ranks}
    os.environ |= {f"HOROVOD_{name}": str(value) for name, value in shape.items()}  # As horovodrun's ranks on gloo.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    output = os.open(f"{result}.output", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        written = result.with_suffix(".part")
        written.write_text(json.dumps(_outcome(case)))
        written.rename(result)
        hvd.shutdown()
    finally:
        os._exit(0)


def _outcome(case: unittest.TestCase) -> tuple[str, str]:
    method = getattr(case, case._testMethodName)
    for mark in getattr(method, "pytestmark", ()):
        if mark.name == "skip":
            return SKIPPED, str(mark.kwargs.get("reason", ""))
    collected = unittest.TestResult()
    try:
        case.run(collected)
    except BaseException:
        return FAILED, traceback.format_exc()
    for _, text in (*collected.errors, *collected.failures):
        return FAILED, text
    for _, reason in collected.skipped:
        return SKIPPED, reason
    return PASSED, ""


def _wait(children: list[int]) -> None:
    """Wait for the ranks, and kill those that are late."""
    deadline = time.monotonic() + LIMIT_S
    while children:
        late = time.monotonic() > deadline
        for child in list(children):
            if late:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            if os.waitpid(child, 0 if late else os.WNOHANG)[0]:
                children.remove(child)
        time.sleep(0.01)


def main() -> None:
    """Print each test's outcome, and the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkout", type=Path, help="the folder of a Horovod checkout")
    parser.add_argument("--only", default="", help="run the tests whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="print whole tracebacks instead of their last line")
    arguments = parser.parse_args()
    put_in_place()
    os.environ["DDPOBS_TELEMETRY"] = "0"
    counts: dict[str, Counter[str]] = {}
    for name, case, ranks in cases(arguments.checkout):
        if arguments.only not in name:
            continue
        outcome, reasons = run(case, ranks)
        counts.setdefault(name.split(":")[0], Counter())[outcome] += 1
        print(f"{outcome:<8} {name}", flush=True)
        for reason in reasons:
            print("    " + (reason if arguments.verbose else _in_a_line(reason)), flush=True)
    for file, outcomes in counts.items():
        shares = ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in (PASSED, FAILED, SKIPPED))
        print(f"{file}: {shares} of {outcomes.total()}")


def _in_a_line(reason: str) -> str:
    """The rank, and the line of a traceback that has the error."""
    rank, _, text = reason.partition(": ")
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line[:1].isalpha() and not line.startswith("Traceback")]
    return f"{rank}: {(errors or lines or [''])[0]}"[: shutil.get_terminal_size((160, 0)).columns]


if __name__ == "__main__":
    main()
