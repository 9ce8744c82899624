"""Named ranges in the traces of torch.profiler and of Nsight Systems (NVTX)."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

import torch
from torch.autograd import profiler


def profiler_records() -> bool:
    """Whether a profiler of torch records; an attribute's read, so cheap enough for every bucket."""
    return bool(profiler._is_profiler_enabled)


def mark(name: str, nvtx: bool) -> AbstractContextManager[object]:
    """Return a context that appears as a range in torch's profiler, and with `nvtx` in Nsight Systems.

    Kineto shows a name outside of ASCII as `unknown`, so such characters become `?`.
    """
    name = name.encode("ascii", "replace").decode()
    ranges = ExitStack()
    ranges.enter_context(torch.profiler.record_function(name))
    if nvtx:
        ranges.enter_context(torch.cuda.nvtx.range(name))
    return ranges
