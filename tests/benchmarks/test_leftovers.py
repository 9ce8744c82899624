"""`benchmarks.rig.leftovers`: what a session of pytest leaves behind is ended, and fails the session."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.rig import leftovers, patience

pytestmark = pytest.mark.wide

ROOT = Path(__file__).resolve().parents[2]
LEAVES_AN_ORPHAN = """
import subprocess
def test_leaves_an_orphan():
    subprocess.run(["sh", "-c", "sleep 600 & echo $! > pid"], stdout=subprocess.DEVNULL)
"""
WAITS = """
import subprocess, time
from pathlib import Path
def test_waits():
    process = subprocess.Popen(["sleep", "600"])
    try:
        Path("pid").write_text(f"{process.pid}\\n")
        time.sleep(600)
    finally:
        process.kill()
        process.wait()
"""


def session(folder: Path, code: str, *arguments: str) -> subprocess.Popen[str]:
    """A session of pytest with this project's settings of tests."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (folder / "test_it.py").write_text(code)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", *arguments, "."]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)


def is_over(folder: Path) -> bool:
    """Whether the process whose number the session wrote has ended."""
    return (folder / "pid").read_text().strip() not in map(str, leftovers.started(os.environ[leftovers.MARK]))


@pytest.mark.parametrize("arguments", [(), ("-n", "1")])
def test_an_orphan_fails_the_session_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    with session(tmp_path, LEAVES_AN_ORPHAN, *arguments) as running:
        output, _ = running.communicate(timeout=patience.HANG_S)
    assert running.returncode == 1
    assert "tests left behind: process" in output
    assert "(sleep 600, of test_it.py::test_leaves_an_orphan (call))" in output
    assert is_over(tmp_path)


@pytest.mark.parametrize("arguments", [(), ("-n", "1")])
def test_sigterm_ends_a_session_with_its_processes(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with session(tmp_path, WAITS, *arguments) as running:
        deadline = time.monotonic() + patience.HANG_S
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=patience.HANG_S)
    assert running.returncode != 0
    assert is_over(tmp_path)
