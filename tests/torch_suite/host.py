"""A process that has imported torch's DDP tests, and forks the processes of each test.

It reads a test's name per line, and answers with a line of JSON: outcome, output and seconds. `launch.py` starts it.
With the argument `torch` the tests use torch's own class.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import unittest
from contextlib import nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch._dynamo  # A process's first optimizer imports it, which takes seconds.
from torch import multiprocessing
from torch.nn import parallel

import ddpobs
from tests.torch_suite.cpu import CpuTensors, lift_gpu_requirements
from tests.torch_suite.first_backward import EARLIER_ERRORS, first_backward_raises

LIMIT_S = 90
"""Seconds after which a test's processes are killed."""

TESTS_OUR_CLASS = "torch" not in sys.argv
_Base: Any = ddpobs.DistributedDataParallel if TESTS_OUR_CLASS else parallel.DistributedDataParallel


class CpuDDP(_Base):  # type: ignore[misc]
    """The class under test, without device numbers."""

    def __init__(self, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        super().__init__(module, None, None, **kwargs)


def main() -> None:
    """Run a test for each name that arrives, until the input ends."""
    lift_gpu_requirements()
    suite = _import_suite()
    for line in sys.stdin:
        print(json.dumps(_run(suite, line.strip())), flush=True)  # noqa: T201


def _import_suite() -> ModuleType:
    """The module with torch's tests, which use `CpuDDP`."""
    parallel.DistributedDataParallel = CpuDDP  # type: ignore[assignment, misc]
    from torch.testing._internal.distributed import distributed_test

    return distributed_test


def _run(suite: ModuleType, name: str) -> dict[str, Any]:
    """Run a test in processes of its own: torch's parent process, and two ranks."""
    start = time.monotonic()
    with TemporaryDirectory() as folder:
        for subfolder in ("barrier", "test_dir"):
            (Path(folder) / subfolder).mkdir()
        output = Path(folder) / "output"
        output.touch()
        outcome = "missing"
        if hasattr(suite.DistributedTest._DistTestBase, name):
            child = os.fork()
            if not child:
                _run_in_child(suite, name, output)
            status = _wait(child, start + LIMIT_S)
            outcome = {0: "passed", 2: "skipped", None: f"not over after {LIMIT_S} s"}.get(status, "failed")
        text = output.read_text(errors="replace")
    return {"outcome": outcome, "output": text, "seconds": round(time.monotonic() - start, 1)}


def _run_in_child(suite: ModuleType, name: str, output: Path) -> NoReturn:
    os.setsid()
    os.environ["TEMP_DIR"] = str(output.parent)
    log = os.open(output, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    status = 1
    try:
        result = unittest.TextTestRunner(verbosity=2).run(_case(suite, name))
        status = 2 if result.skipped else int(not result.wasSuccessful())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _case(suite: ModuleType, name: str) -> unittest.TestCase:
    """The test in torch's own runner, with ranks that are forked."""

    class TestDistBackendWithFork(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def run_test(self, test_name: str, pipe: Any) -> None:
            torch.set_num_threads(1)
            is_late = TESTS_OUR_CLASS and test_name in EARLIER_ERRORS
            with CpuTensors(), first_backward_raises() if is_late else nullcontext():
                super().run_test(test_name, pipe)

    return TestDistBackendWithFork(name)


def _wait(child: int, deadline: float) -> int | None:
    """The exit status of a child; None if it did not end in time. Its session ends with it."""
    over = None
    while over is None and time.monotonic() < deadline:
        over = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if over is None:
            time.sleep(0.02)
    # Until the child is waited for, no other process can have its number.
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return None if over is None else os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
