"""From queued records to encoded batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zstandard

from ddpobs import wire
from ddpobs.clocks import anchor
from ddpobs.export.identity import Envelope, Identity
from ddpobs.export.once import Once
from ddpobs.export.record_queue import RecordQueue
from ddpobs.export.spool import Encoded


class BatchCutter:
    """Cuts batches, each with the counts of records so far.

    Args:
        queue: The records.
        encoder: Builds a batch from records.
        warn: Logs warnings.

    Attributes:
        identity: Of the batches; until it is set, records wait in the queue.
        is_urgent: The next batch is to be cut and sent at once.
    """

    def __init__(
        self, queue: RecordQueue, encoder: Callable[[Sequence[object], Envelope], wire.Batch], warn: Once
    ) -> None:
        self._queue, self._encoder, self._warn = queue, encoder, warn
        self.identity: Identity | None = None
        self.is_urgent = False
        self._latest: object = None
        self._seq = 0
        self._reported_dropped = 0

    def offer_latest(self, record: object, urgent: bool) -> None:
        """Send a record with the next batch. It replaces the previous such record, and is not counted."""
        if urgent or not self.is_urgent:
            self._latest = record
        self.is_urgent = self.is_urgent or urgent

    def is_due(self, flushes: bool, idle: bool) -> bool:
        """Whether a batch is to be cut now.

        Args:
            flushes: A batch need not be full.
            idle: The collector has accepted the previous batch; otherwise a latest record alone waits.
        """
        if self.identity is None:
            return False
        if self._queue.is_ready:
            return flushes or self._queue.fills_a_batch
        return flushes and self._latest is not None and (self.is_urgent or idle)

    @property
    def has_any(self) -> bool:
        """Whether anything can be cut."""
        return self.identity is not None and (self._queue.is_ready or self._latest is not None)

    @property
    def has_losses(self) -> bool:
        """Whether records were lost that no batch has reported."""
        return self.identity is not None and self._queue.dropped != self._reported_dropped

    def cut(self) -> Encoded | None:
        """Cut one batch; None if the identity is not set, or after an error, which loses the batch."""
        if self.identity is None:
            return None
        records, weight = self._queue.take()
        if self._latest is not None:
            records.append(self._latest)
            self._latest = None
        envelope = Envelope(
            **vars(self.identity),
            seq=self._seq,
            emitted=self._queue.emitted,
            dropped=self._queue.dropped,
            anchor=anchor(),
        )
        self._seq += 1
        self._reported_dropped = envelope.dropped
        try:
            body = zstandard.compress(wire.encode(self._encoder(records, envelope)), 1)
        except Exception:
            self._queue.count_lost(weight)
            self._warn("batch", "telemetry failed (batch); training goes on", trace=True)
            return None
        return Encoded(self.identity.run, self.identity.source, envelope.seq, weight, body)
