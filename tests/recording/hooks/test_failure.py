"""The description of an error that ends a training, and the hooks on uncaught errors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest

from ddpobs.recording.hooks.failure import UncaughtErrors, describe


class UnprintableError(Exception):
    """An error of the user's whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError


def raised(error: BaseException, depth: int = 0) -> BaseException:
    def fail(level: int) -> None:
        if level:
            fail(level - 1)
        raise error

    try:
        fail(depth)
    except BaseException as caught:
        return caught
    raise AssertionError


def test_an_error_is_described_by_type_message_and_last_lines() -> None:
    detail = describe(raised(ValueError("x" * 600), depth=20), texts=True)
    assert (detail["error"], detail["message"]) == ("ValueError", "x" * 500)
    text = detail["traceback"]
    assert isinstance(text, str)
    assert len(text.splitlines()) == 10
    assert text.endswith(f"ValueError: {'x' * 600}")


def test_a_long_traceback_is_cut_at_its_begin() -> None:
    text = describe(raised(ValueError("€" * 3000 + "end")), texts=True)["traceback"]
    assert isinstance(text, str)
    assert len(text.encode()) <= 2000
    assert text.endswith("€end")


def test_without_texts_only_the_type_remains() -> None:
    assert describe(raised(ValueError("secret")), texts=False) == {"error": "ValueError"}


@pytest.mark.parametrize("error", [UnprintableError(), ValueError("\udcff")], ids=["unprintable", "surrogate"])
def test_any_text_can_be_sent(error: Exception) -> None:
    assert msgspec.json.encode(describe(raised(error), texts=True))


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
