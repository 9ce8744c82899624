"""Works over MPI requests, completed by threads of their own.

The thread that starts a collective hands its requests over and goes on; MPI must allow this (MPI_THREAD_MULTIPLE). MPI
moves data only while a thread is inside of it, and no call of MPI waits with a timeout. So one thread at a time tests
the requests again and again and sleeps in between: a thread that spins would take the processor from training.

A completed work calls its future's callbacks. They may wait for another work, as torch's PowerSGD hook does. So another
thread tests meanwhile; there are as many threads as such waits have needed at a time, mostly two.
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
_JOIN_S = 5.0
"""Longest wait for a thread at the end: a callback of the user's may block it for ever, outside of MPI."""


class MpiWork(dist._Work):  # type: ignore[name-defined, misc]
    """A started collective, or a started message.

    Args:
        name: The collective, for errors.
        requests: MPI's requests; the work is complete when all of them are.
        tensors: The result, which the future holds.
        timeout: Time after which the work fails.
        finish: Called when the requests are complete, before the work is: copies the result to its tensors.
        keep: Further objects whose memory MPI uses.
        broken: Called with the error if the work fails.

    Attributes:
        lost: Whether the work has failed while MPI may still use its memory.
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
        self.lost = False
        self._ended: Future[None] = Future()
        # The outcome of `then` is an error for C++ too; `set_exception` makes one for Python alone.
        self._future = self._ended.then(self._outcome)

    def has_ended(self) -> bool:
        """Whether the requests are complete, or the work has failed; `complete` is to be called then."""
        statuses = [MPI.Status() for _ in self._requests]
        try:
            if MPI.Request.Testall(self._requests, statuses):
                self._source = statuses[0].Get_source() if statuses else -1
                return True
        except MPI.Exception as error:
            self._fail(f"{self._name} over MPI failed: {error}")
            return True
        if time.monotonic() < self._deadline_s:
            return False
        self.lost = True
        self._fail(f"Timed out waiting {self._timeout_s * 1000:.0f}ms for {self._name} over MPI to complete")
        return True

    def complete(self) -> None:
        """Copy the result, and call the future's callbacks."""
        try:
            if self._error is None and self._finish is not None:
                self._finish()
        except Exception as error:
            self._fail(f"{self._name} over MPI failed: {error}")
        if not self.lost:
            self._keep = self._finish = None
        self._ended.set_result(None)

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
        if timeout and not self._ends_within(timeout.total_seconds()):
            limit_ms = timeout.total_seconds() * 1000
            raise dist.DistBackendError(f"Timed out waiting {limit_ms:.0f}ms for {self._name} over MPI")
        with suppress(RuntimeError):  # The future's error has lost its type in C++.
            value_of(self._future)
        if self._error is not None:
            raise self._error
        return True

    def _ends_within(self, limit_s: float) -> bool:
        if self._future.done():
            return True
        ended = threading.Event()
        self._future.add_done_callback(lambda _: ended.set())
        return ended.wait(limit_s)

    def get_future(self) -> Any:
        """A future of the result, done on a thread that completes works."""
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
    """The threads that complete works."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._started: deque[MpiWork] = deque()
        self._pending: list[MpiWork] = []
        self._lost: list[MpiWork] = []
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._is_polled = self._stops = False

    def add(self, work: MpiWork) -> MpiWork:
        """Complete a work later, and return it."""
        with self._changed:
            self._started.append(work)
            self._call_poller()
        return work

    def stop(self) -> bool:
        """End the threads, and return whether all requests of MPI are complete; works that are not complete fail."""
        with self._changed:
            self._stops = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_polled)
        left = [*self._pending, *self._started]
        for work in left:
            work.abandon()
        for thread in self._threads:
            thread.join(_JOIN_S)
        return not left and not self._lost

    def _call_poller(self) -> None:
        """Have a thread that tests the works; to be called with the lock."""
        if self._is_polled or self._stops:
            return
        if self._idle:
            self._changed.notify()
            return
        thread = threading.Thread(target=self._run, name=f"ddpobs-mpi-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        with torch.no_grad():
            while self._becomes_poller():
                ended = self._poll()
                with self._changed:
                    self._is_polled = False
                    self._lost += [work for work in ended if work.lost]
                    if self._stops:
                        self._changed.notify_all()
                    elif self._pending or self._started:
                        self._call_poller()
                for work in ended:
                    work.complete()

    def _becomes_poller(self) -> bool:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(
                lambda: self._stops or (not self._is_polled and bool(self._started or self._pending))
            )
            self._idle -= 1
            self._is_polled = not self._stops
            return self._is_polled

    def _poll(self) -> list[MpiWork]:
        """Test until works have ended, and return them."""
        spins, changed_s = 0, time.monotonic()
        while not self._stops:
            if self._started:
                spins, changed_s = 0, time.monotonic()
            while self._started:
                self._pending.append(self._started.popleft())
            ended = [work for work in self._pending if work.has_ended()]
            if ended:
                self._pending = [work for work in self._pending if work not in ended]
                return ended
            spins += 1
            waited_s = time.monotonic() - changed_s
            time.sleep(0 if spins < _SPINS else min(max(waited_s / _PATIENCE, _SHORTEST_S), _LONGEST_S))
        return []


progress = Progress()
