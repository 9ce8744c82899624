"""The hooks on uncaught errors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from ddpobs.recording.hooks.failure import UncaughtErrors


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """Errors reported by installed hooks; this thread does not train."""
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    errors: list[BaseException] = []
    hooks = UncaughtErrors(lambda: threading.current_thread().name == "trains", errors.append)
    before = sys.excepthook, threading.excepthook
    hooks.install()
    yield errors
    hooks.remove()
    assert (sys.excepthook, threading.excepthook) == before


@pytest.mark.parametrize(("name", "count"), [("trains", 1), ("writes logs", 0)])
def test_an_error_of_the_training_thread_is_reported(name: str, count: int, reported: list[BaseException]) -> None:
    thread = threading.Thread(target=lambda: 1 / 0, name=name)
    thread.start()
    thread.join()
    assert [type(error) for error in reported] == [ZeroDivisionError] * count


@pytest.mark.parametrize("interactive", [False, True])
def test_an_error_of_a_script_is_reported_and_of_a_session_not(
    interactive: bool, reported: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    if interactive:
        monkeypatch.setattr(sys, "ps1", ">", raising=False)
    error = ValueError("x")
    sys.excepthook(ValueError, error, None)
    assert reported == ([] if interactive else [error])
