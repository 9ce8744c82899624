"""A queue in which workspaces take turns, so that an item waits for few items of each other workspace."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from typing import Generic, TypeVar

_RECENT_S = 10.0
"""Time for which a workspace counts as active after an item."""
Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """First in, first out within a workspace. Safe to use from several threads."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Item]] = OrderedDict()
        self._size, self._is_closed = 0, False
        self._latest: dict[str, float] = {}
        self._changed = threading.Condition(threading.Lock())

    def put(self, workspace: str, item: Item, *, urgent: bool = False) -> None:
        """Add an item; an urgent one is the next of its workspace."""
        with self._changed:
            items = self._queues.setdefault(workspace, deque())
            (items.appendleft if urgent else items.append)(item)
            self._latest[workspace] = time.monotonic()
            self._size += 1
            self._changed.notify()

    def get(self) -> tuple[str, Item] | None:
        """Wait for an item of the workspace whose turn it is, and take it; None once the queue is closed and empty."""
        with self._changed:
            while not self._size:
                if self._is_closed:
                    return None
                self._changed.wait()
            workspace, items = next(iter(self._queues.items()))
            item = items.popleft()
            self._size -= 1
            if items:
                self._queues.move_to_end(workspace)
            else:
                del self._queues[workspace]
        return workspace, item

    def close(self) -> None:
        """Let `get` return None after the last item."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def qsize(self) -> int:
        """Number of items."""
        return self._size

    def sizes(self) -> dict[str, int]:
        """Number of items of each workspace that has any."""
        with self._changed:
            return {workspace: len(items) for workspace, items in self._queues.items()}

    def is_shared(self) -> bool:
        """Whether several workspaces have added items within the last seconds."""
        with self._changed:
            if len(self._latest) > 1:
                since = time.monotonic() - _RECENT_S
                self._latest = {workspace: at for workspace, at in self._latest.items() if at >= since}
            return len(self._latest) > 1

    def size_of(self, workspace: str) -> int:
        """Number of a workspace's items."""
        with self._changed:
            return len(self._queues.get(workspace, ()))
