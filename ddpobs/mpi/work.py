"""The asynchronous work of one operation."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from typing_extensions import override

from ddpobs.torch_seam.collectives import value_of


class MpiWork(dist.Work):
    """An operation that the progress thread completes.

    Args:
        name: The operation, with its number and group, for error messages.
        value: The future's value: the tensors that hold the result.
    """

    def __init__(self, name: str, value: list[Any]) -> None:
        super().__init__()
        self.name = name
        self._value = value
        self._error: Exception | None = None
        self._source = -1
        self._ended: Future[list[Any]] = Future()
        # A callback that raises leaves the error in the future of `then`, where C++ finds it. `set_exception` does not.
        self._future: Future[list[Any]] = self._ended.then(self._outcome)

    def complete(self, error: Exception | None = None, source: int = -1) -> None:
        """End the work, with an error or with the rank from which a message came; runs the future's callbacks."""
        self._error, self._source = error, source
        self._ended.set_result(self._value)

    def _outcome(self, ended: Future[list[Any]]) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._value

    @override
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end.

        Raises:
            DistBackendError: The operation failed or timed out, or `timeout` passed; then it goes on.
        """
        if timeout is not None and timeout > timedelta(0):
            self._wait_for_at_most(timeout)
        return self._settle(self._future.wait)

    def wait_unrecorded(self) -> None:
        """As `wait`, unseen by telemetry."""
        self._settle(lambda: value_of(self._future))

    def _settle(self, wait: Any) -> bool:
        try:
            wait()
        except RuntimeError:
            if self._error is None:
                raise
        if self._error is not None:
            raise self._error
        return True

    def _wait_for_at_most(self, timeout: timedelta) -> None:
        ended = threading.Event()
        self._future.add_done_callback(lambda _: ended.set())
        if not ended.wait(timeout.total_seconds()):
            raise dist.DistBackendError(f"{self.name}: Timed out waiting {timeout.total_seconds() * 1000:.0f}ms")

    @override
    def get_future(self) -> Future[list[Any]]:
        return self._future

    @override
    def is_completed(self) -> bool:
        return self._future.done()

    @override
    def is_success(self) -> bool:
        return self._future.done() and self._error is None

    @override
    def exception(self) -> Any:
        return self._error

    @override
    def synchronize(self) -> None:
        self.wait()

    @override
    def result(self) -> list[torch.Tensor]:
        return self._value

    @override
    def source_rank(self) -> int:
        return self._source

    @override
    def _source_rank(self) -> int:
        return self._source


def all_of(works: list[MpiWork]) -> MpiWork:
    """Return a work that ends when all works have ended; with the error of the first that failed."""
    whole = MpiWork("coalesced", [value for work in works for value in work.result()])
    left = len(works)
    lock = threading.Lock()

    def ended(_: object) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            whole.complete(next((work.exception() for work in works if not work.is_success()), None))

    for work in works:
        work.get_future().add_done_callback(ended)
    if not works:
        whole.complete()
    return whole
