"""Admission of new runs and sources, up to the configured limits."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

from fastapi.concurrency import run_in_threadpool

from ddpobs_server.settings import Settings
from ddpobs_server.store import Store
from ddpobs_server.web.problems import Problem
from ddpobs_server.web.workspace_limits import WorkspaceLimits

_MAX_REMEMBERED = 100_000
_COUNT_VALID_S = 5.0
"""Seconds for which the count of a run's sources is used."""
_RETRY_LATER = {"Retry-After": "60"}


class Admission:
    """Admits new runs and sources up to the configured limits; known sources are always admitted.

    The limits are approximate: concurrent first batches all pass, and each collector on a shared database counts by
    itself.

    Args:
        settings: `max_sources`.
        limits: `max_runs` of each workspace.
        store: Holds the stored runs and sources.
    """

    def __init__(self, settings: Settings, limits: WorkspaceLimits, store: Store) -> None:
        self._settings, self._limits, self._store = settings, limits, store
        self._admitted: dict[tuple[str, str], None] = {}
        self._remaining: dict[str, tuple[int, float]] = {}
        """By stored run: how many further sources it may have, and until when this count is valid."""
        self._count_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def check(self, workspace: str, run: str, source: str) -> None:
        """Return if the source may send; call `remember` after its batch is stored.

        Raises:
            Problem: 429 if the workspace has too many runs or the run too many sources.
        """
        if self._is_admitted(run, source):
            return
        # All ranks of a job start at once: one rank's count serves the others. Other workspaces do not wait for it.
        async with self._count_locks[workspace]:
            if not self._is_admitted(run, source):
                await run_in_threadpool(self._count_sources, workspace, run, source)

    def remember(self, run: str, source: str) -> None:
        """Record that a batch of the source is stored."""
        self._admitted[run, source] = None
        if len(self._admitted) > _MAX_REMEMBERED:
            del self._admitted[next(iter(self._admitted))]

    def _is_admitted(self, run: str, source: str) -> bool:
        if (run, source) in self._admitted:
            return True
        remaining, valid_until = self._remaining.pop(run, (0, 0.0))
        if remaining == 0 or time.monotonic() > valid_until:
            return False
        self._remaining[run] = remaining - 1, valid_until
        return True

    def _count_sources(self, workspace: str, run: str, source: str) -> None:
        sources, is_known = self._store.count_sources(run, source)
        if sources:
            remaining = max(0, self._settings.max_sources - sources - 1)
            self._remaining[run] = remaining, time.monotonic() + _COUNT_VALID_S
            if len(self._remaining) > _MAX_REMEMBERED:
                del self._remaining[next(iter(self._remaining))]
        if is_known:
            return
        if sources >= self._settings.max_sources:
            detail = f"the run has {sources} sources (DDPOBS_SERVER_MAX_SOURCES); start another run"
            raise Problem(429, "Too many sources", detail, _RETRY_LATER)
        if sources == 0 and (runs := self._store.count_runs(workspace)) >= self._limits.of(workspace).max_runs:
            detail = (
                f"workspace {workspace} has {runs} runs (DDPOBS_SERVER_MAX_RUNS); delete some, or let old runs expire "
                "(DDPOBS_SERVER_KEEP_RUNS_DAYS)"
            )
            raise Problem(429, "Too many runs", detail, _RETRY_LATER)
