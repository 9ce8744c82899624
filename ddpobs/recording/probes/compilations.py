"""Compilations of `torch.compile`, and the reason of the latest one that was made anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddpobs.steps.account import Recompilation
from ddpobs.torch_seam.compilations import Compilation, CompilationLog


class Compilations:
    """Reads compilations on the telemetry thread.

    Args:
        texts: Keep function and reason.
        log: Source of the compilations.

    Attributes:
        latest: The latest one for which torch gives a reason; None before it.
    """

    def __init__(self, texts: bool, log: CompilationLog | None = None) -> None:
        self._texts, self._log = texts, log or CompilationLog()
        self.latest: Recompilation | None = None

    def read(self) -> Sequence[tuple[int, int]] | None:
        """Return begin and end of each compilation since the last call; None if torch does not report them."""
        new = self._log.read()
        if new is None:
            return None
        if self._texts and (reasons := [compilation for compilation in new if compilation.reason]):
            self.latest = Recompilation(reasons[-1].began_ns, _place(reasons[-1]), reasons[-1].reason)
        return [(compilation.began_ns, compilation.ended_ns) for compilation in new]


def _place(compilation: Compilation) -> str:
    return f"{Path(compilation.file).name}:{compilation.line} {compilation.function}"
