"""Running collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddpobs.errors import MismatchError
from ddpobs.horovod import agreement, timeline
from ddpobs.horovod.failures import failures_as_internal_errors


class Handle:
    """A running collective.

    Args:
        works: Torch's works.
        finish: Returns the result, once the works are complete.
        agreed: The ranks' agreement.
        on_gpu: Whether the works are a GPU's, for which the host does not wait.
    """

    __slots__ = ("__weakref__", "_ended", "_failure", "_finish", "_look", "agreed", "on_gpu", "works")

    def __init__(
        self, works: Sequence[Any], finish: Callable[[], Any], agreed: agreement.Agreement, on_gpu: bool
    ) -> None:
        self.works, self._finish, self.agreed, self.on_gpu = list(works), finish, agreed, on_gpu
        self._look: agreement.Look | None = None
        self._failure: MismatchError | None = None
        self._ended = False

    @property
    def is_running(self) -> bool:
        """Whether this rank has not waited for the collective, and it is not complete."""
        return not (self._ended or all(work.is_completed() for work in self.works))

    def poll(self) -> bool:
        """Whether `wait` would return or raise at once."""
        if self._failure is not None:
            return True
        if all(work.is_completed() for work in self.works):
            self._end_look()
            return True
        self._look = self._look or self.agreed.look(after_s=agreement.MOMENT_S)
        try:
            self._look.again()
        except MismatchError as error:
            self._failure = error
        return self._failure is not None

    def _end_look(self) -> None:
        if self._look is not None:
            self._look.end()

    def then(self, convert: Callable[[Any], Any]) -> Handle:
        """Return a handle with another result of the same collective."""
        return Handle(self.works, lambda: convert(self.wait()), self.agreed, self.on_gpu)

    def wait(self) -> Any:
        """Wait for the collective and return its result; further calls return the same result.

        Raises:
            MismatchError: Some ranks called another collective. Raised on every rank.
            HorovodInternalError: The collective failed.
        """
        if self._failure is not None:
            raise self._failure
        self._ended = True
        try:
            wait_for(self.works, self.agreed, self.on_gpu)
        except MismatchError as error:
            self._failure = error
            raise
        self._end_look()
        result = self._finish()
        self._finish = lambda: result
        return result

    def __call__(self) -> Any:
        """As `wait`: Horovod's handles of sparse reductions are functions."""
        return self.wait()


def wait_for(works: Sequence[Any], agreed: agreement.Agreement, on_gpu: bool) -> None:
    """Wait for works. On the host they may turn out to belong to different collectives."""
    with failures_as_internal_errors():
        for work in works:
            if on_gpu:
                work.wait()
            else:
                agreed.wait(work)


def started(handle: Handle, operation: str, tensor: torch.Tensor, name: str | None) -> Handle:
    """Return the handle of a collective that was just started.

    Its name is taken while it runs, and a timeline records it.

    Args:
        handle: The collective.
        operation: What it does, in Horovod's words, such as `allreduce`.
        tensor: The tensor that takes part.
        name: Its name; None for none.
    """
    agreed = handle.agreed
    agreed.takes_name(handle)
    if (current := timeline.current()) is not None:
        lane = None if name is None else f"{operation}.{name}"
        current.follow(handle.works[0], agreed.key, agreed.ranks, agreed.group.name(), operation, tensor, lane)
    return handle


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for a collective and return its result."""
    return handle.wait()
