"""Limits of each workspace: defaults from the settings, and values that an operator stored for a workspace."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ddpobs_server.settings import Settings
from ddpobs_server.store import Store
from ddpobs_server.web.problems import Problem

_log = logging.getLogger(__name__)
_REFRESH_S = 5.0
"""Age at which stored limits are read again."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a workspace; None is no limit.

    Attributes:
        share: Largest part of the places and of the memory that all workspaces share.
        max_runs: Stored runs.
        max_series: Series of the active runs.
        batches_per_s: Batches a second, over a few seconds.
        mb_per_s: MB of bodies a second, over a few seconds.
        reads_per_s: Reads and scrapes a second, over a few seconds.
        keep_gb: Stored GB, above which old data are removed.
        keep_runs_days: Days of silence after which a run is removed.
    """

    share: float
    max_runs: int
    max_series: int
    batches_per_s: float | None
    mb_per_s: float | None
    reads_per_s: float | None
    keep_gb: float | None
    keep_runs_days: float | None


def effective_limits(settings: Settings, stored: Mapping[str, Any]) -> Limits:
    """The settings' limits, with the stored values instead where there are any."""
    defaults: dict[str, Any] = {
        "share": settings.workspace_share,
        "max_runs": settings.max_runs,
        "max_series": settings.max_series,
        "batches_per_s": settings.workspace_batches_per_s,
        "mb_per_s": settings.workspace_mb_per_s,
        "reads_per_s": settings.workspace_reads_per_s,
        "keep_gb": settings.workspace_keep_gb,
        "keep_runs_days": settings.keep_runs_days,
    }
    recognised = {name: value for name, value in stored.items() if name in defaults}
    return Limits(**defaults | recognised)


class WorkspaceLimits:
    """Limits by workspace, refreshed from the store every few seconds on a thread.

    Args:
        settings: The defaults.
        store: Holds the stored limits and the tokens, which name the workspaces.
    """

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings, self._store = settings, store
        self._limits: dict[str, Limits] = {}
        self._default = effective_limits(settings, {})
        self._is_shared = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ddpobs-limits", daemon=True)

    def start(self) -> None:
        """Read the limits, then start the thread."""
        self.refresh()
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()

    def refresh(self) -> None:
        """Follow the settings, and read the stored limits; keep the last stored ones if that fails."""
        self._default = effective_limits(self._settings, {})
        try:
            stored, tokens = self._store.workspace_limits(), self._store.tokens()
        except Exception as error:
            _log.warning("limits of workspaces cannot be read: %s: %s", type(error).__name__, error)
            return
        self._limits = {name: effective_limits(self._settings, limits) for name, limits in stored.items()}
        names = {token.workspace for token in tokens if token.revoked_ns is None}
        self._is_shared = len(names) > 1 or (self._settings.token is not None and bool(names))

    def of(self, workspace: str) -> Limits:
        """Limits of a workspace."""
        return self._limits.get(workspace, self._default)

    def share(self, workspace: str) -> float:
        """Part of the shared places and memory that a workspace may use; all if there is no other workspace."""
        return self.of(workspace).share if self._is_shared else 1.0

    def _run(self) -> None:
        while not self._closing.wait(_REFRESH_S):
            self.refresh()


_MAX_WAIT_S, _BURST_S = 1.0, 2.0
"""Longest time for which a request waits for its turn, and the time whose allowance may be used at once."""


class Rate:
    """A steady rate with a burst, as in the generic cell rate algorithm (ITU-T I.371). Times are monotonic seconds."""

    def __init__(self) -> None:
        self._due_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next request is due."""
        return self._due_s - now_s - _BURST_S

    def take(self, amount: float, per_s: float, now_s: float) -> None:
        """Count an amount."""
        self._due_s = max(self._due_s, now_s) + amount / per_s


class Rates:
    """Delays the requests of workspaces that send faster than their limits. Used only on the event loop's thread.

    Args:
        limits: The limits.
    """

    def __init__(self, limits: WorkspaceLimits) -> None:
        self._limits = limits
        self._rates: dict[tuple[str, str], Rate] = {}

    async def wait_to_send(self, workspace: str) -> None:
        """Wait until the workspace's next batch is due, and count it.

        Raises:
            Problem: 429 if that takes long. The response waits too, so that refusals need little work.
        """
        limits = self._limits.of(workspace)
        await self._wait(workspace, ("batches", limits.batches_per_s), ("mb", limits.mb_per_s))

    async def wait_to_read(self, workspace: str) -> None:
        """The same for the workspace's next read."""
        await self._wait(workspace, ("reads", self._limits.of(workspace).reads_per_s))

    def count_bytes(self, workspace: str, size_bytes: int) -> None:
        """Count the bytes of a body that has arrived."""
        if (mb_per_s := self._limits.of(workspace).mb_per_s) is not None:
            self._rate("mb", workspace).take(size_bytes / 1e6, mb_per_s, time.monotonic())

    def _rate(self, kind: str, workspace: str) -> Rate:
        return self._rates.setdefault((kind, workspace), Rate())

    async def _wait(self, workspace: str, *per_s: tuple[str, float | None]) -> None:
        limited = [(kind, self._rate(kind, workspace), rate) for kind, rate in per_s if rate is not None]
        now_s = time.monotonic()
        wait_s = max((rate.wait_s(now_s) for _, rate, _ in limited), default=0.0)
        if wait_s > _MAX_WAIT_S:
            await asyncio.sleep(_MAX_WAIT_S)
            detail = f"workspace {workspace} exceeds its rate limits (`ddpobs-server workspace limits {workspace}`)"
            raise Problem(429, "Too fast", detail, {"Retry-After": str(int(wait_s) + 1)})
        for kind, rate, amount_per_s in limited:
            if kind != "mb":  # Bytes are counted once they have arrived.
                rate.take(1, amount_per_s, now_s)
        if wait_s > 0:
            await asyncio.sleep(wait_s)
