"""Answers kept until what they are about has changed; of those who ask at once, one works it out."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

Answer = TypeVar("Answer")


class Known(NamedTuple, Generic[Answer]):
    """An answer, and the version that it is of."""

    version: Hashable
    answer: Answer


class Cache(Generic[Answer]):
    """The answers asked for last, each of one version of what it is about.

    Args:
        size: Most that are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._known: OrderedDict[Hashable, Known[Answer]] = OrderedDict()
        self._making: dict[tuple[Hashable, Hashable], Future[Answer]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, version: Hashable, make: Callable[[], Answer]) -> Answer:
        """The answer of this version: a known one, or one that is made now, or is being made by another thread.

        Raises:
            Exception: What `make` raised, in every thread that waits for it; nothing is kept then.
        """
        with self._lock:
            known = self._known.get(key)
            if known is not None and known.version == version:
                self._known.move_to_end(key)
                return known.answer
            making = self._making.get((key, version))
            if making is None:
                mine: Future[Answer] = Future()
                self._making[key, version] = mine
        if making is not None:
            return making.result()
        try:
            answer = make()
        except BaseException as error:
            with self._lock:
                del self._making[key, version]
            mine.set_exception(error)
            raise
        with self._lock:
            self._known[key] = Known(version, answer)
            self._known.move_to_end(key)
            while len(self._known) > self._size:
                self._known.popitem(last=False)
            del self._making[key, version]
        mine.set_result(answer)
        return answer

    def known(self, key: Hashable) -> Known[Answer] | None:
        """The last answer made, of whatever version."""
        with self._lock:
            return self._known.get(key)
