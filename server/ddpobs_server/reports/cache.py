"""A cache of responses by version; concurrent requests for one response compute it once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, NamedTuple, TypeVar

Response = TypeVar("Response")


class CachedResponse(NamedTuple, Generic[Response]):
    """A response and its version."""

    version: Hashable
    response: Response


class Cache(Generic[Response]):
    """The most recently used responses, the latest version of each.

    Args:
        size: Most responses that are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._responses: OrderedDict[Hashable, CachedResponse[Response]] = OrderedDict()
        self._pending: dict[tuple[Hashable, Hashable], Future[Response]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, version: Hashable, compute: Callable[[], Response]) -> Response:
        """Return the response of this version: the cached one, a computed one, or the result of another thread.

        Raises:
            Exception: The exception of `compute`, in every thread that waits for the response; nothing is cached then.
        """
        with self._lock:
            cached = self._responses.get(key)
            if cached is not None and cached.version == version:
                self._responses.move_to_end(key)
                return cached.response
            pending = self._pending.get((key, version))
            if pending is None:
                own: Future[Response] = Future()
                self._pending[key, version] = own
        if pending is not None:
            return pending.result()
        try:
            response = compute()
        except BaseException as error:
            with self._lock:
                del self._pending[key, version]
            own.set_exception(error)
            raise
        with self._lock:
            self._add(key, CachedResponse(version, response))
            del self._pending[key, version]
        own.set_result(response)
        return response

    def _add(self, key: Hashable, cached: CachedResponse[Response]) -> None:
        self._responses[key] = cached
        self._responses.move_to_end(key)
        while len(self._responses) > self._size:
            self._responses.popitem(last=False)

    def pending(self, key: Hashable) -> list[tuple[Hashable, Future[Response]]]:
        """Return the versions that are computed now, in the order of their begin."""
        with self._lock:
            return [(version, future) for (known, version), future in self._pending.items() if known == key]

    def latest(self, key: Hashable) -> CachedResponse[Response] | None:
        """Return the last computed response, of any version."""
        with self._lock:
            return self._responses.get(key)
