"""Names of the parameters that a backward left out, sent when they change."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ddpobs import wire

_MAX_PER_BATCH = 2_000
"""Maximum number of names in a batch; the collector refuses batches with too many names."""


class UnusedNames:
    """The names of one module.

    If they change all the time (experts, dropped layers), they would fill the batch, and the batch would be refused.
    Beyond `_MAX_PER_BATCH` names only the latest set is sent, with the next batch.

    Args:
        module: Index of the module.
        offer: Sends a record.
    """

    def __init__(self, module: int, offer: Callable[[object], object]) -> None:
        self._module, self._offer = module, offer
        self._latest: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._sent = 0
        self._pending: wire.Unused | None = None
        self._sending = threading.Lock()

    def record(self, step: int, locally: tuple[str, ...], globally: tuple[str, ...]) -> None:
        """Record the names of a step: those unused on this rank, and those unused on every rank."""
        if (locally, globally) == self._latest:
            return
        self._latest = locally, globally
        unused = wire.Unused(step=step, module=self._module, locally=list(locally), globally=list(globally))
        with self._sending:
            self._pending = None
            if self._sent < _MAX_PER_BATCH:
                self._send(unused)
            else:
                self._pending = unused

    def batch_cut(self) -> None:
        """Begin a new batch, with the pending names; called on the telemetry thread."""
        with self._sending:
            self._sent = 0
            pending, self._pending = self._pending, None
            if pending is not None:
                self._send(pending)

    def _send(self, unused: wire.Unused) -> None:
        self._sent += len(unused.locally) + len(unused.globally)
        self._offer(unused)
