"""Admission of new runs and sources, up to the configured limits."""

from __future__ import annotations

import asyncio
import time

from fastapi.concurrency import run_in_threadpool

from ddpobs_server.settings import Settings
from ddpobs_server.store import Store
from ddpobs_server.web.problems import Problem

_REMEMBERED = 100_000


_COUNTED_S = 5.0
"""How long a count of a run's sources is gone by."""


_LATER = {"Retry-After": "60"}


class Admission:
    """Lets new runs and new sources in until there are too many; those that are known always may send.

    Those that arrive before the first of them is stored are all let in, and several collectors on one database count
    for themselves: there may be a few more.

    Args:
        settings: `max_runs` and `max_sources`.
        store: Knows who is there.
    """

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings, self._store = settings, store
        self._known: dict[tuple[str, str], None] = {}
        self._left: dict[str, tuple[int, float]] = {}
        """Of runs that are stored, how many sources more each may have, and until when that holds."""
        self._counting = asyncio.Lock()

    async def check(self, workspace: str, run: str, source: str) -> None:
        """Return where the source may send; `remember` it once it has.

        Raises:
            Problem: 429, where the workspace has too many runs or the run too many sources.
        """
        if self._let_in(run, source):
            return
        async with self._counting:  # All ranks of a job begin at once: what one has found holds for the others.
            if not self._let_in(run, source):
                await run_in_threadpool(self._count, workspace, run, source)

    def remember(self, run: str, source: str) -> None:
        """A batch of the source is stored."""
        self._known[run, source] = None
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def _let_in(self, run: str, source: str) -> bool:
        if (run, source) in self._known:
            return True
        left, until = self._left.pop(run, (0, 0.0))
        if left == 0 or time.monotonic() > until:
            return False
        self._left[run] = left - 1, until
        return True

    def _count(self, workspace: str, run: str, source: str) -> None:
        sources, known = self._store.count_sources(run, source)
        if sources:
            self._left[run] = max(0, self._settings.max_sources - sources - 1), time.monotonic() + _COUNTED_S
            if len(self._left) > _REMEMBERED:
                del self._left[next(iter(self._left))]
        if known:
            return
        if sources >= self._settings.max_sources:
            raise Problem(
                429,
                "Too many sources",
                f"the run has {sources} sources (DDPOBS_SERVER_MAX_SOURCES); start another run",
                _LATER,
            )
        if sources == 0 and (runs := self._store.count_runs(workspace)) >= self._settings.max_runs:
            raise Problem(
                429,
                "Too many runs",
                f"workspace {workspace} has {runs} runs (DDPOBS_SERVER_MAX_RUNS); delete some, or have them expire",
                _LATER,
            )
