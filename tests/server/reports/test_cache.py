"""Answers are cached by version, in a bounded number; concurrent requests compute an answer once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from ddpobs_server.reports.cache import Cache


def test_concurrent_requests_get_an_answer_that_is_computed_once() -> None:
    cache: Cache[object] = Cache(4)
    computing_threads: list[int] = []
    requested, may_continue = threading.Barrier(5), threading.Event()

    def compute() -> object:
        computing_threads.append(threading.get_ident())
        assert may_continue.wait(60)
        return object()

    def request() -> object:
        requested.wait(60)
        return cache.get("run", 1, compute)

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(request) for _ in range(4)]
        requested.wait(60)
        time.sleep(0.2)  # Without the cache the other threads would begin to compute now.
        ((version, pending),) = cache.pending("run")
        may_continue.set()
        assert {id(answer.result(60)) for answer in answers} == {id(pending.result(60))}
    assert (version, len(computing_threads)) == (1, 1)
    assert cache.pending("run") == []


def test_another_version_is_computed_again_and_the_latest_answer_is_cached() -> None:
    cache: Cache[str] = Cache(4)
    assert cache.latest("run") is None
    assert [cache.get("run", version, partial("of {}".format, version)) for version in (1, 1, 2)] == [
        "of 1",
        "of 1",
        "of 2",
    ]
    assert cache.latest("run") == (2, "of 2")


def test_only_the_latest_answers_are_cached() -> None:
    cache: Cache[int] = Cache(2)
    for number in (1, 2, 1, 3):
        cache.get(number, 0, partial(int, number))
    assert [cache.latest(number) is not None for number in (1, 2, 3)] == [True, False, True]


def test_a_failure_is_raised_and_not_cached() -> None:
    cache: Cache[int] = Cache(2)
    with pytest.raises(ZeroDivisionError):
        cache.get("run", 0, lambda: 1 // 0)
    assert cache.get("run", 0, lambda: 7) == 7
