"""The run of Horovod's tests, with a checkout of three small files in the place of Horovod's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks import horovod_suite

ROOT = Path(__file__).resolve().parents[2]
TORCH = """
import unittest
import mock, pytest, torch
import horovod.torch as hvd
from common import ONE
from horovod.runner.util.threads import in_thread

class TorchTests(unittest.TestCase):
    def test_sum(self):
        hvd.init()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2 * ONE
    def test_wrong_on_one_rank(self):
        hvd.init()
        self.assertEqual(hvd.rank(), 0, "not the first")
    def test_raising(self):
        raise RuntimeError("several\\nlines")
    def test_of_gpus(self):
        self.skipTest("No GPUs available")
    @pytest.mark.skip(reason="flaky")
    def test_flaky(self):
        raise AssertionError
    def test_ending(self):
        import os
        os._exit(3)
"""
ELASTIC = """
import unittest
import horovod.torch as hvd

class TorchElasticTests(unittest.TestCase):
    def test_size(self):
        hvd.init()
        assert hvd.size() == 1
"""
EXPECTED = """\
passed   test_torch: test_sum
failed   test_torch: test_wrong_on_one_rank
    rank 1: AssertionError: 1 != 0 : not the first
failed   test_torch: test_raising
    rank 0: RuntimeError: several
    rank 1: RuntimeError: several
skipped  test_torch: test_of_gpus
    rank 0: No GPUs available
    rank 1: No GPUs available
skipped  test_torch: test_flaky
    rank 0: flaky
    rank 1: flaky
failed   test_torch: test_ending
    rank 0: the process ended, or was killed after 180 s
    rank 1: the process ended, or was killed after 180 s
passed   test_torch_elastic: test_size
test_torch: 1 passed, 3 failed, 2 skipped of 6
test_torch_elastic: 1 passed, 0 failed, 0 skipped of 1
"""


def test_each_tests_outcome_is_printed_with_its_reason(tmp_path: Path) -> None:
    for path, text in zip((*horovod_suite.FILES, "test/utils/common.py"), (TORCH, ELASTIC, "ONE = 1"), strict=True):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    command = [sys.executable, "-m", "benchmarks.horovod_suite", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(EXPECTED.splitlines())
