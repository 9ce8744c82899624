"""The telemetry thread in a training process that forks and ends."""

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
from benchmarks.rig import patience
from ddpobs import TelemetryConfig
from ddpobs.clocks import HostClock
from ddpobs.export.exporter import Exporter
from ddpobs.recording.journal import Journal
from tests.support.exporters import encode, event, exporter
from tests.support.integration.collectors import absent, acknowledge, collector

ROOT = Path(__file__).resolve().parents[2]


def forked(child: Callable[[], bool]) -> bool:
    """Evaluate a condition in a forked child."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if child() else 1)
    return os.waitpid(pid, 0)[1] == 0


def test_a_forked_child_inherits_no_lock_of_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs.export.exporter._FORK_PAUSE_S", 20.0)
    library = threading.Lock()

    def call_into_it() -> None:
        with library:
            time.sleep(0.06)

    running = Exporter(TelemetryConfig(collector=absent(), spool=tmp_path), encode)
    running.call_every(0.001, call_into_it)
    running.start()
    assert all(forked(lambda: library.acquire(timeout=5)) for _ in range(20))
    running.close()


def test_a_forked_child_deletes_none_of_the_parents_records(tmp_path: Path) -> None:
    """A CUDA event ends a process that deletes it without having created it."""

    class Event:
        def __del__(self) -> None:
            if os.getpid() != parent:
                os._exit(3)

    parent = os.getpid()
    journal = Journal(HostClock(), lambda _: None)
    journal.waits.comm_ended(0, 0, Event(), Event())
    running = Exporter(TelemetryConfig(collector=absent(), spool=tmp_path), encode)
    running.offer(Event())
    assert forked(lambda: not journal.entries._queue and not running._queue)
    assert len(journal.entries._queue) == 3


def test_forks_do_not_wait_for_a_request_without_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs.export.exporter._FORK_PAUSE_S", 10.0)
    with broken("silent") as url:
        running = exporter(url, tmp_path, exit_s=0.2)
        running.offer(event())
        patience.until(lambda: running.queued_sizes)
        began = time.monotonic()
        assert all(forked(lambda: True) for _ in range(10))
        assert time.monotonic() - began < 10
        running.close()


def test_forks_wait_once_for_a_thread_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpobs.export.exporter._FORK_PAUSE_S", 3.0)
    hangs, resumes = threading.Event(), threading.Event()
    running = Exporter(TelemetryConfig(collector=absent(), spool=tmp_path, exit_s=0.2), encode)

    def hang() -> None:
        hangs.set()
        resumes.wait(60)

    running.call_every(0.001, hang)
    running.start()
    assert hangs.wait(20)
    began = time.monotonic()
    assert all(forked(lambda: True) for _ in range(10))
    assert time.monotonic() - began < 20  # Ten pauses take 30 s.
    resumes.set()
    running.close()


def test_the_thread_imports_nothing(tmp_path: Path) -> None:
    """A child forked during an import would wait forever for the half-imported module."""
    script = f"""
import sys, threading
from pathlib import Path
from tests.support.exporters import event, exporter
def imported(name, args):
    if name == "import" and threading.current_thread().name.startswith("ddpobs-"):
        print(args[0])
sys.addaudithook(imported)
for url in sys.argv[1:]:
    running = exporter(url, Path({str(tmp_path)!r}))
    running.offer(event())
    running.close()
print("done")
"""
    with collector(acknowledge) as server:
        by_name = server.url.replace("127.0.0.1", "localhost")
        assert _python(script, server.url, by_name, "https://127.0.0.1:9").stdout == "done\n"
    assert len(server.puts) == 2


def test_a_process_may_end_while_the_thread_is_in_a_store() -> None:
    """C++ code that returns to an ending interpreter is unwound, which aborts the process."""
    script = """
import sys, threading, time
from torch.distributed import TCPStore
from ddpobs import TelemetryConfig
from ddpobs.clocks import HostClock
from ddpobs.export.exporter import Exporter
from ddpobs.recording.journal import Journal
store = TCPStore("127.0.0.1", 0, 1, True)
ours = store.clone()
began = threading.Event()
def check():
    began.set()
    end = time.monotonic() + 3.2
    while time.monotonic() < end:
        ours.check(["key"])
running = Exporter(TelemetryConfig(collector="http://127.0.0.1:9", exit_s=4), lambda *_: None)
running.call_every(0.001, check)
running.start()
began.wait()
running.close()
"""
    completed = _python(script)
    assert (completed.returncode, completed.stderr) == (0, "")


def _python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return patience.run([sys.executable, "-c", script, *arguments], environ=environ, cwd=ROOT)
