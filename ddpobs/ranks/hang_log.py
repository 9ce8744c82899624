"""The verdict on a hang in a rank's log, so that a hang is named without a collector too.

A rank that stands still reads the pulses of all ranks from the store, on a thread of its own: if the process that hosts
the store is stopped, a read waits for ever, and pulses must go on meanwhile. The thread has its own connection, because
calls on a shared one wait for each other. It starts with the first hang.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ddpobs import wire
from ddpobs.ranks.hang_report import HangReport
from ddpobs.shared.hang_verdict import BucketLookup, Hang

_log = logging.getLogger("ddpobs")
_READ_AFTER = 0.5
"""Share of its patience after which a rank reads the other ranks' pulses, to see in time which of them are silent."""


class HangLog:
    """Logs the verdict when it appears or changes, and once when it is over.

    Args:
        connect: Connects to the store again, under the prefix of this attempt.
        rank: This process's rank.
        world_size: Number of ranks.
        buckets: Finds a bucket.
    """

    def __init__(
        self, connect: Callable[[], Any], rank: int, world_size: int, buckets: BucketLookup = lambda *_: None
    ) -> None:
        self._connect, self._rank, self._world_size = connect, rank, world_size
        self._buckets = buckets
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._ends = False
        self._stands_still = False
        self._logged: object = None
        self._since = 0.0
        self._report: HangReport | None = None

    @property
    def processes(self) -> dict[int, str]:
        """State of this host's processes that no longer run, by rank, as of the last verdict."""
        report = self._report if self._stands_still else None
        return dict(report.processes) if report is not None else {}

    def follow(self, pulse: wire.Pulse) -> None:
        """Judge if the rank stands still; never waits."""
        self._stands_still = pulse.idle_ns >= _READ_AFTER * pulse.patience_ns
        if self._stands_still and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ddpobs-hangs", daemon=True)
            self._thread.start()
        if self._thread is not None:
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """End the thread. A read that waits for ever is abandoned."""
        self._ends = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._wake.wait() and not self._ends:
                self._wake.clear()
                if self._report is None:
                    self._report = HangReport(self._connect(), self._rank, self._world_size)
                self._show(self._report.judge(self._buckets) if self._stands_still else None)
        except dist.DistNetworkError:
            _log.info("ddpobs: rendezvous store closed: hang detection off")
        except Exception:
            _log.exception("ddpobs: telemetry failed in the verdict on hangs; training goes on")

    def _show(self, hang: Hang | None) -> None:
        verdict = None if hang is None else (hang.kind, hang.ranks, hang.module, hang.bucket)
        if verdict == self._logged or self._ends:
            return
        if hang is None:
            _log.warning("ddpobs: the run goes on after %.0f s", time.monotonic() - self._since)
        else:
            if self._logged is None:
                self._since = time.monotonic() - hang.since_ns / 1e9
            _log.warning("ddpobs: %s", hang.line)
        self._logged = verdict
