"""Bounds the memory of all batches together, from their first byte to their commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Gauge

from ddpobs_server.web.problems import Problem
from ddpobs_server.web.workspace_limits import WorkspaceLimits

_DECODED_RATIO = 10
"""Maximum ratio of a decoded batch's memory to its bytes before decoding."""


class Reservation:
    """One request's share of an `IngestMemoryBudget`."""

    def __init__(self, budget: IngestMemoryBudget, workspace: str) -> None:
        self._budget, self._workspace, self.bytes = budget, workspace, 0

    def add(self, size_bytes: int) -> None:
        """Reserve further memory.

        Raises:
            Problem: 503 if the budget or the workspace's share of it is spent. A request that is alone in its
                workspace may exceed the share, and a request that is alone may exceed the budget.
        """
        self._budget.take(self._workspace, self.bytes, size_bytes)
        self.bytes += size_bytes


class IngestMemoryBudget:
    """Memory of batches from their first byte to their commit. Used only on the event loop's thread.

    Args:
        limit_bytes: Most memory of all requests together.
        limits: Share of each workspace.
        registry: Receives the metric.
    """

    def __init__(self, limit_bytes: int, limits: WorkspaceLimits, registry: CollectorRegistry) -> None:
        self.limit_bytes, self._limits = limit_bytes, limits
        self.in_use: Counter[str] = Counter()
        gauge = Gauge("ddpobs_server_under_way_bytes", "Memory of batches from arrival to commit.", registry=registry)
        gauge.set_function(self.in_use.total)

    @contextmanager
    def reserve(self, workspace: str) -> Iterator[Reservation]:
        """Open a reservation, empty at first, and release it at the end of the block."""
        reservation = Reservation(self, workspace)
        try:
            yield reservation
        finally:
            self.in_use[workspace] -= reservation.bytes
            if not self.in_use[workspace]:
                del self.in_use[workspace]

    def used_ratio(self) -> float:
        """Used part of the budget, or of the share of the workspace that uses most of its own."""
        shares = (used / self._limits.share(workspace) for workspace, used in self.in_use.items())
        return max(self.in_use.total(), *shares, 0.0) / self.limit_bytes

    def take(self, workspace: str, own_bytes: int, size_bytes: int) -> None:
        """Reserve memory for a request of a workspace that has `own_bytes` already.

        Raises:
            Problem: As `Reservation.add`.
        """
        share_bytes = int(self.limit_bytes * self._limits.share(workspace))
        used_bytes = self.in_use[workspace]
        if used_bytes > own_bytes and used_bytes + size_bytes > share_bytes:
            raise _busy(f"batches under way of workspace {workspace} use its share of {share_bytes} bytes")
        if (total := self.in_use.total()) > own_bytes and total + size_bytes > self.limit_bytes:
            raise _busy(f"batches under way use {self.limit_bytes} bytes")
        self.in_use[workspace] += size_bytes


def _busy(reason: str) -> Problem:
    return Problem(503, "Busy", f"{reason} (DDPOBS_SERVER_MAX_UNDER_WAY_MB); try again", {"Retry-After": "1"})


def decoded_bytes(plain_bytes: int) -> int:
    """Most memory of a decoded batch that has `plain_bytes` before decoding."""
    return plain_bytes * _DECODED_RATIO
