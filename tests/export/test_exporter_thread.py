"""The telemetry thread beside what a training process does: fork, and end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.broken import broken
from ddpobs import TelemetryConfig
from ddpobs.clocks import HostClock
from ddpobs.export.exporter import Exporter
from ddpobs.recording.journal import Journal
from tests import patience
from tests.export.test_exporter import encode, event, exporter, until
from tests.integration.collectors import absent, acknowledge, collector

ROOT = Path(__file__).resolve().parents[2]


def forked(child: Callable[[], bool]) -> bool:
    """Whether the child found that it is so."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if child() else 1)
    return os.waitpid(pid, 0)[1] == 0


def test_a_forked_child_finds_no_lock_that_the_thread_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs.export.exporter._REST_S", 20.0)
    library = threading.Lock()

    def call_into_it() -> None:
        with library:
            time.sleep(0.06)

    made = Exporter(TelemetryConfig(collector=absent(), spool=tmp_path), encode)
    made.call_every(0.001, call_into_it)
    made.start()
    assert all(forked(lambda: library.acquire(timeout=5)) for _ in range(20))
    made.close()


def test_a_forked_child_drops_nothing_of_the_parent_s(tmp_path: Path) -> None:
    """An event of CUDA's ends the process that drops it and did not make it."""

    class Event:
        def __del__(self) -> None:
            if os.getpid() != parent:
                os._exit(3)

    parent = os.getpid()
    journal = Journal(HostClock(), lambda _: None)
    journal.comm_ended(0, 0, Event(), Event())
    made = Exporter(TelemetryConfig(collector=absent(), spool=tmp_path), encode)
    made.offer(Event())
    assert forked(lambda: not journal._entries and not made._queue)
    assert len(journal._entries) == 3


def test_forks_do_not_wait_for_a_request_without_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs.export.exporter._REST_S", 10.0)
    with broken("silent") as url:
        sent = exporter(url, tmp_path, exit_s=0.2)
        sent.offer(event())
        until(lambda: sent.queued_sizes)
        began = time.monotonic()
        assert all(forked(lambda: True) for _ in range(10))
        assert time.monotonic() - began < 10
        sent.close()


def test_forks_wait_once_for_a_thread_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs.export.exporter._REST_S", 1.0)
    hangs, goes_on = threading.Event(), threading.Event()
    made = Exporter(TelemetryConfig(collector=absent(), spool=tmp_path, exit_s=0.2), encode)
    made.call_every(0.001, lambda: hangs.set() or goes_on.wait(60))
    made.start()
    assert hangs.wait(20)
    began = time.monotonic()
    assert all(forked(lambda: True) for _ in range(10))
    assert time.monotonic() - began < 6
    goes_on.set()
    made.close()


def test_the_thread_imports_nothing(tmp_path: Path) -> None:
    """A child forked while it did would wait for ever for a module half imported."""
    script = f"""
import sys, threading
from pathlib import Path
from tests.export.test_exporter import event, exporter
def imported(name, args):
    if name == "import" and threading.current_thread().name.startswith("ddpobs-"):
        print(args[0])
sys.addaudithook(imported)
for url in sys.argv[1:]:
    sent = exporter(url, Path({str(tmp_path)!r}))
    sent.offer(event())
    sent.close()
print("done")
"""
    with collector(acknowledge) as seen:
        named = seen.url.replace("127.0.0.1", "localhost")
        assert _python(script, seen.url, named, "https://127.0.0.1:9").stdout == "done\n"
    assert len(seen.puts) == 2


def test_a_process_may_end_while_the_thread_is_in_a_store() -> None:
    """C++ that comes back to an interpreter that is ending is unwound, and aborts the process."""
    script = """
import sys, threading, time
from torch.distributed import TCPStore
from ddpobs import TelemetryConfig
from ddpobs.clocks import HostClock
from ddpobs.exporter import Exporter
from ddpobs.journal import Journal
store = TCPStore("127.0.0.1", 0, 1, True)
ours = store.clone()
began = threading.Event()
def ask():
    began.set()
    end = time.monotonic() + 3.2
    while time.monotonic() < end:
        ours.check(["key"])
made = Exporter(TelemetryConfig(collector="http://127.0.0.1:9", exit_s=4), lambda *_: None)
made.every(0.001, ask)
made.start()
began.wait()
made.close()
"""
    done = _python(script)
    assert (done.returncode, done.stderr) == (0, "")


def _python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return patience.run([sys.executable, "-c", script, *arguments], environ=environ, timeout_s=60, cwd=ROOT)
