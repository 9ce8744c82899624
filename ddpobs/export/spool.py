"""Batches on disk while the collector is not reachable: a bounded folder of ready-to-send bodies.

A file's name holds the batch's key, its time and its number of records. So the spool can be listed, counted and trimmed
without opening a file.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddpobs.wire.text import NONCE, RUN_ID

_RECOUNT_EVERY = 64
"""Batches after which the folder is counted again, because other processes write to it and send from it."""
_NAME = re.compile(rf"(\d{{20}})~({RUN_ID})~({NONCE})~(\d+)~(\d+)\.batch")


@dataclass(frozen=True)
class Spooled:
    """One batch in the spool. Its body is read on demand."""

    path: Path
    run: str
    source: str
    seq: int
    records: int

    def body(self) -> bytes:
        """Read the body, compressed as it is sent."""
        return self.path.read_bytes()

    def set_aside(self) -> None:
        """Exclude the file from the spool: it keeps its name, with another ending."""
        with suppress(OSError):
            self.path.rename(self.path.with_suffix(".unreadable"))


@dataclass(frozen=True)
class Encoded:
    """A batch as it is sent, with its file if it comes from the spool."""

    run: str
    source: str
    seq: int
    records: int
    body: bytes
    spooled: Spooled | None = None


class Spool:
    """A folder of batches, oldest first.

    Args:
        folder: Created for the first batch.
        limit_bytes: Limit of the total size; the oldest batches are dropped for new ones. If several processes share a
            folder, each may exceed it by a few batches.
        private: Require that the folder belongs to this user. In a folder that is open to all, another user may have
            created it first.

    Attributes:
        copies: Files that are not dropped for new batches: copies of batches that are in memory.
    """

    def __init__(self, folder: Path, limit_bytes: int, private: bool = False) -> None:
        self.folder, self._limit_bytes, self._private = folder, limit_bytes, private
        self._total_bytes = 0
        self._puts_until_recount = 0
        self.copies: set[Path] = set()

    def put(self, batch: Encoded, at_ns: int, on_drop: Callable[[str, int], None]) -> None:
        """Store a batch, completely or not at all, by a rename.

        Args:
            batch: The batch with its body.
            at_ns: Time of the batch, on the wall clock.
            on_drop: Called with run and number of records of each dropped batch: an older one, or this one if it is too
                large.

        Raises:
            OSError: The disk does not store it.
        """
        body = batch.body
        if len(body) > self._limit_bytes:
            on_drop(batch.run, batch.records)
            return
        self._make_folder()
        if self._puts_until_recount == 0 or self._total_bytes + len(body) > self._limit_bytes:
            self._make_room(len(body), on_drop)
            self._puts_until_recount = _RECOUNT_EVERY
        self._write(batch, at_ns)

    def put_if_room(self, batch: Encoded, at_ns: int) -> Spooled | None:
        """Store a copy of a batch, unless another one would have to be dropped for it; returns the copy.

        Raises:
            OSError: The disk does not store it.
        """
        self._make_folder()
        if self._puts_until_recount == 0:
            self._total_bytes = sum(_size(spooled.path) for spooled in self.batches())
            self._puts_until_recount = _RECOUNT_EVERY
        if self._total_bytes + len(batch.body) > self._limit_bytes:
            self._puts_until_recount -= 1
            return None
        path = self._write(batch, at_ns)
        return Spooled(path, batch.run, batch.source, batch.seq, batch.records)

    def remove(self, spooled: Spooled, size_bytes: int) -> None:
        """Remove a batch; another process may have done so.

        Raises:
            OSError: The disk does not remove it.
        """
        self.copies.discard(spooled.path)
        spooled.path.unlink(missing_ok=True)
        self._total_bytes = max(0, self._total_bytes - size_bytes)

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._private and self.folder.lstat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "the folder belongs to another user: set DDPOBS_SPOOL", str(self.folder))

    def _write(self, batch: Encoded, at_ns: int) -> Path:
        final = self.folder / f"{at_ns:020d}~{batch.run}~{batch.source}~{batch.seq}~{batch.records}.batch"
        partial = final.with_suffix(f".{os.getpid()}.partial")
        try:
            partial.write_bytes(batch.body)
            partial.replace(final)
        finally:
            partial.unlink(missing_ok=True)
        self._total_bytes += len(batch.body)
        self._puts_until_recount -= 1
        return final

    def batches(self, sources: Container[str] | None = None) -> Iterator[Spooled]:
        """Yield the batches in the spool, oldest first, of some sources or of all; other files are skipped."""
        # os.listdir: creating a Path for each of tens of thousands of files would take a second.
        for name in sorted(os.listdir(self.folder)) if self.folder.is_dir() else []:  # noqa: PTH208
            match = _NAME.fullmatch(name)
            if match and (sources is None or match[3] in sources):
                yield Spooled(self.folder / name, match[2], match[3], int(match[4]), int(match[5]))

    def _make_room(self, size_bytes: int, on_drop: Callable[[str, int], None]) -> None:
        """Recount the folder; if it is too full, drop the oldest batches until a tenth is free."""
        batches = list(self.batches())
        sizes = [_size(spooled.path) for spooled in batches]
        total = sum(sizes)
        if total + size_bytes > self._limit_bytes:
            for spooled, size in zip(batches, sizes, strict=True):
                if spooled.path in self.copies:
                    continue
                try:
                    spooled.path.unlink()
                except FileNotFoundError:  # Another process has sent it meanwhile, or dropped and counted it.
                    total -= size
                except OSError:  # For example, another user's file: it stays.
                    continue
                else:
                    total -= size
                    on_drop(spooled.run, spooled.records)
                if total + size_bytes <= 0.9 * self._limit_bytes:
                    break
        self._total_bytes = total


def folder_of(spool: str | Path | None) -> Path:
    """Return the spool's folder for the setting `spool`."""
    return Path(spool) if spool else default_folder()


def default_folder() -> Path:
    """Return this user's folder under the system's temporary folder, which `ddpobs push` can send."""
    return Path(tempfile.gettempdir()) / f"ddpobs-spool-{os.getuid()}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
