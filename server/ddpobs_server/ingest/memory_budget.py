"""Bounds the memory of all batches together, from their first byte to their commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Gauge

from ddpobs_server.web.problems import Problem

_DECODED_RATIO = 10
"""Largest ratio of a decoded batch's memory to its bytes before decoding."""


class Reservation:
    """One request's share of an `IngestMemoryBudget`."""

    def __init__(self, budget: IngestMemoryBudget) -> None:
        self._budget, self.bytes = budget, 0

    def add(self, size_bytes: int) -> None:
        """Reserve further memory.

        Raises:
            Problem: 503 if the budget is spent. A request that is alone may exceed the budget.
        """
        budget = self._budget
        if budget.bytes > self.bytes and budget.bytes + size_bytes > budget.limit_bytes:
            raise Problem(
                503,
                "Busy",
                f"batches under way use {budget.limit_bytes} bytes (DDPOBS_SERVER_MAX_UNDER_WAY_MB); try again",
                {"Retry-After": "1"},
            )
        self.bytes += size_bytes
        budget.bytes += size_bytes


class IngestMemoryBudget:
    """Memory of batches from their first byte to their commit. Used only on the event loop's thread.

    Args:
        limit_bytes: Most memory of all requests together.
        registry: Receives the metric.
    """

    def __init__(self, limit_bytes: int, registry: CollectorRegistry) -> None:
        self.limit_bytes, self.bytes = limit_bytes, 0
        gauge = Gauge("ddpobs_server_under_way_bytes", "Memory of batches from arrival to commit.", registry=registry)
        gauge.set_function(lambda: self.bytes)

    @contextmanager
    def reserve(self) -> Iterator[Reservation]:
        """Open a reservation, empty at first, and release it at the end of the block."""
        reservation = Reservation(self)
        try:
            yield reservation
        finally:
            self.bytes -= reservation.bytes


def decoded_bytes(plain_bytes: int) -> int:
    """Most memory of a decoded batch that has `plain_bytes` before decoding."""
    return plain_bytes * _DECODED_RATIO
