"""Works over MPI requests, completed by one thread of the process.

The thread that starts a collective hands its requests over and goes on; MPI must allow this (MPI_THREAD_MULTIPLE). MPI
moves data only while a thread is inside of it, and no call of MPI waits with a timeout. So the thread tests the
requests again and again and sleeps in between: a thread that spins would take the processor from training.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from ddpobs.mpi.library import MPI
from ddpobs.torch_seam.collectives import value_of

_SPINS = 20
"""Tests without a sleep after a work was started or completed."""
_SHORTEST_S, _LONGEST_S = 20e-6, 200e-6
_PATIENCE = 20
"""A sleep is at most this fraction of the time since the last work was started or completed."""
_NO_TIMEOUT = timedelta(0)


class MpiWork(dist._Work):
    """A started collective, or a started message.

    Args:
        name: The collective, for errors.
        requests: MPI's requests; the work is complete when all of them are.
        tensors: The result, which the future holds.
        timeout: Time after which the work fails.
        finish: Called when the requests are complete, before the work is: copies the result to its tensors.
        keep: Further objects whose memory MPI uses.
        broken: Called with the error if the work fails.
    """

    recorded = False
    """Whether telemetry records the wait: a work of the user's, not of a reducer's."""

    def __init__(  # noqa: PLR0917
        self,
        name: str,
        requests: Sequence[MPI.Request],
        tensors: list[torch.Tensor],
        timeout: timedelta,
        finish: Callable[[], None] | None = None,
        keep: Any = None,
        broken: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        super().__init__()
        self._name, self._requests, self._tensors, self._keep = name, list(requests), tensors, keep
        self._timeout_s = timeout.total_seconds()
        self._deadline_s = time.monotonic() + self._timeout_s
        self._finish, self._broken = finish, broken
        self._error: Exception | None = None
        self._source = -1
        self._ended: Future[None] = Future()
        # The outcome of `then` is an error for C++ too; `set_exception` makes one for Python alone.
        self._future = self._ended.then(self._outcome)

    def test(self) -> bool:
        """Whether the work has ended, which this call does if its requests have."""
        statuses = [MPI.Status() for _ in self._requests]
        try:
            complete = MPI.Request.Testall(self._requests, statuses)
            if not complete and time.monotonic() < self._deadline_s:
                return False
            if not complete:
                self._fail(f"Timed out waiting {self._timeout_s * 1000:.0f}ms for {self._name} over MPI to complete")
            else:
                self._source = statuses[0].Get_source() if statuses else -1
                if self._finish is not None:
                    self._finish()
        except Exception as error:
            self._fail(f"{self._name} over MPI failed: {error}")
        self._keep = self._finish = None
        self._ended.set_result(None)
        return True

    def abandon(self) -> None:
        """Fail the work, because the process ends."""
        self._fail(f"{self._name} over MPI was not complete when the process ended")
        self._ended.set_result(None)

    def _fail(self, message: str) -> None:
        self._error = dist.DistBackendError(message)
        self._broken(self._error)

    def _outcome(self, _ended: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the work is complete; raises its error, or an error at the end of the timeout."""
        if timeout:
            deadline_s = time.monotonic() + timeout.total_seconds()
            while not self._future.done():
                if time.monotonic() > deadline_s:
                    limit_ms = timeout.total_seconds() * 1000
                    raise dist.DistBackendError(f"Timed out waiting {limit_ms:.0f}ms for {self._name} over MPI")
                time.sleep(_LONGEST_S)
        with suppress(RuntimeError):  # The future's error has lost its type in C++.
            value_of(self._future)
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Any:
        """A future of the result, done on the thread that completes the work."""
        return self._future

    def is_completed(self) -> bool:
        """Whether the work has ended, with an error too."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether the work has ended without an error."""
        return self._future.done() and self._error is None

    def exception(self) -> Any:
        """The error, or None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors with the result."""
        return self._tensors

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def source_rank(self) -> int:
        """The rank that sent a received message."""
        return self._source

    _source_rank = source_rank


class Progress:
    """The thread that completes works, started with the first of them."""

    def __init__(self) -> None:
        self._started: deque[MpiWork] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stops = False
        self._pending: list[MpiWork] = []

    def add(self, work: MpiWork) -> MpiWork:
        """Complete a work later, unless it is complete already, and return it."""
        with self._wake:
            self._started.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ddpobs-mpi", daemon=True)
                self._thread.start()
            self._wake.notify()
        return work

    def stop(self) -> bool:
        """End the thread, and return whether all works had ended; works that had not fail."""
        with self._wake:
            self._stops = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        left = [*self._pending, *self._started]
        for work in left:
            work.abandon()
        return not left

    def _run(self) -> None:
        with torch.no_grad():
            while self._wait_for_work():
                self._complete_works()

    def _wait_for_work(self) -> bool:
        with self._wake:
            self._wake.wait_for(lambda: self._started or self._stops)
            return not self._stops

    def _complete_works(self) -> None:
        spins, changed_s = 0, time.monotonic()
        while not self._stops:
            added, before = len(self._started), len(self._pending)
            while self._started:
                self._pending.append(self._started.popleft())
            self._pending = [work for work in self._pending if not work.test()]
            if not self._pending:
                return
            if added or len(self._pending) < before:
                spins, changed_s = 0, time.monotonic()
            spins += 1
            waited_s = time.monotonic() - changed_s
            time.sleep(0 if spins < _SPINS else min(max(waited_s / _PATIENCE, _SHORTEST_S), _LONGEST_S))


progress = Progress()
