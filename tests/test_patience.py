from __future__ import annotations

import os
import sys

import pytest

from tests import patience

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


def test_what_hangs_says_where_though_whoever_started_it_is_gone() -> None:
    with pytest.raises(AssertionError, match=r"(?s)did not end within 3 s.*began.*in in_the_orphan"):
        patience.run([sys.executable, "-c", _SCRIPT], environ=os.environ, timeout_s=3)


def test_what_ends_is_as_subprocess_gives_it() -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); raise SystemExit(3)"
    done = patience.run([sys.executable, "-c", script], environ=os.environ, timeout_s=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "out\n", "err\n")
