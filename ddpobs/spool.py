"""Batches on disk while the collector is away: a bounded folder of ready-to-send bodies.

A file's name holds the batch's key, its age and how many records it carries, so that the spool can be read, counted
and trimmed without opening anything.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(\d{20})~([A-Za-z0-9._-]{1,128})~([0-9a-f]{16})~(\d+)~(\d+)\.batch")


@dataclass(frozen=True)
class Spooled:
    """One batch in the spool; `body` is read on demand."""

    path: Path
    run: str
    source: str
    seq: int
    records: int

    def body(self) -> bytes:
        """What is sent, compressed as it was."""
        return self.path.read_bytes()

    def set_aside(self) -> None:
        """Have it looked at no more: it keeps its name with another ending."""
        with suppress(OSError):
            self.path.rename(self.path.with_suffix(".unreadable"))


class Spool:
    """A folder of batches, oldest first.

    Args:
        folder: Made when the first batch comes.
        limit_bytes: Most it may hold; the oldest make room.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self._limit_bytes = folder, limit_bytes

    def put(self, run: str, source: str, seq: int, *, records: int, body: bytes, at_ns: int) -> int:
        """Keep a batch; whole or not at all, by a rename.

        Returns:
            How many records were dropped for it: of older batches, or its own where it alone is too large.

        Raises:
            OSError: The disk does not take it.
        """
        dropped = self._make_room(len(body))
        if len(body) > self._limit_bytes:
            return dropped + records
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        final = self.folder / f"{at_ns:020d}~{run}~{source}~{seq}~{records}.batch"
        partial = final.with_suffix(f".{os.getpid()}.partial")
        try:
            partial.write_bytes(body)
            partial.replace(final)
        finally:
            partial.unlink(missing_ok=True)
        return dropped

    def batches(self, source: str | None = None) -> Iterator[Spooled]:
        """What is in the spool, oldest first; of one source, or of all. Files that are no batches are passed over."""
        paths = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        for path in paths:
            found = _NAME.fullmatch(path.name)
            if found and source in (None, found[3]):
                yield Spooled(path, found[2], found[3], int(found[4]), int(found[5]))

    def _make_room(self, size_bytes: int) -> int:
        kept = list(self.batches())
        sizes = [_size(spooled.path) for spooled in kept]
        dropped, total = 0, sum(sizes)
        for spooled, size in zip(kept, sizes, strict=True):
            if total + size_bytes <= self._limit_bytes:
                break
            spooled.path.unlink(missing_ok=True)
            dropped, total = dropped + spooled.records, total - size
        return dropped


def default_folder() -> Path:
    """One folder a user under the system's temporary folder, which `ddpobs push` finds again."""
    return Path(tempfile.gettempdir()) / f"ddpobs-spool-{os.getuid()}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
