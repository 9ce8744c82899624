"""A cache of answers by version; concurrent requests for one answer compute it once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

Answer = TypeVar("Answer")


class CachedAnswer(NamedTuple, Generic[Answer]):
    """An answer and its version."""

    version: Hashable
    answer: Answer


class Cache(Generic[Answer]):
    """The most recently used answers, the latest version of each.

    Args:
        size: Most answers that are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: OrderedDict[Hashable, CachedAnswer[Answer]] = OrderedDict()
        self._pending: dict[tuple[Hashable, Hashable], Future[Answer]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, version: Hashable, compute: Callable[[], Answer]) -> Answer:
        """Return the answer of this version: the cached one, a computed one, or the result of another thread.

        Raises:
            Exception: The exception of `compute`, in every thread that waits for the answer; nothing is cached then.
        """
        with self._lock:
            cached = self._answers.get(key)
            if cached is not None and cached.version == version:
                self._answers.move_to_end(key)
                return cached.answer
            pending = self._pending.get((key, version))
            if pending is None:
                own: Future[Answer] = Future()
                self._pending[key, version] = own
        if pending is not None:
            return pending.result()
        try:
            answer = compute()
        except BaseException as error:
            with self._lock:
                del self._pending[key, version]
            own.set_exception(error)
            raise
        with self._lock:
            self._add(key, CachedAnswer(version, answer))
            del self._pending[key, version]
        own.set_result(answer)
        return answer

    def _add(self, key: Hashable, cached: CachedAnswer[Answer]) -> None:
        self._answers[key] = cached
        self._answers.move_to_end(key)
        while len(self._answers) > self._size:
            self._answers.popitem(last=False)

    def latest(self, key: Hashable) -> CachedAnswer[Answer] | None:
        """Return the last computed answer, of any version."""
        with self._lock:
            return self._answers.get(key)
