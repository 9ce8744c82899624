"""Places that all workspaces share: each may use a part of them, and waiting workspaces take turns."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class FairSlots:
    """A semaphore with a share for each workspace. Used only on the event loop's thread.

    Args:
        total: Number of places.
        share: Largest part of the places for a workspace, which has at least one place.
    """

    def __init__(self, total: int, share: Callable[[str], float]) -> None:
        self._total, self._share = total, share
        self.in_use: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def place(self, workspace: str) -> AsyncIterator[None]:
        """Hold a place for the block."""
        await self.acquire(workspace)
        try:
            yield
        finally:
            self.release(workspace)

    async def acquire(self, workspace: str) -> None:
        """Take a place; wait for it behind the workspace's earlier requests."""
        if self._has_place(workspace) and workspace not in self._waiting:
            self.in_use[workspace] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(workspace, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(workspace)  # The place was given at the same moment.
            else:
                self._forget(workspace, turn)
            raise

    def release(self, workspace: str) -> None:
        """Return a place, and give free places to waiting requests."""
        self.in_use[workspace] -= 1
        if not self.in_use[workspace]:
            del self.in_use[workspace]
        for name in list(self._waiting):
            while self._has_place(name) and name in self._waiting:
                self._give(name)

    def waiting(self) -> int:
        """Number of requests that wait."""
        return sum(map(len, self._waiting.values()))

    def _has_place(self, workspace: str) -> bool:
        allowed = max(1, int(self._total * self._share(workspace)))
        return self.in_use[workspace] < allowed and self.in_use.total() < self._total

    def _give(self, workspace: str) -> None:
        turns = self._waiting[workspace]
        turn = turns.popleft()
        if turns:
            self._waiting.move_to_end(workspace)
        else:
            del self._waiting[workspace]
        if not turn.done():
            self.in_use[workspace] += 1
            turn.set_result(None)

    def _forget(self, workspace: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(workspace)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[workspace]
