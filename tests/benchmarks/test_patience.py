"""`benchmarks.rig.patience`: end and output of commands, with stacks of those that hang."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks.rig import patience

_SCRIPT = """
import os, time
def in_the_orphan():
    time.sleep(600)
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        in_the_orphan()
    os._exit(0)
os.wait()
print("began", flush=True)
"""


def test_a_hanging_orphan_is_reported_with_its_stack() -> None:
    with pytest.raises(AssertionError, match=r"(?s)did not end within 3 s.*began.*in in_the_orphan"):
        patience.run([sys.executable, "-c", _SCRIPT], environ=os.environ, timeout_s=3)


def test_a_command_that_ends_has_the_result_of_subprocess() -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); raise SystemExit(3)"
    completed = patience.run([sys.executable, "-c", script], environ=os.environ, timeout_s=60)
    assert (completed.returncode, completed.stdout, completed.stderr) == (3, "out\n", "err\n")
