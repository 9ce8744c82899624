"""The thread that completes works.

MPI moves data only inside its own calls. So one thread tests the requests of all groups: often at first, because small
operations end in microseconds, then after short sleeps, because the ranks share their cores with training.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from ddpobs.mpi.runtime import library, refuse_to_finalize
from ddpobs.mpi.work import MpiWork

Stages = Iterator[list[Any]]
"""Starts an operation's requests and yields them; goes on when they are complete. Ends when the result is there."""

_BUSY_POLLS = 100
"""Tests without a sleep after the last progress."""
_SLEEP_S, _LONGEST_SLEEP_S = 10e-6, 100e-6
"""Sleep after the first of the later tests, and the limit of its growth."""


@dataclass(eq=False)
class Operation:
    """Requests that end one work.

    Attributes:
        work: The work.
        stages: Starts the next requests.
        requests: Requests that are not complete.
        timeout_s: Seconds after which the operation fails.
        group: The process group's key.
        staged: Whether it has more than one stage. The later stages of a group's operations start in launch order, so
            that they meet the other ranks' stages.
        deadline_s: End of the timeout, by `time.monotonic`.
        source: Rank that sent the received message.
    """

    work: MpiWork
    stages: Stages
    requests: list[Any]
    timeout_s: float
    group: int
    staged: bool = False
    deadline_s: float = field(init=False)
    source: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self.deadline_s = time.monotonic() + self.timeout_s

    def test(self) -> bool:
        """Test the requests, and return whether one of them completed."""
        before = len(self.requests)
        status = library().Status()
        for request in list(self.requests):
            if request.Test(status):
                self.requests.remove(request)
                self.source = status.Get_source()
        return len(self.requests) < before


class Progress:
    """Completes operations on a thread of its own, from the first operation until `stop`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrivals: deque[Operation] = deque()
        self._operations: list[Operation] = []
        self._abandoned: list[Operation] = []
        """Operations that failed. MPI may still write into their buffers."""
        self._aborted: set[int] = set()
        self._thread: threading.Thread | None = None
        self._stops = False

    def add(self, operation: Operation) -> None:
        """Take an operation whose first requests have started."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ddpobs-mpi", daemon=True)
                self._thread.start()
            self._arrivals.append(operation)
            self._changed.notify()

    def holds(self, group: int) -> bool:
        """Whether operations of the group have not ended."""
        with self._changed:
            return any(operation.group == group for operation in (*self._arrivals, *self._operations))

    def abort(self, group: int) -> None:
        """End the group's works with an error."""
        with self._changed:
            self._aborted.add(group)
            self._changed.notify()

    def stop(self) -> bool:
        """End and join the thread; return whether no operation was left."""
        with self._changed:
            self._stops = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        return not (self._arrivals or self._operations)

    def _run(self) -> None:
        idle_polls = 0
        while self._take_arrivals():
            idle_polls = 0 if self._advance() else idle_polls + 1
            if idle_polls > _BUSY_POLLS:
                self._fail_late()
            time.sleep(min(_SLEEP_S * max(idle_polls - _BUSY_POLLS, 0), _LONGEST_SLEEP_S))

    def _take_arrivals(self) -> bool:
        """Wait for operations; return False when the thread is to end."""
        with self._changed:
            while not (self._stops or self._arrivals or self._operations):
                self._changed.wait()
            self._operations.extend(self._arrivals)
            self._arrivals.clear()
            return not self._stops

    def _advance(self) -> bool:
        """Test all operations, and start the next stages; return whether any request completed."""
        progressed = False
        staged: set[int] = set()
        for operation in list(self._operations):
            try:
                progressed |= operation.test()
                if not operation.requests and not (operation.staged and operation.group in staged):
                    self._continue(operation)
                    progressed = True
            except Exception as error:
                self._fail(operation, str(error))
            if operation.staged:
                staged.add(operation.group)
        return progressed

    def _continue(self, operation: Operation) -> None:
        requests = next(operation.stages, None)
        if requests is not None:
            operation.requests = list(requests)
            return
        self._operations.remove(operation)
        operation.work.complete(source=operation.source)

    def _fail_late(self) -> None:
        """Fail the operations that have timed out or whose group was aborted."""
        now_s = time.monotonic()
        for operation in list(self._operations):
            if operation.group in self._aborted:
                self._fail(operation, "the process group was aborted")
            elif now_s > operation.deadline_s:
                self._fail(operation, f"Timed out waiting {operation.timeout_s * 1000:.0f}ms for it to complete")

    def _fail(self, operation: Operation, reason: str) -> None:
        refuse_to_finalize()
        self._operations.remove(operation)
        self._abandoned.append(operation)
        operation.work.complete(dist.DistBackendError(f"{operation.work.name}: {reason}"))


progress = Progress()
"""The process's progress thread."""
