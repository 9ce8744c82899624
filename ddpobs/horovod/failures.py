"""The failure of a collective, as the error from which `elastic.run` recovers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ddpobs.errors import DdpobsError, HorovodInternalError


@contextmanager
def failures_as_internal_errors() -> Iterator[None]:
    """Raise an error of torch's in a collective as a HorovodInternalError; other errors pass.

    Raises:
        HorovodInternalError: A RuntimeError that is not one of ddpobs' own: a lost connection, or a timeout.
    """
    try:
        yield
    except DdpobsError:
        raise
    except RuntimeError as error:
        raise HorovodInternalError(str(error)) from error
