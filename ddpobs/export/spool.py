"""Batches on disk while the collector is away: a bounded folder of ready-to-send bodies.

A file's name holds the batch's key, its age and how many records it carries, so that the spool can be read, counted
and trimmed without opening anything.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddpobs.wire.text import NONCE, RUN_ID

_COUNTED_EVERY = 64
"""Batches after which the folder is counted anew, for other processes write to it and send from it."""
_NAME = re.compile(rf"(\d{{20}})~({RUN_ID})~({NONCE})~(\d+)~(\d+)\.batch")


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


@dataclass(frozen=True)
class Encoded:
    """A batch as it is sent; `kept` where it comes from the spool."""

    run: str
    source: str
    seq: int
    records: int
    body: bytes
    kept: Spooled | None = None


class Spool:
    """A folder of batches, oldest first.

    Args:
        folder: Made when the first batch comes.
        limit_bytes: Most it may hold; the oldest make room. Several processes that share a folder may each be a few
            batches over it.
        private: The folder has to be this user's own: where everybody may make one, another user may have been faster.
    """

    def __init__(self, folder: Path, limit_bytes: int, private: bool = False) -> None:
        self.folder, self._limit_bytes, self._private = folder, limit_bytes, private
        self._total_bytes = 0
        self._until_counted = 0

    def put(self, batch: Encoded, at_ns: int, dropped: Callable[[str, int], None]) -> None:
        """Keep a batch; whole or not at all, by a rename.

        Args:
            batch: Which, and its body.
            at_ns: Its age, on the wall clock.
            dropped: Told of run and records of each batch that goes: older ones, or this one where it is too large.

        Raises:
            OSError: The disk does not take it.
        """
        body = batch.body
        if len(body) > self._limit_bytes:
            dropped(batch.run, batch.records)
            return
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._private and self.folder.lstat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user: set DDPOBS_SPOOL", str(self.folder))
        if self._until_counted == 0 or self._total_bytes + len(body) > self._limit_bytes:
            self._make_room(len(body), dropped)
            self._until_counted = _COUNTED_EVERY
        final = self.folder / f"{at_ns:020d}~{batch.run}~{batch.source}~{batch.seq}~{batch.records}.batch"
        partial = final.with_suffix(f".{os.getpid()}.partial")
        try:
            partial.write_bytes(body)
            partial.replace(final)
        finally:
            partial.unlink(missing_ok=True)
        self._total_bytes += len(body)
        self._until_counted -= 1

    def batches(self, source: str | None = None) -> Iterator[Spooled]:
        """What is in the spool, oldest first; of one source, or of all. Files that are no batches are passed over."""
        # Names: a Path for each of tens of thousands would take a second.
        for name in sorted(os.listdir(self.folder)) if self.folder.is_dir() else []:  # noqa: PTH208
            found = _NAME.fullmatch(name)
            if found and source in (None, found[3]):
                yield Spooled(self.folder / name, found[2], found[3], int(found[4]), int(found[5]))

    def _make_room(self, size_bytes: int, dropped: Callable[[str, int], None]) -> None:
        """Count what is there, and where it is too much drop the oldest until a tenth is free."""
        kept = list(self.batches())
        sizes = [_size(spooled.path) for spooled in kept]
        total = sum(sizes)
        if total + size_bytes > self._limit_bytes:
            for spooled, size in zip(kept, sizes, strict=True):
                try:
                    spooled.path.unlink()
                except FileNotFoundError:  # Another process sent it meanwhile, or dropped and counted it.
                    total -= size
                except OSError:  # Another user's, say: it stays.
                    continue
                else:
                    total -= size
                    dropped(spooled.run, spooled.records)
                if total + size_bytes <= 0.9 * self._limit_bytes:
                    break
        self._total_bytes = total


def default_folder() -> Path:
    """One folder a user under the system's temporary folder, which `ddpobs push` finds again."""
    return Path(tempfile.gettempdir()) / f"ddpobs-spool-{os.getuid()}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
