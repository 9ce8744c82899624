"""Answers are kept by version, a bounded number of them, and made once for all who ask at the same time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ddpobs_server.reports.cache import Cache


def test_those_who_ask_at_once_get_the_answer_that_one_of_them_made() -> None:
    cache: Cache[object] = Cache(4)
    makers: list[int] = []
    asked, go_on = threading.Barrier(5), threading.Event()

    def make() -> object:
        makers.append(threading.get_ident())
        assert go_on.wait(60)
        return object()

    def ask() -> object:
        asked.wait(60)
        return cache.get("run", 1, make)

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask) for _ in range(4)]
        asked.wait(60)
        time.sleep(0.2)  # The others would begin to make it now.
        go_on.set()
        assert len({id(answer.result(60)) for answer in answers}) == 1
    assert len(makers) == 1


def test_another_version_is_made_anew_and_the_last_one_made_is_known() -> None:
    cache: Cache[str] = Cache(4)
    assert cache.known("run") is None
    assert [cache.get("run", version, lambda v=version: f"of {v}") for version in (1, 1, 2)] == ["of 1", "of 1", "of 2"]
    assert cache.known("run") == (2, "of 2")


def test_only_the_latest_answers_are_kept() -> None:
    cache: Cache[int] = Cache(2)
    for number in (1, 2, 1, 3):
        cache.get(number, 0, lambda n=number: n)
    assert [cache.known(number) is not None for number in (1, 2, 3)] == [True, False, True]


def test_a_failure_is_raised_and_not_kept() -> None:
    cache: Cache[int] = Cache(2)
    with pytest.raises(ZeroDivisionError):
        cache.get("run", 0, lambda: 1 // 0)
    assert cache.get("run", 0, lambda: 7) == 7
