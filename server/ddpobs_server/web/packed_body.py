"""A large body that stays compressed until it is sent: text of numbers takes a tenth of its size."""

from __future__ import annotations

from collections.abc import Iterable

import zstandard
from fastapi import Response
from typing_extensions import override

from ddpobs_server.web.chunked_responses import CHUNK_BYTES

_LEVEL = 1
"""Fastest level of zstd: higher ones pack such text no better."""


class PackedBody:
    """Bytes that are read in chunks of `CHUNK_BYTES`, as `ChunkedResponses` reads a body.

    All packed chunks share a buffer: each alone would leave a hole in the heap, as large as the chunk before packing.

    Args:
        parts: The bytes, in parts of any size.
    """

    def __init__(self, parts: Iterable[bytes]) -> None:
        self._packed, self._begins = bytearray(), [0]
        self._size = 0
        waiting = bytearray()
        for part in parts:
            self._size += len(part)
            waiting += part
            while len(waiting) > CHUNK_BYTES:
                self._pack(waiting[:CHUNK_BYTES])
                del waiting[:CHUNK_BYTES]
        self._pack(waiting)

    def _pack(self, chunk: bytearray) -> None:
        self._packed += zstandard.compress(chunk, _LEVEL)
        self._begins.append(len(self._packed))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        begin = part.start or 0
        if begin % CHUNK_BYTES or (part.stop is not None and part.stop < min(begin + CHUNK_BYTES, self._size)):
            raise ValueError(f"expected a part of {CHUNK_BYTES} bytes at a multiple of them, got {part}")
        chunk = begin // CHUNK_BYTES
        return zstandard.decompress(self._packed[self._begins[chunk] : self._begins[chunk + 1]])


class PackedResponse(Response):
    """A response with a `PackedBody`; a small body is sent as it is."""

    @override
    def render(self, content: PackedBody) -> bytes:
        """Return the body, which has the length and the parts of bytes."""
        return content[:] if len(content) <= CHUNK_BYTES else content  # type: ignore[return-value]
