"""How the collector takes memory from the C library; with another one than glibc nothing here has an effect."""

from __future__ import annotations

import ctypes

import numpy as np

_RETAINED_BYTES = 2**25 - 2**16
"""Just below glibc's upper limit of 32 MiB."""
_M_ARENA_MAX = -8
"""As in glibc's malloc.h."""


def limit_arenas() -> None:
    """Let all threads that start from now on take memory from one arena: mallopt(3).

    glibc gives each thread one of up to eight arenas per processor. What a read frees in its arena, the next read on
    another thread does not reuse.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def retain_freed() -> None:
    """Let glibc reuse the memory of a batch's arrays for the next batch instead of returning it to the system.

    Freeing one block raises M_MMAP_THRESHOLD to the block's size, and glibc retains twice that size: mallopt(3).
    Fresh pages would cost several times the arithmetic on them.
    """
    np.empty(_RETAINED_BYTES, np.uint8)
