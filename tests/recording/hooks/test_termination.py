"""SIGTERM to a real process: flushed, and ended by the signal."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from benchmarks.rig import patience

_PROCESS = """
import os, signal, sys, threading, time
from ddpobs.recording.hooks.termination import Termination
termination = Termination(lambda: print("flushed", flush=True))
BEFORE
print(termination.install(), flush=True)
AFTER
"""


def run(after: str, before: str = "") -> subprocess.Popen[str]:
    script = _PROCESS.replace("BEFORE", before).replace("AFTER", after)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)


def terminated(process: subprocess.Popen[str], expected: str) -> tuple[int, str]:
    """Status and output after SIGTERM, once the process has printed the expected lines."""
    assert process.stdout is not None
    for line in expected.split():
        assert process.stdout.readline().strip() == line
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=patience.HANG_S)[0]
    return process.returncode, output


def test_what_was_recorded_is_flushed_and_the_signal_ends_the_process() -> None:
    assert terminated(run("time.sleep(60)"), "True") == (-signal.SIGTERM, "flushed\n")


def test_a_main_thread_that_never_returns_to_the_interpreter_is_ended() -> None:
    blocked = "import ctypes; ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64))"
    restarting = "signal.siginterrupt(signal.SIGTERM, False); "
    assert terminated(run(restarting + blocked), "True") == (-signal.SIGTERM, "flushed\n")


def test_a_handler_of_the_user_s_stays() -> None:
    theirs = "signal.signal(signal.SIGTERM, lambda *_: (print('theirs', flush=True), sys.exit(3)))"
    assert terminated(run("time.sleep(60)", before=theirs), "True") == (3, "theirs\n")
    later = f"{theirs}; print('set', flush=True); time.sleep(60)"
    assert terminated(run(later), "True set") == (3, "theirs\n")


def test_a_later_handler_that_calls_the_one_before_is_not_ended_by_it() -> None:
    chained = (
        "before = signal.getsignal(signal.SIGTERM)\n"
        "def end(*a): before(*a); time.sleep(0.5); print('orderly', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('set', flush=True)\n"
        "time.sleep(60)"
    )
    assert terminated(run(chained), "True set") == (0, "orderly\n")


def test_a_forked_child_ends_at_once() -> None:
    child = (
        "pid = os.fork()\n"
        "if pid == 0: time.sleep(60)\n"
        "time.sleep(0.2); os.kill(pid, signal.SIGTERM); print(os.waitpid(pid, 0)[1], flush=True)\n"
        "termination.remove(); print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, flush=True); time.sleep(60)"
    )
    assert terminated(run(child), "True 15 True") == (-signal.SIGTERM, "")
