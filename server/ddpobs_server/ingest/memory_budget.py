"""The memory that batches may hold together, from their first byte to their commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Gauge

from ddpobs_server.web.problems import Problem

_IN_MEMORY = 10
"""Most that a batch takes in memory, against its bytes before decoding."""


class Reservation:
    """What one request takes of `IngestMemoryBudget`."""

    def __init__(self, shared: IngestMemoryBudget) -> None:
        self._shared, self.bytes = shared, 0

    def add(self, size_bytes: int) -> None:
        """Take more.

        Raises:
            Problem: 503, where others hold too much already; whoever is alone may go on.
        """
        others = self._shared.bytes - self.bytes
        if others and self._shared.bytes + size_bytes > self._shared.limit_bytes:
            raise Problem(
                503,
                "Busy",
                f"batches under way take {self._shared.limit_bytes} bytes (DDPOBS_SERVER_MAX_UNDER_WAY_MB); try again",
                {"Retry-After": "1"},
            )
        self.bytes += size_bytes
        self._shared.bytes += size_bytes


class IngestMemoryBudget:
    """Memory of batches from their first byte to their commit. Belongs to the event loop's thread.

    Args:
        limit_bytes: Most that all of them may take.
        registry: Takes the metric.
    """

    def __init__(self, limit_bytes: int, registry: CollectorRegistry) -> None:
        self.limit_bytes, self.bytes = limit_bytes, 0
        gauge = Gauge("ddpobs_server_under_way_bytes", "Memory of batches from arrival to commit.", registry=registry)
        gauge.set_function(lambda: self.bytes)

    @contextmanager
    def hold(self) -> Iterator[Reservation]:
        """What is added is given back at the end of the block."""
        held = Reservation(self)
        try:
            yield held
        finally:
            self.bytes -= held.bytes


def memory_bytes(plain: int) -> int:
    """What a batch may take in memory once it is decoded."""
    return plain * _IN_MEMORY
