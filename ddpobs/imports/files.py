"""Files to import, each read by its own reader: the content decides which one, and not the name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import zstandard

from ddpobs import wire
from ddpobs.errors import TraceFileError, WireError
from ddpobs.imports import exported, flight_recorder, horovod_timeline, kineto, nccl_inspector, straggler_analysis
from ddpobs.imports.dumped_run import DumpedRun
from ddpobs.imports.traced_run import TracedRun, numbered

Advance = Callable[[int], object]
"""Is called with the number of further bytes that were read."""


class Imported(Protocol):
    """A run made of files."""

    @property
    def lines(self) -> list[str]:
        """What the files show, in words."""
        ...

    def batches(self) -> Iterator[wire.Batch]:
        """Yield what the run's ranks would have sent."""
        ...


def read(files: Sequence[Path], run: str, advance: Advance = lambda _: None) -> Imported:
    """Read files of one format.

    Args:
        files: The files, of the ranks of one run.
        run: Name of the run.
        advance: Is called as they are read.

    Raises:
        TraceFileError: A file is of no known format, of another one than the first, or is not whole.
    """
    for file in files:
        if not file.is_file():
            raise TraceFileError(file, "a file", "a folder" if file.is_dir() else "none")
    readers = [next(reader for recognises, reader in _FORMATS if recognises(file)) for file in files]
    for file, reader in zip(files, readers, strict=True):
        if reader is not readers[0]:
            raise TraceFileError(file, f"a file of the same format as {files[0].name}", "another format")
    return readers[0](files, run, advance)


def encoded(imported: Imported) -> Iterator[tuple[wire.Batch, bytes]]:
    """Yield each batch, checked, with the bytes in which it is sent.

    Raises:
        TraceFileError: The files' times or numbers contradict each other.
    """
    for batch in imported.batches():
        try:
            body = wire.encode(batch)
            wire.decode(body)
        except (WireError, OverflowError) as error:  # The latter is raised for a number of more than 64 bits.
            file = batch.hello.settings["file"] if batch.hello else f"rank {batch.rank}"
            raise TraceFileError(file, "times and numbers of a training", error) from None
        yield batch, zstandard.compress(body, 1)


def _dumps(files: Sequence[Path], run: str, advance: Advance) -> Imported:
    return DumpedRun([flight_recorder.read(file) for file in files], run)


def _traces(files: Sequence[Path], run: str, advance: Advance) -> Imported:
    traces = [kineto.read(file, advance) for file in files]
    return TracedRun(numbered(traces), run, "torch.profiler")


def _exports(files: Sequence[Path], run: str, advance: Advance) -> Imported:
    traces, replayed = exported.read(files)
    return TracedRun(traces, run, "ddpobs export", replayed)


def _operations(files: Sequence[Path], run: str, advance: Advance) -> Imported:
    return TracedRun(straggler_analysis.read(_only(files)), run, "StragglerAnalysis")


def _only(files: Sequence[Path]) -> Path:
    if len(files) > 1:
        raise TraceFileError(files[1], "one file, which has all ranks", f"{len(files)} files")
    return files[0]


def _timelines(files: Sequence[Path], run: str, advance: Advance) -> Imported:
    return TracedRun(horovod_timeline.read(_only(files), advance), run, "Horovod timeline")


def _logs(files: Sequence[Path], run: str, advance: Advance) -> Imported:
    return TracedRun(numbered(nccl_inspector.read(files, advance)), run, "NCCL Inspector")


_FORMATS: tuple[tuple[Callable[[Path], bool], Callable[[Sequence[Path], str, Advance], Imported]], ...] = (
    (flight_recorder.is_dump, _dumps),
    (exported.is_export, _exports),
    (straggler_analysis.is_trace, _operations),
    (nccl_inspector.is_log, _logs),
    (horovod_timeline.is_timeline, _timelines),
    (lambda _: True, _traces),
)
"""What recognises a file, and what reads all; the last reader refuses files that none recognises."""
