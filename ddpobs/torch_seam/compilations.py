"""Private records of `torch.compile`: when it compiled, which function, and why anew.

Dynamo keeps its latest 64 compilations itself. They are read on another thread, so that a compilation costs nothing
more, and nothing is imported in a process that does not compile.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns, time_ns
from typing import Any, NamedTuple


class Compilation(NamedTuple):
    """One compilation, forward or backward, on the monotonic clock.

    Attributes:
        began_ns: Its begin.
        ended_ns: Its end.
        function: Name of the function; empty for a backward.
        file: Its file.
        line: Its first line.
        reason: The guard that failed, as dynamo words it; empty for a first compilation.
    """

    began_ns: int
    ended_ns: int
    function: str = ""
    file: str = ""
    line: int = 0
    reason: str = ""


class CompilationLog:
    """Reads each compilation once."""

    def __init__(self) -> None:
        self._latest: Any = None

    def read(self) -> list[Compilation] | None:
        """Return the compilations that have ended since the last call; None if this torch has no such records."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is None:
            return []
        with suppress(Exception):  # Another version of torch.
            return self._read(dynamo.get_compilation_metrics)
        return None

    def _read(self, records: Callable[[], list[Any]]) -> list[Compilation]:
        new: list[Any] = []
        for record in reversed(records()):
            if record is self._latest:
                break
            new.append(record)
        if new:
            self._latest = new[0]
        wall_ns = time_ns() - monotonic_ns()
        return [_compilation(record, wall_ns) for record in reversed(new)]


def _compilation(record: Any, wall_ns: int) -> Compilation:
    """Move a record from the wall clock, `wall_ns` ahead, to the monotonic one."""
    _, _, reason = (record.recompile_reason or "").partition(": ")  # `0/3: …`, the number of an earlier compilation.
    return Compilation(
        1000 * record.start_time_us - wall_ns,
        1000 * record.end_time_us - wall_ns,
        record.co_name or "",
        record.co_filename or "",
        record.co_firstlineno or 0,
        reason.partition("\n")[0].strip(),
    )
