"""Capture of this process's telemetry: no collector listens on its port, so batches go to a spool, which is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import zstandard

from ddpobs import TelemetryConfig, telemetry, wire
from ddpobs.export import delivery
from ddpobs.export.spool import Spool

_PAUSE_S = 0.05
"""Between attempts to send: nobody listens, and a training waits for the second one when it ends."""


@dataclass
class Sent:
    """All sent batches, joined by column."""

    config: TelemetryConfig
    batches: list[wire.Batch] = field(default_factory=list)

    @property
    def layouts(self) -> list[wire.Layout]:
        layouts = {(layout.module, layout.revision): layout for batch in self.batches for layout in batch.layouts}
        return [layouts[key] for key in sorted(layouts)]

    @property
    def unused(self) -> list[wire.Unused]:
        return [unused for batch in self.batches for unused in batch.unused]

    @property
    def events(self) -> list[str]:
        return [event.kind for batch in self.batches for event in batch.events]

    def steps(self, column: str) -> list[int]:
        return self._column("steps", column)

    def spans(self, column: str) -> list[int]:
        return self._column("spans", column)

    def comms(self, column: str) -> list[int]:
        return self._column("comms", column)

    def phases(self) -> list[dict[str, int]]:
        """Nanoseconds of each phase, by step."""
        columns = [self.steps(f"{phase}_ns") for phase in wire.PHASES]
        return [dict(zip(wire.PHASES, row, strict=True)) for row in zip(*columns, strict=True)]

    def own(self) -> list[dict[str, int]]:
        """Nanoseconds of each own phase, by step."""
        columns = [self.steps(f"own_{phase}_ns") for phase in wire.OWN_PHASES]
        return [dict(zip(wire.OWN_PHASES, row, strict=True)) for row in zip(*columns, strict=True)]

    def _column(self, records: str, column: str) -> list[int]:
        parts = [getattr(getattr(batch, records), column) for batch in self.batches if getattr(batch, records)]
        return [int(value) for value in np.concatenate(parts)] if parts else []


@contextmanager
def sending() -> Iterator[Sent]:
    """Capture the telemetry of modules that this block builds with `config`; complete when the block ends."""
    with TemporaryDirectory() as name, mock.patch.object(delivery, "pause_s", return_value=_PAUSE_S):
        folder = Path(name)
        capture = Sent(TelemetryConfig(collector="http://127.0.0.1:9", spool=folder, flush_s=0.2, exit_s=5, quiet=True))
        try:
            yield capture
        finally:
            process, telemetry._process = telemetry._process, None
            if process is not None:
                process.close()
            bodies = [spooled.body() for spooled in Spool(folder, 2**30).batches()]
            batches = [wire.decode(zstandard.decompress(body, max_output_size=2**28)) for body in bodies]
            capture.batches = sorted(batches, key=lambda batch: batch.seq)
