"""The failure of a collective, as the error from which `elastic.run` recovers."""

from __future__ import annotations

from types import TracebackType

from ddpobs.errors import DdpobsError, HorovodInternalError


class failures_as_internal_errors:  # noqa: N801 - a context manager, read as a function
    """Raise an error of torch's in a collective as a HorovodInternalError; other errors pass.

    A class costs a tenth of `contextlib.contextmanager`, in each collective.

    Raises:
        HorovodInternalError: A RuntimeError that is not one of ddpobs' own: a lost connection, or a timeout.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, _: object, error: BaseException | None, _traceback: TracebackType | None) -> None:
        """Translate the error, if there is one."""
        if isinstance(error, RuntimeError) and not isinstance(error, DdpobsError):
            raise HorovodInternalError(str(error)) from error
